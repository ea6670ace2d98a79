"""cvt between all pairs of types used by compilers.  PTX ISA: cvt."""

from __future__ import annotations

import math
from fractions import Fraction

import floats
import harness
import numpy as np
import pytest
import torch
from floats import F32, FORMATS, TF32, Format, Value, decode, random_bits, rounded
from oracles import bits_of, check, integers, reading

import ptxsim

Array = np.ndarray
COUNT = 96
INTEGERS = tuple(f"{k}{n}" for k in "us" for n in (8, 16, 32, 64))


# The assembler has no 8-bit integers beside bf16 in registers of 16 bits.
WITH_FLOATS = [
    (f, i)
    for f in ("f16", "bf16", "f32", "f64")
    for i in INTEGERS
    if f != "bf16" or not i.endswith("8")
]


def register(width: int) -> str:
    """Type of the register that holds a value: 8-bit values live in 16-bit registers."""
    return f"u{max(2, width // 8)}"


def held(kind: str, seed: int = 0) -> Array:
    """Registers with random bits, also above the value of an 8-bit type."""
    return integers(max(16, bits_of(kind)), 64, np.random.default_rng(seed))


def limits(kind: str) -> tuple[int, int]:
    bits = bits_of(kind)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def value_of(word: int, kind: str) -> int:
    return reading(word & ((1 << bits_of(kind)) - 1), kind)


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("out", INTEGERS)
def test_integers_extend_by_the_source_and_truncate(out: str, source: str) -> None:
    """The result fills its register by the sign of the destination type."""

    def convert(a: int) -> int:
        narrow = value_of(a, source) & ((1 << bits_of(out)) - 1)
        return reading(narrow, out)

    check(f"cvt.{out}.{source} %d0, %a0;", [held(source)], register(bits_of(out)), convert)


def can_overflow(out: str, source: str) -> bool:
    low, high = limits(out)
    return limits(source)[0] < low or limits(source)[1] > high


# The ISA allows .sat only where a value can be out of range.
SATURATING = [(o, s) for o in INTEGERS for s in INTEGERS if can_overflow(o, s)]


@pytest.mark.parametrize(("out", "source"), SATURATING)
def test_sat_clamps_integers(out: str, source: str) -> None:
    low, high = limits(out)
    check(
        f"cvt.sat.{out}.{source} %d0, %a0;",
        [held(source)],
        register(bits_of(out)),
        lambda a: min(max(value_of(a, source), low), high),
    )


def test_a_wider_register_is_filled() -> None:
    for kind in ("s8", "u8", "s16", "u16"):
        check(
            f"cvt.{kind}.s32 %d0, %a0;",
            [held("s32")],
            "u4",
            lambda a, kind=kind: value_of(a, kind),
        )


def check_to_float(
    body: str, values: Array, out: Format, reference, nan: int | None = None
) -> None:
    """`reference` maps a register's bits to the exact rounded value."""
    for uniform in (False, True):
        (got,) = harness.run(body, [values], [f"u{out.width // 8}"], (uniform,))
        seen = harness.spread(values, uniform)
        for word, bits in zip(seen.tolist(), got.tolist(), strict=True):
            want: Value = reference(word)
            where = f"{body} of {word:#x}: {bits:#x}, want {want}"
            if want != want:
                assert bits == nan if nan is not None else floats.is_nan(bits, out), where
            else:
                assert bits == floats.encode(want, out), where


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(("out", "source"), WITH_FLOATS)
def test_integers_to_floats_round_once(out: str, source: str, mode: str) -> None:
    if out == "f64" and mode != "rn" and bits_of(source) == 64:
        with pytest.raises(ptxsim.UnsupportedInstruction):
            harness.run(f"cvt.{mode}.f64.{source} %d0, %a0;", [held(source)], ["u8"])
        return
    form = FORMATS[out]
    check_to_float(
        f"cvt.{mode}.{out}.{source} %d0, %a0;",
        held(source),
        form,
        lambda a: rounded(Fraction(value_of(a, source)), form, mode),
    )


