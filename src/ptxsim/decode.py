"""From parsed instructions to Python closures, one per instruction, with operands resolved.

Each file of `ptxsim.isa` registers builders by opcode.  A builder checks every modifier (whatever
it does not consume is an `UnsupportedInstruction`), turns operands into register slots (immediates,
special registers and symbol addresses get slots of their own) and returns a function of the warp.

What a step returns tells the scheduler how to go on: None for the next instruction, a
non-negative int for a jump, or one of the signals below.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ptxsim.control_flow import Flow, live_at, reconvergence
from ptxsim.errors import SimulationError, UnsupportedInstruction
from ptxsim.ptx import (
    Immediate,
    Instruction,
    Kernel,
    Memory,
    Negated,
    Operand,
    Pipe,
    PtxModule,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from ptxsim.values import MASKS, merge

if TYPE_CHECKING:
    from ptxsim.machine import Warp

Step = Callable[["Warp"], Any]
Builder = Callable[[Instruction, "Decoder"], Step]

AGAIN = -1  # blocked: run this instruction again when the group wakes up
YIELD = -2  # blocked: go on behind this instruction when the group wakes up
SWITCH = -3  # the warp's lane groups changed: pick one again

_BUILDERS: dict[str, Builder] = {}


def instruction(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder for opcodes (the part before the first dot, or a longer dotted prefix)."""

    def register(builder: Builder) -> Builder:
        for name in names:
            _BUILDERS[name] = builder
        return builder

    return register


class Modifiers:
    """The modifiers of one instruction; whatever stays unread is an error."""

    def __init__(self, ins: Instruction, skip: int = 0) -> None:
        self.ins = ins
        self.left = list(ins.mods[skip:])

    def flag(self, *names: str) -> bool:
        """True if one of `names` stands there; it is consumed."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return True
        return False

    def choice(self, *names: str, default: str | None = None) -> str:
        """The one of `names` that stands there."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        if default is None:
            raise self.unsupported(f"needs one of {', '.join('.' + n for n in names)}")
        return default

    def type(self, *allowed: str) -> str:
        """The first type among the modifiers."""
        for name in self.left:
            if name in allowed:
                self.left.remove(name)
                return name
        raise self.unsupported(f"needs a type of {', '.join('.' + n for n in allowed)}")

    def ignore_cache_hints(self) -> None:
        """Cache operators, eviction priorities, prefetch sizes: no function."""
        hints = ("L1::", "L2::")
        plain = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified")
        self.left = [m for m in self.left if not m.startswith(hints) and m not in plain]

    def unsupported(self, why: str) -> UnsupportedInstruction:
        """An error for this instruction."""
        return UnsupportedInstruction(f"{self.ins.form}: {why}", line=self.ins.line)

    def done(self) -> None:
        """Complain about whatever was not consumed."""
        if self.left:
            raise self.unsupported(f"modifier .{self.left[0]} is not supported here")


