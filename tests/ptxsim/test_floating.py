"""Float arithmetic against exact rationals.  PTX ISA: Floating Point, Half Precision."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import floats
import harness
import numpy as np
import pytest
from floats import (
    F16,
    F32,
    FORMATS,
    Format,
    Value,
    decode,
    encode,
    exact_product,
    exact_sum,
    flushed,
    random_bits,
    rounded,
    sign,
)
from oracles import FLOATS_TRIED, PATTERNS, check_float, samples

Array = np.ndarray

MODES = ("rn", "rz", "rm", "rp")


def operation(name: str, mode: str) -> Callable[..., Value]:
    """The exact result of add, sub, mul or fma, before rounding."""
    if name == "add":
        return lambda a, b: exact_sum(a, b, mode)
    if name == "sub":
        return lambda a, b: exact_sum(a, -b if isinstance(b, Fraction) else -1.0 * b, mode)
    if name == "mul":
        return exact_product
    return lambda a, b, c: exact_sum(exact_product(a, b), c, mode)


def near_ties(form: Format, seed: int = 1) -> list[Array]:
    """a * b + c next to half-way points, where rounding twice gives the wrong neighbour."""
    rng = np.random.default_rng(seed)
    rows = []
    while len(rows) < FLOATS_TRIED:
        c = decode(int(random_bits(form, 1, rng)[0]), form)
        if isinstance(c, float) or abs(c) * 4 > form.largest:
            continue
        step = abs(rounded(c * (1 + Fraction(1, 2 ** (form.precision - 1))), form) - c)  # type: ignore[operator]
        step = step or Fraction(2) ** (form.min_exponent - form.precision + 1)
        # (1 + e)(1 - e) = 1 - e^2: half a step short by a hair, or beyond it by one.
        e = Fraction(1, 2 ** (form.precision - 1))
        half = rounded(step / 2, form)
        a, b = (1 + e, 1 - e) if rng.integers(2) else (1 + e, 1 - e / 2)
        product_scale = rounded(half * b, form)
        sides = (rng.integers(2) * 2 - 1, rng.integers(2) * 2 - 1)
        rows.append(
            (
                encode(a * int(sides[0]), form),
                encode(product_scale, form),
                encode(c * int(sides[1]), form),
            )
        )
    return [np.array(column, f"u{form.width // 8}") for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_f32_rounds_once_in_every_mode(name: str, mode: str) -> None:
    exact = operation(name, mode)
    number = 3 if name == "fma" else 2
    check_float(
        f"{name}.{mode}.f32 %d0, {', '.join(f'%a{n}' for n in range(number))};",
        samples(F32, number),
        F32,
        lambda *args: rounded(exact(*args), F32, mode),
    )


@pytest.mark.parametrize("mode", MODES)
def test_fma_near_half_way_points_is_not_rounded_twice(mode: str) -> None:
    check_float(
        f"fma.{mode}.f32 %d0, %a0, %a1, %a2;",
        near_ties(F32),
        F32,
        lambda a, b, c: rounded(exact_sum(exact_product(a, b), c, mode), F32, mode),
    )


def test_fma_rounds_subnormal_results_once() -> None:
    """z + 2^-150 (1 +- 2^-46): a tie of subnormal float32 in float64, but not exactly."""
    rng = np.random.default_rng(2)
    z = rng.integers(1 << 8, 1 << 14, 64).astype(np.uint32)  # 2^-149 times this
    a = np.where(rng.integers(0, 2, 64), 1 + 2.0**-23, 1 - 2.0**-23).astype(np.float32)
    b = (2.0**-75 * np.where(rng.integers(0, 2, 64), 1 + 2.0**-23, 1 - 2.0**-23)).astype(np.float32)
    c = np.float32(2.0**-75)
    check_float(
        "fma.rn.f32 %d0, %a0, %a1, %a2;",
        [(a * c).view(np.uint32), b.view(np.uint32), z],
        F32,
        lambda x, y, t: rounded(exact_sum(exact_product(x, y), t, "rn"), F32),
    )


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_ftz_flushes_operands_and_result(name: str) -> None:
    exact = operation(name, "rn")
    number = 3 if name == "fma" else 2

    def reference(*args: Value) -> Value:
        return flushed(rounded(exact(*(flushed(a, F32) for a in args)), F32), F32)

    check_float(
        f"{name}.rn.ftz.f32 %d0, {', '.join(f'%a{n}' for n in range(number))};",
        samples(F32, number, seed=4),
        F32,
        reference,
    )


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_sat_clamps_to_the_unit_interval_and_nan_to_zero(name: str) -> None:
    exact = operation(name, "rn")
    number = 3 if name == "fma" else 2

    def reference(*args: Value) -> Value:
        value = rounded(exact(*args), F32)
        return 0.0 if value != value or value <= 0 else min(value, Fraction(1))

    check_float(
        f"{name}.rn.sat.f32 %d0, {', '.join(f'%a{n}' for n in range(number))};",
        samples(F32, number, seed=5),
        F32,
        reference,
        any_zero=True,
    )


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_f64_is_ieee(name: str) -> None:
    form, number = FORMATS["f64"], 3 if name == "fma" else 2
    exact = operation(name, "rn")
    rounding = ".rn" if name == "fma" else ""
    check_float(
        f"{name}{rounding}.f64 %d0, {', '.join(f'%a{n}' for n in range(number))};",
        samples(form, number, seed=6),
        form,
        lambda *args: rounded(exact(*args), form),
    )


def test_f64_fma_of_a_product_beyond_the_range() -> None:
    """2^1000 2^1000 is finite: with -infinity it gives -infinity, and -2^1023 does not save it."""
    big = np.full(32, 2.0**1000).view(np.uint64)
    for last, want in ((-np.inf, -np.inf), (np.nan, np.nan), (-(2.0**1023), np.inf)):
        c = np.full(32, last).view(np.uint64)
        for uniform in PATTERNS[3]:
            (got,) = harness.run("fma.rn.f64 %d0, %a0, %a1, %a2;", [big, big, c], ["f8"], uniform)
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_half_precision_rounds_once(name: str, kind: str) -> None:
    form, number = FORMATS[kind], 3 if name == "fma" else 2
    exact = operation(name, "rn")
    body = f"{name}.rn.{kind} %d0, {', '.join(f'%a{n}' for n in range(number))};"
    check_float(body, samples(form, number), form, lambda *args: rounded(exact(*args), form))
    if name == "fma":
        check_float(body, near_ties(form), form, lambda *args: rounded(exact(*args), form))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_fma_relu_clamps_negative_results_and_keeps_nan(kind: str) -> None:
    form = FORMATS[kind]
    exact = operation("fma", "rn")

    def reference(*args: Value) -> Value:
        value = rounded(exact(*args), form)
        return 0.0 if value <= 0 else value

    check_float(
        f"fma.rn.relu.{kind} %d0, %a0, %a1, %a2;", samples(form, 3), form, reference, any_zero=True
    )


def test_f16_ftz_and_sat() -> None:
    exact = operation("mul", "rn")
    check_float(
        "mul.rn.ftz.f16 %d0, %a0, %a1;",
        samples(F16, 2),
        F16,
        lambda a, b: flushed(rounded(exact(flushed(a, F16), flushed(b, F16)), F16), F16),
    )

    def clamped(a: Value, b: Value) -> Value:
        value = rounded(exact_sum(a, b, "rn"), F16)
        return 0.0 if value != value or value <= 0 else min(value, Fraction(1))

    check_float("add.sat.f16 %d0, %a0, %a1;", samples(F16, 2), F16, clamped, any_zero=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "fma"])
def test_mixed_precision_rounds_once_to_f32(name: str, kind: str, mode: str) -> None:
    """The first operands are narrow, the last is f32, and so is the result."""
    form, exact = FORMATS[kind], operation(name, mode)
    narrow = samples(form, 2 if name == "fma" else 1)
    (wide,) = samples(F32, 1, seed=3)
    inputs = [*narrow, wide]
    names = ", ".join(f"%a{n}" for n in range(len(inputs)))
    for uniform in PATTERNS[len(inputs)]:
        (got,) = harness.run(f"{name}.{mode}.f32.{kind} %d0, {names};", inputs, ["u4"], uniform)
        seen = [harness.spread(i, u).tolist() for i, u in zip(inputs, uniform, strict=True)]
        for row, bits in zip(zip(*seen, strict=True), got.tolist(), strict=True):
            values = [decode(r, form) for r in row[:-1]]
            want = rounded(exact(*values, decode(row[-1], F32)), F32, mode)
            if want != want:
                assert floats.is_nan(bits, F32)
            else:
                assert bits == encode(want, F32), (name, kind, mode, row)


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2", "f32x2"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_packed_types_work_on_both_halves(name: str, kind: str) -> None:
    """Each half of the packed result has the bits of the scalar instruction."""
    scalar, number = kind.removesuffix("x2"), 3 if name == "fma" else 2
    form = FORMATS[scalar]
    names = ", ".join(f"%a{n}" for n in range(number))
    rng = np.random.default_rng(9)
    parts = [[random_bits(form, FLOATS_TRIED, rng) for _ in range(number)] for _ in range(2)]
    wide = f"u{form.width // 4}"
    packed = [
        lo.astype(wide) | hi.astype(wide) << form.width for lo, hi in zip(*parts, strict=True)
    ]
    for uniform in PATTERNS[number]:
        (got,) = harness.run(f"{name}.rn.{kind} %d0, {names};", packed, [wide], uniform)
        for half in range(2):
            (want,) = harness.run(
                f"{name}.rn.{scalar} %d0, {names};", parts[half], [parts[0][0].dtype], uniform
            )
            mine = (got >> np.array(form.width * half, wide)).astype(want.dtype)
            same = (mine == want) | np.array(
                [
                    floats.is_nan(m, form) and floats.is_nan(w, form)
                    for m, w in zip(mine, want, strict=True)
                ]
            )
            assert same.all()


def test_f32x2_takes_registers_packed_by_moves() -> None:
    """A 64-bit register made of two 32-bit ones, and taken apart again, low half first."""
    rng = np.random.default_rng(10)
    a, b = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    body = (
        "{ .reg .b64 %p, %q;\nmov.b64 %p, {%a0, %a1};\nmov.b64 %q, {%a1, %a1};\n"
        "fma.rn.f32x2 %p, %p, %q, %p;\nmov.b64 {%d0, %d1}, %p; }"
    )
    for uniform in harness.mixtures(2):
        low, high = harness.run(body, [a.view("u4"), b.view("u4")], ["f4", "f4"], uniform)
        x, y = harness.spread(a, uniform[0]), harness.spread(b, uniform[1])
        want = [
            [
                float(rounded(Fraction(float(p)) * Fraction(float(q)) + Fraction(float(p)), F32))
                for p, q in zip(v, y, strict=True)
            ]
            for v in (x, y)
        ]
        np.testing.assert_array_equal(low, np.array(want[0], np.float32))
        np.testing.assert_array_equal(high, np.array(want[1], np.float32))


def quotient(a: Value, b: Value) -> Value:
    """IEEE division, before rounding."""
    special = (float("inf"), float("-inf"))
    if a != a or b != b or (a == 0 and b == 0) or (a in special and b in special):
        return float("nan")
    signs = sign(a) * sign(b)
    if a in special or b == 0:
        return signs * float("inf")
    if b in special or a == 0:
        return 0.0 if signs > 0 else -0.0
    return Fraction(a) / Fraction(b)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_div_rcp_sqrt_rn_are_correctly_rounded(kind: str) -> None:
    form = FORMATS[kind]
    check_float(
        f"div.rn.{kind} %d0, %a0, %a1;",
        samples(form, 2),
        form,
        lambda a, b: rounded(quotient(a, b), form),
    )
    check_float(
        f"rcp.rn.{kind} %d0, %a0;",
        samples(form, 1),
        form,
        lambda a: rounded(quotient(Fraction(1), a), form),
    )
    (values,) = samples(form, 1, seed=3)
    for uniform in (False, True):
        (got,) = harness.run(f"sqrt.rn.{kind} %d0, %a0;", [values], [values.dtype], (uniform,))
        for bits, out in zip(harness.spread(values, uniform).tolist(), got.tolist(), strict=True):
            value, root = decode(bits, form), decode(out, form)
            if value != value or (value < 0):
                assert root != root
            elif isinstance(value, float):
                assert out == bits
            else:
                # The root lies between the midpoints to both neighbours.
                below, above = decode(out - 1, form), decode(out + 1, form)
                assert (Fraction(root) + Fraction(below)) ** 2 <= 4 * value
                assert 4 * value <= (Fraction(root) + Fraction(above)) ** 2


@pytest.mark.parametrize(
    ("text", "bound"), [("div.approx.f32", 2), ("div.full.f32", 2), ("div.full.ftz.f32", 2)]
)
def test_approximate_division_is_within_two_ulp(text: str, bound: int) -> None:
    rng = np.random.default_rng(4)
    a, b = (np.exp2(rng.uniform(-30, 30, 128)).astype(np.float32) for _ in range(2))
    (got,) = harness.run(f"{text} %d0, %a0, %a1;", [a.view("u4"), b.view("u4")], ["f4"])
    want = a.astype(np.float64) / b
    assert (np.abs(got - want) <= bound * np.spacing(np.abs(want).astype(np.float32))).all()


def test_subnormals_survive_without_ftz_and_not_with_it() -> None:
    tiny = np.full(32, 0x00012345, np.uint32)
    (got,) = harness.run("add.f32 %d0, %a0, 0f00000000;", [tiny], ["u4"])
    assert (got == tiny).all()
    (got,) = harness.run("add.ftz.f32 %d0, %a0, 0f00000000;", [tiny | 0x80000000], ["u4"])
    assert (got == 0).all()  # -0 + +0 is +0
    (got,) = harness.run("mul.ftz.f32 %d0, %a0, 0f3F800000;", [tiny | 0x80000000], ["u4"])
    assert (got == 0x80000000).all()


def test_the_constants_0f_and_0d_are_bits() -> None:
    one = np.zeros(32, np.uint32)
    (got,) = harness.run("add.f32 %d0, %a0, 0fC0490FDB;", [one], ["f4"])
    assert (got == np.float32(-np.pi)).all()
    (wide,) = harness.run("add.f64 %d0, %a0, 0d400921FB54442D18;", [np.zeros(32, "u8")], ["f8"])
    assert (wide == np.pi).all()


def test_unsupported_float_modifiers_are_errors() -> None:
    import ptxsim

    one = np.zeros(32, np.uint32)
    for text in (
        "add.rs.f32 %d0, %a0, %a0;",
        "fma.rn.relu.f32 %d0, %a0, %a0, %a0;",
        "ex2.f32 %d0, %a0;",
        "sqrt.rz.f32 %d0, %a0;",
        "min.f32.foo %d0, %a0, %a0;",
    ):
        with pytest.raises(ptxsim.UnsupportedInstruction) as caught:
            harness.run(text, [one], ["u4"])
        assert caught.value.line is not None
