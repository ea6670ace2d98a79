"""Warp-wide communication.  PTX ISA: shfl, vote, match, redux, elect, activemask, bar.warp.sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.decode import AGAIN, Decoder, Modifiers, Step, instruction
from ptxsim.errors import DivergenceError, InvalidOperand
from ptxsim.machine import Wait
from ptxsim.ptx import Instruction
from ptxsim.values import LANE_IDS, LANES, MASKS, U32, bits32, lanes, uniform

_LANES64 = np.arange(LANES)
FULL = 0xFFFFFFFF


def mask_bits(mask: np.ndarray | None) -> int:
    """Lanes as a 32-bit number."""
    if mask is None:
        return FULL
    return int(np.packbits(mask, bitorder="little").view(U32)[0])


def gather_lanes(warp: Any, members: int) -> bool:
    """True if all of `members` that still run are in the group; else the group is blocked.

    Another part of the warp that waits at the same instruction joins the group.
    """
    if warp.mask is None:
        return True
    wanted = members & ~mask_bits(warp.exited)
    active = mask_bits(warp.mask)
    if wanted & ~active == 0:
        return True
    group = warp.group
    if mask_bits(group.mask) != active:
        raise DivergenceError(
            f"a warp-wide instruction for lanes {wanted:#010x} has a guard that holds in "
            f"{active:#010x} only"
        )
    for other in [g for g in warp.groups if g is not group]:
        if other.pc == group.pc and other.meets == group.meets and other.wait is not None:
            group.mask = group.mask | other.mask
            warp.groups.remove(other)
    warp.mask = group.mask
    if wanted & ~mask_bits(warp.mask) == 0:
        return True
    missing = wanted & ~mask_bits(warp.mask)
    group.wait = Wait(
        lambda: False,
        lambda: f"the lanes {missing:#010x} of its warp have not reached this instruction",
    )
    return False


def _members(c: Decoder, operand: Any) -> Callable[[Any], int]:
    slot = c.read(operand, 32)

    def read(warp: Any) -> int:
        value = uniform(bits32(warp.registers[slot]), warp.mask)
        if value is None:
            raise InvalidOperand("the member mask differs among lanes")
        active = mask_bits(warp.mask)
        if not int(value) & active:
            raise InvalidOperand(f"member mask {value:#x} does not name the executing lanes")
        return int(value)

    return read


@instruction("elect")
def build_elect(ins: Instruction, c: Decoder) -> Step:
    """elect.sync d|p, mask: p is true in the lowest lane of the mask, d is its number."""
    m = Modifiers(ins)
    m.choice("sync")
    m.done()
    d, p = c.pair(ins.operands[0])
    members = _members(c, ins.operands[1])

    def run(warp: Any) -> Any:
        mask = members(warp)
        if not gather_lanes(warp, mask):
            return AGAIN
        alive = mask & ~mask_bits(warp.exited)
        leader = (alive & -alive).bit_length() - 1
        warp.registers[d] = leader
        if p is not None:
            warp.registers[p] = _LEADERS[leader]
        return None

    return run


_LEADERS = [lane == LANE_IDS for lane in range(LANES)]


def _source_lanes(mode: str, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Source lane of each lane, and whether it is in range."""
    segment, clamp, distance = (c >> 8) & 31, c & 31, b & 31
    first = _LANES64 & segment
    last = first | (clamp & ~segment)
    if mode == "up":
        source = _LANES64 - distance
        inside = source >= last
    elif mode == "down":
        source = _LANES64 + distance
        inside = source <= last
    elif mode == "bfly":
        source = _LANES64 ^ distance
        inside = source <= last
    else:
        source = first | (distance & ~segment)
        inside = source <= last
    return np.where(inside, source, _LANES64), inside


@instruction("shfl")
def build_shuffle(ins: Instruction, c: Decoder) -> Step:
    """shfl.sync.{up,down,bfly,idx}.b32 d{|p}, a, b, c, mask."""
    m = Modifiers(ins)
    m.choice("sync")
    mode = m.choice("up", "down", "bfly", "idx")
    m.type("b32")
    m.done()
    d, p = c.pair(ins.operands[0])
    a, b, limit = (c.read(o, 32) for o in ins.operands[1:4])
    members = _members(c, ins.operands[4])
    cache: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def run(warp: Any) -> Any:
        mask = members(warp)
        if not gather_lanes(warp, mask):
            return AGAIN
        r = warp.registers
        value, index, bound = bits32(r[a]), bits32(r[b]), bits32(r[limit])
        if index.__class__ is int and bound.__class__ is int:
            key = (index, bound)
            if key not in cache:
                cache[key] = _source_lanes(mode, np.array(index), np.array(bound))
            source, inside = cache[key]
        else:
            key = (-1, -1)
            source, inside = _source_lanes(
                mode, lanes(index, 32).astype(int), lanes(bound, 32).astype(int)
            )
        active = warp.mask
        if mask != FULL or active is not None:
            usable = np.ones(LANES, bool) if active is None else active
            bad = ~usable[source] & usable
            if bad.any():
                raise InvalidOperand(
                    f"shfl lane {int(np.flatnonzero(bad)[0])} reads an inactive lane"
                )
        if value.__class__ is int:
            r[d] = value
        elif mode == "idx" and key[1] == 31:
            r[d] = int(value[index & 31])
        else:
            r[d] = r[a][source] if r[a].__class__ is np.ndarray else value[source]
        if p is not None:
            r[p] = inside
        return None

    return run


