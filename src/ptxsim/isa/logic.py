"""Bits and predicates: logic, shifts, comparisons, selection.

PTX ISA: Logic and Shift Instructions; Comparison and Selection Instructions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.isa.floating import half_of, read_narrow
from ptxsim.isa.integer import INTEGER_TYPES, view_of, width_of
from ptxsim.isa.rounding import flush
from ptxsim.ptx import Instruction
from ptxsim.values import BITS, MASKS, SIGNED, UNSIGNED, bits32, lanes, signed

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
    ftz = m.flag("ftz")
    out_kind = m.type("u32", "s32", "f32") if ins.op == "set" else "pred"
    kind = m.type(*INTEGER_TYPES, *_FLOATS, "f16x2", "bf16x2")
    m.done()
    _check_comparison(m, name, kind, ftz)
    view = _operand_view(kind, ftz)
    compare = comparison(name, kind in _FLOATS or kind.endswith("x2"))
    width = _WIDTHS.get(kind) or width_of(kind)
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    p, q = c.pair(ins.operands[0])
    extra = c.predicate(ins.operands[3]) if combine != "none" else None
    mix = _LOGIC.get(combine)
    if kind.endswith("x2"):
        if ins.op == "set" or q is None:
            raise m.unsupported("two halves need setp with p|q")
        return _compare_halves(compare, view, (a, b), (p, q), (extra, mix))
    true_word = 0x3F800000 if out_kind == "f32" else 0xFFFFFFFF

    def run(warp: Any) -> None:
        r = warp.registers
        result = _plain(compare(view(r[a]), view(r[b])))
        inverse = None if q is None else _negate(result)
        if extra is not None and mix is not None:
            other = _negate(r[extra[0]]) if extra[1] else r[extra[0]]
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


_FLOATS = ("f32", "f64", "f16", "bf16")
_WIDTHS = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32}


def _check_comparison(m: Modifiers, name: str, kind: str, ftz: bool) -> None:
    """Operators that the type does not have."""
    is_float = kind in _WIDTHS
    unsigned_only = ("lo", "ls", "hi", "hs")
    if (
        (name in (*_UNORDERED, "num", "nan") and not is_float)
        or (name in unsigned_only and kind[0] != "u")
        or (kind[0] == "b" and not is_float and name not in ("eq", "ne"))
        or (ftz and kind not in ("f32", "f16", "f16x2"))
    ):
        raise m.unsupported(f"this comparison of .{kind}")


def _operand_view(kind: str, ftz: bool) -> Callable[[Any], Any]:
    """How an operand is read; `.ftz` flushes it."""
    scalar = kind.removesuffix("x2")
    if scalar not in _FLOATS:
        return view_of(kind)
    read = read_narrow(scalar)
    return (lambda value: flush(read(value), scalar)) if ftz else read


def _plain(result: Any) -> Any:
    """A NumPy boolean scalar as bool."""
    return result if result.__class__ is bool or np.ndim(result) else bool(result)


def _negate(value: Any) -> Any:
    return not value if value.__class__ is bool else ~value


def _compare_halves(
    compare: Any, view: Any, sources: tuple[int, int], targets: tuple[int, int], mixing: Any
) -> Step:
    """setp of f16x2 or bf16x2: p compares the low halves, q the high ones."""
    extra, mix = mixing

    def run(warp: Any) -> None:
        r = warp.registers
        x, y = (bits32(r[s]) for s in sources)
        for slot, shift in zip(targets, (0, 16), strict=True):
            result = _plain(compare(view(half_of(x, shift)), view(half_of(y, shift))))
            if extra is not None:
                result = mix(result, _negate(r[extra[0]]) if extra[1] else r[extra[0]])
            r[slot] = result

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
    ftz = m.flag("ftz")
    kind = m.type(*INTEGER_TYPES, "f32", "f64")
    test = m.type("s32", "f32")
    m.done()
    if ftz and test != "f32":
        raise m.unsupported(".ftz is for .f32")
    width = int(kind[1:])
    a, b = c.read(ins.operands[1], width), c.read(ins.operands[2], width)
    t, d = c.read(ins.operands[3], 32), c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        value = signed(r[t], 32) if test == "s32" else read_narrow("f32")(r[t])
        condition = (flush(value) if ftz else value) >= 0
        if np.ndim(condition) == 0:
            r[d] = r[a] if condition else r[b]
        else:
            r[d] = np.where(condition, lanes(r[a], width), lanes(r[b], width))

    return run
