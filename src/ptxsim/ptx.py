"""The parsed form of a PTX module: what `parser.parse` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

TYPE_BYTES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    "b128": 16,
    "f16": 2,
    "bf16": 2,
    "f16x2": 4,
    "bf16x2": 4,
    "tf32": 4,
    "f32": 4,
    "f64": 8,
    "f32x2": 8,
    "pred": 1,
}


@dataclass(frozen=True, slots=True)
class Register:
    """A declared register; `slot` is its place in the warp's register list."""

    name: str
    type: str
    slot: int

    @property
    def width(self) -> int:
        """Bits; 1 for a predicate."""
        return 1 if self.type == "pred" else 8 * TYPE_BYTES[self.type]


@dataclass(frozen=True, slots=True)
class Special:
    """A read-only register such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant; `kind` is int, f32 or f64 and `bits` its two's complement or IEEE bits."""

    bits: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, parameter, label or function name."""

    name: str
    scope: int = 0


@dataclass(frozen=True, slots=True)
class Sink:
    """The operand `_`."""


@dataclass(frozen=True, slots=True)
class Negated:
    """The operand `!%p`."""

    operand: Register


@dataclass(frozen=True, slots=True)
class Pipe:
    """Two destinations, `d|p`."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Vector:
    """A brace list."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """`[base+offset]`, or `[map, {coordinates}]` with `more` holding what follows the comma."""

    base: Register | Symbol | Immediate
    offset: int = 0
    more: tuple[Operand, ...] = ()


Operand = Register | Special | Immediate | Symbol | Sink | Negated | Pipe | Vector | Memory


@dataclass(slots=True)
class Instruction:
    """One statement of a body."""

    line: int
    text: str
    op: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None = None
    guard_negated: bool = False
    scope: int = 0

    @property
    def form(self) -> str:
        """Opcode with modifiers, as in the text."""
        return ".".join((self.op, *self.mods))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter."""

    name: str
    size: int
    align: int
    type: str
    pointer: bool = False


@dataclass(slots=True)
class Variable:
    """A variable of a state space; `data` is the initialiser, `size` 0 means `name[]`."""

    name: str
    space: str
    size: int
    align: int
    data: bytes | None = None
    extern: bool = False


@dataclass(slots=True)
class Kernel:
    """One `.entry`."""

    name: str
    params: list[Parameter] = field(default_factory=list)
    reqntid: tuple[int, ...] | None = None
    reqcluster: tuple[int, ...] | None = None
    registers: list[Register] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[tuple[int, str], int] = field(default_factory=dict)
    tables: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    scopes: list[int] = field(default_factory=lambda: [-1])

    def label(self, name: str, scope: int) -> int | None:
        """Instruction index of a label, innermost scope first."""
        while scope >= 0:
            if (scope, name) in self.labels:
                return self.labels[scope, name]
            scope = self.scopes[scope]
        return None

    def table(self, name: str, scope: int) -> list[str] | None:
        """Branch-target list of a label, innermost scope first."""
        while scope >= 0:
            if (scope, name) in self.tables:
                return self.tables[scope, name]
            scope = self.scopes[scope]
        return None


@dataclass(slots=True)
class PtxModule:
    """A whole file; `locations` maps a line to the source position of the `.loc` before it."""

    version: str = ""
    target: str = ""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    locations: dict[int, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def entry(self, name: str | None = None) -> Kernel:
        """The kernel called `name`; the only one if `name` is None."""
        if name is None:
            if len(self.kernels) != 1:
                raise KeyError(f"the module has {len(self.kernels)} kernels: {list(self.kernels)}")
            return next(iter(self.kernels.values()))
        if name not in self.kernels:
            raise KeyError(f"no kernel {name!r}; there are {list(self.kernels)}")
        return self.kernels[name]
