"""Bits and predicates: logic, shifts, bit fields, comparisons, selection.  PTX ISA 9.7.6-9.7.8."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.isa.floating import read_narrow
from ptxsim.isa.integer import INTEGER_TYPES, view_of, width_of
from ptxsim.ptx import Instruction
from ptxsim.values import BITS, LANES, MASKS, SIGNED, U32, UNSIGNED, bits32, lanes, signed

_LOGIC: dict[str, Callable[[Any, Any], Any]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@instruction("and", "or", "xor")
def build_logic(ins: Instruction, c: Decoder) -> Step:
    """and, or, xor of bits or predicates."""
    m = Modifiers(ins)
    kind = m.type("pred", "b16", "b32", "b64")
    m.done()
    function = _LOGIC[ins.op]
    width = 1 if kind == "pred" else width_of(kind)
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    d = c.write(ins.operands[0])
    if width == 1:

        def predicate(warp: Any) -> None:
            r = warp.registers
            r[d] = function(r[a], r[b])

        return predicate
    view = BITS[width]

    def run(warp: Any) -> None:
        r = warp.registers
        r[d] = function(view(r[a]), view(r[b]))

    return run


@instruction("not", "cnot")
def build_not(ins: Instruction, c: Decoder) -> Step:
    """not: all bits; cnot: 1 for zero, else 0."""
    m = Modifiers(ins)
    kind = m.type("pred", "b16", "b32", "b64")
    m.done()
    width = 1 if kind == "pred" else width_of(kind)
    a, d = c.read(ins.operands[1], width), c.write(ins.operands[0])
    mask = MASKS[width]

    def run(warp: Any) -> None:
        x = warp.registers[a]
        if width == 1:
            warp.registers[d] = (not x) if x.__class__ is bool else ~x
            return
        x = BITS[width](x)
        if ins.op == "cnot":
            value = int(x == 0) if x.__class__ is int else (x == 0).astype(UNSIGNED[width])
        else:
            value = x ^ mask if x.__class__ is int else ~x
        warp.registers[d] = value

    return run


@instruction("shl", "shr")
def build_shift(ins: Instruction, c: Decoder) -> Step:
    """shl, shr: amounts at or above the width give 0, or the sign for signed shr."""
    m = Modifiers(ins)
    kind = m.type(*INTEGER_TYPES)
    m.done()
    width = width_of(kind)
    left, is_signed = ins.op == "shl", kind[0] == "s"
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], 32)
    d, mask, view = c.write(ins.operands[0]), MASKS[width], view_of(kind)
    dtype = (SIGNED if is_signed else UNSIGNED)[width]
    limit = width - 1

    def shift(x: Any, n: Any) -> Any:
        if n.__class__ is int:
            if n > limit:
                if is_signed and not left:
                    n = limit
                else:
                    return 0
            if x.__class__ is int:
                return (x << n if left else x >> n) & mask
            return x << n if left else x >> n
        x = np.asarray(x, dtype)
        amount = np.minimum(n, limit).astype(dtype)
        value = x << amount if left else x >> amount
        if left or not is_signed:
            value = np.where(n > limit, dtype.type(0), value)
        return value

    def run(warp: Any) -> None:
        r = warp.registers
        r[d] = shift(view(r[a]), bits32(r[b]))

    return run


@instruction("shf")
def build_funnel(ins: Instruction, c: Decoder) -> Step:
    """shf.{l,r}.{wrap,clamp}: high word of (hi:lo) << n, or low word of (hi:lo) >> n."""
    m = Modifiers(ins)
    left = m.choice("l", "r") == "l"
    wrap = m.choice("wrap", "clamp") == "wrap"
    m.type("b32")
    m.done()
    lo, hi, n = (c.read(o, 32) for o in ins.operands[1:])
    d = c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        values = [bits32(r[s]) for s in (lo, hi, n)]
        low, high, amount = (lanes(v, 32).astype(np.uint64) for v in values)
        amount = amount & np.uint64(31) if wrap else np.minimum(amount, np.uint64(32))
        both = high << np.uint64(32) | low
        shifted = (both << amount) >> np.uint64(32) if left else both >> amount
        result = shifted.astype(U32)
        uniform = all(v.__class__ is int for v in values)
        r[d] = int(result[0]) if uniform else result

    return run


@instruction("lop3")
def build_lop3(ins: Instruction, c: Decoder) -> Step:
    """lop3.b32 d, a, b, c, table: bit = table[a<<2 | b<<1 | c]."""
    m = Modifiers(ins)
    m.type("b32")
    m.done()
    a, b, z = (c.read(o, 32) for o in ins.operands[1:4])
    table = ins.operands[4].bits  # type: ignore[union-attr]
    d = c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        values = [bits32(r[s]) for s in (a, b, z)]
        inverse = [v ^ 0xFFFFFFFF for v in values]
        result: Any = 0
        for row in range(8):
            if table >> row & 1:
                x = values[0] if row & 4 else inverse[0]
                y = values[1] if row & 2 else inverse[1]
                t = values[2] if row & 1 else inverse[2]
                result = result | (x & y & t)
        r[d] = result

    return run


@instruction("prmt")
def build_permute(ins: Instruction, c: Decoder) -> Step:
    """prmt.b32: bytes of (b:a) picked by the nibbles of c; bit 3 of a nibble spreads the sign."""
    m = Modifiers(ins)
    m.type("b32")
    mode = m.choice("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="")
    m.done()
    if mode:
        raise m.unsupported(f"mode .{mode}")
    a, b, s = (c.read(o, 32) for o in ins.operands[1:4])
    d = c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        values = [bits32(r[slot]) for slot in (a, b, s)]
        low, high, selector = (lanes(v, 32).astype(np.uint64) for v in values)
        both = high << np.uint64(32) | low
        result = np.zeros(LANES, np.uint64)
        for byte in range(4):
            nibble = selector >> np.uint64(4 * byte) & np.uint64(15)
            picked = both >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
            sign = np.where(picked >> np.uint64(7), np.uint64(255), np.uint64(0))
            picked = np.where(nibble >> np.uint64(3), sign, picked)
            result |= picked << np.uint64(8 * byte)
        out = result.astype(U32)
        r[d] = int(out[0]) if all(v.__class__ is int for v in values) else out

    return run


def per_lane(c: Decoder, ins: Instruction, widths: list[int], out: int, function: Any) -> Step:
    """A step through Python integers lane by lane: for rare bit instructions."""
    slots = [c.read(o, w) for o, w in zip(ins.operands[1:], widths)]
    d = c.write(ins.operands[0])
    mask = MASKS[out]

    def run(warp: Any) -> None:
        r = warp.registers
        values = [BITS[w](r[s]) for s, w in zip(slots, widths)]
        if all(v.__class__ is int for v in values):
            r[d] = function(*values) & mask
            return
        columns = [lanes(v, w).tolist() for v, w in zip(values, widths)]
        r[d] = np.array([function(*row) & mask for row in zip(*columns)], UNSIGNED[out])

    return run


@instruction("bfe")
def build_extract(ins: Instruction, c: Decoder) -> Step:
    """bfe: `len` bits from `pos`; signed fields fill with the bit min(pos+len-1, msb)."""
    m = Modifiers(ins)
    kind = m.type("u32", "s32", "u64", "s64")
    m.done()
    width, is_signed = width_of(kind), kind[0] == "s"

    def extract(a: int, pos: int, length: int) -> int:
        pos, length = pos & 255, length & 255
        if length == 0:
            return 0
        value = (a >> pos) & ((1 << length) - 1)
        last = min(pos + length - 1, width - 1)
        if is_signed and a >> last & 1:
            present = max(0, min(length, width - pos))
            value |= -1 << present
        return value

    return per_lane(c, ins, [width, 32, 32], width, extract)


@instruction("bfi")
def build_insert(ins: Instruction, c: Decoder) -> Step:
    """bfi d, a, b, pos, len: the low bits of a into b."""
    m = Modifiers(ins)
    width = width_of(m.type("b32", "b64"))
    m.done()

    def insert(a: int, b: int, pos: int, length: int) -> int:
        field = ((1 << (length & 255)) - 1) << (pos & 255)
        return (b & ~field) | (a << (pos & 255) & field)

    return per_lane(c, ins, [width, width, 32, 32], width, insert)


@instruction("bfind")
def build_find(ins: Instruction, c: Decoder) -> Step:
    """bfind: most significant non-sign bit, 0xFFFFFFFF if none; `.shiftamt` counts from the top."""
    m = Modifiers(ins)
    shift = m.flag("shiftamt")
    kind = m.type("u32", "s32", "u64", "s64")
    m.done()
    width, is_signed = width_of(kind), kind[0] == "s"

    def find(a: int) -> int:
        if is_signed and a >> (width - 1):
            a = ~a & MASKS[width]
        at = a.bit_length() - 1
        if at < 0:
            return -1
        return width - 1 - at if shift else at

    return per_lane(c, ins, [width], 32, find)


@instruction("clz", "popc", "brev")
def build_count(ins: Instruction, c: Decoder) -> Step:
    """clz: leading zeros; popc: ones; brev: bits reversed."""
    m = Modifiers(ins)
    width = width_of(m.type("b32", "b64"))
    m.done()
    functions: dict[str, Callable[[int], int]] = {
        "clz": lambda a: width - a.bit_length(),
        "popc": lambda a: a.bit_count(),
        "brev": lambda a: int(f"{a:0{width}b}"[::-1], 2),
    }
    return per_lane(c, ins, [width], width if ins.op == "brev" else 32, functions[ins.op])


@instruction("bmsk")
def build_mask(ins: Instruction, c: Decoder) -> Step:
    """bmsk.{clamp,wrap}: `b` ones from position `a`."""
    m = Modifiers(ins)
    wrap = m.choice("clamp", "wrap") == "wrap"
    m.type("b32")
    m.done()

    def ones(a: int, b: int) -> int:
        a, b = (a & 31, b & 31) if wrap else (min(a, 32), min(b, 32))
        return ((1 << b) - 1) << a

    return per_lane(c, ins, [32, 32], 32, ones)


# Comparisons: ordered ones are false with a NaN, the ones with `u` true.
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}
_UNORDERED = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}


def comparison(name: str, is_float: bool) -> Callable[[Any, Any], Any]:
    """A comparison of two register values as bool or boolean lanes."""
    if name in _UNORDERED:
        inverse = _COMPARE[_UNORDERED[name]]
        if name == "neu":
            return operator.ne
        if name == "equ":
            return lambda a, b: (a == b) | np.isnan(a) | np.isnan(b)
        return lambda a, b: ~inverse(a, b)
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "ne" and is_float:
        return lambda a, b: (a < b) | (a > b)
    return _COMPARE[name]


@instruction("setp", "set")
def build_compare(ins: Instruction, c: Decoder) -> Step:
    """setp.OP{.BOOL}.type p{|q}, a, b{, c}; q holds the negated comparison.  set writes a word."""
    m = Modifiers(ins)
    name = m.choice(*_COMPARE, *_UNORDERED, "num", "nan")
    combine = m.choice("and", "or", "xor", default="none")
    m.flag("ftz")
    out_kind = m.type("u32", "s32", "f32") if ins.op == "set" else "pred"
    kind = m.type(*INTEGER_TYPES, "f32", "f64", "f16", "bf16")
    m.done()
    is_float = kind in ("f32", "f64", "f16", "bf16")
    width = {"f32": 32, "f64": 64}.get(kind, 16) if is_float else width_of(kind)
    view = read_narrow(kind) if is_float else view_of(kind)
    compare = comparison(name, is_float)
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    p, q = c.pair(ins.operands[0])
    extra = c.predicate(ins.operands[3]) if combine != "none" else None
    mix = _LOGIC.get(combine)
    true_word = 0x3F800000 if out_kind == "f32" else 0xFFFFFFFF

    def run(warp: Any) -> None:
        r = warp.registers
        result = compare(view(r[a]), view(r[b]))
        if result.__class__ is not bool and not np.ndim(result):
            result = bool(result)
        inverse = None
        if q is not None:
            inverse = not result if result.__class__ is bool else ~result
        if extra is not None and mix is not None:
            other = r[extra[0]]
            if extra[1]:
                other = not other if other.__class__ is bool else ~other
            result = mix(result, other)
            inverse = mix(inverse, other) if q is not None else None
        if q is not None:
            r[q] = inverse
        if out_kind == "pred":
            r[p] = result
        elif result.__class__ is bool:
            r[p] = true_word if result else 0
        else:
            r[p] = np.where(result, np.uint32(true_word), np.uint32(0))

    return run


@instruction("selp")
def build_select(ins: Instruction, c: Decoder) -> Step:
    """selp d, a, b, p: p ? a : b."""
    m = Modifiers(ins)
    kind = m.type(*INTEGER_TYPES, "f32", "f64")
    m.done()
    width = int(kind[1:])
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    p, negated = c.predicate(ins.operands[3])
    d = c.write(ins.operands[0])
    is_float = kind == "f32"

    def run(warp: Any) -> None:
        r = warp.registers
        condition = r[p]
        if condition.__class__ is bool:
            r[d] = r[b] if condition is negated else r[a]
            return
        x, y = r[a], r[b]
        if negated:
            x, y = y, x
        if is_float:
            value = np.where(condition, _float_lanes(x), _float_lanes(y))
        else:
            value = np.where(condition, _word(x, width), _word(y, width))
        r[d] = value

    return run


def _word(value: Any, width: int) -> Any:
    return UNSIGNED[width].type(value) if value.__class__ is int else lanes(value, width)


def _float_lanes(value: Any) -> Any:
    return read_narrow("f32")(value)


@instruction("slct")
def build_sign_select(ins: Instruction, c: Decoder) -> Step:
    """slct d, a, b, c: c >= 0 ? a : b (a NaN selects b)."""
    m = Modifiers(ins)
    m.flag("ftz")
    kind = m.type(*INTEGER_TYPES, "f32", "f64")
    test = m.type("s32", "f32") if len(m.left) else "s32"
    m.done()
    width = int(kind[1:])
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    t, d = c.read(ins.operands[3], 32), c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        value = signed(r[t], 32) if test == "s32" else read_narrow("f32")(r[t])
        condition = value >= 0
        if np.ndim(condition) == 0:
            r[d] = r[a] if condition else r[b]
        else:
            r[d] = np.where(condition, lanes(r[a], width), lanes(r[b], width))

    return run
