"""Moves, branches, exits and no-ops.  PTX ISA: mov, Control Flow Instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.errors import SimulationError
from ptxsim.isa.floating import join16
from ptxsim.ptx import Immediate, Instruction, Special, Symbol, Vector
from ptxsim.scheduler import exit_lanes, split
from ptxsim.values import Pair, bits32, bits64, halves, uniform

_MOVES = ("pred", *(f"{k}{n}" for k in "bus" for n in (16, 32, 64)), "f16", "bf16", "f32", "f64")
_COUNTERS = ("clock", "globaltimer")


@instruction("mov")
def build_move(ins: Instruction, c: Decoder) -> Step:
    """mov: registers, immediates, addresses of variables; packs and unpacks brace lists."""
    m = Modifiers(ins)
    kind = m.type(*_MOVES, "b128")
    m.done()
    target, source = ins.operands
    if isinstance(target, Vector):
        return _unpack(c, target, source, kind)
    if isinstance(source, Vector):
        return _pack(c, target, source, kind)
    if isinstance(source, Special) and source.name[1:].startswith(_COUNTERS):
        return _counter(c, target)
    width = 1 if kind == "pred" else int(kind.lstrip("bfus"))
    a, d = c.read(source, width), c.write(target)

    def run(warp: Any) -> None:
        warp.registers[d] = warp.registers[a]

    return run


def _counter(c: Decoder, target: Any) -> Step:
    d = c.write(target)

    def run(warp: Any) -> None:
        # Only monotone: the simulator has no time.
        warp.registers[d] = warp.cta.machine.progress & 0xFFFFFFFF

    return run


def _pack(c: Decoder, target: Any, source: Vector, kind: str) -> Step:
    """mov.b64 d, {lo, hi} and mov.b32 d, {lo16, hi16}: first element least significant."""
    width = int(kind[1:]) // len(source.items)
    slots = [c.read(item, width) for item in source.items]
    d = c.write(target)
    if kind == "b64" and len(slots) == 2:
        lo, hi = slots

        def pair(warp: Any) -> None:
            r = warp.registers
            x, y = r[lo], r[hi]
            r[d] = x | y << 32 if x.__class__ is int and y.__class__ is int else Pair(x, y)

        return pair
    if kind == "b32" and len(slots) == 2:
        lo, hi = slots

        def word(warp: Any) -> None:
            r = warp.registers
            r[d] = join16(_bits16(r[lo]), _bits16(r[hi]))

        return word
    if kind == "b64" and len(slots) == 4:

        def four(warp: Any) -> None:
            parts = [_bits16(warp.registers[s]) for s in slots]
            lo32, hi32 = join16(parts[0], parts[1]), join16(parts[2], parts[3])
            both_int = lo32.__class__ is int and hi32.__class__ is int
            warp.registers[d] = lo32 | hi32 << 32 if both_int else Pair(lo32, hi32)

        return four
    if kind == "b128" and len(slots) == 2:
        lo, hi = slots

        def quad(warp: Any) -> None:
            warp.registers[d] = Pair(warp.registers[lo], warp.registers[hi])

        return quad
    raise c.error("this packing")


def _bits16(value: Any) -> Any:
    return value if value.__class__ is int else value.view(np.uint16)


def _unpack(c: Decoder, target: Vector, source: Any, kind: str) -> Step:
    """mov.b64 {lo, hi}, a and mov.b32 {lo16, hi16}, a; `_` drops a part."""
    width = int(kind[1:])
    a = c.read(source, width)
    slots = c.writes(target, width // len(target.items))
    if kind == "b64" and len(slots) == 2:
        lo, hi = slots

        def pair(warp: Any) -> None:
            r = warp.registers
            r[lo], r[hi] = halves(r[a])

        return pair
    if kind == "b128" and len(slots) == 2:
        lo, hi = slots

        def quad(warp: Any) -> None:
            r = warp.registers
            r[lo], r[hi] = r[a]

        return quad
    if kind in ("b32", "b64") and width // len(slots) == 16:

        def words(warp: Any) -> None:
            r = warp.registers
            value = bits32(r[a]) if width == 32 else bits64(r[a])
            for number, slot in enumerate(slots):
                part = value >> (16 * number)
                r[slot] = part & 0xFFFF if part.__class__ is int else part.astype(np.uint16)

        return words
    raise c.error("this unpacking")


@instruction("bra")
def build_branch(ins: Instruction, c: Decoder) -> Step:
    """bra: jumps if the guard holds; lanes that disagree split and meet at the post-dominator."""
    m = Modifiers(ins)
    m.flag("uni")
    m.done()
    target, following, pc = c.label(ins.operands[0]), c.pc + 1, c.pc
    c.branches_to(target)
    if ins.guard is None:
        return lambda warp: target
    guard, negated = ins.guard.slot, ins.guard_negated

    def run(warp: Any) -> int:
        condition = warp.registers[guard]
        if condition.__class__ is bool:
            return target if condition is not negated else following
        return _branch_by_lanes(warp, ~condition if negated else condition, target, pc)

    return run


def _branch_by_lanes(warp: Any, condition: np.ndarray, target: int, pc: int) -> int:
    mask = warp.mask
    if mask is not None:
        condition = condition & mask
    text = condition.tobytes()
    if b"\x01" not in text:
        return pc + 1
    if mask is None:
        if b"\0" not in text:
            return target
        rest = ~condition
    else:
        rest = mask & ~condition
        if b"\x01" not in rest.tobytes():
            return target
    meet = warp.cta.machine.program.meets[pc]
    return split(warp, meet, [(target, condition), (pc + 1, rest)])


@instruction("brx.idx")
def build_indexed_branch(ins: Instruction, c: Decoder) -> Step:
    """brx.idx: jumps by an index into a list of labels."""
    m = Modifiers(ins, skip=1)
    m.flag("uni")
    m.done()
    table = ins.operands[1]
    if not isinstance(table, Symbol):
        raise c.error("the second operand must be a branch-target list")
    names = c.kernel.table(table.name, table.scope)
    if names is None:
        raise c.error(f"no branch-target list {table.name}")
    targets = [c.label(Symbol(name, ins.scope)) for name in names]
    index, pc = c.read(ins.operands[0], 32), c.pc
    c.branches_to(*targets)

    def run(warp: Any) -> int:
        value = bits32(warp.registers[index])
        same = uniform(value, warp.mask)
        if same is not None:
            if same >= len(targets):
                raise SimulationError(f"brx.idx {same} of {len(targets)} targets")
            return targets[same]
        active = np.ones(32, bool) if warp.mask is None else warp.mask
        sides: dict[int, np.ndarray] = {}
        for number, target in enumerate(targets):
            lanes = active & (value == number)
            if lanes.any():
                sides[target] = sides.get(target, np.zeros(32, bool)) | lanes
        return split(warp, warp.cta.machine.program.meets[pc], list(sides.items()))

    return run


@instruction("ret", "exit")
def build_exit(ins: Instruction, c: Decoder) -> Step:
    """ret and exit end the lanes that reach them (kernels call no functions here)."""
    m = Modifiers(ins)
    m.flag("uni")
    m.done()
    pc = c.pc
    if ins.guard is None:
        return exit_lanes
    guard, negated = ins.guard.slot, ins.guard_negated

    def run(warp: Any) -> int:
        condition = warp.registers[guard]
        if condition.__class__ is bool:
            return exit_lanes(warp) if condition is not negated else pc + 1
        outcome = _branch_by_lanes(
            warp, ~condition if negated else condition, len(warp.cta.machine.program.steps) - 1, pc
        )
        if outcome == len(warp.cta.machine.program.steps) - 1:
            return exit_lanes(warp)
        return outcome

    return run


@instruction("trap", "brkpt")
def build_trap(ins: Instruction, c: Decoder) -> Step:
    """trap: the kernel has detected an error of its own."""
    Modifiers(ins).done()

    def run(warp: Any) -> int:
        raise SimulationError(f"the kernel executed `{ins.op}`")

    return run


@instruction("setmaxnreg.inc", "setmaxnreg.dec")
def build_register_budget(ins: Instruction, c: Decoder) -> Step:
    """setmaxnreg: no function here; the count is checked (24..256, a multiple of 8)."""
    m = Modifiers(ins)
    m.choice("inc", "dec")
    m.choice("sync")
    m.choice("aligned")
    m.type("u32")
    m.done()
    count = ins.operands[0]
    if not isinstance(count, Immediate) or not 24 <= count.bits <= 256 or count.bits % 8:
        raise c.error("the count must be a multiple of 8 in 24..256")
    return lambda warp: None


@instruction(
    "griddepcontrol",
    "nanosleep",
    "pmevent",
    "prefetchu",
    "applypriority",
)
def build_no_operation(ins: Instruction, c: Decoder) -> Step:
    """Hints, and programmatic dependent launch: launches here run one after the other."""
    allowed = {
        "griddepcontrol": ("launch_dependents", "wait"),
        "nanosleep": ("u32",),
        "prefetchu": ("L1",),
        "applypriority": ("global", "L2::evict_normal"),
    }
    m = Modifiers(ins)
    m.left = [x for x in m.left if x not in allowed.get(ins.op, ())]
    m.done()
    for operand in ins.operands:
        if not hasattr(operand, "base"):
            c.read(operand, 32)
    return lambda warp: None
