"""cvt and address-space conversions.  PTX ISA 9.7.9.20-24 (cvta, cvt, cvt.pack, mapa)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.errors import InvalidOperand
from ptxsim.isa.floating import join16
from ptxsim.isa.rounding import flush, to_bf16_bits, to_f16_bits, to_tf32
from ptxsim.memory import LOCAL_BASE, OFFSET_MASK, PARAM_BASE, RANK_SHIFT, SHARED_BASE
from ptxsim.ptx import Instruction
from ptxsim.values import (
    BITS,
    F32,
    F64,
    MASKS,
    SIGNED,
    UNSIGNED,
    bf16,
    bits32,
    bits64,
    f16,
    f32,
    f64,
    from_float,
)

_INTEGERS = tuple(f"{k}{n}" for k in "us" for n in (8, 16, 32, 64))
_FLOATS = ("f16", "bf16", "f32", "f64")
_PACKED = ("f16x2", "bf16x2")
_INTEGER_ROUNDING: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


@instruction("cvt")
def build_convert(ins: Instruction, c: Decoder) -> Step:
    """cvt.dtype.atype in all combinations of integers, f16, bf16, f32, f64, and packing to x2."""
    m = Modifiers(ins)
    kinds = [t for t in m.left if t in (*_INTEGERS, *_FLOATS, *_PACKED, "tf32")]
    if len(kinds) != 2:
        raise m.unsupported("needs a destination and a source type of those known here")
    for kind in kinds:
        m.left.remove(kind)
    out, source = kinds
    rounding = m.choice("rn", "rna", "rz", "rm", "rp", *_INTEGER_ROUNDING, default="")
    ftz, saturate = m.flag("ftz"), m.flag("sat")
    finite, relu = m.flag("satfinite"), m.flag("relu")
    m.done()
    if out in _PACKED:
        if source != "f32" or finite:
            raise m.unsupported("packing is from two f32 without .satfinite")
        return _pack(ins, c, out, rounding or "rn", relu)
    if finite or (relu and out not in ("f16", "bf16", "tf32")):
        raise m.unsupported(".satfinite or .relu in this combination")
    if out == "tf32":
        return _float_step(ins, c, source, lambda v: from_float(to_tf32(v, rounding or "rna")), relu)
    if source in _FLOATS and out in _FLOATS:
        return _float_to_float(ins, c, (out, source), rounding, (ftz, saturate, relu))
    if source in _FLOATS:
        return _float_to_int(ins, c, (out, source), rounding or "rzi", ftz)
    if out in _FLOATS:
        return _int_to_float(ins, c, (out, source), rounding or "rn")
    return _int_to_int(ins, c, (out, source), saturate)


def _read_float(kind: str) -> tuple[int, Callable[[Any], Any]]:
    return {
        "f32": (32, f32),
        "f64": (64, f64),
        "f16": (16, lambda v: f16(v).astype(F32)),
        "bf16": (16, bf16),
    }[kind]


def _pack(ins: Instruction, c: Decoder, out: str, rounding: str, relu: bool) -> Step:
    """cvt.rn.bf16x2.f32 d, a, b: a goes to the high half, b to the low one."""
    narrow = to_bf16_bits if out == "bf16x2" else to_f16_bits
    a, b = c.read(ins.operands[1], 32), c.read(ins.operands[2], 32)
    d = c.write(ins.operands[0])
    if rounding not in ("rn", "rz"):
        raise c.error(f"rounding .{rounding}")

    def run(warp: Any) -> None:
        r = warp.registers
        high, low = f32(r[a]), f32(r[b])
        if relu:
            high, low = (np.where(v > 0, v, F32.type(0)).astype(F32)[()] for v in (high, low))
        r[d] = join16(narrow(low, rounding), narrow(high, rounding))

    return run


def _float_step(
    ins: Instruction, c: Decoder, source: str, function: Callable[[Any], Any], relu: bool
) -> Step:
    width, read = _read_float(source)
    a, d = c.read(ins.operands[1], width), c.write(ins.operands[0])

    def run(warp: Any) -> None:
        value = read(warp.registers[a])
        if relu:
            value = np.where(value > 0, value, F32.type(0)).astype(F32)[()]
        warp.registers[d] = function(value)

    return run


def _float_to_float(
    ins: Instruction,
    c: Decoder,
    kinds: tuple[str, str],
    rounding: str,
    flags: tuple[bool, bool, bool],
) -> Step:
    out, source = kinds
    ftz, saturate, relu = flags
    integral = _INTEGER_ROUNDING.get(rounding)

    def convert(value: Any) -> Any:
        if ftz and source == "f32":
            value = flush(value)
        if integral is not None:
            value = integral(value)
        if saturate:
            value = np.clip(np.where(np.isnan(value), 0, value), 0, 1).astype(value.dtype)[()]
        if out in ("f16", "bf16"):
            narrow = to_bf16_bits if out == "bf16" else to_f16_bits
            return narrow(value.astype(F32), "rz" if rounding == "rz" else "rn")
        if out == "f64":
            return from_float(value.astype(F64))
        if source == "f64" and rounding in ("rz", "rm", "rp"):
            from ptxsim.isa.rounding import directed

            return from_float(directed(value, 0.0, value.astype(F32), rounding))
        result = value.astype(F32)
        return from_float(flush(result) if ftz else result)

    if rounding in ("rm", "rp") and out in ("f16", "bf16"):
        raise c.error(f"rounding .{rounding} to {out}")
    return _float_step(ins, c, source, convert, relu)


def _float_to_int(
    ins: Instruction, c: Decoder, kinds: tuple[str, str], rounding: str, ftz: bool
) -> Step:
    """Out-of-range values clamp; a NaN gives 0 (for 64-bit results too, see docs/ptxsim.md)."""
    out, source = kinds
    bits = int(out[1:])
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if out[0] == "s" else (0, MASKS[bits])
    to_integral = _INTEGER_ROUNDING[rounding]
    slot = c.kernel.code[c.pc].operands[0]
    width = getattr(slot, "width", 32)

    def convert(value: Any) -> Any:
        if ftz and source == "f32":
            value = flush(value)
        whole = to_integral(value.astype(F64))
        lanes = [
            0 if v != v else int(min(max(v, -1e30), 1e30)) for v in np.atleast_1d(whole).tolist()
        ]
        clamped = [min(max(v, low), high) & MASKS[width] for v in lanes]
        return clamped[0] if np.ndim(whole) == 0 else np.array(clamped, UNSIGNED[width])

    return _float_step(ins, c, source, convert, False)


def _int_to_float(ins: Instruction, c: Decoder, kinds: tuple[str, str], rounding: str) -> Step:
    out, source = kinds
    a, d = c.read(ins.operands[1], max(16, int(source[1:]))), c.write(ins.operands[0])
    read = _int_reader(source, c.width(a) if source[1:] in ("8", "16") else int(source[1:]))
    if rounding != "rn":
        raise c.error(f"rounding .{rounding} from an integer")

    def run(warp: Any) -> None:
        value = read(warp.registers[a])
        if out in ("f32", "f64"):
            dtype = F32 if out == "f32" else F64
            floats = np.asarray(value, SIGNED[64] if source != "u64" else UNSIGNED[64])
            result = from_float(floats.astype(dtype)[()])
        else:
            wide = np.asarray(value, SIGNED[64]).astype(F32)[()]
            result = (to_bf16_bits if out == "bf16" else to_f16_bits)(wide)
        warp.registers[d] = result

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


_WINDOWS = {"shared": SHARED_BASE, "local": LOCAL_BASE, "param": PARAM_BASE, "global": 0, "const": 0}


@instruction("cvta")
def build_address_space(ins: Instruction, c: Decoder) -> Step:
    """cvta{.to}.space: between a state space's own addresses and generic ones."""
    m = Modifiers(ins)
    back = m.flag("to")
    name = m.choice(
        "shared", "shared::cta", "shared::cluster", "local", "param", "global", "const",
        "param::entry",
    ).split("::")[0]
    m.type("u64", "u32")
    m.done()
    base = _WINDOWS[name]
    a, d = c.read(ins.operands[1], 64), c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        value = bits64(r[a])
        if not base:
            r[d] = value
        elif not back:
            r[d] = value | base if value.__class__ is int else value | np.uint64(base)
        else:
            first = value if value.__class__ is int else int(value[0])
            if not first & base:
                raise InvalidOperand(f"cvta.to.{name} of {first:#x}, which is not in that window")
            r[d] = value & ~base if value.__class__ is int else value & np.uint64(~base & MASKS[64])

    return run


