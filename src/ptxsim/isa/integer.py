"""Integer arithmetic.  PTX ISA: Integer and Extended-Precision Arithmetic Instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.errors import InvalidOperand
from ptxsim.ptx import Instruction
from ptxsim.values import BITS, MASKS, S64, SIGNED, U64, UNSIGNED, signed

INTEGER_TYPES = tuple(f"{kind}{bits}" for kind in "usb" for bits in (16, 32, 64))
NUMBER_TYPES = tuple(t for t in INTEGER_TYPES if t[0] != "b")
PACKED_TYPES = ("u16x2", "s16x2")
Scalar = Callable[[int, int], int]


def width_of(kind: str) -> int:
    """Bits of an integer type name."""
    return int(kind[1:])


def view_of(kind: str) -> Callable[[Any], Any]:
    """How a register is read as this integer type."""
    width = width_of(kind)
    if kind[0] == "s":
        return lambda value: signed(value, width)
    return BITS[width]


def binary(c: Decoder, ins: Instruction, kind: str, scalar: Scalar, vector: Any) -> Step:
    """d = op(a, b) on integers of type `kind`."""
    width, view = width_of(kind), view_of(kind)
    mask = MASKS[width]
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    d = c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        x, y = view(r[a]), view(r[b])
        if x.__class__ is int and y.__class__ is int:
            r[d] = scalar(x, y) & mask
        else:
            r[d] = vector(x, y)

    return run


def _packed_binary(c: Decoder, ins: Instruction, kind: str, relu: bool = False) -> Step:
    """add, min, max on the two 16-bit integers of a word."""
    width, dtype = 32, (SIGNED if kind[0] == "s" else UNSIGNED)[16]
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[ins.op]
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    d = c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        words = [BITS[32](r[s]) for s in (a, b)]
        parts = [np.asarray(w, UNSIGNED[32]).reshape(-1).view(dtype) for w in words]
        if parts[0].size != parts[1].size:
            parts = [np.resize(p, 64) for p in parts]
        result = function(*parts)
        result = np.maximum(result, dtype.type(0)) if relu else result
        out = result.view(UNSIGNED[32])
        r[d] = int(out[0]) if out.size == 1 else out

    return run


def build_add(ins: Instruction, c: Decoder, sign: int) -> Step:
    """add/sub.{u,s}{16,32,64}: wraps; `.sat` clamps s32.  The most frequent integer instruction."""
    m = Modifiers(ins)
    saturate = m.flag("sat")
    kind = m.type(*NUMBER_TYPES, *PACKED_TYPES)
    m.done()
    if kind in PACKED_TYPES:
        if saturate or sign < 0:
            raise m.unsupported(f"this operation on .{kind}")
        return _packed_binary(c, ins, kind)
    if saturate:
        if kind != "s32":
            raise m.unsupported(".sat is for .s32")
        return binary(
            c,
            ins,
            kind,
            lambda x, y: min(max(x + sign * y, -(1 << 31)), (1 << 31) - 1),
            lambda x, y: np.clip(
                np.asarray(x, S64) + sign * np.asarray(y, S64), -(1 << 31), (1 << 31) - 1
            ).astype(SIGNED[32]),
        )
    width = width_of(kind)
    mask, view = MASKS[width], BITS[width]
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    d = c.write(ins.operands[0])

    def add(warp: Any) -> None:
        r = warp.registers
        x, y = r[a], r[b]
        if x.__class__ is int and y.__class__ is int:
            r[d] = (x + y) & mask
        else:
            r[d] = view(x) + view(y)

    def subtract(warp: Any) -> None:
        r = warp.registers
        x, y = r[a], r[b]
        if x.__class__ is int and y.__class__ is int:
            r[d] = (x - y) & mask
        else:
            r[d] = view(x) - view(y)

    return add if sign > 0 else subtract


def high_product(x: Any, y: Any, width: int, is_signed: bool) -> Any:
    """High half of the double-width product of two lane vectors or ints."""
    if width < 64:
        wide = S64 if is_signed else U64
        product = np.asarray(x, wide) * np.asarray(y, wide)
        return (product >> width).astype(UNSIGNED[width])
    product_object = np.asarray(x, object) * np.asarray(y, object) >> 64
    return np.array([int(v) & MASKS[64] for v in np.broadcast_to(product_object, 32)], U64)


def multiply(kind: str, part: str) -> Callable[[Any, Any], Any]:
    """The product of two register values read as `kind`: `lo`, `hi` or `wide`."""
    width, is_signed = width_of(kind), kind[0] == "s"
    if part == "wide":
        wide = (SIGNED if is_signed else UNSIGNED)[2 * width]
        mask = MASKS[2 * width]

        def wide_product(x: Any, y: Any) -> Any:
            if x.__class__ is int and y.__class__ is int:
                return x * y & mask
            if x.__class__ is int:
                return y.astype(wide) * x
            return x.astype(wide) * (y if y.__class__ is int else y.astype(wide))

        return wide_product
    if part == "lo":
        mask = MASKS[width]
        return lambda x, y: x * y & mask if x.__class__ is int and y.__class__ is int else x * y

    def high(x: Any, y: Any) -> Any:
        if x.__class__ is int and y.__class__ is int:
            return (x * y >> width) & MASKS[width]
        return high_product(x, y, width, is_signed)

    return high


def build_mul(ins: Instruction, c: Decoder) -> Step:
    """mul.{lo,hi,wide}: low or high half, or the full double-width product."""
    m = Modifiers(ins)
    part = m.choice("lo", "hi", "wide")
    kind = m.type(*NUMBER_TYPES)
    m.done()
    width, view, product = width_of(kind), view_of(kind), multiply(kind, part)
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    d = c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        r[d] = product(view(r[a]), view(r[b]))

    return run


def build_mad(ins: Instruction, c: Decoder) -> Step:
    """mad.{lo,hi,wide}: the product as `mul`, plus c of the result's width, wrapping.

    `mad.hi.sat.s32` clamps the sum; `mad.cc` and `madc` go to `build_carry_mad`.
    """
    if "cc" in ins.mods:
        return build_carry_mad(ins, c)
    m = Modifiers(ins)
    part = m.choice("lo", "hi", "wide")
    saturate = m.flag("sat")
    kind = m.type(*NUMBER_TYPES)
    m.done()
    if saturate and (part, kind) != ("hi", "s32"):
        raise m.unsupported(".sat is for mad.hi.s32")
    width, view, product = width_of(kind), view_of(kind), multiply(kind, part)
    out = 2 * width if part == "wide" else width
    bits, mask = BITS[out], MASKS[out]
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    addend, d = c.read(ins.operands[3], out), c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        p, z = product(view(r[a]), view(r[b])), bits(r[addend])
        if saturate:
            total = np.asarray(signed(p, 32), S64) + np.asarray(signed(z, 32), S64)
            total = np.clip(total, -(1 << 31), (1 << 31) - 1)
            r[d] = total.astype(SIGNED[32]) if total.ndim else int(total) & mask
        elif p.__class__ is int and z.__class__ is int:
            r[d] = (p + z) & mask
        else:
            r[d] = bits(p) + z

    return run


def _quotient(x: Any, y: Any) -> Any:
    """Division truncating towards zero: one more than the floor if inexact and negative."""
    q = x // y
    return q + ((q * y != x) & ((x < 0) != (y < 0)))


@instruction("div", "rem")
def build_divide(ins: Instruction, c: Decoder) -> Step:
    """div/rem of integers truncate towards zero.

    By zero the value is unspecified (here all ones, and the dividend for rem): an error if strict,
    else a warning, since compilers compute quotients that nothing then uses.
    """
    from ptxsim.isa.floating import FLOAT_TYPES, build_float_divide

    if any(t in ins.mods for t in FLOAT_TYPES):
        return build_float_divide(ins, c)
    m = Modifiers(ins)
    kind = m.type(*NUMBER_TYPES)
    m.done()
    width, view = width_of(kind), view_of(kind)
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    d, mask = c.write(ins.operands[0]), MASKS[width]
    remainder, ones = ins.op == "rem", -1 if kind[0] == "s" else mask
    dtype = (SIGNED if kind[0] == "s" else UNSIGNED)[width]

    def suspect(warp: Any) -> None:
        warp.cta.machine.suspect(InvalidOperand(f"{ins.op} by zero", line=ins.line))

    def run(warp: Any) -> None:
        r = warp.registers
        x, y = view(r[a]), view(r[b])
        if y.__class__ is int:
            if y == 0:
                suspect(warp)
                r[d] = r[a] if remainder else mask
                return
        else:
            zero = y == 0
            if (zero if warp.mask is None else zero & warp.mask).any():
                suspect(warp)
            # x / 1 leaves the remainder 0: mended below.
            y = np.where(zero, np.ones_like(y), y)
        q = _quotient(x, y)
        value = x - q * y if remainder else q
        if y.__class__ is not int and zero.any():
            value = np.where(zero, x if remainder else ones, value)
        r[d] = value & mask if value.__class__ is int else value.astype(dtype)

    return run


@instruction("min", "max")
def build_min_max(ins: Instruction, c: Decoder) -> Step:
    """min/max of integers; `.relu` clamps the result at 0.  Floats: see floating.py."""
    from ptxsim.isa.floating import FLOAT_TYPES, build_float_min_max

    if any(t in ins.mods for t in FLOAT_TYPES):
        return build_float_min_max(ins, c)
    m = Modifiers(ins)
    relu = m.flag("relu")
    kind = m.type(*NUMBER_TYPES, *PACKED_TYPES)
    m.done()
    if relu and kind not in ("s32", "s16x2"):
        raise m.unsupported(".relu is for .s32 and .s16x2")
    if kind in PACKED_TYPES:
        return _packed_binary(c, ins, kind, relu)
    scalar, vector = (min, np.minimum) if ins.op == "min" else (max, np.maximum)
    if relu:
        return binary(
            c,
            ins,
            kind,
            lambda x, y: max(scalar(x, y), 0),
            lambda x, y: np.maximum(vector(x, y), 0),
        )
    return binary(c, ins, kind, scalar, vector)


@instruction("abs", "neg")
def build_negate(ins: Instruction, c: Decoder) -> Step:
    """abs/neg of signed integers; the smallest value wraps to itself."""
    from ptxsim.isa.floating import FLOAT_TYPES, build_float_sign

    if any(t in ins.mods for t in FLOAT_TYPES):
        return build_float_sign(ins, c)
    m = Modifiers(ins)
    kind = m.type("s16", "s32", "s64")
    m.done()
    width, mask = width_of(kind), MASKS[width_of(kind)]
    a, d = c.read(ins.operands[1], width), c.write(ins.operands[0])
    absolute = ins.op == "abs"

    def run(warp: Any) -> None:
        r = warp.registers
        x = signed(r[a], width)
        if x.__class__ is int:
            r[d] = (abs(x) if absolute else -x) & mask
        else:
            r[d] = np.abs(x) if absolute else -x

    return run


@instruction("add.cc", "addc", "sub.cc", "subc")
def build_carry(ins: Instruction, c: Decoder) -> Step:
    """Extended precision: `.cc` writes the carry flag of each thread, `addc`/`subc` use it."""
    m = Modifiers(ins)
    writes = m.flag("cc")
    kind = m.type("u32", "s32", "u64", "s64")
    m.done()
    width = width_of(kind)
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    d, mask, view = c.write(ins.operands[0]), MASKS[width], BITS[width]
    reads, sign = ins.op in ("addc", "subc"), 1 if ins.op.startswith("add") else -1

    def run(warp: Any) -> None:
        r = warp.registers
        carry = warp.carry if reads else 0
        x, y = view(r[a]), view(r[b])
        if all(v.__class__ is int for v in (x, y, carry)):
            total = x + sign * (y + carry)
            r[d] = total & mask
            out: Any = int(not 0 <= total <= mask)
        else:
            wide = np.asarray(x, object) + sign * (np.asarray(y, object) + carry)
            wide = np.broadcast_to(wide, 32)
            r[d] = np.array([int(v) & mask for v in wide], UNSIGNED[width])
            out = np.array([int(not 0 <= v <= mask) for v in wide], object)
        if writes:
            warp.carry = out

    return run


@instruction("madc")
def build_carry_mad(ins: Instruction, c: Decoder) -> Step:
    """mad.cc, madc{.cc}: as mad.{lo,hi}, with the carry of the addition out, and in for madc."""
    m = Modifiers(ins)
    part = m.choice("lo", "hi")
    writes = m.flag("cc")
    kind = m.type("u32", "s32", "u64", "s64")
    m.done()
    width, view, product = width_of(kind), view_of(kind), multiply(kind, part)
    a, b, z = (c.read(o, width) for o in ins.operands[1:])
    d, mask, bits, reads = c.write(ins.operands[0]), MASKS[width], BITS[width], ins.op == "madc"

    def run(warp: Any) -> None:
        r = warp.registers
        p, t = bits(product(view(r[a]), view(r[b]))), bits(r[z])
        carry = warp.carry if reads else 0
        if all(v.__class__ is int for v in (p, t, carry)):
            total = (p & mask) + t + carry
            r[d], out = total & mask, total >> width
        else:
            wide = np.broadcast_to(np.asarray(p, object) + np.asarray(t, object) + carry, 32)
            r[d] = np.array([int(v) & mask for v in wide], UNSIGNED[width])
            out = np.array([int(v) >> width for v in wide], object)
        if writes:
            warp.carry = out

    return run


@instruction("mul24", "mad24")
def build_mul24(ins: Instruction, c: Decoder) -> Step:
    """mul24/mad24.{lo,hi}: product of the low 24 bits of each operand, its bits 0-31 or 16-47."""
    m = Modifiers(ins)
    shift = 0 if m.choice("lo", "hi") == "lo" else 16
    saturate = m.flag("sat")
    kind = m.type("u32", "s32")
    m.done()
    if saturate and (ins.op, shift, kind) != ("mad24", 16, "s32"):
        raise m.unsupported(".sat is for mad24.hi.s32")
    slots = [c.read(o, 32) for o in ins.operands[1:]]
    d = c.write(ins.operands[0])

    def low24(value: Any) -> Any:
        bits = BITS[32](value)
        bits = np.asarray(bits, S64) & 0xFFFFFF
        return np.where(bits >> 23 & 1, bits - (1 << 24), bits) if kind == "s32" else bits

    def run(warp: Any) -> None:
        r = warp.registers
        total = low24(r[slots[0]]) * low24(r[slots[1]]) >> shift
        if len(slots) > 2:
            total = _word(total, kind) + np.asarray(view_of(kind)(r[slots[2]]), S64)
        if saturate:
            total = np.clip(total, -(1 << 31), (1 << 31) - 1)
        total = total & MASKS[32]
        r[d] = int(total) if total.ndim == 0 else total.astype(UNSIGNED[32])

    return run


def _word(value: Any, kind: str) -> Any:
    """The low 32 bits read as u32 or s32, in int64."""
    low = value & MASKS[32]
    return low - ((low >> 31) << 32) if kind == "s32" else low


@instruction("sad")
def build_sad(ins: Instruction, c: Decoder) -> Step:
    """sad: c + |a - b|."""
    m = Modifiers(ins)
    kind = m.type(*NUMBER_TYPES)
    m.done()
    width, view = width_of(kind), view_of(kind)
    a, b, z = (c.read(o, width) for o in ins.operands[1:])
    d, mask = c.write(ins.operands[0]), MASKS[width]

    def run(warp: Any) -> None:
        r = warp.registers
        x, y, t = view(r[a]), view(r[b]), BITS[width](r[z])
        if x.__class__ is int and y.__class__ is int:
            distance: Any = abs(x - y) & mask
        else:
            distance = BITS[width](np.maximum(x, y) - np.minimum(x, y))
        total = distance + t
        r[d] = total & mask if total.__class__ is int else total

    return run