@pytest.mark.parametrize("source", ["s8", "u16", "s32", "u64", "s64"])
@pytest.mark.parametrize("out", ["f16", "f32", "f64"])
def test_sat_of_an_integer_is_zero_or_one(out: str, source: str) -> None:
    form = FORMATS[out]
    check_to_float(
        f"cvt.rn.sat.{out}.{source} %d0, %a0;",
        held(source),
        form,
        lambda a: rounded(Fraction(min(max(value_of(a, source), 0), 1)), form),
    )


def half_way(source: Format, out: Format) -> Array:
    """Source values half-way between two of the destination, and their neighbours."""
    rng = np.random.default_rng(1)
    words = []
    for bits in random_bits(out, COUNT, rng).tolist():
        value = decode(bits, out)
        if isinstance(value, float) or abs(value) * 2 > min(out.largest, source.largest):
            words.append(0)
            continue
        unit = Fraction(2) ** (max(floats._log2(abs(value)), out.min_exponent) - out.precision)
        middle = rounded(value + unit, source)
        words.append(floats.encode(middle, source) + int(rng.integers(-1, 2)))
    top = (1 << source.width) - 1
    return np.array([w & top for w in words], f"u{source.width // 8}")


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(
    ("out", "source"),
    [
        ("f32", "f64"),
        ("f16", "f64"),
        ("bf16", "f64"),
        ("bf16", "f32"),
        ("bf16", "f16"),
        ("f16", "f32"),
    ],
)
def test_narrowing_floats_round_once(out: str, source: str, mode: str) -> None:
    form, wide = FORMATS[out], FORMATS[source]
    body = f"cvt.{mode}.{out}.{source} %d0, %a0;"
    values = random_bits(wide, COUNT, np.random.default_rng(0))
    nan = 0x7FFF if out != "f32" else None
    for inputs in (values, half_way(wide, form)):
        check_to_float(body, inputs, form, lambda a: rounded(decode(a, wide), form, mode), nan)


@pytest.mark.parametrize(
    ("out", "source"),
    [
        ("f32", "f16"),
        ("f32", "bf16"),
        ("f64", "f32"),
        ("f64", "f16"),
        ("f64", "bf16"),
        ("f32", "f32"),
    ],
)
def test_widening_floats_is_exact(out: str, source: str) -> None:
    values = random_bits(FORMATS[source], COUNT, np.random.default_rng(0))
    check_to_float(
        f"cvt.{out}.{source} %d0, %a0;",
        values,
        FORMATS[out],
        lambda a: decode(a, FORMATS[source]),
    )


