"""atom, red and the arithmetic of reductions.  PTX ISA: atom, red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim import access, races
from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.isa.loadstore import SPACES, address_reader
from ptxsim.isa.rounding import to_bf16_bits, to_f16_bits
from ptxsim.ptx import TYPE_BYTES, Instruction
from ptxsim.values import LANES, U32, bits32, bits64, lanes

REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_INTEGERS = ("u32", "s32", "u64", "s64")
# Types of each operation on scalars; floats of 16 bits need .noftz.
_TYPES = {
    "add": ("u32", "s32", "u64", "f32", "f64", *_HALVES),
    "min": _INTEGERS,
    "max": _INTEGERS,
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "cas": ("b16", "b32", "b64"),
}
# Types and lengths of vectors, for add; halves have min and max too.  Global memory only.
_VECTORS = {"v2": ("f32", *_HALVES), "v4": ("f32", *_HALVES), "v8": ("f16", "bf16")}
_ORDER = ("relaxed", "acquire", "release", "acq_rel")


def _bf16_sum(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    wide = [(v.astype(U32) << np.uint32(16)).view(np.float32) for v in (old, new)]
    return to_bf16_bits(wide[0] + wide[1])  # type: ignore[no-any-return]


def _f16_sum(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    wide = [v.view(np.float16).astype(np.float32) for v in (old, new)]
    return to_f16_bits(wide[0] + wide[1])  # type: ignore[no-any-return]


def _float_extreme(function: Any, kind: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    if kind == "bf16":

        def pick(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            wide = [(v.astype(U32) << 16).view(np.float32) for v in (old, new)]
            return to_bf16_bits(function(*wide))  # type: ignore[no-any-return]

        return pick
    return lambda old, new: function(old.view(kind_dtype(kind)), new.view(kind_dtype(kind)))


def kind_dtype(kind: str) -> np.dtype[Any]:
    """NumPy type of an element type (bits for bf16)."""
    names = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "uint16"}
    if kind in names:
        return np.dtype(names[kind])
    return np.dtype(("int" if kind[0] == "s" else "uint") + kind[1:])


def combine(name: str, kind: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """new = f(old, operand), elementwise on arrays of unsigned bits of the element's size."""
    if kind in ("bf16", "f16") and name == "add":
        return _bf16_sum if kind == "bf16" else _f16_sum
    if kind in ("bf16", "f16", "f32", "f64") and name in ("min", "max"):
        return _float_extreme(np.fmin if name == "min" else np.fmax, kind)
    dtype = kind_dtype(kind)
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda old, new: new,
        "inc": lambda old, new: np.where(old >= new, dtype.type(0), old + dtype.type(1)),
        "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - dtype.type(1)),
    }
    function = functions[name]
    return lambda old, new: function(old.view(dtype), new.view(dtype))


def reduce_into(target: np.ndarray, data: np.ndarray, name: str, kind: str) -> None:
    """target = f(target, data) on byte arrays of one element type."""
    bits = np.dtype(f"uint{8 * TYPE_BYTES[kind]}")
    result = combine(name, kind)(target.view(bits), data.view(bits))
    target[:] = np.ascontiguousarray(result).view(np.uint8)


def _check_form(m: Modifiers, form: tuple[str, str, str, str], no_flush: bool) -> None:
    """Combinations of operation, type, vector length and space that exist."""
    op, name, kind, length = form
    if length == "v1":
        known = kind in _TYPES[name] and not (op == "red" and name in ("exch", "cas"))
    else:
        names = ("add", "min", "max") if kind in _HALVES else ("add",)
        known = kind in _VECTORS[length] and name in names
    if not known:
        raise m.unsupported(f".{name} on .{kind}" + ("" if length == "v1" else f" {length}"))
    if no_flush != (kind in _HALVES):
        raise m.unsupported(".noftz is for, and needed by, floats of 16 bits")