@instruction("isspacep")
def build_is_space(ins: Instruction, c: Decoder) -> Step:
    """isspacep.space p, a: does the generic address lie in the window?"""
    m = Modifiers(ins)
    name = m.choice("shared", "shared::cta", "shared::cluster", "local", "param", "global", "const")
    m.done()
    a, p = c.read(ins.operands[1], 64), c.write(ins.operands[0])
    windows = np.uint64(SHARED_BASE | LOCAL_BASE | PARAM_BASE)

    def run(warp: Any) -> None:
        value = np.asarray(bits64(warp.registers[a]), np.uint64)
        if name in ("global", "const"):
            result = (value & windows) == 0 if name == "global" else np.zeros_like(value, bool)
        else:
            result = (value & np.uint64(_WINDOWS[name.split("::")[0]])) != 0
            if name in ("shared", "shared::cta"):
                rank = (value & np.uint64(0xFFFFFFFF)) >> np.uint64(RANK_SHIFT)
                result = result & (rank == warp.cta.rank)
        warp.registers[p] = result if result.ndim else bool(result)

    return run


@instruction("mapa")
def build_map_address(ins: Instruction, c: Decoder) -> Step:
    """mapa{.shared::cluster} d, a, rank: the same offset in another CTA of the cluster."""
    m = Modifiers(ins)
    shared = m.flag("shared::cluster")
    kind = m.type("u32", "u64")
    m.done()
    a, rank = c.read(ins.operands[1], int(kind[1:])), c.read(ins.operands[2], 32)
    d = c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        address = (bits32 if kind == "u32" else bits64)(r[a])
        number = bits32(r[rank])
        largest = number if number.__class__ is int else int(number.max())
        if largest >= len(warp.cta.cluster.ctas):
            raise InvalidOperand(f"mapa to rank {largest} of {len(warp.cta.cluster.ctas)} CTAs")
        keep = OFFSET_MASK | (0 if shared else SHARED_BASE)
        if number.__class__ is not int:
            number = number.astype(UNSIGNED[int(kind[1:])])
        r[d] = (address & keep) | number << RANK_SHIFT

    return run


@instruction("getctarank")
def build_rank_of(ins: Instruction, c: Decoder) -> Step:
    """getctarank: the rank in the cluster that a shared address belongs to."""
    m = Modifiers(ins)
    m.flag("shared::cluster")
    kind = m.type("u32", "u64")
    m.done()
    a, d = c.read(ins.operands[1], int(kind[1:])), c.write(ins.operands[0])

    def run(warp: Any) -> None:
        value = bits64(warp.registers[a]) if kind == "u64" else bits32(warp.registers[a])
        rank = (value & 0xFFFFFFFF) >> RANK_SHIFT
        warp.registers[d] = rank if rank.__class__ is int else rank.astype(UNSIGNED[32])

    return run


