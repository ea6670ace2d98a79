"""Float min, max, neg, abs, copysign, testp.  PTX ISA: Floating Point, Half Precision."""

from __future__ import annotations

from collections.abc import Callable

import floats
import harness
import numpy as np
import pytest
from floats import F32, FORMATS, Value, flushed, sign
from oracles import FLOATS_TRIED, check_float, samples


def extreme(a: Value, b: Value, largest: bool, nan: bool) -> Value:
    """The ISA's min/max: -0 < +0; a NaN loses, or wins with `.NaN`."""
    if a != a or b != b:
        if nan or (a != a and b != b):
            return float("nan")
        return b if a != a else a
    low = a if (a < b or (a == b and sign(a) < sign(b))) else b
    return (b if low is a else a) if largest else low


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_min_max_order_zeros_and_drop_nan(op: str, kind: str) -> None:
    form = FORMATS[kind]
    check_float(
        f"{op}.{kind} %d0, %a0, %a1;",
        samples(form, 2),
        form,
        lambda a, b: extreme(a, b, op == "max", False),
    )


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_min_max_nan_and_xorsign_abs(op: str, kind: str) -> None:
    form = FORMATS[kind]
    check_float(
        f"{op}.NaN.{kind} %d0, %a0, %a1;",
        samples(form, 2),
        form,
        lambda a, b: extreme(a, b, op == "max", True),
    )

    def xorsign(nan: bool) -> Callable[[Value, Value], Value]:
        def reference(a: Value, b: Value) -> Value:
            value = extreme(abs(a), abs(b), op == "max", nan)
            return -value if sign(a) * sign(b) < 0 else value

        return reference

    # The sign of a NaN is part of its bits: the xor is then left to the implementation, so NaNs
    # are given positive here.
    inputs = samples(form, 2)
    top = 1 << (form.width - 1)
    for values in inputs:
        nans = np.array([floats.is_nan(int(v), form) for v in values])
        values[nans] &= np.array(top - 1, values.dtype)
    check_float(f"{op}.xorsign.abs.{kind} %d0, %a0, %a1;", inputs, form, xorsign(False))
    check_float(f"{op}.NaN.xorsign.abs.{kind} %d0, %a0, %a1;", inputs, form, xorsign(True))


@pytest.mark.parametrize("op", ["min", "max"])
def test_min_max_of_f32_give_the_canonical_nan_and_take_three_inputs(op: str) -> None:
    nan = np.full(32, 0xFFC12345, np.uint32)
    (got,) = harness.run(f"{op}.f32 %d0, %a0, %a1;", [nan, nan], ["u4"])
    assert (got == 0x7FFFFFFF).all()
    for modifier in ("", ".NaN"):
        check_float(
            f"{op}{modifier}.f32 %d0, %a0, %a1, %a2;",
            samples(F32, 3, seed=12),
            F32,
            lambda a, b, c, modifier=modifier: extreme(
                extreme(a, b, op == "max", bool(modifier)), c, op == "max", bool(modifier)
            ),
        )


@pytest.mark.parametrize("op", ["min", "max"])
def test_min_max_ftz(op: str) -> None:
    check_float(
        f"{op}.ftz.f32 %d0, %a0, %a1;",
        samples(F32, 2),
        F32,
        lambda a, b: extreme(flushed(a, F32), flushed(b, F32), op == "max", False),
    )


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_neg_and_abs_touch_the_sign_only(kind: str) -> None:
    form = FORMATS[kind]
    (values,) = samples(form, 1)
    numbers = values[[not floats.is_nan(int(v), form) for v in values]]
    numbers = np.resize(numbers, FLOATS_TRIED)
    top = np.array(1 << (form.width - 1), numbers.dtype)
    for uniform in (False, True):
        seen = harness.spread(numbers, uniform)
        (got,) = harness.run(f"neg.{kind} %d0, %a0;", [numbers], [numbers.dtype], (uniform,))
        np.testing.assert_array_equal(got, seen ^ top)
        (got,) = harness.run(f"abs.{kind} %d0, %a0;", [numbers], [numbers.dtype], (uniform,))
        np.testing.assert_array_equal(got, seen & ~top)


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_neg_and_abs(kind: str) -> None:
    values = np.random.default_rng(3).integers(0, 0x7C00, 128).astype(np.uint32)
    values = values[:64] | values[64:] << 16 | 0x80000000
    (got,) = harness.run(f"neg.{kind} %d0, %a0;", [values], ["u4"])
    np.testing.assert_array_equal(got, values ^ 0x80008000)
    (got,) = harness.run(f"abs.{kind} %d0, %a0;", [values], ["u4"])
    np.testing.assert_array_equal(got, values & 0x7FFF7FFF)


def test_copysign_and_testp() -> None:
    a, b = samples(F32, 2)
    for uniform in harness.mixtures(2):
        (got,) = harness.run("copysign.f32 %d0, %a0, %a1;", [a, b], ["u4"], uniform)
        x, y = (harness.spread(v, u) for v, u in zip((a, b), uniform, strict=True))
        np.testing.assert_array_equal(got, (x & 0x80000000) | (y & 0x7FFFFFFF))
    a[:2] = 0, 0x80000000
    exponent, fraction = a >> 23 & 255, a & 0x7FFFFF
    tests = {
        "finite": exponent < 255,
        "infinite": (exponent == 255) & (fraction == 0),
        "number": (exponent < 255) | (fraction == 0),
        "notanumber": (exponent == 255) & (fraction != 0),
        # The ISA counts zeros as normal.
        "normal": ((exponent > 0) & (exponent < 255)) | (a << 1 == 0),
        "subnormal": (exponent == 0) & (fraction != 0),
    }
    for name, want in tests.items():
        (got,) = harness.run(f"testp.{name}.f32 %d0, %a0;", [a], [bool])
        np.testing.assert_array_equal(got, want, err_msg=name)
        (got,) = harness.run(f"testp.{name}.f32 %d0, %a0;", [a], [bool], (True,))
        np.testing.assert_array_equal(got, harness.spread(want, True), err_msg=name)