@pytest.mark.parametrize("name", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_rounding_to_integral_floats(kind: str, name: str) -> None:
    form = FORMATS[kind]

    def integral(a: int) -> Value:
        value = decode(a, form)
        if isinstance(value, float):
            return value
        whole = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[name](value)
        return Fraction(whole) if whole else (0.0 if value > 0 else -0.0)

    nan = 0x7FFF if form.width == 16 else None
    values = random_bits(form, COUNT, np.random.default_rng(0))
    check_to_float(f"cvt.{name}.{kind}.{kind} %d0, %a0;", values, form, integral, nan)


@pytest.mark.parametrize("name", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize(("source", "out"), WITH_FLOATS)
def test_floats_to_integers_clamp(source: str, out: str, name: str) -> None:
    """NaN: 0, or only the top bit if f64 or a 64-bit integer takes part."""
    form, (low, high) = FORMATS[source], limits(out)

    def convert(a: int) -> int:
        value = decode(a, form)
        if value != value:
            of_nan = 1 << (bits_of(out) - 1) if source == "f64" or bits_of(out) == 64 else 0
            return reading(of_nan, out)
        if value in (float("inf"), float("-inf")):
            return high if value > 0 else low
        whole = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[name](
            Fraction(value)
        )
        return min(max(whole, low), high)

    values = random_bits(form, COUNT, np.random.default_rng(0))
    near = [float(x) for x in (low, high, low - 0.5, high + 0.5, 0.5, 1.5, 2.5, -0.5, -1.5, 3.49)]
    for number, x in enumerate(near):
        values[number] = floats.encode(rounded(Fraction(x), form), form)
    check(f"cvt.{name}.{out}.{source} %d0, %a0;", [values], register(bits_of(out)), convert)


def test_ftz_flushes_f32_subnormals_before_and_after() -> None:
    tiny = np.array([1, 0x80000001, 0x007FFFFF, 0x00800000] * 8, np.uint32)
    (got,) = harness.run("cvt.ftz.f32.f32 %d0, %a0;", [tiny], ["u4"])
    np.testing.assert_array_equal(got, np.array([0, 0x80000000, 0, 0x00800000] * 8, np.uint32))
    (got,) = harness.run("cvt.rpi.ftz.s32.f32 %d0, %a0;", [tiny], ["i4"])
    np.testing.assert_array_equal(got, np.array([0, 0, 0, 1] * 8, np.int32))
    wide = np.full(32, 2.0**-140)
    (got,) = harness.run("cvt.rn.ftz.f32.f64 %d0, %a0;", [wide.view("u8")], ["u4"])
    assert (got == 0).all()
    (got,) = harness.run("cvt.rn.f32.f64 %d0, %a0;", [wide.view("u8")], ["u4"])
    assert (got == 1 << 9).all()


@pytest.mark.parametrize(("out", "source"), [("f32", "f32"), ("f32", "f64"), ("f16", "f32")])
def test_sat_of_floats_is_the_unit_interval(out: str, source: str) -> None:
    form, wide = FORMATS[out], FORMATS[source]
    rounding = ".rn" if out != source else ""

    def clamp(a: int) -> Value:
        value = decode(a, wide)
        if value != value or value <= 0:
            return 0.0
        return rounded(min(value, Fraction(1)), form)

    values = random_bits(wide, COUNT, np.random.default_rng(0))
    check_to_float(f"cvt{rounding}.sat.{out}.{source} %d0, %a0;", values, form, clamp)


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("modifier", ["", ".relu", ".satfinite", ".relu.satfinite"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packing_two_floats_puts_the_first_high(kind: str, modifier: str, mode: str) -> None:
    form = FORMATS[kind]

    def narrow(word: int) -> int:
        value = decode(word, F32)
        if value != value:
            return 0x7FFF
        if "relu" in modifier and value <= 0:
            return 0
        result = rounded(value, form, mode)
        if "satfinite" in modifier and abs(result) > form.largest:
            result = form.largest if result > 0 else -form.largest
        return floats.encode(result, form)

    rng = np.random.default_rng(3)
    a, b = (random_bits(F32, COUNT, rng) for _ in range(2))
    check(
        f"cvt.{mode}{modifier}.{kind}x2.f32 %d0, %a0, %a1;",
        [a, b],
        "u4",
        lambda x, y: narrow(x) << 16 | narrow(y),
    )
    check(f"cvt.{mode}{modifier}.{kind}.f32 %d0, %a0;", [a], "u2", narrow)


@pytest.mark.parametrize(
    ("mode", "modifier"),
    [
        (m, x)
        for m in ("rna", "rn", "rz")
        for x in ("", ".relu", ".satfinite")
        if m + x != "rna.relu"
    ],
)
def test_tf32(mode: str, modifier: str) -> None:
    def convert(word: int) -> Value:
        value = decode(word, F32)
        if modifier == ".relu" and value <= 0:
            return 0.0
        result = rounded(value, TF32, mode)
        if modifier == ".satfinite" and abs(result) > TF32.largest:
            result = TF32.largest if result > 0 else -TF32.largest
        return result

    values = random_bits(F32, COUNT, np.random.default_rng(5))
    values[:32] = values[:32] & 0xFFFFE000 | 0x1000  # ties
    check_to_float(f"cvt.{mode}{modifier}.tf32.f32 %d0, %a0;", values, F32, convert)


FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def float8_codes(values: Array, kind: str) -> Array:
    """PyTorch's codes, with satfinite: its own conversion saturates for e4m3fn only in part."""
    largest = torch.finfo(FLOAT8[kind]).max
    finite = torch.from_numpy(values).clamp(-largest, largest)
    codes = finite.to(FLOAT8[kind]).view(torch.uint8).numpy().astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7F), codes)


@pytest.mark.parametrize("kind", FLOAT8)
def test_float8_pairs_from_f32(kind: str) -> None:
    rng = np.random.default_rng(7)
    values = [np.exp2(rng.uniform(-20, 18, 512)) * rng.choice((-1, 1), 512) for _ in range(2)]
    a, b = (v.astype(np.float32) for v in values)
    table = torch.arange(256, dtype=torch.uint8).view(FLOAT8[kind]).float().numpy()
    positive = np.sort(table[(table >= 0) & np.isfinite(table)])
    middles = (positive[1:] + positive[:-1]) / 2
    a[: len(middles)], a[-4:] = middles, (np.inf, -np.inf, np.nan, -0.0)
    for uniform in harness.mixtures(2):
        (got,) = harness.run(
            f"cvt.rn.satfinite.{kind}x2.f32 %d0, %a0, %a1;",
            [a.view("u4"), b.view("u4")],
            ["u2"],
            uniform,
        )
        x, y = (harness.spread(v, u) for v, u in zip((a, b), uniform, strict=True))
        np.testing.assert_array_equal(got >> 8, float8_codes(x, kind))
        np.testing.assert_array_equal(got & 0xFF, float8_codes(y, kind))
    (got,) = harness.run(
        f"cvt.rn.satfinite.relu.{kind}x2.f32 %d0, %a0, %a1;", [a.view("u4"), b.view("u4")], ["u2"]
    )
    positive_a = np.where(a <= 0, np.float32(0), a)
    np.testing.assert_array_equal(got >> 8, float8_codes(positive_a, kind))


@pytest.mark.parametrize("kind", FLOAT8)
def test_float8_pairs_to_and_from_f16x2(kind: str) -> None:
    codes = np.arange(256, dtype=np.uint16)
    pairs = codes | codes[::-1] << 8
    values = torch.arange(256, dtype=torch.uint8).view(FLOAT8[kind]).half().numpy()
    for uniform in (False, True):
        (got,) = harness.run(f"cvt.rn.f16x2.{kind}x2 %d0, %a0;", [pairs], ["u4"], (uniform,))
        seen = harness.spread(pairs, uniform)
        for half, index in ((got & 0xFFFF, seen & 0xFF), (got >> 16, seen >> 8)):
            np.testing.assert_array_equal(half.astype(np.uint16).view(np.float16), values[index])
        # Back again: every finite code survives.
        (back,) = harness.run(
            f"cvt.rn.satfinite.{kind}x2.f16x2 %d0, %a0;",
            [got.astype(np.uint32)],
            ["u2"],
            (uniform,),
        )
        sent = harness.spread(got, uniform)
        for shift in (0, 8):
            code, index = back >> shift & 0xFF, harness.spread(pairs, uniform) >> shift & 0xFF
            finite = np.isfinite(values[index])
            np.testing.assert_array_equal(code[finite], index[finite])
        assert (sent == got).all()


def test_conversions_that_the_isa_lacks_are_errors() -> None:
    one = np.zeros(32, np.uint32)
    for text in (
        "cvt.rn.satfinite.e4m3x2.s32 %d0, %a0;",
        "cvt.f32.s32 %d0, %a0;",
        "cvt.rn.s32.f32 %d0, %a0;",
        "cvt.rzi.f32.s32 %d0, %a0;",
        "cvt.rna.f32.s32 %d0, %a0;",
        "cvt.ftz.s32.s32 %d0, %a0;",
        "cvt.rn.s32.s32 %d0, %a0;",
        "cvt.rn.f32.f32 %d0, %a0;",
        "cvt.rn.ftz.tf32.f32 %d0, %a0;",
        "cvt.rn.sat.bf16x2.f32 %d0, %a0, %a0;",
        "cvt.rn.relu.f32.f64 %d0, %a0;",
    ):
        with pytest.raises(ptxsim.UnsupportedInstruction) as caught:
            harness.run(text, [one], ["u4"])
        assert caught.value.line is not None
