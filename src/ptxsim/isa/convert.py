"""Conversions between types.  PTX ISA: Data Movement and Conversion Instructions: cvt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.isa.floating import half_of, join16
from ptxsim.isa.rounding import (
    bf16_pair,
    directed,
    float8_values,
    flush,
    integer_to_f32,
    to_bf16_bits,
    to_f16_bits,
    to_float8_bits,
    to_odd,
    to_tf32,
)
from ptxsim.ptx import Instruction, Register
from ptxsim.values import (
    BITS,
    F32,
    F64,
    MASKS,
    SIGNED,
    UNSIGNED,
    bf16,
    bits32,
    f16,
    f32,
    f64,
    from_float,
)

_INTEGERS = tuple(f"{k}{n}" for k in "us" for n in (8, 16, 32, 64))
_FLOATS = ("f16", "bf16", "f32", "f64")
_PACKED = ("f16x2", "bf16x2")
_FLOAT8 = ("e4m3x2", "e5m2x2")
_INTEGER_ROUNDING: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_NARROW: dict[str, Callable[..., Any]] = {"f16": to_f16_bits, "bf16": to_bf16_bits}
# The types whose values a float type has too.
_CONTAINED = {"f64": _FLOATS, "f32": ("f16", "bf16", "f32"), "f16": ("f16",), "bf16": ("bf16",)}
Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Form:
    """The modifiers of a cvt."""

    out: str
    source: str
    rounding: str
    ftz: bool
    saturate: bool
    finite: bool
    relu: bool


@instruction("cvt")
def build_convert(ins: Instruction, c: Decoder) -> Step:
    """cvt.dtype.atype among integers, f16, bf16, f32, f64; tf32; pairs of f16, bf16, e4m3, e5m2."""
    m = Modifiers(ins)
    kinds = [t for t in m.left if t in (*_INTEGERS, *_FLOATS, *_PACKED, *_FLOAT8, "tf32")]
    if len(kinds) != 2:
        raise m.unsupported("needs a destination and a source type of those known here")
    for kind in kinds:
        m.left.remove(kind)
    rounding = m.choice("rn", "rna", "rz", "rm", "rp", *_INTEGER_ROUNDING, default="")
    form = _Form(
        kinds[0], kinds[1], rounding, *(m.flag(n) for n in ("ftz", "sat", "satfinite", "relu"))
    )
    m.done()
    _check_form(m, form)
    if form.out in _FLOAT8 or form.source in _FLOAT8:
        return _float8(ins, c, form)
    if form.out in _PACKED:
        return _pack(ins, c, form)
    if form.out == "tf32":
        return _to_tf32(ins, c, form)
    if form.source in _FLOATS and form.out in _FLOATS:
        return _float_to_float(ins, c, form)
    if form.source in _FLOATS:
        return _float_to_int(ins, c, form)
    if form.out in _FLOATS:
        return _int_to_float(ins, c, form)
    return _int_to_int(ins, c, (form.out, form.source), form.saturate)


def _check_form(m: Modifiers, f: _Form) -> None:
    """Combinations that the ISA does not have."""
    out = f.out.removesuffix("x2")
    if (f.finite or f.relu) and (out not in ("f16", "bf16", "tf32", "e4m3", "e5m2")):
        raise m.unsupported(".satfinite or .relu with this destination")
    if (f.finite or f.relu) and f.source not in ("f32", *_PACKED, *_FLOAT8):
        raise m.unsupported(".satfinite or .relu with this source")
    if f.ftz and "f32" not in (f.out, f.source):
        raise m.unsupported(".ftz without .f32")
    if (f.out in _PACKED or f.out == "tf32") and f.source not in ("f32", *_FLOAT8):
        raise m.unsupported(f"from .{f.source}")
    lossy = f.out in (*_PACKED, *_FLOAT8, "tf32") or (
        f.out in _FLOATS and f.source not in _CONTAINED[f.out]
    )
    if (lossy or (f.source in _FLOATS and f.out in _INTEGERS)) and not f.rounding:
        raise m.unsupported("needs a rounding modifier")
    exact = f.source in _FLOATS and f.out in _FLOATS and not lossy
    if f.rounding and (
        (f.source in _INTEGERS and f.out in _INTEGERS)
        or (exact and f.out == f.source and f.rounding not in _INTEGER_ROUNDING)
        or (exact and f.out != f.source and f.source != "bf16")
    ):
        raise m.unsupported("no rounding in this conversion")
    if f.ftz and f.out in (*_PACKED, *_FLOAT8, "tf32"):
        raise m.unsupported(".ftz with this destination")
    if f.saturate and (f.out == "bf16" or f.out in (*_PACKED, *_FLOAT8, "tf32")):
        raise m.unsupported(".sat with this destination")
    if f.rounding == "rna" and f.out != "tf32":
        raise m.unsupported(".rna is for .tf32")


def _read_float(kind: str) -> tuple[int, Convert]:
    return {
        "f32": (32, f32),
        "f64": (64, f64),
        "f16": (16, lambda v: f16(v).astype(F32)),
        "bf16": (16, bf16),
    }[kind]


def _relu(value: Any) -> Any:
    """Negative values, and -0, become 0; a NaN stays."""
    return np.where(value <= 0, F32.type(0), value)[()]


def _pack(ins: Instruction, c: Decoder, form: _Form) -> Step:
    """cvt.rn.bf16x2.f32 d, a, b: a goes to the high half, b to the low one."""
    narrow, rounding, finite = _NARROW[form.out.removesuffix("x2")], form.rounding, form.finite
    a, b = c.read(ins.operands[1], 32), c.read(ins.operands[2], 32)
    d = c.write(ins.operands[0])
    if rounding not in ("rn", "rz"):
        raise c.error(f"rounding .{rounding}")

    quick = form.out == "bf16x2" and rounding == "rn" and not (finite or form.relu)

    def run(warp: Any) -> None:
        r = warp.registers
        high, low = f32(r[a]), f32(r[b])
        if quick and high.__class__ is np.ndarray and low.__class__ is np.ndarray:
            packed = bf16_pair(low, high)
            if packed is not None:
                r[d] = packed
                return
        if form.relu:
            high, low = _relu(high), _relu(low)
        r[d] = join16(narrow(low, rounding, finite), narrow(high, rounding, finite))

    return run


def _float8(ins: Instruction, c: Decoder, form: _Form) -> Step:
    """cvt.rn.satfinite.e4m3x2 from two f32 (the first goes high) or a pair; cvt.rn.f16x2.e4m3x2."""
    d = c.write(ins.operands[0])
    if form.rounding != "rn":
        raise c.error("the rounding must be .rn")
    if form.source in _FLOAT8:
        if form.out != "f16x2":
            raise c.error(f"from .{form.source} to .{form.out}")
        return _from_float8(c, ins, d, form)
    kind = form.out.removesuffix("x2")
    if not form.finite:
        raise c.error("needs .satfinite")
    if form.source == "f32":
        slots = [c.read(o, 32) for o in ins.operands[1:3]]
        split: Convert = f32
    elif form.source in _PACKED:
        slots = [c.read(ins.operands[1], 32)] * 2
        split = _read_float(form.source.removesuffix("x2"))[1]
    else:
        raise c.error(f"from .{form.source}")

    def run(warp: Any) -> None:
        r = warp.registers
        if form.source == "f32":
            high, low = (split(r[s]) for s in slots)
        else:
            word = bits32(r[slots[0]])
            high, low = split(half_of(word, 16)), split(half_of(word, 0))
        if form.relu:
            high, low = _relu(high), _relu(low)
        r[d] = to_float8_bits(low, kind) | to_float8_bits(high, kind) << 8

    return run


def _from_float8(c: Decoder, ins: Instruction, d: int, form: _Form) -> Step:
    a = c.read(ins.operands[1], 16)
    values = float8_values(form.source.removesuffix("x2"))
    table = to_f16_bits(_relu(values) if form.relu else values)  # every code is exact in f16

    def run(warp: Any) -> None:
        pair = BITS[16](warp.registers[a])
        low, high = table[pair & 0xFF], table[pair >> 8]
        if pair.__class__ is int:
            low, high = int(low), int(high)
        warp.registers[d] = join16(low, high)

    return run


def _float_step(ins: Instruction, c: Decoder, source: str, function: Convert) -> Step:
    width, read = _read_float(source)
    a, d = c.read(ins.operands[1], width), c.write(ins.operands[0])

    def run(warp: Any) -> None:
        warp.registers[d] = function(read(warp.registers[a]))

    return run


def _to_tf32(ins: Instruction, c: Decoder, form: _Form) -> Step:
    if form.rounding not in ("rn", "rna", "rz"):
        raise c.error(f"rounding .{form.rounding}")

    def convert(value: Any) -> Any:
        value = _relu(value) if form.relu else value
        return from_float(to_tf32(value, form.rounding, form.finite))

    return _float_step(ins, c, "f32", convert)


def _unit_range(value: Any) -> Any:
    """`.sat`: [0, 1], a NaN gives 0."""
    return np.where(value > 0, np.minimum(value, value.dtype.type(1)), value.dtype.type(0))[()]


def _float_to_float(ins: Instruction, c: Decoder, form: _Form) -> Step:
    out, source, rounding, ftz = form.out, form.source, form.rounding, form.ftz
    integral = _INTEGER_ROUNDING.get(rounding)
    if integral is not None and out != source:
        raise c.error("an integer rounding needs equal types")
    mode = rounding if rounding in ("rn", "rz", "rm", "rp") else "rn"

    def convert(value: Any) -> Any:
        if ftz and source == "f32":
            value = flush(value)
        if integral is not None:
            value = integral(value)
        if form.saturate:
            value = _unit_range(value)
        if form.relu:
            value = _relu(value)
        if out in _NARROW:
            single = to_odd(value) if source == "f64" else value
            return _NARROW[out](single, mode, form.finite)
        if out == "f64":
            return from_float(value.astype(F64))
        result = value.astype(F32)
        if source == "f64" and mode != "rn":
            result = directed(value, 0.0, result, mode)
        return from_float(flush(result) if ftz else result)

    return _float_step(ins, c, source, convert)


def _float_to_int(ins: Instruction, c: Decoder, form: _Form) -> Step:
    """Out-of-range values clamp; a NaN gives 0, or 1 << (n-1) with f64 or a 64-bit integer."""
    out, source, ftz = form.out, form.source, form.ftz
    if form.rounding not in _INTEGER_ROUNDING:
        raise c.error("needs an integer rounding")
    bits = int(out[1:])
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if out[0] == "s" else (0, MASKS[bits])
    to_integral = _INTEGER_ROUNDING[form.rounding]
    of_nan = 1 << (bits - 1) if source == "f64" or bits == 64 else 0
    if out[0] == "s" and of_nan:
        of_nan = -of_nan
    target = ins.operands[0]
    width = max(16, bits, target.width if isinstance(target, Register) else 0)

    def clamp(value: float) -> int:
        if value != value:
            return of_nan
        return low if value <= low else high if value >= high else int(value)

    def convert(value: Any) -> Any:
        if ftz and source == "f32":
            value = flush(value)
        whole = to_integral(value.astype(F64))
        if bits < 64 and np.ndim(whole):
            inside = np.where(np.isnan(whole), float(of_nan), np.clip(whole, low, high))
            return inside.astype(SIGNED[64]).astype(UNSIGNED[width])
        clamped = [clamp(v) & MASKS[width] for v in np.atleast_1d(whole).tolist()]
        return clamped[0] if np.ndim(whole) == 0 else np.array(clamped, UNSIGNED[width])

    return _float_step(ins, c, source, convert)


def _int_to_float(ins: Instruction, c: Decoder, form: _Form) -> Step:
    out, source, rounding = form.out, form.source, form.rounding
    a, d = c.read(ins.operands[1], max(16, int(source[1:]))), c.write(ins.operands[0])
    own = c.width(a) if a < len(c.kernel.registers) else int(source[1:])
    read = _int_reader(source, own)
    if rounding not in ("rn", "rz", "rm", "rp"):
        raise c.error(f"rounding .{rounding} from an integer")
    if out == "f64" and rounding != "rn" and source[1:] == "64":
        raise c.error(f"rounding .{rounding} from 64 bits to f64")
    dtype = (SIGNED if source[0] == "s" else UNSIGNED)[64]
    if form.ftz and out != "f32":
        raise c.error(".ftz is for .f32")

    def run(warp: Any) -> None:
        value = np.asarray(read(warp.registers[a]), dtype)[()]
        if form.saturate:  # [0, 1]
            value = np.clip(value, dtype.type(0), dtype.type(1))
        if out == "f64":
            warp.registers[d] = from_float(value.astype(F64))
        elif out == "f32":
            warp.registers[d] = from_float(integer_to_f32(value, rounding))
        else:
            warp.registers[d] = _NARROW[out](integer_to_f32(value, "odd"), rounding)

    return run


def _int_reader(kind: str, register: int) -> Callable[[Any], Any]:
    """The value of a `kind` integer held in a register that may be wider."""
    bits, is_signed = int(kind[1:]), kind[0] == "s"
    register = {8: 16}.get(register, register)
    view = BITS[register if register in BITS else 64]

    def read(value: Any) -> Any:
        raw = view(value)
        if raw.__class__ is int:
            raw &= MASKS[bits]
            return raw - (1 << bits) if is_signed and raw >> (bits - 1) else raw
        return raw.astype((SIGNED if is_signed else UNSIGNED)[bits])

    return read


def _int_to_int(ins: Instruction, c: Decoder, kinds: tuple[str, str], saturate: bool) -> Step:
    """Extends by the source's sign, narrows by truncation (`.sat`: clamps), fills the register."""
    out, source = kinds
    a, d = c.read(ins.operands[1], max(16, int(source[1:]))), c.write(ins.operands[0])
    # An immediate or special register has no width of its own.
    own = c.width(a) if a < len(c.kernel.registers) else max(16, int(source[1:]))
    read = _int_reader(source, own)
    bits, fill = int(out[1:]), max(c.width(d), int(out[1:]))
    fill = fill if d < len(c.kernel.registers) else max(16, int(out[1:]))
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if out[0] == "s" else (0, MASKS[bits])
    narrow = (SIGNED if out[0] == "s" else UNSIGNED)[bits]
    whole = (SIGNED if out[0] == "s" else UNSIGNED)[fill]

    def run(warp: Any) -> None:
        value = read(warp.registers[a])
        if value.__class__ is int:
            if saturate:
                value = min(max(value, low), high)
            else:
                value &= MASKS[bits]
                if out[0] == "s" and value >> (bits - 1):
                    value -= 1 << bits
            warp.registers[d] = value & MASKS[fill]
            return
        if saturate:
            value = np.clip(value.astype(object), low, high)
        warp.registers[d] = value.astype(narrow).astype(whole)

    return run
