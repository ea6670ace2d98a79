"""Bit fields, counts, byte permutations, funnel shifts, small dot products.

PTX ISA: Integer Arithmetic Instructions (popc .. dp2a), Logic and Shift Instructions (lop3, shf),
Data Movement (prmt).  Rare ones go through Python integers lane by lane; prmt, shf and lop3, which
compilers emit in inner loops, are vectorised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.isa.integer import width_of
from ptxsim.ptx import Immediate, Instruction
from ptxsim.values import BITS, LANES, MASKS, U32, U64, UNSIGNED, bits32, lanes


def per_lane(c: Decoder, ins: Instruction, widths: list[int], out: int, function: Any) -> Step:
    """A step through Python integers lane by lane: for rare bit instructions."""
    slots = [c.read(o, w) for o, w in zip(ins.operands[1:], widths, strict=True)]
    d = c.write(ins.operands[0])
    mask = MASKS[out]

    def run(warp: Any) -> None:
        r = warp.registers
        values = [BITS[w](r[s]) for s, w in zip(slots, widths, strict=True)]
        if all(v.__class__ is int for v in values):
            r[d] = function(*values) & mask
            return
        columns = [lanes(v, w).tolist() for v, w in zip(values, widths, strict=True)]
        rows = zip(*columns, strict=True)
        r[d] = np.array([function(*row) & mask for row in rows], UNSIGNED[out])

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
        low, high, amount = (lanes(v, 32).astype(U64) for v in values)
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
    table_operand = ins.operands[4]
    if not isinstance(table_operand, Immediate) or not 0 <= table_operand.bits <= 255:
        raise c.error("the table must be an immediate in 0..255")
    table = table_operand.bits
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


# The byte (of eight, b:a) that each result byte takes in the modes with a selector of 2 bits.
_MODES: dict[str, Callable[[int, int], int]] = {
    "f4e": lambda n, byte: n + byte,
    "b4e": lambda n, byte: (n - byte) % 8,
    "rc8": lambda n, byte: n,
    "ecl": lambda n, byte: max(n, byte),
    "ecr": lambda n, byte: min(n, byte),
    "rc16": lambda n, byte: 2 * (n & 1) + (byte & 1),
}


def _nibbles(mode: str, selector: np.ndarray) -> Any:
    """The selector of the plain form that does what this mode does."""
    pick = _MODES[mode]
    table = [sum(pick(n, byte) << (4 * byte) for byte in range(4)) for n in range(4)]
    return np.array(table, U64)[(selector & np.uint64(3)).astype(int)]


@instruction("prmt")
def build_permute(ins: Instruction, c: Decoder) -> Step:
    """prmt.b32: bytes of (b:a) picked by the nibbles of c; bit 3 of a nibble spreads the sign."""
    m = Modifiers(ins)
    m.type("b32")
    mode = m.choice(*_MODES, default="")
    m.done()
    a, b, s = (c.read(o, 32) for o in ins.operands[1:4])
    d = c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        values = [bits32(r[slot]) for slot in (a, b, s)]
        low, high, selector = (lanes(v, 32).astype(U64) for v in values)
        if mode:
            selector = _nibbles(mode, selector)
        both = high << np.uint64(32) | low
        result = np.zeros(LANES, U64)
        for byte in range(4):
            nibble = selector >> np.uint64(4 * byte) & np.uint64(15)
            picked = both >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
            sign = np.where(picked >> np.uint64(7), np.uint64(255), np.uint64(0))
            picked = np.where(nibble >> np.uint64(3), sign, picked)
            result |= picked << np.uint64(8 * byte)
        out = result.astype(U32)
        r[d] = int(out[0]) if all(v.__class__ is int for v in values) else out

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


@instruction("fns")
def build_find_nth(ins: Instruction, c: Decoder) -> Step:
    """fns.b32 d, mask, base, n: the n-th set bit from `base` upwards, or downwards if n < 0."""
    m = Modifiers(ins)
    m.type("b32")
    m.done()

    def find(mask: int, base: int, offset: int) -> int:
        offset -= (offset >> 31) << 32
        if offset == 0:
            return base if base < 32 and mask >> base & 1 else -1
        step, left = (1, offset) if offset > 0 else (-1, -offset)
        while 0 <= base < 32:
            left -= mask >> base & 1
            if left == 0:
                return base
            base += step
        return -1

    return per_lane(c, ins, [32, 32, 32], 32, find)


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


@instruction("szext")
def build_extend(ins: Instruction, c: Decoder) -> Step:
    """szext.{clamp,wrap}.{u32,s32} d, a, n: the low n bits, extended by zero or their sign."""
    m = Modifiers(ins)
    wrap = m.choice("clamp", "wrap") == "wrap"
    is_signed = m.type("u32", "s32") == "s32"
    m.done()

    def extend(a: int, n: int) -> int:
        n = n & 31 if wrap else min(n, 32)
        value = a & ((1 << n) - 1)
        return value - (1 << n) if is_signed and n and value >> (n - 1) else value

    return per_lane(c, ins, [32, 32], 32, extend)


def _parts(word: int, bits: int, is_signed: bool) -> list[int]:
    """A 32-bit word cut into fields of `bits` bits, low first."""
    fields = [word >> at & MASKS[bits] for at in range(0, 32, bits)]
    return [f - (1 << bits) if is_signed and f >> (bits - 1) else f for f in fields]


@instruction("dp4a", "dp2a")
def build_dot(ins: Instruction, c: Decoder) -> Step:
    """dp4a: four products of bytes plus c; dp2a.{lo,hi}: halves of a times two bytes of b."""
    m = Modifiers(ins)
    first = (0 if m.choice("lo", "hi") == "lo" else 2) if ins.op == "dp2a" else 0
    kinds = (m.type("u32", "s32"), m.type("u32", "s32"))
    m.done()
    bits = 16 if ins.op == "dp2a" else 8

    def dot(a: int, b: int, z: int) -> int:
        left, right = _parts(a, bits, kinds[0] == "s32"), _parts(b, 8, kinds[1] == "s32")
        return z + sum(x * y for x, y in zip(left, right[first:], strict=False))

    return per_lane(c, ins, [32, 32, 32], 32, dot)
