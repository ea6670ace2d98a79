"""How register contents are held, and the conversions between the views of them.

A register of a warp holds one of

* a Python `int`: the bits of all active lanes, known to be equal (uniform), non-negative;
* an array of 32 lanes whose dtype has the register's width, in whatever interpretation its writer
  produced (`float32`, `uint32`, `int32`, ...): readers take the view they need, mostly for free;
* a `Pair` for 64-bit registers: two 32-bit halves, as packed floats and register moves make them;
  a 128-bit register is always a `Pair`, of 64-bit halves;
* for predicates a `bool` or a boolean array of 32 lanes.

Values are never changed in place, so a move is an assignment and a divergent write is a merge.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

LANES = 32
U8, U16, U32, U64 = (np.dtype(f"uint{n}") for n in (8, 16, 32, 64))
S8, S16, S32, S64 = (np.dtype(f"int{n}") for n in (8, 16, 32, 64))
F16, F32, F64 = (np.dtype(f"float{n}") for n in (16, 32, 64))
BOOL = np.dtype(bool)
UNSIGNED = {8: U8, 16: U16, 32: U32, 64: U64}
SIGNED = {8: S8, 16: S16, 32: S32, 64: S64}
MASKS = {n: (1 << n) - 1 for n in (1, 8, 16, 32, 64)}
LANE_IDS = np.arange(LANES, dtype=np.uint32)

Value = Any  # int | bool | np.ndarray | Pair


class Pair(NamedTuple):
    """The two 32-bit halves of a 64-bit register, low first."""

    lo: Value
    hi: Value


def bits16(value: Value) -> Value:
    """16-bit register contents as int or uint16 lanes."""
    if value.__class__ is int or value.dtype is U16:
        return value
    return value.view(U16)


def bits32(value: Value) -> Value:
    """32-bit register contents as int or uint32 lanes."""
    if value.__class__ is int or value.dtype is U32:
        return value
    return value.view(U32)


def bits64(value: Value) -> Value:
    """64-bit register contents as int or uint64 lanes."""
    if value.__class__ is int:
        return value
    if value.__class__ is Pair:
        lo, hi = bits32(value.lo), bits32(value.hi)
        if lo.__class__ is int and hi.__class__ is int:
            return lo | hi << 32
        lo = lo if lo.__class__ is int else lo.astype(U64)
        hi = hi << 32 if hi.__class__ is int else hi.astype(U64) << 32
        return lo | hi
    return value if value.dtype is U64 else value.view(U64)


def halves(value: Value) -> Pair:
    """64-bit register contents as two 32-bit halves."""
    if value.__class__ is Pair:
        return value  # type: ignore[no-any-return]
    if value.__class__ is int:
        return Pair(value & 0xFFFFFFFF, value >> 32)
    words = value.view(U32)
    return Pair(words[0::2], words[1::2])


BITS = {16: bits16, 32: bits32, 64: bits64}


@lru_cache(maxsize=4096)
def _float32(bits: int) -> np.float32:
    return np.float32(struct.unpack("<f", struct.pack("<I", bits))[0])


def float32_of_bits(bits: int) -> np.float32:
    """The float with these bits; NaN payloads survive only as NaN."""
    return _float32(bits)


def f32(value: Value) -> Any:
    """32-bit register contents as a float32 scalar or lanes."""
    if value.__class__ is int:
        return _float32(value)
    return value if value.dtype is F32 else value.view(F32)


def f64(value: Value) -> Any:
    """64-bit register contents as a float64 scalar or lanes."""
    bits = bits64(value) if value.__class__ is Pair else value
    if bits.__class__ is int:
        return np.float64(struct.unpack("<d", struct.pack("<Q", bits))[0])
    return bits if bits.dtype is F64 else bits.view(F64)


def f16(value: Value) -> Any:
    """16-bit register contents as a float16 scalar or lanes."""
    if value.__class__ is int:
        return np.uint16(value).view(F16)
    return value if value.dtype is F16 else value.view(F16)


def bf16(value: Value) -> Any:
    """16-bit register contents, a bfloat16, widened to float32."""
    bits = bits16(value)
    if bits.__class__ is int:
        return _float32(bits << 16)
    return (bits.astype(U32) << 16).view(F32)


def from_float(result: Any) -> Value:
    """A float result as register contents: a scalar becomes the uniform bits."""
    if isinstance(result, np.ndarray) and result.ndim:
        return result
    scalar = np.asarray(result)
    return int(scalar.view(UNSIGNED[8 * scalar.dtype.itemsize]))


def signed(value: Value, width: int) -> Value:
    """Register contents of `width` bits as signed: a Python int or signed lanes."""
    if value.__class__ is Pair:
        value = bits64(value)
    if value.__class__ is int:
        return value - (1 << width) if value >> (width - 1) else value
    dtype = SIGNED[width]
    return value if value.dtype is dtype else value.view(dtype)


def lanes(value: Value, width: int) -> np.ndarray:
    """Register contents as 32 unsigned lanes (boolean for width 1)."""
    if width == 1:
        return np.full(LANES, value) if value.__class__ is bool else value
    if value.__class__ is Pair:
        value = bits64(value)
    if value.__class__ is int:
        return np.full(LANES, value, UNSIGNED[width])
    dtype = UNSIGNED[width]
    return value if value.dtype is dtype else value.view(dtype)  # type: ignore[no-any-return]


def uniform(value: Value, mask: np.ndarray | None) -> Value | None:
    """The int (or bool) that all active lanes hold, or None if they differ."""
    if value.__class__ is int or value.__class__ is bool:
        return value
    if value.__class__ is Pair:
        value = bits64(value)
        if value.__class__ is int:
            return value
    active = value if mask is None else value[mask]
    if active.dtype.kind == "f":
        active = active.view(UNSIGNED[8 * active.itemsize])
    first = active[0]
    if (active == first).all():
        return bool(first) if active.dtype is BOOL else int(first)
    return None


def merge(mask: np.ndarray, old: Value, new: Value, width: int) -> Value:
    """`new` where `mask`, `old` elsewhere."""
    if new is old:
        return new
    kind = new.__class__
    if (kind is int or kind is bool) and old.__class__ is kind and old == new:
        return new
    if kind is Pair and (old.__class__ is Pair or width == 128):
        half = width // 2
        lo, hi = old if old.__class__ is Pair else (0, 0)  # a 128-bit register never written
        return Pair(merge(mask, lo, new.lo, half), merge(mask, hi, new.hi, half))
    if kind is np.ndarray and new.dtype.kind == "f":
        # Keep the float view, so that float code does not convert back and forth.
        return np.where(mask, new, lanes(old, width).view(new.dtype))
    return np.where(mask, lanes(new, width), lanes(old, width))