@instruction("atom", "red")
def build_atomic(ins: Instruction, c: Decoder) -> Step:
    """atom/red: lane after lane on equal addresses; vectors and x2 types element by element."""
    m = Modifiers(ins)
    m.flag(*_ORDER)
    m.flag("cta", "cluster", "gpu", "sys")
    m.ignore_cache_hints()
    no_flush = m.flag("noftz")
    space = SPACES.get(m.choice(*SPACES, default="generic"), "generic")
    name = m.choice(*REDUCTIONS, "exch", "cas")
    length = m.choice("v2", "v4", "v8", default="v1")
    kind = next((x for x in m.left if x in TYPE_BYTES), "")
    _check_form(m, (ins.op, name, kind, length), no_flush)
    m.left.remove(kind)
    m.done()
    vector = int(length[1:])
    returns = ins.op == "atom"
    operands = ins.operands[1:] if returns else ins.operands
    slots = c.writes(ins.operands[0], 8 * TYPE_BYTES[kind]) if returns else []
    address = address_reader(c, operands[0], space)
    width = 8 * TYPE_BYTES[kind]
    sources = c.reads(operands[1], max(16, width))
    if len(sources) != vector or (returns and len(slots) != vector):
        raise m.unsupported(f"{len(sources)} operands for {length}")
    swap = c.read(operands[2], max(16, width)) if name == "cas" else None
    for operand in operands[3 if name == "cas" else 2 :]:
        c.read(operand, 64)
    element = kind.removesuffix("x2")
    item = TYPE_BYTES[element]
    size = TYPE_BYTES[kind] * vector
    function = combine(name, element) if name != "cas" else None
    bits = np.dtype(f"uint{8 * item}")
    view = {16: lambda v: lanes(v, 16), 32: bits32, 64: bits64}[max(16, width)]

    def run(warp: Any) -> None:
        r = warp.registers
        active = np.arange(LANES) if warp.mask is None else np.flatnonzero(warp.mask)
        where = access.lane_addresses(address(warp))
        columns = [lanes(view(r[s]), max(16, width)) for s in sources]
        table = np.stack(columns, -1).view(bits)
        swaps = None if swap is None else lanes(view(r[swap]), width)
        old = np.zeros((LANES, size // item), bits)
        with warp.cta.machine.atomic:
            for group in _distinct(where, active):
                operation = (table, swaps, function, bits)
                old[group] = _apply(warp, space, (where, size), operation, group)
        if returns:
            words = np.ascontiguousarray(old).view(np.dtype(f"uint{width}"))
            for number, slot in enumerate(slots):
                r[slot] = np.ascontiguousarray(words[:, number])

    is_lock = space != "global" or any(x in ins.mods for x in _ORDER if x != "relaxed")
    return races.as_flag(run) if is_lock else run


def _distinct(where: np.ndarray, active: np.ndarray) -> list[np.ndarray]:
    """Active lanes in groups without equal addresses, so that each group is one vector update."""
    addresses = where[active].tolist()
    if len(set(addresses)) == len(addresses):
        return [active]
    groups: list[list[int]] = []
    seen: dict[int, int] = {}
    for lane, one in zip(active.tolist(), addresses, strict=True):
        number = seen.get(one, 0)
        seen[one] = number + 1
        if number == len(groups):
            groups.append([])
        groups[number].append(lane)
    return [np.array(g) for g in groups]


def _apply(warp: Any, space: str, place: Any, operation: Any, group: np.ndarray) -> np.ndarray:
    """One vector of updates on distinct addresses; gives the old elements of those lanes."""
    where, size = place
    table, swaps, function, bits = operation
    if space == "global" and function is not None:
        found = access.global_elements(warp, where[group], size, bits.itemsize)
        if found is not None:
            elements, index = found
            old = elements[index]
            elements[index] = function(old, table[group]).view(bits).reshape(old.shape)
            return old  # type: ignore[no-any-return]
    outer = warp.mask
    if len(group) != LANES:
        mask = np.zeros(LANES, bool)
        mask[group] = True
        warp.mask = mask
    else:
        warp.mask = None
    try:
        raw = access.load(warp, space, where, size)
        old = np.ascontiguousarray(raw).view(bits).reshape(LANES, -1)
        if function is None:
            new = np.where(old == table, swaps[:, None], old)
        else:
            new = function(old, table)
        packed = np.ascontiguousarray(np.asarray(new)).view(np.uint8).reshape(LANES, size)
        if size < 16:
            value = packed.view(np.dtype(f"uint{8 * size}"))[:, 0]
        else:
            value = packed.view(np.complex128)
            value = value[:, 0] if size == 16 else value
        access.store(warp, space, where, value, size)
    finally:
        warp.mask = outer
    return old[group]  # type: ignore[no-any-return]