@dataclass(slots=True)
class Decoder:
    """Decodes one kernel; collects the constant slots that warps need."""

    kernel: Kernel
    globals: dict[str, int]
    module_shared: list[Variable]
    registers: int = 0
    constants: dict[int, int | bool] = field(default_factory=dict)
    specials: dict[str, int] = field(default_factory=dict)
    shared_symbols: dict[int, int] = field(default_factory=dict)
    uses: list[int] = field(default_factory=list)
    defs: list[int] = field(default_factory=list)
    widths: dict[int, int] = field(default_factory=dict)
    shared_offsets: dict[str, int] = field(default_factory=dict)
    static_shared: int = 0
    local_offsets: dict[str, int] = field(default_factory=dict)
    local_size: int = 0
    param_offsets: dict[str, int] = field(default_factory=dict)
    param_size: int = 0
    targets: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pc: int = 0
    _constant_slots: dict[int | bool | str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.registers = len(self.kernel.registers)
        self.widths = {r.slot: r.width for r in self.kernel.registers}
        self._lay_out()

    def _lay_out(self) -> None:
        at = 0
        extern: list[tuple[str, int]] = []
        for variable in self.module_shared + self.kernel.variables:
            if variable.space == "local":
                start = -(-self.local_size // variable.align) * variable.align
                self.local_offsets[variable.name] = start
                self.local_size = start + variable.size
            elif variable.space == "shared" and variable.size == 0:
                extern.append((variable.name, variable.align))
            elif variable.space == "shared":
                start = -(-at // variable.align) * variable.align
                self.shared_offsets[variable.name] = start
                at = start + variable.size
        # Dynamic shared memory starts behind the static, at the largest alignment asked for.
        align = max((a for _, a in extern), default=16)
        self.static_shared = -(-at // align) * align if extern else at
        for name, _ in extern:
            self.shared_offsets[name] = self.static_shared
        at = 0
        for parameter in self.kernel.params:
            at = -(-at // parameter.align) * parameter.align
            self.param_offsets[parameter.name] = at
            at += parameter.size
        self.param_size = at

    # Slots.
    def constant(self, value: int | bool) -> int:
        """A slot that always holds `value`."""
        key: int | str = f"p{value}" if value.__class__ is bool else value
        if key not in self._constant_slots:
            self._constant_slots[key] = slot = self._new_slot(1 if value.__class__ is bool else 64)
            self.constants[slot] = value
        return self._constant_slots[key]

    def scratch(self, width: int) -> int:
        """A slot nobody reads."""
        return self._new_slot(width)

    def _new_slot(self, width: int) -> int:
        slot = self.registers
        self.registers += 1
        self.widths[slot] = width
        return slot

    def read(self, operand: Operand, width: int) -> int:
        """The slot of a source operand of `width` bits (1 for predicates)."""
        if isinstance(operand, Register):
            self.uses.append(operand.slot)
            return operand.slot
        if isinstance(operand, Immediate):
            if width == 1:
                return self.constant(bool(operand.bits))
            if operand.kind == "f64" and width == 32:  # a decimal literal of an f32 instruction
                value = struct.unpack("<d", struct.pack("<Q", operand.bits))[0]
                return self.constant(struct.unpack("<I", struct.pack("<f", value))[0])
            return self.constant(operand.bits & MASKS[width])
        if isinstance(operand, Special):
            if operand.name not in self.specials:
                self.specials[operand.name] = self._new_slot(64)
            return self.specials[operand.name]
        if isinstance(operand, Symbol):
            return self.symbol(operand)
        raise self.error(f"operand {operand} cannot be read here")

    def symbol(self, symbol: Symbol) -> int:
        """The slot of a variable's address in its own state space."""
        if symbol.name in self.shared_offsets:
            key = f"shared:{symbol.name}"
            if key not in self._constant_slots:
                self._constant_slots[key] = slot = self._new_slot(64)
                self.shared_symbols[slot] = self.shared_offsets[symbol.name]
            return self._constant_slots[key]
        for table in (self.param_offsets, self.local_offsets, self.globals):
            if symbol.name in table:
                return self.constant(table[symbol.name])
        raise self.error(f"unknown symbol {symbol.name}")

    def write(self, operand: Operand, width: int | None = None) -> int:
        """The slot of a destination; `_` gets a slot nobody reads."""
        if isinstance(operand, Register):
            self.defs.append(operand.slot)
            return operand.slot
        if isinstance(operand, Sink):
            return self.scratch(width or 64)
        raise self.error(f"operand {operand} cannot be written")

    def reads(self, operand: Operand, width: int) -> list[int]:
        """The slots of a brace list (or of a single operand)."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.read(item, width) for item in items]

    def writes(self, operand: Operand, width: int | None = None) -> list[int]:
        """The destination slots of a brace list (or of a single operand)."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.write(item, width) for item in items]

    def pair(self, operand: Operand) -> tuple[int, int | None]:
        """The two destinations of `d|p`; the second None if absent."""
        if isinstance(operand, Pipe):
            return self.write(operand.first), self.write(operand.second, 1)
        return self.write(operand), None

    def predicate(self, operand: Operand) -> tuple[int, bool]:
        """Slot and negation of a predicate source."""
        if isinstance(operand, Negated):
            return self.read(operand.operand, 1), True
        return self.read(operand, 1), False

    def address(self, operand: Operand, width: int = 64) -> tuple[int, int]:
        """Slot and byte offset of `[base+offset]`."""
        if not isinstance(operand, Memory):
            raise self.error(f"operand {operand} must be an address")
        return self.read(operand.base, width), operand.offset

    def width(self, slot: int) -> int:
        """Bits of a register slot."""
        return self.widths[slot]

    def label(self, operand: Operand) -> int:
        """Instruction index of a branch target."""
        if isinstance(operand, Symbol):
            target = self.kernel.label(operand.name, operand.scope)
            if target is not None:
                return target
        raise self.error(f"no label {operand}")

    def branches_to(self, *targets: int) -> None:
        """Tell the control-flow analysis where this instruction may jump."""
        self.targets[self.pc] = targets

    def error(self, why: str) -> UnsupportedInstruction:
        """An error at the instruction being decoded."""
        ins = self.kernel.code[self.pc]
        return UnsupportedInstruction(f"{ins.form}: {why}", line=ins.line)


def find_builder(ins: Instruction) -> Builder | None:
    """The builder of an instruction: the longest registered dotted prefix of its form."""
    parts = (ins.op, *ins.mods[:4])
    for count in range(len(parts), 0, -1):
        builder = _BUILDERS.get(".".join(parts[:count]))
        if builder is not None:
            return builder
    return None


def build(ins: Instruction, decoder: Decoder) -> Step:
    """The step of one instruction, without its guard."""
    builder = find_builder(ins)
    if builder is None:
        unknown = UnsupportedInstruction(f"{ins.form}: no such instruction here", line=ins.line)
        unknown.text = ins.text
        raise unknown
    try:
        return builder(ins, decoder)
    except SimulationError as error:
        error.line = error.line or ins.line
        error.text = error.text or ins.text
        raise
    except (IndexError, KeyError, ValueError, AttributeError) as error:
        wrong = UnsupportedInstruction(f"{ins.form}: operands not understood", line=ins.line)
        wrong.text = ins.text
        raise wrong from error


def guarded(step: Step, guard: int, negated: bool, defs: tuple[tuple[int, int], ...]) -> Step:
    """`@p step`: lanes without the guard keep their registers."""

    def run(warp: Warp) -> Any:
        registers = warp.registers
        condition = registers[guard]
        if condition.__class__ is bool:
            return step(warp) if condition is not negated else None
        outer = warp.mask
        active = ~condition if negated else condition
        if outer is not None:
            active = active & outer
        if not active.any():
            return None
        if active.all():
            return step(warp)
        kept = [registers[slot] for slot, _ in defs]
        warp.mask = active
        try:
            result = step(warp)
        finally:
            warp.mask = outer
        for (slot, width), old in zip(defs, kept, strict=True):
            registers[slot] = merge(active, old, registers[slot], width)
        return result

    return run


@dataclass(slots=True)
class Program:
    """A decoded kernel."""

    kernel: Kernel
    decoder: Decoder
    steps: list[Step]
    defs: list[tuple[tuple[int, int], ...]]
    meets: dict[int, int]
    live: list[int]
    lines: list[str]
    _fresh: list[Any] = field(default_factory=list)

    def initial_registers(self) -> list[Any]:
        """Register file of a fresh warp, without specials and shared symbols."""
        if not self._fresh:
            registers: list[Any] = [0] * self.decoder.registers
            for slot, width in self.decoder.widths.items():
                if width == 1:
                    registers[slot] = False
            for slot, value in self.decoder.constants.items():
                registers[slot] = value
            self._fresh = registers
        return list(self._fresh)


# Opcodes whose guard splits the warp rather than masking a write.
_JUMPS = ("bra", "brx", "ret", "exit")


def decode(module: PtxModule, kernel: Kernel, global_addresses: dict[str, int]) -> Program:
    """Decode every instruction; the first without semantics is an error."""
    import ptxsim.isa  # noqa: F401  (registers the builders)

    shared = [v for v in module.variables if v.space == "shared"]
    decoder = Decoder(kernel, global_addresses, shared)
    steps, flows, defs = [], [], []
    end = len(kernel.code)
    for pc, ins in enumerate(kernel.code):
        decoder.pc = pc
        decoder.uses, decoder.defs = [], []
        step = build(ins, decoder)
        written = tuple((slot, decoder.width(slot)) for slot in decoder.defs)
        is_jump = ins.op in _JUMPS
        if ins.guard is not None:
            decoder.uses.append(ins.guard.slot)
            if not is_jump:
                step = guarded(step, ins.guard.slot, ins.guard_negated, written)
        targets = decoder.targets.get(pc, ())
        conditional = ins.guard is not None
        if ins.op in ("ret", "exit") and conditional:
            targets = (end,)
        falls = not is_jump or conditional
        flows.append(Flow(tuple(decoder.uses), tuple(decoder.defs), targets, falls, conditional))
        steps.append(step)
        defs.append(written)
    return Program(kernel, decoder, steps, defs, reconvergence(flows), live_at(flows), module.lines)
