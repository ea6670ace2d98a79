"""Rounding of exact or nearly exact results to the narrower float types.

Sums and products of float32 are formed in float64; the result of a float64 addition is kept with
its error (Knuth's two-sum), so that the single rounding to float32 that PTX asks for is right also
where a plain double rounding would not be.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim.values import F32, F64, U16, U32, U64

_TIE_MASK = np.uint64(0x1FFFFFFF)
_TIE = np.uint64(0x10000000)
SMALLEST_NORMAL = np.float32(2.0**-126)


def two_sum_error(a: Any, b: Any, total: Any) -> Any:
    """The part of a + b that float64 rounding lost."""
    part = total - a
    return (a - (total - part)) + (b - part)


def round_sum(a: Any, b: Any, mode: str = "rn") -> Any:
    """float64 a + b rounded once to float32."""
    total = a + b
    rounded = total.astype(F32)
    if mode == "rn":
        ties = (total.view(U64) & _TIE_MASK) == _TIE
        if ties.__class__ is np.ndarray:
            if b"\x01" not in ties.tobytes():
                return rounded
        elif not ties:
            return rounded
        error = two_sum_error(a, b, total)
        # A tie of the float64 sum is no tie of the exact one if something was lost.
        up = np.nextafter(rounded, F32.type(np.inf))
        down = np.nextafter(rounded, F32.type(-np.inf))
        fixed = np.where((error > 0) & (rounded < total), up, rounded)
        fixed = np.where((error < 0) & (rounded > total), down, fixed)
        return np.where(ties & np.isfinite(total), fixed, rounded)[()]
    error = two_sum_error(a, b, total)
    return directed(total, np.where(np.isfinite(total), error, 0.0), rounded, mode)


def directed(exact: Any, error: Any, rounded: Any, mode: str) -> Any:
    """`rounded` (to nearest) corrected to rounding towards -inf (rm), +inf (rp) or zero (rz)."""
    too_high = (rounded > exact) | ((rounded == exact) & (error < 0))
    too_low = (rounded < exact) | ((rounded == exact) & (error > 0))
    down = np.nextafter(rounded, F32.type(-np.inf))
    up = np.nextafter(rounded, F32.type(np.inf))
    if mode == "rm":
        return np.where(too_high, down, rounded)[()]
    if mode == "rp":
        return np.where(too_low, up, rounded)[()]
    toward_zero = np.where((exact > 0) & too_high, down, rounded)
    return np.where((exact < 0) & too_low, up, toward_zero)[()]


def wide(value: Any) -> Any:
    """float32 to float64, scalar or lanes."""
    return value.astype(F64)


def flush(value: Any) -> Any:
    """`.ftz`: subnormals become zeros of the same sign."""
    small = np.abs(value) < SMALLEST_NORMAL
    if small.__class__ is np.ndarray:
        if b"\x01" not in small.tobytes():
            return value
    elif not small:
        return value
    return np.where(small, np.copysign(F32.type(0), value), value)[()]


def to_bf16_bits(value: Any, mode: str = "rn") -> Any:
    """float32 to bfloat16 bits (uint16 lanes or int); NaN becomes 0x7FFF."""
    scalar = not isinstance(value, np.ndarray)
    bits = np.asarray(value, F32).reshape(-1).view(U32)
    if mode == "rn":
        rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
        out = (rounded >> 16).astype(U16)
    else:  # rz: drop the low bits
        out = (bits >> 16).astype(U16)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if b"\x01" in nan.tobytes():
        out = np.where(nan, np.uint16(0x7FFF), out)
    return int(out[0]) if scalar else out


def to_f16_bits(value: Any, mode: str = "rn") -> Any:
    """float32 to float16 bits (uint16 lanes or int); NaN becomes 0x7FFF."""
    scalar = not isinstance(value, np.ndarray)
    wide_value = np.asarray(value, F32).reshape(-1)
    half = wide_value.astype(np.float16)
    if mode == "rz":
        over = np.abs(half.astype(F32)) > np.abs(wide_value)
        half = np.where(over, np.nextafter(half, np.float16(0)), half)
    out = half.view(U16)
    nan = np.isnan(wide_value)
    if b"\x01" in nan.tobytes():
        out = np.where(nan, np.uint16(0x7FFF), out)
    return int(out[0]) if scalar else out


def to_tf32(value: Any, mode: str = "rna") -> Any:
    """float32 with the low 13 bits rounded away (`rna`: ties away from zero; `rn`: to even)."""
    bits = np.asarray(value, F32).reshape(-1).view(U32)
    if mode == "rn":
        rounded = bits + np.uint32(0xFFF) + ((bits >> 13) & np.uint32(1))
    elif mode == "rz":
        rounded = bits
    else:
        rounded = bits + np.uint32(0x1000)
    out = rounded & np.uint32(0xFFFFE000)
    out = np.where((bits & 0x7F800000) == 0x7F800000, bits, out).view(F32)
    return out if isinstance(value, np.ndarray) else out[0]
