"""setp, set, selp, slct.  PTX ISA: Comparison and Selection, Half Precision Comparison."""

from __future__ import annotations

from collections.abc import Callable

import harness
import numpy as np
import pytest
from floats import FORMATS, decode, flushed, random_bits
from oracles import Array, bits_of, check, integers, reading

import ptxsim

COUNT = 64
ORDERED: dict[str, Callable[[object, object], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,  # type: ignore[operator]
    "le": lambda a, b: a <= b,  # type: ignore[operator]
    "gt": lambda a, b: a > b,  # type: ignore[operator]
    "ge": lambda a, b: a >= b,  # type: ignore[operator]
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def float_comparison(name: str) -> Callable[[object, object], bool]:
    """Ordered comparisons are false with a NaN, the unordered ones (…u) true."""

    def compare(a: object, b: object) -> bool:
        nan = a != a or b != b
        if name in ("num", "nan"):
            return nan == (name == "nan")
        if nan:
            return name.endswith("u")
        return ORDERED[name.removesuffix("u") if name not in ORDERED else name](a, b)

    return compare


def pairs(width: int, seed: int = 0) -> list[Array]:
    """Two operands, equal in a third of the cases."""
    rng = np.random.default_rng(seed)
    a, b = integers(width, COUNT, rng), integers(width, COUNT, rng)
    b[::3] = a[::3]
    return [a, b]


def float_pairs(kind: str, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    a, b = (random_bits(FORMATS[kind], COUNT, rng) for _ in range(2))
    b[::3] = a[::3]
    return [a, b]


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", [*ORDERED, *UNSIGNED])
def test_integer_comparisons(name: str, kind: str) -> None:
    inputs = pairs(bits_of(kind))
    if name in UNSIGNED and kind[0] == "s":
        with pytest.raises(ptxsim.UnsupportedInstruction):
            harness.run(f"setp.{name}.{kind} %d0, %a0, %a1;", inputs, [bool])
        return
    compare = ORDERED[UNSIGNED.get(name, name)]
    check(
        f"setp.{name}.{kind} %d0, %a0, %a1;",
        inputs,
        bool,
        lambda a, b: compare(reading(a, kind), reading(b, kind)),
    )


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_bit_types_compare_for_equality_only(kind: str) -> None:
    inputs = pairs(bits_of(kind))
    check(f"setp.eq.{kind} %d0, %a0, %a1;", inputs, bool, lambda a, b: a == b)
    check(f"setp.ne.{kind} %d0, %a0, %a1;", inputs, bool, lambda a, b: a != b)
    with pytest.raises(ptxsim.UnsupportedInstruction):
        harness.run(f"setp.lt.{kind} %d0, %a0, %a1;", inputs, [bool])


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", [*ORDERED, *(f"{n}u" for n in ORDERED), "num", "nan"])
def test_float_comparisons_with_nan(name: str, kind: str) -> None:
    form, compare = FORMATS[kind], float_comparison(name)
    check(
        f"setp.{name}.{kind} %d0, %a0, %a1;",
        float_pairs(kind),
        bool,
        lambda a, b: compare(decode(a, form), decode(b, form)),
    )


@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_ftz_compares_subnormals_as_zeros(kind: str) -> None:
    form = FORMATS[kind]
    for name in ("eq", "lt"):
        check(
            f"setp.{name}.ftz.{kind} %d0, %a0, %a1;",
            float_pairs(kind),
            bool,
            lambda a, b, name=name: ORDERED[name](
                flushed(decode(a, form), form), flushed(decode(b, form), form)
            ),
        )


@pytest.mark.parametrize("combine", ["and", "or", "xor"])
@pytest.mark.parametrize("negated", [False, True])
def test_the_second_predicate_is_the_negated_comparison_before_combining(
    combine: str, negated: bool
) -> None:
    mix = {"and": lambda x, y: x and y, "or": lambda x, y: x or y, "xor": lambda x, y: x != y}
    a, b = pairs(32)
    c = np.random.default_rng(2).integers(0, 2, COUNT).astype(bool)
    text = f"setp.lt.{combine}.s32 %d0|%d1, %a0, %a1, {'!' if negated else ''}%a2;"
    for uniform in harness.mixtures(3):
        p, q = harness.run(text, [a, b, c], [bool, bool], uniform)
        seen = [harness.spread(v, u) for v, u in zip((a, b, c), uniform, strict=True)]
        for x, y, z, got, other in zip(*(s.tolist() for s in (*seen, p, q)), strict=True):
            less = reading(x, "s32") < reading(y, "s32")
            assert got == mix[combine](less, z != negated)
            assert other == mix[combine](not less, z != negated)


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_halves_compare_into_two_predicates(kind: str) -> None:
    scalar = kind.removesuffix("x2")
    form = FORMATS[scalar]
    low, high = float_pairs(scalar, 1), float_pairs(scalar, 2)
    a, b = (x.astype("u4") | y.astype("u4") << 16 for x, y in zip(low, high, strict=True))
    for uniform in harness.mixtures(2):
        p, q = harness.run(f"setp.ltu.{kind} %d0|%d1, %a0, %a1;", [a, b], [bool, bool], uniform)
        compare = float_comparison("ltu")
        seen = [harness.spread(v, u).tolist() for v, u in zip((a, b), uniform, strict=True)]
        for x, y, first, second in zip(*seen, p.tolist(), q.tolist(), strict=True):
            assert first == compare(decode(x & 0xFFFF, form), decode(y & 0xFFFF, form))
            assert second == compare(decode(x >> 16, form), decode(y >> 16, form))


def test_set_writes_all_ones_or_one_point_zero() -> None:
    a, b = pairs(32)
    for out, one in (("u32", 0xFFFFFFFF), ("s32", 0xFFFFFFFF), ("f32", 0x3F800000)):
        check(
            f"set.gt.{out}.s32 %d0, %a0, %a1;",
            [a, b],
            "u4",
            lambda x, y, one=one: one if reading(x, "s32") > reading(y, "s32") else 0,
        )
    form = FORMATS["f32"]
    check(
        "set.lt.and.u32.f32 %d0, %a0, %a1, %a2;",
        [*float_pairs("f32"), np.random.default_rng(4).integers(0, 2, COUNT).astype(bool)],
        "u4",
        lambda x, y, p: 0xFFFFFFFF if decode(x, form) < decode(y, form) and p else 0,
    )


@pytest.mark.parametrize(
    "kind", ["b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64"]
)
def test_selp_picks_by_predicate(kind: str) -> None:
    width = int(kind[1:])
    p = np.random.default_rng(5).integers(0, 2, COUNT).astype(bool)
    check(
        f"selp.{kind} %d0, %a0, %a1, %a2;",
        [*pairs(width), p],
        f"u{width // 8}",
        lambda a, b, c: a if c else b,
    )


@pytest.mark.parametrize("kind", ["b16", "u32", "s64", "f32", "f64"])
def test_slct_picks_by_sign(kind: str) -> None:
    width = int(kind[1:])
    operands = pairs(width)
    (sign,) = integers(32, COUNT, np.random.default_rng(6)).reshape(1, -1)
    check(
        f"slct.{kind}.s32 %d0, %a0, %a1, %a2;",
        [*operands, sign],
        f"u{width // 8}",
        lambda a, b, c: a if reading(c, "s32") >= 0 else b,
    )
    numbers = random_bits(FORMATS["f32"], COUNT, np.random.default_rng(7))
    check(
        f"slct.{kind}.f32 %d0, %a0, %a1, %a2;",
        [*operands, numbers],
        f"u{width // 8}",
        lambda a, b, c: a if decode(c, FORMATS["f32"]) >= 0 else b,
    )
