"""ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh within the bounds that the ISA documents."""

from __future__ import annotations

from collections.abc import Callable

import floats
import harness
import numpy as np
import pytest

INF = float("inf")
NAN = float("nan")
F64 = np.float64


def uniform_sample(low: float, high: float, count: int = 512) -> np.ndarray:
    return np.random.default_rng(0).uniform(low, high, count).astype(np.float32)


def magnitudes(low: float, high: float, count: int = 512) -> np.ndarray:
    return np.exp2(np.random.default_rng(1).uniform(low, high, count)).astype(np.float32)


# name, arguments, exact function in float64, error bound as a function of the exact value.
Bound = Callable[[np.ndarray], np.ndarray]
RELATIVE: dict[str, tuple[np.ndarray, Callable[[np.ndarray], np.ndarray], Bound]] = {
    "ex2.approx.f32": (uniform_sample(-126, 127), np.exp2, lambda v: 2.0**-22 * v),
    "ex2.approx.ftz.f32": (uniform_sample(-126, 127), np.exp2, lambda v: 2.0**-22 * v),
    "rcp.approx.f32": (magnitudes(-125, 125), lambda x: 1 / x, lambda v: 2.0**-23 * v),
    "rcp.approx.ftz.f32": (magnitudes(-125, 125), lambda x: 1 / x, lambda v: 2.0**-23 * v),
    "rsqrt.approx.f32": (
        magnitudes(-126, 126),
        lambda x: 1 / np.sqrt(x),
        lambda v: 2.0**-22.9 * v,
    ),
    "sqrt.approx.f32": (magnitudes(-126, 126), np.sqrt, lambda v: 2.0**-23 * v),
    "lg2.approx.f32": (
        magnitudes(-120, 120),
        np.log2,
        lambda v: np.maximum(2.0**-22, 2.0**-22 * np.abs(v)),
    ),
    "sin.approx.f32": (uniform_sample(-np.pi, np.pi), np.sin, lambda v: 2.0**-20.5 + 0 * v),
    "cos.approx.f32": (uniform_sample(-np.pi, np.pi), np.cos, lambda v: 2.0**-20.5 + 0 * v),
    "tanh.approx.f32": (uniform_sample(-9, 9), np.tanh, lambda v: 2.0**-11 * np.abs(v)),
}


@pytest.mark.parametrize("name", RELATIVE)
def test_error_is_within_the_documented_bound(name: str) -> None:
    values, exact, bound = RELATIVE[name]
    for uniform in (False, True):
        seen = harness.spread(values, uniform).astype(F64)
        (got,) = harness.run(f"{name} %d0, %a0;", [values.view("u4")], ["f4"], (uniform,))
        want = exact(seen)
        assert (np.abs(got - want) <= bound(np.abs(want))).all()


# The ISA's tables of special inputs: (input, result) pairs.
TINY = 2.0**-140  # a subnormal
SPECIAL: dict[str, list[tuple[float, float]]] = {
    "ex2.approx.f32": [(-INF, 0.0), (-0.0, 1.0), (0.0, 1.0), (INF, INF), (NAN, NAN), (TINY, 1.0)],
    "ex2.approx.ftz.f32": [(-INF, 0.0), (0.0, 1.0), (INF, INF), (TINY, 1.0), (-126.5, 0.0)],
    "lg2.approx.f32": [
        *((-INF, NAN), (-1.0, NAN), (-0.0, -INF), (0.0, -INF), (INF, INF), (NAN, NAN)),
        (TINY, -140.0),
    ],
    "lg2.approx.ftz.f32": [(TINY, -INF), (-TINY, -INF), (INF, INF)],
    "rcp.approx.f32": [(-INF, -0.0), (-0.0, -INF), (0.0, INF), (INF, 0.0), (NAN, NAN)],
    "rcp.approx.ftz.f32": [(TINY, INF), (-TINY, -INF), (2.0**127, 0.0), (-(2.0**127), -0.0)],
    "rsqrt.approx.f32": [
        *((-INF, NAN), (-1.0, NAN), (-0.0, -INF), (0.0, INF), (INF, 0.0), (NAN, NAN)),
    ],
    "rsqrt.approx.ftz.f32": [(TINY, INF), (-TINY, -INF)],
    "sqrt.approx.f32": [
        *((-INF, NAN), (-1.0, NAN), (-0.0, -0.0), (0.0, 0.0), (INF, INF), (NAN, NAN)),
    ],
    "sqrt.approx.ftz.f32": [(TINY, 0.0), (-TINY, -0.0)],
    "sin.approx.f32": [(-INF, NAN), (-0.0, -0.0), (0.0, 0.0), (INF, NAN), (NAN, NAN)],
    "cos.approx.f32": [(-INF, NAN), (-0.0, 1.0), (0.0, 1.0), (INF, NAN), (NAN, NAN)],
    "tanh.approx.f32": [(-INF, -1.0), (-0.0, -0.0), (0.0, 0.0), (INF, 1.0), (NAN, NAN)],
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_inputs(name: str) -> None:
    for value, result in SPECIAL[name]:
        inputs = np.full(32, value, np.float32)
        for uniform in (False, True):
            (got,) = harness.run(f"{name} %d0, %a0;", [inputs.view("u4")], ["f4"], (uniform,))
            np.testing.assert_array_equal(got, np.float32(result), err_msg=str(value))
            if result == 0:
                np.testing.assert_array_equal(np.signbit(got), np.signbit(result), str(value))


@pytest.mark.parametrize(
    ("name", "kind", "bound"),
    [
        ("ex2.approx.f16", "f16", 2.0**-9.9),
        ("ex2.approx.ftz.bf16", "bf16", 2.0**-7),
        ("tanh.approx.f16", "f16", 2.0**-10.987),
        ("tanh.approx.bf16", "bf16", 2.0**-8),
    ],
)
def test_half_precision_approximations(name: str, kind: str, bound: float) -> None:
    """Relative for ex2, absolute for tanh (for bf16 the bound is half a unit near 1)."""
    form = floats.FORMATS[kind]
    numbers = np.random.default_rng(2).uniform(-6, 6, 256)
    bits = np.array(
        [floats.encode(floats.rounded(floats.Fraction(float(v)), form), form) for v in numbers],
        np.uint16,
    )
    exact = np.exp2 if name.startswith("ex2") else np.tanh
    (got,) = harness.run(f"{name} %d0, %a0;", [bits], ["u2"], real=False)
    values = np.array([float(floats.decode(int(b), form)) for b in bits])
    result = np.array([float(floats.decode(int(b), form)) for b in got])
    want = exact(values)
    scale = want if name.startswith("ex2") else 1.0
    assert (np.abs(result - want) <= bound * scale).all()
    (packed,) = harness.run(
        f"{name}x2 %d0, %a0;",
        [bits.astype("u4") | bits[::-1].astype("u4") << 16],
        ["u4"],
        real=False,
    )
    np.testing.assert_array_equal(packed & 0xFFFF, got)
    np.testing.assert_array_equal(packed >> 16, got[::-1])
