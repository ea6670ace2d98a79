"""ld, st, prefetch and cache policies.  PTX ISA: ld, st, prefetch, createpolicy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim import access, races
from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.errors import InvalidOperand
from ptxsim.memory import PARAM_BASE
from ptxsim.ptx import TYPE_BYTES, Instruction, Memory, Symbol
from ptxsim.values import MASKS, UNSIGNED, bits32, bits64, signed

TYPES = tuple(
    t for t in TYPE_BYTES if t[0] in "busf" and "x2" not in t and t not in ("b128", "bf16")
)
SPACES = {
    "global": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "shared::cluster",
    "local": "local",
    "param": "param",
    "param::entry": "param",
    "const": "const",
}
_ORDER = ("weak", "relaxed", "acquire", "release", "volatile", "mmio")
_SCOPES = ("cta", "cluster", "gpu", "sys")


def address_reader(c: Decoder, operand: Any, space: str) -> Any:
    """A function of the warp that gives the address of `[base+offset]` as int or lanes."""
    slot, offset = c.address(operand)
    narrow = space.startswith("shared") and c.width(slot) == 32
    view, mask = (bits32, MASKS[32]) if narrow else (bits64, MASKS[64])
    if not narrow and c.width(slot) == 32:
        view = bits32
    wrapped = offset & mask

    def read(warp: Any) -> Any:
        value = view(warp.registers[slot])
        if value.__class__ is int:
            return (value + offset) & mask
        return value + value.dtype.type(wrapped) if offset else value

    return read


def is_flag(ins: Instruction) -> bool:
    """An ordered access, which may be a flag that orders others: for race detection."""
    return any(order in ins.mods for order in _ORDER if order != "weak")


def memory_modifiers(ins: Instruction) -> tuple[Modifiers, str, int]:
    """The modifiers common to ld and st: what is left, the state space, the vector length."""
    m = Modifiers(ins)
    # Memory order needs no action: a warp instruction is carried out whole, in one total order.
    m.flag(*_ORDER)
    m.flag(*_SCOPES)
    m.ignore_cache_hints()
    space = SPACES.get(m.choice(*SPACES, default="generic"), "generic")
    vector = int(m.choice("v2", "v4", "v8", default="v1")[1:])
    return m, space, vector


def vector_item(m: Modifiers, kind: str, vector: int) -> int:
    """Bytes of an element; vectors of eight are of 32-bit elements."""
    size = TYPE_BYTES[kind]
    if vector == 8 and size != 4:
        raise m.unsupported("a vector of eight needs a type of 32 bits")
    return size


@instruction("ld", "ldu")
def build_load(ins: Instruction, c: Decoder) -> Step:
    """ld.space.vec.type: narrow types are extended to the register's width by their sign."""
    m, space, vector = memory_modifiers(ins)
    kind = m.type(*TYPES)
    m.done()
    size = vector_item(m, kind, vector)
    address = address_reader(c, ins.operands[1], space)
    slots = c.writes(ins.operands[0], 8 * size)
    if len(slots) != vector:
        raise m.unsupported(f"{len(slots)} destinations for .v{vector}")
    for operand in ins.operands[2:]:  # cache policy
        c.read(operand, 64)
    widths = [max(c.width(s), 8 * size) if s < len(c.kernel.registers) else 8 * size for s in slots]
    total = size * vector
    extend = [_extender(kind, 8 * size, width) for width in widths]
    plain = all(e is None for e in extend)

    base, pc = ins.operands[1], c.pc
    if space == "param" and isinstance(base, Memory) and isinstance(base.base, Symbol):

        def parameter(warp: Any) -> None:
            values = warp.cta.machine.param_values
            if pc not in values:
                parts = access.split(access.load(warp, space, address(warp), total), size, vector)
                values[pc] = [p if f is None else f(p) for p, f in zip(parts, extend, strict=True)]
            for slot, value in zip(slots, values[pc], strict=True):
                warp.registers[slot] = value

        return parameter

    def run(warp: Any) -> None:
        r = warp.registers
        parts = access.split(access.load(warp, space, address(warp), total), size, vector)
        if plain:
            for slot, part in zip(slots, parts, strict=True):
                r[slot] = part
        else:
            for slot, part, function in zip(slots, parts, extend, strict=True):
                r[slot] = part if function is None else function(part)

    return races.as_flag(run) if is_flag(ins) else run


