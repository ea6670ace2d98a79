"""The 128-byte tensor map: decoding, encoding, and the bytes of one box.  PTX ISA: Tensors.

Bit positions: docs/ptxsim.md lists them and how they were confirmed.  Modes count from the
innermost (contiguous) one, as the coordinates of the copy instructions do.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ptxsim.errors import InvalidOperand

MAP_BYTES = 128
ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2}
ELEMENT_NAMES = {
    0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f32",
    9: "f64", 10: "bf16",
}  # fmt: skip
_CODES = {"u8": 0, "u16": 1, "u32": 2, "u64": 4, "f16": 6, "f32": 7, "f64": 9, "bf16": 10}
SWIZZLE_SPANS = (0, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A decoded map; `strides` are in bytes, the first (contiguous) one included."""

    address: int
    element: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    nan_fill: bool

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.element]

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Elements of one box per mode, after element strides."""
        return tuple(-(-b // s) for b, s in zip(self.box, self.element_strides, strict=True))

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy moves and announces, filled elements included."""
        return int(np.prod(self.box_shape)) * self.item


def decode(raw: bytes) -> TensorMap:
    """The map in the first 64 bytes of `raw`, checked for what the instructions require."""
    address, flags = struct.unpack_from("<QI", raw, 0)
    rank = (flags >> 4 & 7) + 1
    element, interleave = flags >> 7 & 15, flags >> 11 & 3
    if rank > 5 or element not in ELEMENT_BYTES:
        raise InvalidOperand(f"this is no tensor map: rank {rank}, element code {element}")
    if interleave:
        raise InvalidOperand("interleaved tensor maps are not supported")
    low = struct.unpack_from("<4I", raw, 12)
    high = struct.unpack_from("<I", raw, 28)[0]
    item = ELEMENT_BYTES[element]
    strides = [item]
    strides += [(low[i] | (high >> (4 * i) & 15) << 32) * 16 for i in range(rank - 1)]
    dims = [d + 1 for d in struct.unpack_from("<5I", raw, 32)[:rank]]
    steps = struct.unpack_from("<I", raw, 52)[0]
    box = [b + 1 for b in raw[55 : 55 + rank]]
    found = TensorMap(
        address,
        element,
        tuple(dims),
        tuple(strides),
        tuple(box),
        tuple((steps >> (3 * i) & 7) + 1 for i in range(rank)),
        SWIZZLE_SPANS[flags >> 13 & 3],
        bool(flags >> 15 & 1),
    )
    _check(found)
    return found


def _check(found: TensorMap) -> None:
    inner = found.box_shape[0] * found.item
    if found.address % 16:
        raise InvalidOperand(f"tensor map: global address {found.address:#x} is no multiple of 16")
    if inner % 16:
        raise InvalidOperand(f"tensor map: inner box of {inner} bytes is no multiple of 16")
    if found.swizzle and inner > found.swizzle:
        raise InvalidOperand(
            f"tensor map: inner box of {inner} bytes exceeds the {found.swizzle}-byte swizzle"
        )
    if found.swizzle and inner < found.swizzle:
        raise InvalidOperand(
            f"tensor map: inner box of {inner} bytes is smaller than the {found.swizzle}-byte "
            "swizzle span; the row pitch of that case was never verified"
        )


def encode(
    address: int,
    element: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
    nan_fill: bool = False,
) -> bytes:
    """A map for tests and hand-written launches; `strides` in bytes for modes 1.. only."""
    rank = len(dims)
    flags = 2 | (rank - 1) << 4 | _CODES[element] << 7 | SWIZZLE_SPANS.index(swizzle) << 13
    flags |= nan_fill << 15 | 2 << 17
    units = [s // 16 for s in strides] + [0] * (4 - len(strides))
    raw = bytearray(MAP_BYTES)
    struct.pack_into("<QI", raw, 0, address, flags)
    struct.pack_into("<4I", raw, 12, *(u & 0xFFFFFFFF for u in units))
    struct.pack_into("<I", raw, 28, sum((u >> 32) << (4 * i) for i, u in enumerate(units)))
    struct.pack_into("<5I", raw, 32, *[d - 1 for d in dims], *[0] * (5 - rank))
    raw[55 : 55 + rank] = bytes(b - 1 for b in box)
    return bytes(raw)


def swizzle_rows(rows: np.ndarray, span: int) -> np.ndarray:
    """16-byte row numbers of shared memory after the XOR of a swizzle span.

    On byte addresses a the pattern is a ^= (a >> 7 & (span/16 - 1)) << 4: it works on absolute
    addresses and moves whole 16-byte rows.
    """
    if not span:
        return rows
    moved: np.ndarray = rows ^ (rows >> 3 & (span // 16 - 1))
    return moved


def box_coordinates(found: TensorMap, start: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Byte offsets of the box's elements from the global address, outermost mode first, and which
    of them lie inside the tensor."""
    offset, inside = np.zeros((), np.int64), np.ones((), bool)
    for mode, (first, count) in enumerate(zip(start, found.box_shape, strict=True)):
        index = first + np.arange(count, dtype=np.int64) * found.element_strides[mode]
        shape = (-1,) + (1,) * mode
        good = (index >= 0) & (index < found.dims[mode])
        offset = offset + (index * found.strides[mode]).reshape(shape)
        inside = inside & good.reshape(shape)
    return offset, np.broadcast_to(inside, offset.shape)


def fill_value(found: TensorMap) -> int:
    """Bits of an element outside the tensor: zero, or a NaN for float types if the map says so."""
    if not found.nan_fill:
        return 0
    return {6: 0x7FFF, 7: 0x7FFFFFFF, 8: 0x7FFFFFFF, 9: 0x7FFFFFFFFFFFFFFF, 10: 0x7FFF}.get(
        found.element, 0
    )
