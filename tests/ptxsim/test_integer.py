"""Integer arithmetic against Python integers.  PTX ISA: Integer Arithmetic Instructions."""

from __future__ import annotations

import harness
import numpy as np
import pytest
from oracles import bits_of, check, integers, reading, signed

COUNT = 64
ALL = ("u16", "s16", "u32", "s32", "u64", "s64")
S32 = ((-(1 << 31)), (1 << 31) - 1)


def operands(kinds: tuple[str, ...] | str, number: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    names = (kinds,) * number if isinstance(kinds, str) else kinds
    return [integers(bits_of(k), COUNT, rng) for k in names]


def word(kind: str) -> str:
    return f"u{bits_of(kind) // 8}"


def clamp(value: int) -> int:
    return min(max(value, S32[0]), S32[1])


def truncated(a: int, b: int) -> int:
    """C's division."""
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("op", ["add", "sub", "mul.lo", "min", "max", "and", "or", "xor"])
def test_two_operands_wrap_at_the_width(op: str, kind: str) -> None:
    functions = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul.lo": lambda a, b: a * b,
        "min": min,
        "max": max,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
    name = f"{op}.b{bits_of(kind)}" if op in ("and", "or", "xor") else f"{op}.{kind}"
    check(
        f"{name} %d0, %a0, %a1;",
        operands(kind, 2),
        word(kind),
        lambda a, b: functions[op](reading(a, kind), reading(b, kind)),
    )


@pytest.mark.parametrize("op", ["add", "sub"])
def test_saturating_sum_clamps_to_s32(op: str) -> None:
    sign = 1 if op == "add" else -1
    check(
        f"{op}.sat.s32 %d0, %a0, %a1;",
        operands("s32", 2),
        "u4",
        lambda a, b: clamp(signed(a, 32) + sign * signed(b, 32)),
    )


@pytest.mark.parametrize("op", ["min", "max"])
def test_relu_clamps_the_result_at_zero(op: str) -> None:
    pick = {"min": min, "max": max}[op]
    check(
        f"{op}.relu.s32 %d0, %a0, %a1;",
        operands("s32", 2),
        "u4",
        lambda a, b: max(pick(signed(a, 32), signed(b, 32)), 0),
    )


@pytest.mark.parametrize("name", ["add", "min", "max", "max.relu"])
@pytest.mark.parametrize("kind", ["u16x2", "s16x2"])
def test_packed_16_bit_integers(kind: str, name: str) -> None:
    if name == "max.relu" and kind == "u16x2":
        kind = "s16x2"
    functions = {
        "add": lambda a, b: a + b,
        "min": min,
        "max": max,
        "max.relu": lambda a, b: max(a, b, 0),
    }

    def packed(a: int, b: int) -> int:
        out = 0
        for shift in (0, 16):
            x, y = (reading(v >> shift & 0xFFFF, f"{kind[0]}16") for v in (a, b))
            out |= (functions[name](x, y) & 0xFFFF) << shift
        return out

    check(f"{name}.{kind} %d0, %a0, %a1;", operands("u32", 2), "u4", packed)


@pytest.mark.parametrize("kind", ALL)
def test_mul_hi_is_the_upper_half(kind: str) -> None:
    check(
        f"mul.hi.{kind} %d0, %a0, %a1;",
        operands(kind, 2),
        word(kind),
        lambda a, b: reading(a, kind) * reading(b, kind) >> bits_of(kind),
    )


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_mul_wide_doubles_the_width(kind: str) -> None:
    check(
        f"mul.wide.{kind} %d0, %a0, %a1;",
        operands(kind, 2),
        f"u{bits_of(kind) // 4}",
        lambda a, b: reading(a, kind) * reading(b, kind),
    )


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("part", ["lo", "hi"])
def test_mad_adds_to_the_half_product(part: str, kind: str) -> None:
    shift = bits_of(kind) if part == "hi" else 0
    check(
        f"mad.{part}.{kind} %d0, %a0, %a1, %a2;",
        operands(kind, 3),
        word(kind),
        lambda a, b, c: (reading(a, kind) * reading(b, kind) >> shift) + c,
    )


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_mad_wide_adds_at_double_width(kind: str) -> None:
    double = f"{kind[0]}{2 * bits_of(kind)}"
    check(
        f"mad.wide.{kind} %d0, %a0, %a1, %a2;",
        operands((kind, kind, double), 3),
        word(double),
        lambda a, b, c: reading(a, kind) * reading(b, kind) + c,
    )


def test_mad_hi_sat_clamps_the_sum() -> None:
    check(
        "mad.hi.sat.s32 %d0, %a0, %a1, %a2;",
        operands("s32", 3),
        "u4",
        lambda a, b, c: clamp((signed(a, 32) * signed(b, 32) >> 32) + signed(c, 32)),
    )


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("part", ["lo", "hi"])
def test_mul24_and_mad24_use_24_bits(part: str, kind: str) -> None:
    def low24(a: int) -> int:
        return signed(a, 24) if kind == "s32" else a & 0xFFFFFF

    shift = 16 if part == "hi" else 0
    check(
        f"mul24.{part}.{kind} %d0, %a0, %a1;",
        operands(kind, 2),
        "u4",
        lambda a, b: low24(a) * low24(b) >> shift,
    )
    check(
        f"mad24.{part}.{kind} %d0, %a0, %a1, %a2;",
        operands(kind, 3),
        "u4",
        lambda a, b, c: (low24(a) * low24(b) >> shift) + c,
    )


def test_mad24_hi_sat() -> None:
    check(
        "mad24.hi.sat.s32 %d0, %a0, %a1, %a2;",
        operands("s32", 3),
        "u4",
        lambda a, b, c: clamp(signed(signed(a, 24) * signed(b, 24) >> 16, 32) + signed(c, 32)),
    )


@pytest.mark.parametrize("kind", ALL)
def test_sad_adds_the_distance(kind: str) -> None:
    check(
        f"sad.{kind} %d0, %a0, %a1, %a2;",
        operands(kind, 3),
        word(kind),
        lambda a, b, c: abs(reading(a, kind) - reading(b, kind)) + c,
    )


@pytest.mark.parametrize("kind", ALL)
def test_division_truncates_towards_zero(kind: str) -> None:
    a, b = operands(kind, 2)
    b[b == 0] = 7
    check(
        f"div.{kind} %d0, %a0, %a1;",
        [a, b],
        word(kind),
        lambda x, y: truncated(reading(x, kind), reading(y, kind)),
    )
    check(
        f"rem.{kind} %d0, %a0, %a1;",
        [a, b],
        word(kind),
        lambda x, y: (
            reading(x, kind) - reading(y, kind) * truncated(reading(x, kind), reading(y, kind))
        ),
    )


@pytest.mark.parametrize("op", ["div", "rem"])
@pytest.mark.parametrize("uniform", [False, True])
def test_division_by_zero_is_unspecified_and_an_error_if_strict(op: str, uniform: bool) -> None:
    import ptxsim

    a, b = np.full(32, 5, np.uint32), np.zeros(32, np.uint32)
    with pytest.raises(ptxsim.InvalidOperand, match=f"{op} by zero") as caught:
        harness.run(f"{op}.u32 %d0, %a0, %a1;", [a, b], ["u4"], (uniform, uniform), strict=True)
    assert caught.value.line is not None
    assert op in str(caught.value.text)
    # A GPU gives what its compiler makes of it: not compared.
    body = f"{op}.u32 %d0, %a0, %a1;"
    (found,) = harness.run(body, [a, b], ["u4"], (uniform, uniform), real=False)
    assert (found == (5 if op == "rem" else 0xFFFFFFFF)).all()


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_abs_and_neg_wrap_the_smallest_value(kind: str) -> None:
    check(f"abs.{kind} %d0, %a0;", operands(kind, 1), word(kind), lambda a: abs(reading(a, kind)))
    check(f"neg.{kind} %d0, %a0;", operands(kind, 1), word(kind), lambda a: -reading(a, kind))


@pytest.mark.parametrize("bits", [32, 64])
def test_extended_precision_adds_and_subtracts_two_words(bits: int) -> None:
    kind, mask = f"u{bits}", (1 << bits) - 1
    for plus, sign in (("add", 1), ("sub", -1)):
        body = (
            f"{{ .reg .b{bits} %lo;\n{plus}.cc.{kind} %lo, %a0, %a1;\n"
            f"{plus}c.{kind} %d0, %a2, %a3; }}"
        )
        check(
            body,
            operands(kind, 4),
            word(kind),
            lambda a, b, c, d, sign=sign: ((a | c << bits) + sign * (b | d << bits)) >> bits & mask,
        )


def test_carry_passes_through_three_words() -> None:
    body = (
        "{ .reg .b32 %t0, %t1;\nadd.cc.u32 %t0, %a0, %a1;\naddc.cc.u32 %t1, %a2, %a3;\n"
        "addc.u32 %d0, 0, 0; }"
    )
    check(
        body,
        operands("u32", 4),
        "u4",
        lambda a, b, c, d: ((a | c << 32) + (b | d << 32)) >> 64,
    )


@pytest.mark.parametrize("bits", [32, 64])
def test_mad_cc_and_madc_form_a_double_width_product(bits: int) -> None:
    kind = f"u{bits}"
    body = (
        f"{{ .reg .b{bits} %lo;\nmad.lo.cc.{kind} %lo, %a0, %a1, %a2;\n"
        f"madc.hi.{kind} %d0, %a0, %a1, 0; }}"
    )
    check(body, operands(kind, 3), word(kind), lambda a, b, c: (a * b + c) >> bits)


@pytest.mark.parametrize("kinds", ["u32.u32", "u32.s32", "s32.u32", "s32.s32"])
def test_dp4a_and_dp2a(kinds: str) -> None:
    first, second = kinds.split(".")

    def fields(value: int, bits: int, kind: str) -> list[int]:
        parts = [value >> at & ((1 << bits) - 1) for at in range(0, 32, bits)]
        return [signed(p, bits) if kind == "s32" else p for p in parts]

    check(
        f"dp4a.{kinds} %d0, %a0, %a1, %a2;",
        operands("u32", 3),
        "u4",
        lambda a, b, c: (
            c + sum(x * y for x, y in zip(fields(a, 8, first), fields(b, 8, second), strict=True))
        ),
    )
    for part, start in (("lo", 0), ("hi", 2)):
        check(
            f"dp2a.{part}.{kinds} %d0, %a0, %a1, %a2;",
            operands("u32", 3),
            "u4",
            lambda a, b, c, start=start: (
                c
                + sum(
                    x * y
                    for x, y in zip(
                        fields(a, 16, first), fields(b, 8, second)[start : start + 2], strict=True
                    )
                )
            ),
        )


def test_immediate_operands_are_sign_extended_to_the_width() -> None:
    check("add.s32 %d0, %a0, -7;", operands("s32", 1), "u4", lambda a: a - 7)
    check("add.s64 %d0, %a0, -7;", operands("s64", 1), "u8", lambda a: a - 7)
    check("and.b32 %d0, %a0, 0xFFFF0000;", operands("u32", 1), "u4", lambda a: a & 0xFFFF0000)
    check("mul.wide.s32 %d0, %a0, -4;", operands("s32", 1), "u8", lambda a: signed(a, 32) * -4)
