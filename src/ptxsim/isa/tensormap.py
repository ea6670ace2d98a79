"""Tensor maps changed on the device.  PTX ISA: tensormap.replace, tensormap.cp_fenceproxy.

The fields lie where `tensor_maps.py` says; sizes of dimensions, boxes and element strides are kept
minus one, strides in units of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim import access
from ptxsim.decode import AGAIN, Decoder, Modifiers, Step, instruction
from ptxsim.errors import InvalidOperand, Misaligned
from ptxsim.isa.loadstore import address_reader
from ptxsim.isa.warp import FULL, gather_lanes
from ptxsim.ptx import Immediate, Instruction
from ptxsim.tensor_maps import MAP_BYTES
from ptxsim.values import U64, bits32, bits64

# Fields that an immediate sets in the word at byte 8: first bit, width, largest value.
_FLAGS = {
    "rank": (4, 3, 4),
    "elemtype": (7, 4, 12),
    "interleave_layout": (11, 2, 2),
    "swizzle_mode": (13, 2, 3),
    "fill_mode": (15, 1, 1),
}
_TF32 = 16  # this bit beside f32 (7) makes the elements tf32; `replace` counts them 11 and 12
_MODES = {"box_dim": 5, "global_dim": 5, "global_stride": 4, "element_stride": 5}


@instruction("tensormap.replace")
def build_replace(ins: Instruction, c: Decoder) -> Step:
    """tensormap.replace.tile.field.space.b1024.type [map]{, mode}, value."""
    m = Modifiers(ins, skip=1)
    m.choice("tile")
    field = m.choice("global_address", *_FLAGS, *_MODES)
    space = m.choice("global", "shared::cta", default="generic")
    m.choice("b1024")
    wide = field in ("global_address", "global_stride")
    m.type("b64" if wide else "b32")
    m.done()
    address = address_reader(c, ins.operands[0], "shared" if space == "shared::cta" else space)
    if field in _FLAGS:
        write = _flag(c, field, ins.operands[1])
    else:
        mode = _immediate(c, ins.operands[1], _MODES[field]) if field in _MODES else 0
        slot = c.read(ins.operands[-1], 64 if wide else 32)
        write = _number(field, mode, slot)
    kind = "shared" if space == "shared::cta" else space

    def run(warp: Any) -> None:
        where = address(warp)
        first = where if where.__class__ is int else int(where[0])
        if first % 64:
            raise Misaligned(f"a tensor map at {first:#x}: it must be 64-byte aligned")
        write(warp, kind, where)

    return run


def _immediate(c: Decoder, operand: Any, limit: int) -> int:
    if not isinstance(operand, Immediate) or not 0 <= operand.bits < limit:
        raise c.error(f"needs an immediate below {limit}")
    return operand.bits


def _change(warp: Any, place: tuple[str, Any], size: int, mask: int, bits: Any) -> None:
    """Replace the bits of `mask` in a word of `size` bytes."""
    space, address = place
    old = access.load(warp, space, address, size)
    kept = ~mask & ((1 << (8 * size)) - 1)
    if old.__class__ is int and bits.__class__ is int:
        access.store(warp, space, address, old & kept | bits, size)
        return
    dtype = np.dtype(f"uint{8 * size}")
    word = np.broadcast_to(np.asarray(old, U64) & np.uint64(kept) | np.asarray(bits, U64), 32)
    access.store(warp, space, address, word.astype(dtype), size)


def _flag(c: Decoder, field: str, operand: Any) -> Callable[[Any, str, Any], None]:
    first, width, largest = _FLAGS[field]
    value = _immediate(c, operand, largest + 1)
    mask, extra = ((1 << width) - 1) << first, 0
    if field == "elemtype":
        mask |= 1 << _TF32
        if value > 10:
            value, extra = value - 4, 1 << _TF32
    bits = value << first | extra
    return lambda warp, space, address: _change(warp, (space, address + 8), 4, mask, bits)


def _number(field: str, mode: int, slot: int) -> Callable[[Any, str, Any], None]:
    """Writers of the fields that come from a register."""

    def run(warp: Any, space: str, address: Any) -> None:
        value = warp.registers[slot]
        if field == "global_address":
            _change(warp, (space, address), 8, (1 << 64) - 1, bits64(value))
        elif field == "global_dim":
            _change(warp, (space, address + (32 + 4 * mode)), 4, (1 << 32) - 1, _less(value))
        elif field == "box_dim":
            _change(warp, (space, address + (55 + mode)), 1, 255, _less(value))
        elif field == "element_stride":
            shift = 3 * mode
            _change(warp, (space, address + 52), 4, 7 << shift, _less(value) << shift)
        else:
            units = bits64(value)
            wrong = units % 16 if units.__class__ is int else (units % np.uint64(16)).any()
            if wrong:
                raise InvalidOperand("a tensor map's stride that is no multiple of 16 bytes")
            units = units >> 4
            low, high = units & 0xFFFFFFFF, units >> 32 & 15
            _change(warp, (space, address + (12 + 4 * mode)), 4, (1 << 32) - 1, low)
            _change(warp, (space, address + 28), 4, 15 << (4 * mode), high << (4 * mode))

    return run


def _less(value: Any) -> Any:
    """The number minus one, as 32 bits."""
    bits = bits32(value)
    return (bits - 1) & 0xFFFFFFFF if bits.__class__ is int else (bits - np.uint32(1)).astype(U64)


@instruction("tensormap.cp_fenceproxy")
def build_copy(ins: Instruction, c: Decoder) -> Step:
    """tensormap.cp_fenceproxy [global], [shared], 128: a warp publishes a map that it has made."""
    m = Modifiers(ins, skip=1)
    for name in ("global", "shared::cta", "tensormap::generic", "release", "sync", "aligned"):
        m.choice(name)
    m.choice("cta", "cluster", "gpu", "sys")
    m.done()
    to = address_reader(c, ins.operands[0], "global")
    source = address_reader(c, ins.operands[1], "shared")
    size = ins.operands[2]
    if not isinstance(size, Immediate) or size.bits != MAP_BYTES:
        raise c.error(f"the size must be {MAP_BYTES}")

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        target, start = (_one(read(warp)) for read in (to, source))
        for offset in range(0, MAP_BYTES, 16):
            data = access.load(warp, "shared", start + offset, 16)
            access.store(warp, "global", target + offset, data, 16)
        return None

    return run


def _one(address: Any) -> int:
    """An address that all lanes have."""
    if address.__class__ is int:
        return int(address)
    if (address != address[0]).any():
        raise InvalidOperand("tensormap.cp_fenceproxy with addresses that differ among the lanes")
    return int(address[0])