def _extender(kind: str, bits: int, width: int) -> Any:
    """How a loaded value fills a wider register; None if it fits."""
    if kind[0] == "s" and bits < width:

        def sign(value: Any) -> Any:
            if value.__class__ is int:
                return signed(value, bits) & MASKS[width]
            return value.view(f"int{bits}").astype(UNSIGNED[width].name.replace("u", "", 1))

        return sign
    if bits >= width:
        return None
    return lambda value: value if value.__class__ is int else value.astype(UNSIGNED[width])


@instruction("st")
def build_store(ins: Instruction, c: Decoder) -> Step:
    """st.space.vec.type: the low bits of each source register."""
    m, space, vector = memory_modifiers(ins)
    kind = m.type(*TYPES)
    m.done()
    size = vector_item(m, kind, vector)
    address = address_reader(c, ins.operands[0], space)
    slots = c.reads(ins.operands[1], max(16, 8 * size))
    if len(slots) != vector:
        raise m.unsupported(f"{len(slots)} sources for .v{vector}")
    for operand in ins.operands[2:]:  # cache policy
        c.read(operand, 64)
    readers = [source_reader(c, slot, size) for slot in slots]

    def run(warp: Any) -> None:
        r = warp.registers
        parts = [read(r[slot]) for read, slot in zip(readers, slots, strict=True)]
        access.store(warp, space, address(warp), access.join(parts, size), size * vector)

    return races.as_flag(run) if is_flag(ins) else run


def source_reader(c: Decoder, slot: int, size: int) -> Any:
    """The low `size` bytes of a register's contents as int or unsigned lanes."""
    mask = (1 << (8 * size)) - 1
    dtype = np.dtype(f"uint{8 * size}")
    if size == 8:
        return bits64

    def read(value: Any) -> Any:
        if value.__class__ is int:
            return value & mask
        if value.__class__ is tuple or not isinstance(value, np.ndarray):
            value = bits64(value)
        if value.dtype.itemsize == size:
            return value if value.dtype is dtype else value.view(dtype)
        return value.view(UNSIGNED[8 * value.dtype.itemsize]).astype(dtype)

    del c, slot
    return read


@instruction("prefetch")
def build_prefetch(ins: Instruction, c: Decoder) -> Step:
    """prefetch: no effect; a tensor map's address must be in a known place, 64-aligned."""
    m = Modifiers(ins)
    is_map = m.flag("tensormap")
    space = SPACES.get(m.choice(*SPACES, default="generic"), "generic")
    m.ignore_cache_hints()
    m.flag("L1", "L2")
    m.done()
    address = address_reader(c, ins.operands[0], space)

    def run(warp: Any) -> None:
        value = address(warp)
        if is_map and value.__class__ is int:
            if value & 63:
                raise InvalidOperand(f"a tensor map at {value:#x}: it must be 64-byte aligned")
            if not value & PARAM_BASE:
                warp.cta.machine.memory.bytes_at(value, 64)

    return run


@instruction("createpolicy")
def build_policy(ins: Instruction, c: Decoder) -> Step:
    """createpolicy: a token that only cache hints read."""
    m = Modifiers(ins)
    m.ignore_cache_hints()
    m.flag("fractional", "range")
    m.flag("global")
    m.type("b64")
    m.done()
    d = c.write(ins.operands[0])
    for operand in ins.operands[1:]:
        if not hasattr(operand, "base"):
            c.read(operand, 32)

    def run(warp: Any) -> None:
        warp.registers[d] = 0x1000000000000000

    return run