@instruction("vote")
def build_vote(ins: Instruction, c: Decoder) -> Step:
    """vote.sync.{all,any,uni}.pred and vote.sync.ballot.b32."""
    m = Modifiers(ins)
    m.choice("sync")
    mode = m.choice("all", "any", "uni", "ballot")
    m.type("pred", "b32")
    m.done()
    p, negated = c.predicate(ins.operands[1])
    members = _members(c, ins.operands[2])
    d = c.write(ins.operands[0])

    def run(warp: Any) -> Any:
        mask = members(warp)
        if not gather_lanes(warp, mask):
            return AGAIN
        alive = mask & ~mask_bits(warp.exited)
        ballot = mask_bits(lanes(warp.registers[p], 1) ^ negated) & alive
        result: Any = ballot
        if mode == "all":
            result = ballot == alive
        elif mode == "any":
            result = ballot != 0
        elif mode == "uni":
            result = ballot in (0, alive)
        warp.registers[d] = result
        return None

    return run


@instruction("activemask")
def build_active(ins: Instruction, c: Decoder) -> Step:
    """activemask.b32: the lanes that execute it now."""
    m = Modifiers(ins)
    m.type("b32")
    m.done()
    d = c.write(ins.operands[0])

    def run(warp: Any) -> None:
        warp.registers[d] = mask_bits(warp.mask)

    return run


@instruction("match")
def build_match(ins: Instruction, c: Decoder) -> Step:
    """match.{any,all}.sync: lanes with equal values."""
    m = Modifiers(ins)
    mode = m.choice("any", "all")
    m.choice("sync")
    width = int(m.type("b32", "b64")[1:])
    m.done()
    d, p = c.pair(ins.operands[0])
    a = c.read(ins.operands[1], width)
    members = _members(c, ins.operands[2])

    def run(warp: Any) -> Any:
        mask = members(warp)
        if not gather_lanes(warp, mask):
            return AGAIN
        alive = mask & ~mask_bits(warp.exited)
        values = lanes(warp.registers[a], width).tolist()
        inside = [lane for lane in range(LANES) if alive >> lane & 1]
        if mode == "all":
            same = len({values[lane] for lane in inside}) == 1
            warp.registers[d] = alive if same else 0
            if p is not None:
                warp.registers[p] = same
            return None
        by_value: dict[int, int] = {}
        for lane in inside:
            by_value[values[lane]] = by_value.get(values[lane], 0) | 1 << lane
        warp.registers[d] = np.array([by_value.get(v, 0) for v in values], U32)
        return None

    return run


@instruction("redux")
def build_reduce(ins: Instruction, c: Decoder) -> Step:
    """redux.sync: one value from all member lanes; f32 min/max on sm_100."""
    m = Modifiers(ins)
    m.choice("sync")
    name = m.choice("add", "min", "max", "and", "or", "xor")
    absolute, nan = m.flag("abs"), m.flag("NaN")
    kind = m.type("u32", "s32", "b32", "f32")
    m.done()
    d, a = c.write(ins.operands[0]), c.read(ins.operands[1], 32)
    members = _members(c, ins.operands[2])
    integer: dict[str, Callable[[Any], Any]] = {
        "add": lambda v: int(v.sum(dtype=np.int64)),
        "min": lambda v: int(v.min()),
        "max": lambda v: int(v.max()),
        "and": lambda v: int(np.bitwise_and.reduce(v)),
        "or": lambda v: int(np.bitwise_or.reduce(v)),
        "xor": lambda v: int(np.bitwise_xor.reduce(v)),
    }

    def run(warp: Any) -> Any:
        mask = members(warp)
        if not gather_lanes(warp, mask):
            return AGAIN
        alive = np.array([mask >> lane & 1 for lane in range(LANES)], bool) & ~warp.exited
        words = lanes(warp.registers[a], 32)[alive]
        if kind == "f32":
            floats = words.view(np.float32)
            floats = np.abs(floats) if absolute else floats
            pick = {
                ("min", False): np.fmin,
                ("max", False): np.fmax,
                ("min", True): np.minimum,
                ("max", True): np.maximum,
            }[name, nan]
            result = pick.reduce(floats)
            warp.registers[d] = 0x7FFFFFFF if np.isnan(result) else int(result.view(U32))
            return None
        values = words.view(np.int32) if kind == "s32" else words
        warp.registers[d] = integer[name](values) & MASKS[32]
        return None

    return run


@instruction("bar.warp.sync")
def build_warp_barrier(ins: Instruction, c: Decoder) -> Step:
    """bar.warp.sync mask: the lanes meet."""
    Modifiers(ins, skip=2).done()
    members = _members(c, ins.operands[0])

    def run(warp: Any) -> Any:
        return None if gather_lanes(warp, members(warp)) else AGAIN

    return run
