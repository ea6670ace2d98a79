"""Floating-point arithmetic.  PTX ISA: Floating Point and Half Precision Instructions.

The approximate instructions return the correctly rounded value: it lies within every error bound
that the ISA documents, though a chip's last bits may differ.  NaN results are NaNs, with no promise
about their payload where the ISA makes none.  An `add` and a `mul` without `.rn`
may be fused by a chip's assembler; here they are two rounded operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.isa import integer
from ptxsim.isa.rounding import (
    SMALLEST_NORMAL,
    directed,
    flush,
    round_sum,
    to_bf16_bits,
    to_f16_bits,
    wide,
)
from ptxsim.ptx import Instruction
from ptxsim.values import (
    BITS,
    F32,
    F64,
    LANES,
    MASKS,
    Pair,
    bf16,
    bits32,
    f16,
    f32,
    f64,
    from_float,
    halves,
)

FLOAT_TYPES = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
ROUNDINGS = ("rn", "rz", "rm", "rp")
CANONICAL_NAN = np.uint32(0x7FFFFFFF).view(F32)
Lanewise = Callable[..., Any]


def read_narrow(kind: str) -> Callable[[Any], Any]:
    """Register contents of a scalar type, widened to where the arithmetic is done."""
    return {"f32": f32, "f64": f64, "f16": lambda v: f16(v).astype(F32), "bf16": bf16}[kind]


def write_narrow(kind: str) -> Callable[[Any], Any]:
    """The arithmetic result rounded to a scalar type, as register contents."""
    if kind == "bf16":
        return to_bf16_bits
    if kind == "f16":
        return to_f16_bits
    return from_float


def lanewise(
    c: Decoder, ins: Instruction, kind: str, function: Lanewise, ftz: bool = False
) -> Step:
    """d = function(sources...) in a float type; the packed types apply it to both halves.

    `function` works on float32 (float64 for f64) lanes or scalars and rounds to float32 itself;
    16-bit types are rounded once more from there.  For +, -, * that equals a single rounding, since
    float32 holds 2p+2 bits of their precision p; fma rounds to odd first (see rounding.py).
    """
    if kind in ("f16x2", "bf16x2"):
        return _packed16(c, ins, kind, function, ftz)
    if kind == "f32x2":
        return _packed32(c, ins, function, ftz)
    width = {"f64": 64, "f32": 32}.get(kind, 16)
    slots = [c.read(o, width) for o in ins.operands[1:]]
    d = c.write(ins.operands[0])
    read, write = _accessors(kind, ftz)

    if len(slots) == 2:
        a, b = slots

        def two(warp: Any) -> None:
            r = warp.registers
            r[d] = write(function(read(r[a]), read(r[b])))

        return two

    def run(warp: Any) -> None:
        r = warp.registers
        r[d] = write(function(*[read(r[s]) for s in slots]))

    return run


def _accessors(kind: str, ftz: bool) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """How a scalar type is read and written; `.ftz` flushes what is read and what is written."""
    read, write = read_narrow(kind), write_narrow(kind)
    if not ftz:
        return read, write
    if kind == "f16":  # rounded first: the result may only become subnormal, or normal, by that
        return lambda value: flush(read(value), kind), lambda value: _flush16(write(value))
    return lambda value: flush(read(value)), lambda value: write(flush(value))


def _flush16(bits: Any) -> Any:
    """float16 bits without subnormals."""
    if bits.__class__ is int:
        return bits if bits & 0x7C00 else bits & 0x8000
    return np.where(bits & np.uint16(0x7C00), bits, bits & np.uint16(0x8000))


def _packed32(c: Decoder, ins: Instruction, function: Lanewise, ftz: bool) -> Step:
    slots = [c.read(o, 64) for o in ins.operands[1:]]
    d = c.write(ins.operands[0])
    fix = flush if ftz else lambda value: value
    if function in (np.add, np.subtract, np.multiply) and not ftz:
        a, b = slots

        def plain(warp: Any) -> None:
            r = warp.registers
            (x_lo, x_hi), (y_lo, y_hi) = halves(r[a]), halves(r[b])
            lo, hi = function(f32(x_lo), f32(y_lo)), function(f32(x_hi), f32(y_hi))
            r[d] = Pair(from_float(lo), from_float(hi))

        return plain

    def run(warp: Any) -> None:
        r = warp.registers
        pairs = [halves(r[s]) for s in slots]
        if any(p.lo.__class__ is np.ndarray or p.hi.__class__ is np.ndarray for p in pairs):
            # Both halves in one pass: NumPy's cost is per call.
            tables = []
            for pair in pairs:
                table = np.empty((2, LANES), F32)
                table[0], table[1] = f32(pair.lo), f32(pair.hi)
                tables.append(fix(table))
            result = fix(function(*tables))
            r[d] = Pair(result[0], result[1])
            return
        lo = function(*[fix(f32(p.lo)) for p in pairs])
        hi = function(*[fix(f32(p.hi)) for p in pairs])
        r[d] = Pair(from_float(fix(lo)), from_float(fix(hi)))

    return run


def _packed16(c: Decoder, ins: Instruction, kind: str, function: Lanewise, ftz: bool) -> Step:
    slots = [c.read(o, 32) for o in ins.operands[1:]]
    d = c.write(ins.operands[0])
    read, write = _accessors(kind.removesuffix("x2"), ftz)

    def run(warp: Any) -> None:
        r = warp.registers
        words = [bits32(r[s]) for s in slots]
        lo = write(function(*[read(half_of(w, 0)) for w in words]))
        hi = write(function(*[read(half_of(w, 16)) for w in words]))
        r[d] = join16(lo, hi)

    return run


def half_of(word: Any, shift: int) -> Any:
    """The 16 bits of a 32-bit word from bit `shift` on."""
    if word.__class__ is int:
        return word >> shift & 0xFFFF
    return (word >> shift).astype(np.uint16)


def join16(lo: Any, hi: Any) -> Any:
    """Two 16-bit register values as one 32-bit word."""
    if lo.__class__ is int and hi.__class__ is int:
        return lo | hi << 16
    low = np.uint32(lo) if lo.__class__ is int else lo.astype(np.uint32)
    high = np.uint32(hi) if hi.__class__ is int else hi.astype(np.uint32)
    return low | high << 16


def rounded(name: str, mode: str) -> Lanewise:
    """add, sub, mul, fma in float32 with one rounding in `mode`."""
    if name == "fma":
        return lambda a, b, z: round_sum(wide(a) * wide(b), wide(z), mode)
    if mode == "rn":
        return {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    if name == "mul":  # exact in float64

        def multiply(a: Any, b: Any) -> Any:
            product = wide(a) * wide(b)
            return directed(product, 0.0, product.astype(F32), mode)

        return multiply
    sign = 1 if name == "add" else -1
    return lambda a, b: round_sum(wide(a), sign * wide(b), mode)


def _double(name: str) -> Lanewise:
    if name == "fma":
        return _fma64
    return {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]


def _fma64(a: Any, b: Any, z: Any) -> Any:
    """float64 fma with one rounding, through exact rationals (rare, so slow is fine)."""
    from fractions import Fraction

    def one(x: float, y: float, t: float) -> float:
        if not (np.isfinite(x) and np.isfinite(y)):
            return x * y + t
        if not np.isfinite(t):
            return t  # x * y is finite, though its float64 may not be
        exact = Fraction(x) * Fraction(y) + Fraction(t)
        if exact == 0:
            return x * y + t
        try:
            return float(exact)
        except OverflowError:
            return np.inf if exact > 0 else -np.inf

    result = np.vectorize(one, otypes=[F64])(a, b, z)
    return result if result.ndim else F64.type(result)


@instruction("add", "sub", "mul", "fma", "mad")
def build_arithmetic(ins: Instruction, c: Decoder) -> Step:
    """add, sub, mul, fma of every type; integers go to integer.py."""
    if not any(t in ins.mods for t in FLOAT_TYPES):
        if ins.op == "mul":
            return integer.build_mul(ins, c)
        if ins.op == "mad":
            return integer.build_mad(ins, c)
        return integer.build_add(ins, c, 1 if ins.op == "add" else -1)
    if sum(t in ("f32", "f16", "bf16") for t in ins.mods) == 2:
        from ptxsim.isa.mixed import build_mixed

        return build_mixed(ins, c)
    name = "fma" if ins.op == "mad" else ins.op
    m = Modifiers(ins)
    kind = m.type(*FLOAT_TYPES)
    # add, sub and mul round to nearest by default; fma has no default.
    mode = m.choice(*ROUNDINGS, default=None if name == "fma" else "rn")
    ftz = m.flag("ftz")
    saturate, relu = m.flag("sat"), m.flag("relu")
    m.done()
    narrow = kind.removesuffix("x2") in ("f16", "bf16")
    if kind == "f64":
        if mode != "rn" or ftz or saturate or relu:
            raise m.unsupported("f64 with a modifier other than .rn")
        return lanewise(c, ins, kind, _double(name))
    if narrow and mode != "rn":
        raise m.unsupported(f".{mode} on {kind}")
    if (relu and not (narrow and name == "fma")) or (ftz and kind.startswith("bf16")):
        raise m.unsupported("this modifier with this type")
    function = rounded(name, "odd" if narrow and name == "fma" else mode)
    if saturate or relu:
        function = clamped(function, saturate)
    return lanewise(c, ins, kind, function, ftz)


def clamped(function: Lanewise, saturate: bool) -> Lanewise:
    """`.relu`: negative results become 0; `.sat`: also those above 1 become 1, and a NaN 0."""

    def run(*args: Any) -> Any:
        value = function(*args)
        value = np.where(value <= 0, F32.type(0), value)
        if saturate:
            value = np.where(np.isnan(value), F32.type(0), np.minimum(value, F32.type(1)))
        return value[()]

    return run


def _min_max(largest: bool, propagate_nan: bool, magnitude: bool) -> Lanewise:
    pick = np.fmax if largest else np.fmin
    strict = np.maximum if largest else np.minimum

    def one(a: Any, b: Any) -> Any:
        sign = None
        if magnitude:  # .xorsign.abs: magnitudes compared, sign is the xor
            sign = np.signbit(a) ^ np.signbit(b)
            a, b = np.abs(a), np.abs(b)
        value = (strict if propagate_nan else pick)(a, b)
        zeros = (a == 0) & (b == 0)
        if np.any(zeros):  # -0 < +0
            negative = (np.signbit(a) & np.signbit(b)) if largest else np.signbit(a) | np.signbit(b)
            value = np.where(zeros, np.where(negative, -np.abs(a), np.abs(a)), value)[()]
        nan = np.isnan(value)
        if sign is not None:
            value = np.where(sign, -np.abs(value), np.abs(value))[()]
        if np.any(nan) and value.dtype is F32:
            value = np.where(nan, CANONICAL_NAN, value)[()]
        return value

    def many(*args: Any) -> Any:
        value = one(args[0], args[1])
        return one(value, args[2]) if len(args) > 2 else value

    return many


def build_float_min_max(ins: Instruction, c: Decoder) -> Step:
    """min/max: a NaN gives way to a number unless `.NaN`; -0 < +0; three inputs on sm_100."""
    m = Modifiers(ins)
    kind = m.type(*FLOAT_TYPES)
    ftz, nan = m.flag("ftz"), m.flag("NaN")
    magnitude = m.flag("xorsign")
    if magnitude:
        m.choice("abs")
    m.done()
    three = kind == "f32" and not magnitude
    if kind == "f32x2" or len(ins.operands) not in ((3, 4) if three else (3,)):
        raise m.unsupported(f"{len(ins.operands) - 1} sources")
    if kind == "f64" and (ftz or nan or magnitude):
        raise m.unsupported("a modifier on f64")
    return lanewise(c, ins, kind, _min_max(ins.op == "max", nan, magnitude), ftz)


_SIGN_BITS = {"f16": 0x8000, "bf16": 0x8000, "f16x2": 0x80008000, "bf16x2": 0x80008000}


def build_float_sign(ins: Instruction, c: Decoder) -> Step:
    """neg and abs change the sign bit only."""
    m = Modifiers(ins)
    kind = m.type(*FLOAT_TYPES)
    ftz = m.flag("ftz")
    m.done()
    if kind in _SIGN_BITS and not ftz:
        return _sign_by_bits(c, ins, kind)
    return lanewise(c, ins, kind, np.abs if ins.op == "abs" else np.negative, ftz)


def _sign_by_bits(c: Decoder, ins: Instruction, kind: str) -> Step:
    width = 32 if kind.endswith("x2") else 16
    view, sign = BITS[width], _SIGN_BITS[kind]
    keep = MASKS[width] ^ sign
    a, d = c.read(ins.operands[1], width), c.write(ins.operands[0])
    if ins.op == "abs":

        def absolute(warp: Any) -> None:
            warp.registers[d] = view(warp.registers[a]) & keep

        return absolute

    def negate(warp: Any) -> None:
        warp.registers[d] = view(warp.registers[a]) ^ sign

    return negate


@instruction("copysign")
def build_copysign(ins: Instruction, c: Decoder) -> Step:
    """copysign d, a, b: the magnitude of b with the sign of a."""
    m = Modifiers(ins)
    kind = m.type("f32", "f64")
    m.done()
    return lanewise(c, ins, kind, lambda a, b: np.copysign(b, a))


def build_float_divide(ins: Instruction, c: Decoder) -> Step:
    """div.{rn,approx,full}: correctly rounded to nearest in each case."""
    m = Modifiers(ins)
    kind = m.type("f32", "f64")
    m.choice("rn", "approx", "full")
    ftz = m.flag("ftz")
    m.done()
    return lanewise(c, ins, kind, np.divide, ftz)


def _unary(function: Callable[[Any], Any]) -> Lanewise:
    """A float64 function rounded once to float32."""
    return lambda a: function(wide(a)).astype(F32)


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1.0 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


# Rounding of the exact forms beside .approx, and the types that have an approximation.
_EXACT = ("rcp", "sqrt")
_NARROW_FUNCTIONS = ("ex2", "tanh")


@instruction(*_FUNCTIONS)
def build_function(ins: Instruction, c: Decoder) -> Step:
    """ex2, lg2, rcp, sqrt, rsqrt, sin, cos, tanh: the correctly rounded value."""
    m = Modifiers(ins)
    kind = m.type(*FLOAT_TYPES)
    exact = m.flag("rn")
    if not exact:
        m.choice("approx")
    ftz = m.flag("ftz")
    m.done()
    function, narrow = _FUNCTIONS[ins.op], kind.removesuffix("x2") in ("f16", "bf16")
    if (exact and ins.op not in _EXACT) or (narrow and ins.op not in _NARROW_FUNCTIONS):
        raise m.unsupported(f"{ins.op} of this kind on {kind}")
    if narrow and ftz != (ins.op == "ex2" and kind.startswith("bf16")):
        raise m.unsupported(".ftz is for, and needed by, ex2 of bf16")
    if kind == "f64":
        if not exact or ftz:
            raise m.unsupported("an approximation of f64")
        return lanewise(c, ins, kind, function)
    return lanewise(c, ins, kind, _unary(function), ftz and not kind.startswith("bf16"))


@instruction("testp")
def build_testp(ins: Instruction, c: Decoder) -> Step:
    """testp.{finite,infinite,number,notanumber,normal,subnormal}."""
    m = Modifiers(ins)
    kind = m.type("f32", "f64")
    what = m.choice("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    m.done()
    tiny = SMALLEST_NORMAL[kind]
    tests: dict[str, Callable[[Any], Any]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda v: ~np.isnan(v),
        "notanumber": np.isnan,
        "normal": lambda v: np.isfinite(v) & ((v == 0) | (np.abs(v) >= tiny)),  # zeros are
        "subnormal": lambda v: (v != 0) & (np.abs(v) < tiny),
    }
    test, read = tests[what], read_narrow(kind)
    a, d = c.read(ins.operands[1], 64 if kind == "f64" else 32), c.write(ins.operands[0])

    def run(warp: Any) -> None:
        value = test(read(warp.registers[a]))
        warp.registers[d] = value if np.ndim(value) else bool(value)

    return run
