"""Rounding of exact results to the narrower float types.  PTX ISA: Floating Point, cvt.

Sums and products of float32 are formed in float64; the result of a float64 addition is kept with
its error (Knuth's two-sum), so that the single rounding to float32 that PTX asks for is right also
where a plain double rounding would not be.  A value on its way to a 16-bit type is first rounded to
odd in float32 (truncated, with the last bit set if anything was lost): rounding that once more, in
any mode, equals rounding the exact value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ptxsim.values import F16, F32, F64, U16, U32, U64

_TIE_MASK = np.uint64(0x1FFFFFFF)
_TIE = np.uint64(0x10000000)
_MAGNITUDE = np.uint64(0x7FFFFFFFFFFFFFFF)
_TINY = np.uint64(0x3810000000000000)  # float64 bits of 2^-126, the smallest normal float32
_ONE64 = np.uint64(1)
_ONE32, _SIXTEEN = np.uint32(1), np.uint32(16)
_SUBNORMAL = np.uint32(0x00FFFFFE)
_HALF, _UPPER = np.uint32(0x7FFF), np.uint32(0xFFFF0000)
SMALLEST_NORMAL = {"f32": F32.type(2.0**-126), "f16": F32.type(2.0**-14), "f64": 2.0**-1022}
_LARGEST = {"bf16": 0x7F7F, "f16": 0x7BFF, "tf32": 0x7F7FE000}


def wide(value: Any) -> Any:
    """float32 to float64, scalar or lanes."""
    return value.astype(F64)


def two_sum_error(a: Any, b: Any, total: Any) -> Any:
    """The part of a + b that float64 rounding lost."""
    part = total - a
    return (a - (total - part)) + (b - part)


def round_sum(a: Any, b: Any, mode: str = "rn") -> Any:
    """float64 a + b rounded once to float32; `mode` is rn, rz, rm, rp or odd."""
    total = a + b
    rounded = total.astype(F32)
    if mode == "rn":
        bits = total.view(U64)
        # Only a float64 sum that is half-way between two float32 can mislead; below the normal
        # range the half-way points lie elsewhere (the subtraction leaves zeros out of it).
        doubtful = ((bits & _TIE_MASK) == _TIE) | ((bits & _MAGNITUDE) - _ONE64 < _TINY - _ONE64)
        if doubtful.__class__ is np.ndarray:
            if b"\x01" not in doubtful.tobytes():
                return rounded
        elif not doubtful:
            return rounded
        return _nearest(total, _finite_error(a, b, total), rounded)
    result = directed(total, _finite_error(a, b, total), rounded, mode)
    if mode == "rm":  # x - x is -0 here, and +0 + -0 too
        positive = (a == 0) & (b == 0) & ~(np.signbit(a) | np.signbit(b))
        result = np.where((total == 0) & ~positive, F32.type(-0.0), result)[()]
    return result


def _finite_error(a: Any, b: Any, total: Any) -> Any:
    return np.where(np.isfinite(total), two_sum_error(a, b, total), 0.0)


def _nearest(total: Any, error: Any, rounded: Any) -> Any:
    """Of two float32 at the same distance from `total`, the one that the lost part points to."""
    towards = np.where(total > rounded, F32.type(np.inf), F32.type(-np.inf))
    other = np.where(total == rounded, rounded, np.nextafter(rounded, towards))
    tie = (wide(rounded) + wide(other) == 2 * total) & (error != 0) & np.isfinite(other)
    chosen = np.where(error > 0, np.maximum(rounded, other), np.minimum(rounded, other))
    return np.where(tie, chosen, rounded)[()]


def directed(exact: Any, error: Any, rounded: Any, mode: str) -> Any:
    """`rounded` (to nearest) corrected to the rounding of exact + error: rm, rp, rz or odd."""
    too_high = (rounded > exact) | ((rounded == exact) & (error < 0))
    too_low = (rounded < exact) | ((rounded == exact) & (error > 0))
    down = np.nextafter(rounded, F32.type(-np.inf))
    up = np.nextafter(rounded, F32.type(np.inf))
    if mode == "rm":
        return np.where(too_high, down, rounded)[()]
    if mode == "rp":
        return np.where(too_low, up, rounded)[()]
    # The sign of the exact value: that of `exact`, or of the error if that is all there is.
    positive, negative = (exact > 0) | (error > 0), (exact < 0) | (error < 0)
    truncated = np.where(positive & too_high & ~(exact < 0), down, rounded)
    truncated = np.where(negative & too_low & ~(exact > 0), up, truncated)
    if mode == "rz":
        return truncated[()]
    inexact = (too_high | too_low).astype(np.uint32)
    return (np.asarray(truncated, F32).view(U32) | inexact).view(F32)[()]


def to_odd(value: Any) -> Any:
    """float64 to float32, rounded to odd."""
    return directed(value, 0.0, value.astype(F32), "odd")


def integer_to_f32(value: Any, mode: str) -> Any:
    """int64 or uint64 lanes (or a NumPy scalar) to float32 in any mode."""
    thirty_two, low_word = value.dtype.type(32), value.dtype.type(0xFFFFFFFF)
    high = (value >> thirty_two).astype(F64) * 2.0**32
    low = (value & low_word).astype(F64)
    return round_sum(high, low, mode)


def flush(value: Any, kind: str = "f32") -> Any:
    """`.ftz`: subnormals of this type become zeros of the same sign."""
    if kind == "f32" and value.__class__ is np.ndarray:
        # Bits without the sign, minus one: only subnormals are below the largest of them then.
        bits = value.view(U32)
        if b"\x01" not in (bits + bits - _ONE32 < _SUBNORMAL).tobytes():
            return value
    small = np.abs(value) < SMALLEST_NORMAL[kind]
    if small.__class__ is np.ndarray:
        if b"\x01" not in small.tobytes():
            return value
    elif not small:
        return value
    return np.where(small, np.copysign(value.dtype.type(0), value), value)[()]


def _finish16(value: Any, out: Any, nan: Any, kind: str, finite: bool) -> Any:
    """Canonical NaN, `.satfinite`, and a scalar as int."""
    if finite:
        largest = np.uint16(_LARGEST[kind])
        over = (out & np.uint16(0x7FFF)) > largest
        out = np.where(over, (out & np.uint16(0x8000)) | largest, out)
    if b"\x01" in nan.tobytes():
        out = np.where(nan, np.uint16(0x7FFF), out)
    return out if isinstance(value, np.ndarray) else int(out[0])


def bf16_words(value: np.ndarray) -> np.ndarray | None:
    """float32 lanes rounded to nearest bfloat16, in the upper halves of words; None for NaNs."""
    if b"\x01" in (value != value).tobytes():
        return None
    bits = value.view(U32)
    up = bits >> _SIXTEEN
    up &= _ONE32
    up += _HALF
    up += bits
    return up


def bf16_pair(low: np.ndarray, high: np.ndarray) -> np.ndarray | None:
    """Two vectors of float32 lanes rounded to nearest bfloat16 in one word; None for NaNs."""
    both = np.empty((2, len(low)), F32)
    both[0], both[1] = low, high
    words = bf16_words(both)
    if words is None:
        return None
    return words[0] >> _SIXTEEN | words[1] & _UPPER  # type: ignore[no-any-return]


def to_bf16_bits(value: Any, mode: str = "rn", finite: bool = False) -> Any:
    """float32 to bfloat16 bits (uint16 lanes or int); NaN becomes 0x7FFF."""
    if mode == "rn" and not finite and value.__class__ is np.ndarray and value.dtype is F32:
        words = bf16_words(value)
        if words is not None:
            return (words >> _SIXTEEN).astype(U16)
        shape = value.shape
        return to_bf16_bits(value.reshape(-1).astype(F64), mode).reshape(shape)
    bits = np.asarray(value, F32).reshape(-1).view(U32)
    bits_up: Any
    if mode == "rn":
        bits_up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    elif mode == "rz":
        bits_up = np.uint32(0)
    else:  # away from zero for one sign, towards it for the other
        away = (bits >> np.uint32(31)) == (1 if mode == "rm" else 0)
        bits_up = np.where(away, np.uint32(0xFFFF), np.uint32(0))
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    infinite = (bits & np.uint32(0x7FFFFFFF)) == np.uint32(0x7F800000)
    out = ((bits + np.where(infinite, np.uint32(0), bits_up)) >> np.uint32(16)).astype(U16)
    return _finish16(value, out, nan, "bf16", finite)


def to_f16_bits(value: Any, mode: str = "rn", finite: bool = False) -> Any:
    """float32 to float16 bits (uint16 lanes or int); NaN becomes 0x7FFF."""
    single = np.asarray(value, F32).reshape(-1)
    half = single.astype(F16)
    if mode != "rn":
        back = half.astype(F32)
        down, up = (np.nextafter(half, F16.type(end)) for end in (-np.inf, np.inf))
        if mode in ("rm", "rz"):
            lower = (back > single) & ((mode == "rm") | (single > 0))
            half = np.where(lower, down, half)
        if mode in ("rp", "rz"):
            raise_it = (back < single) & ((mode == "rp") | (single < 0))
            half = np.where(raise_it, up, half)
    return _finish16(value, half.view(U16), np.isnan(single), "f16", finite)


def to_tf32(value: Any, mode: str = "rna", finite: bool = False) -> Any:
    """float32 with the low 13 bits rounded away (`rna`: ties away from zero; `rn`: to even)."""
    bits = np.asarray(value, F32).reshape(-1).view(U32)
    if mode == "rn":
        rounded = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    elif mode == "rz":
        rounded = bits
    else:
        rounded = bits + np.uint32(0x1000)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    out = np.where(special, bits, rounded & np.uint32(0xFFFFE000))
    if finite:
        largest = np.uint32(_LARGEST["tf32"])
        over = (out & np.uint32(0x7FFFFFFF) > largest) & ~np.isnan(bits.view(F32))
        out = np.where(over, (out & np.uint32(0x80000000)) | largest, out)
    return out.view(F32) if isinstance(value, np.ndarray) else out.view(F32)[0]


@lru_cache(maxsize=4)
def float8_values(kind: str) -> Any:
    """The float32 value of each of the 256 codes of e4m3 or e5m2."""
    mantissa_bits, bias = (3, 7) if kind == "e4m3" else (2, 15)
    codes = np.arange(256)
    exponent = (codes & 0x7F) >> mantissa_bits
    mantissa = codes & ((1 << mantissa_bits) - 1)
    scale = 2.0 ** (np.maximum(exponent, 1) - bias - mantissa_bits)
    values = ((exponent > 0) * (1 << mantissa_bits) + mantissa) * scale
    if kind == "e4m3":
        values[(codes & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == 31
        values[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    return np.where(codes & 0x80, -values, values).astype(F32)


def to_float8_bits(value: Any, kind: str) -> Any:
    """float32 to e4m3 or e5m2 codes, to nearest even, `.satfinite`; NaN becomes 0x7F."""
    single = np.asarray(value, F32).reshape(-1)
    values = float8_values(kind)[:128]
    finite = values[np.isfinite(values)].astype(F64)
    middles = (finite[1:] + finite[:-1]) / 2
    size = np.abs(single).astype(F64)
    code = np.searchsorted(middles, size, side="left")
    tie = middles[np.minimum(code, len(middles) - 1)] == size
    code = code + (tie & (code % 2 == 1))
    out = np.minimum(code, len(finite) - 1) | np.where(np.signbit(single), 0x80, 0)
    out = np.where(np.isnan(single), 0x7F, out).astype(U16)
    return out if isinstance(value, np.ndarray) else int(out[0])
