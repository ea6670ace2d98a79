"""Exact rounding of rationals to float formats, written from IEEE 754 alone: the floats' oracle."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

INF = float("inf")


@dataclass(frozen=True)
class Format:
    """A binary format: precision with the hidden bit, exponent range, width of its encoding."""

    name: str
    precision: int
    min_exponent: int
    max_exponent: int
    width: int

    @property
    def largest(self) -> Fraction:
        return (2 - Fraction(2) ** (1 - self.precision)) * Fraction(2) ** self.max_exponent

    @property
    def smallest_normal(self) -> Fraction:
        return Fraction(2) ** self.min_exponent


F16 = Format("f16", 11, -14, 15, 16)
BF16 = Format("bf16", 8, -126, 127, 16)
F32 = Format("f32", 24, -126, 127, 32)
F64 = Format("f64", 53, -1022, 1023, 64)
TF32 = Format("tf32", 11, -126, 127, 32)
FORMATS = {f.name: f for f in (F16, BF16, F32, F64, TF32)}

Value = Fraction | float  # a float only for NaN, the infinities and the two zeros


def decode(bits: int, form: Format) -> Value:
    """The value of an encoding; tf32 is encoded as the f32 that it is a subset of."""
    if form.name == "bf16":
        return decode(bits << 16, F32)
    code = {"f16": "<He", "f32": "<If", "tf32": "<If", "f64": "<Qd"}[form.name]
    value = struct.unpack(f"<{code[2]}", struct.pack(code[:2], bits))[0]
    if value != value or value in (INF, -INF) or value == 0:
        return float(value)
    return Fraction(value)


def encode(value: Value, form: Format) -> int:
    """The encoding of a value of this format; NaN as None of the formats: compare with `is_nan`."""
    if form.name == "bf16":
        bits = encode(value, F32)
        assert bits & 0xFFFF == 0
        return bits >> 16
    code = {"f16": "<eH", "f32": "<fI", "tf32": "<fI", "f64": "<dQ"}[form.name]
    packed = struct.pack(code[:2], float(value))
    return int(struct.unpack(f"<{code[2]}", packed)[0])


def is_nan(bits: int, form: Format) -> bool:
    value = decode(bits, form)
    return value != value


def _log2(value: Fraction) -> int:
    """floor(log2(value)) of a positive rational."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def rounded(value: Value, form: Format, mode: str = "rn", zero_sign: int = 1) -> Value:
    """The value rounded to the format: rn (to even), rna (ties away), rz, rm, rp.

    `zero_sign` is the sign of an exact zero.
    """
    if isinstance(value, float) and (value != value or value in (INF, -INF)):
        return value
    if value == 0:
        if isinstance(value, float):
            return value
        return 0.0 if zero_sign > 0 else -0.0
    value = Fraction(value)
    size, negative = abs(value), value < 0
    exponent = max(_log2(size), form.min_exponent)
    unit = Fraction(2) ** (exponent - form.precision + 1)
    steps, rest = divmod(size, unit)
    up = {
        "rn": rest * 2 > unit or (rest * 2 == unit and steps % 2 == 1),
        "rna": rest * 2 >= unit,
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    result = (steps + up) * unit
    if result > form.largest:
        to_infinity = {"rn": True, "rna": True, "rz": False, "rm": negative, "rp": not negative}
        result_value: Value = INF if to_infinity[mode] else form.largest
    else:
        result_value = result if result else 0.0
    return -result_value if negative else result_value


def flushed(value: Value, form: Format) -> Value:
    """`.ftz`: a subnormal becomes a zero of its sign."""
    if isinstance(value, Fraction) and value and abs(value) < form.smallest_normal:
        return 0.0 if value > 0 else -0.0
    return value


def sign(value: Value) -> int:
    """-1 for negative values and -0."""
    if isinstance(value, float):
        return -1 if np.signbit(value) else 1
    return -1 if value < 0 else 1


def exact_sum(a: Value, b: Value, mode: str) -> Value:
    """a + b, before rounding; a zero carries the sign that the mode gives it."""
    special = [v for v in (a, b) if isinstance(v, float) and (v != v or v in (INF, -INF))]
    if special:  # the other one, however large, does not count
        return sum(special)
    total = Fraction(a) + Fraction(b)
    if total:
        return total
    if a == 0 and b == 0 and sign(a) == sign(b):
        return 0.0 if sign(a) > 0 else -0.0
    return -0.0 if mode == "rm" else 0.0


def exact_product(a: Value, b: Value) -> Value:
    """a * b, before rounding."""
    if any(isinstance(v, float) and (v != v or v in (INF, -INF)) for v in (a, b)):
        infinite = [v for v in (a, b) if isinstance(v, float) and v in (INF, -INF)]
        if a != a or b != b or a == 0 or b == 0:
            return float("nan")
        assert infinite
        return INF * sign(a) * sign(b)
    product = Fraction(a) * Fraction(b)
    if product:
        return product
    return 0.0 if sign(a) * sign(b) > 0 else -0.0


def corners(form: Format) -> list[int]:
    """Encodings at the edges: zeros, subnormals, smallest and largest, infinities, NaN, ones."""
    fraction = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}[form.name]
    top = ((1 << (form.width - 1 - fraction)) - 1) << fraction
    one = encode(Fraction(1), form)
    sign_bit = 1 << (form.width - 1)
    plain = [
        0,
        1,
        2,
        (1 << fraction) - 1,
        1 << fraction,
        (1 << fraction) + 1,
        one,
        one + 1,
        one - 1,
        top - 1,
        top,
        top | 1 << (fraction - 1),
    ]
    return plain + [p | sign_bit for p in plain]


def random_bits(form: Format, count: int, rng: np.random.Generator) -> np.ndarray:
    """Corner cases, numbers near one, and any bits at all."""
    edges = corners(form)
    fraction = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}[form.name]
    one = encode(Fraction(1), form)
    picks = []
    for _ in range(count):
        how = rng.integers(3)
        anything = int.from_bytes(rng.bytes(form.width // 8), "little")
        if how == 0:
            picks.append(edges[rng.integers(len(edges))])
        elif how == 1:
            near = (one >> fraction) + int(rng.integers(-6, 7))
            low = anything & ((1 << fraction) - 1)
            picks.append((anything & 1 << (form.width - 1)) | near << fraction | low)
        else:
            picks.append(anything)
    return np.array(picks, np.dtype(f"u{form.width // 8}"))
