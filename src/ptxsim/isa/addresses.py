"""Address-space conversions.  PTX ISA: cvta, isspacep, mapa, getctarank."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.errors import InvalidOperand
from ptxsim.memory import LOCAL_BASE, OFFSET_MASK, PARAM_BASE, RANK_SHIFT, SHARED_BASE
from ptxsim.ptx import Instruction
from ptxsim.values import MASKS, UNSIGNED, bits32, bits64

_WINDOWS = {
    "shared": SHARED_BASE,
    "local": LOCAL_BASE,
    "param": PARAM_BASE,
    "global": 0,
    "const": 0,
}


@instruction("cvta")
def build_address_space(ins: Instruction, c: Decoder) -> Step:
    """cvta{.to}.space: between a state space's own addresses and generic ones."""
    m = Modifiers(ins)
    back = m.flag("to")
    name = m.choice(
        "shared",
        "shared::cta",
        "shared::cluster",
        "local",
        "param",
        "global",
        "const",
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


_RANKS = (1 << (32 - RANK_SHIFT)) - 1  # what fits above the offset in a 32-bit address


@instruction("mapa")
def build_map_address(ins: Instruction, c: Decoder) -> Step:
    """mapa{.shared::cluster} d, a, rank: the same offset in another CTA of the cluster.

    A rank that does not exist gives an address that no access accepts: compilers compute it in all
    lanes and use it in some.
    """
    m = Modifiers(ins)
    shared = m.flag("shared::cluster")
    kind = m.type("u32", "u64") if shared else m.type("u64")
    m.done()
    a, rank = c.read(ins.operands[1], int(kind[1:])), c.read(ins.operands[2], 32)
    d = c.write(ins.operands[0])

    def run(warp: Any) -> None:
        r = warp.registers
        address = (bits32 if kind == "u32" else bits64)(r[a])
        number = bits32(r[rank]) & _RANKS
        keep = OFFSET_MASK | (0 if shared else SHARED_BASE)
        if number.__class__ is not int:
            number = number.astype(UNSIGNED[int(kind[1:])])
        r[d] = (address & keep) | number << RANK_SHIFT

    return run


@instruction("getctarank")
def build_rank_of(ins: Instruction, c: Decoder) -> Step:
    """getctarank: the rank in the cluster that a shared address belongs to."""
    m = Modifiers(ins)
    kind = m.type("u32", "u64") if m.flag("shared::cluster") else m.type("u64")
    m.done()
    a, d = c.read(ins.operands[1], int(kind[1:])), c.write(ins.operands[0])

    def run(warp: Any) -> None:
        value = bits64(warp.registers[a]) if kind == "u64" else bits32(warp.registers[a])
        rank = (value & 0xFFFFFFFF) >> RANK_SHIFT
        warp.registers[d] = rank if rank.__class__ is int else rank.astype(UNSIGNED[32])

    return run
