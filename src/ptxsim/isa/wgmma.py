"""wgmma: warpgroup matrix instructions of sm_90a.  PTX ISA: wgmma.

Each warp computes its 16 rows of the 64 by itself.  Until a wait_group covers an instruction, its D
registers hold `Pending` markers: moves and further wgmmas pass them on, any other use is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim import races
from ptxsim.decode import AGAIN, Decoder, Modifiers, Step, instruction
from ptxsim.errors import AsyncHazard, InvalidOperand, MissingFence
from ptxsim.isa.matrix import check_rows, operand_rows, product, read_operand, widen
from ptxsim.isa.sync import uniform_int
from ptxsim.isa.warp import FULL, gather_lanes
from ptxsim.machine import AsyncOp, Wait
from ptxsim.ptx import Immediate, Instruction, Vector
from ptxsim.values import F32, U32, bits32, lanes

_LANE = np.arange(32)


class Chain:
    """The result of one wgmma: known once it has run."""

    __slots__ = ("op", "value")

    def __init__(self) -> None:
        self.op: AsyncOp | None = None
        self.value: Any = None  # the words of the registers, once it has run


class Pending:
    """A D register of an unfinished wgmma."""

    __slots__ = ("chain", "number")

    def __init__(self, chain: Chain, number: int) -> None:
        self.chain, self.number = chain, number

    def __getattr__(self, name: str) -> Any:
        line = self.chain.op.line if self.chain.op else 0
        raise AsyncHazard(
            f"a D register of the wgmma of line {line} is used before wgmma.wait_group covers it"
        )


def result_table(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row (of the warp's 16) and column of f32 register i of each lane."""
    i = np.arange(n // 2)[:, None]
    row = _LANE // 4 + 8 * (i // 2 % 2)
    column = 2 * (_LANE % 4) + i % 2 + 8 * (i // 4)
    return row, column


def register_a(warp: Any, slots: list[int], kind: str) -> np.ndarray:
    """A from registers: this warp's 16 rows, 32 bytes of K."""
    words = np.stack([lanes(bits32(warp.registers[s]), 32) for s in slots])
    if kind == "tf32":
        a = np.empty((16, 8), F32)
        for i in range(4):
            a[_LANE // 4 + 8 * (i % 2), _LANE % 4 + 4 * (i // 2)] = widen(words[i], kind)
        return a
    a = np.empty((16, 16), F32)
    for i in range(4):
        for half in range(2):
            values = (words[i] >> np.uint32(16 * half)).astype(np.uint16)
            row, k = _LANE // 4 + 8 * (i % 2), 2 * (_LANE % 4) + half + 8 * (i // 2)
            a[row, k] = widen(values, kind)
    return a


@instruction("wgmma.mma_async")
def build_mma(ins: Instruction, c: Decoder) -> Step:
    """wgmma.mma_async.m64nNkK.{f32,f16}.kind.kind d, a, b, p, imm-a, imm-b{, trans-a, trans-b}."""
    m = Modifiers(ins, skip=1)
    m.choice("sync")
    m.choice("aligned")
    shape = next((x for x in m.left if x.startswith("m64n")), "")
    if not shape:
        raise m.unsupported("needs a shape m64nNkK")
    m.left.remove(shape)
    n, k = (int(v) for v in shape[4:].split("k"))
    d_kind = m.type("f32", "f16")
    kind = m.type("f16", "bf16", "tf32")
    if m.type("f16", "bf16", "tf32") != kind:
        raise m.unsupported("A and B of different types")
    m.done()
    if k != (8 if kind == "tf32" else 16) or n % 8 or not 8 <= n <= 256:
        raise m.unsupported(f"shape {shape}")
    targets = c.writes(ins.operands[0], 32)
    c.uses.extend(targets)
    from_registers = isinstance(ins.operands[1], Vector)
    a_slots = c.reads(ins.operands[1], 32 if from_registers else 64)
    b_slot = c.read(ins.operands[2], 64)
    flag, negated = c.predicate(ins.operands[3])
    rest = [_integer(c, o) for o in ins.operands[4:]]
    signs, transposes = rest[:2], rest[2:]
    transpose_a = bool(transposes[0]) if transposes and not from_registers else False
    transpose_b = bool(transposes[-1]) if transposes else False
    row, column = result_table(n)
    item = 4 if kind == "tf32" else 2
    if len(targets) != (n // 2 if d_kind == "f32" else n // 4):
        raise m.unsupported(f"{len(targets)} D registers")

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        r, shared = warp.registers, warp.cta.shared
        accumulate = uniform_int(warp, flag, "scale-d") != int(negated)
        b_bits = uniform_int(warp, b_slot, "B")
        b_rows = operand_rows(b_bits, False, transpose_b, n, item)
        check_rows(shared, b_rows, b_bits, "wgmma (B)")
        reads = [b_rows]
        a_value: Any = None
        if from_registers:
            a_value = register_a(warp, a_slots, kind)
        else:
            a_bits = uniform_int(warp, a_slots[0], "A")
            a_rows = operand_rows(a_bits, False, transpose_a, 64, item)
            check_rows(shared, a_rows, a_bits, "wgmma (A)")
            reads.append(a_rows)
        before = _before(warp, targets, d_kind) if accumulate else None
        _require_fence(warp, targets)
        for rows in reads:
            shared.busy[rows] += np.uint32(1)
        chain = Chain()

        def finish() -> None:
            for rows in reads:
                shared.busy[rows] -= np.uint32(1)
            a = a_value
            if a is None:
                first = 16 * (warp.index % 4)
                a = read_operand(shared, a_rows, kind, transpose_a)[first : first + 16]
            b = read_operand(shared, b_rows, kind, transpose_b)
            result = product(a * F32.type(signs[0]), b * F32.type(signs[1]))[row, column]
            if before is not None:
                start = before.value if isinstance(before, Chain) else before
                result = result + _unpack(start, d_kind)
            chain.value = _pack(result, d_kind)

        chain.op = AsyncOp("wgmma.mma_async", warp, ins.line, finish)
        warp.cta.cluster.issue(chain.op, ("wgmma", warp.cta.rank, warp.index))
        for rows in reads:
            races.operand(chain.op, shared, rows, False)
        warp.wgmma_open.append(chain.op)
        for number, slot in enumerate(targets):
            r[slot] = Pending(chain, number)
        return None

    return run


def _integer(c: Decoder, operand: Any) -> int:
    if not isinstance(operand, Immediate):
        raise c.error("scale and transpose operands must be immediates")
    return operand.bits


def _before(warp: Any, targets: list[int], d_kind: str) -> Any:
    """The accumulator's present value: an unfinished chain, or the registers' words."""
    first = warp.registers[targets[0]]
    if first.__class__ is Pending:
        chain = first.chain
        for number, slot in enumerate(targets):
            value = warp.registers[slot]
            if value.__class__ is not Pending or value.chain is not chain or value.number != number:
                raise AsyncHazard("a wgmma accumulates on registers of several unfinished ones")
        return chain
    return np.stack([lanes(bits32(warp.registers[s]), 32) for s in targets])


def _require_fence(warp: Any, targets: list[int]) -> None:
    if not warp.wgmma_fenced and warp.registers[targets[0]].__class__ is not Pending:
        raise MissingFence("a wgmma without wgmma.fence since its registers were last accessed")


def _unpack(words: np.ndarray, d_kind: str) -> np.ndarray:
    if d_kind == "f32":
        return words.view(F32)
    low = (words & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(F32)
    high = (words >> np.uint32(16)).astype(np.uint16).view(np.float16).astype(F32)
    return np.stack([low, high], 1).reshape(-1, 32)


def _pack(values: np.ndarray, d_kind: str) -> Any:
    if d_kind == "f32":
        return np.ascontiguousarray(values, F32).view(U32)
    half = values.astype(np.float16).view(np.uint16).astype(U32).reshape(-1, 2, 32)
    return half[:, 0] | half[:, 1] << np.uint32(16)


@instruction("wgmma.fence")
def build_fence(ins: Instruction, c: Decoder) -> Step:
    """wgmma.fence: register accesses before it are ordered with the wgmmas behind it."""
    m = Modifiers(ins, skip=1)
    m.choice("sync")
    m.choice("aligned")
    m.done()

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        warp.wgmma_fenced = True
        return None

    return run


@instruction("wgmma.commit_group", "wgmma.wait_group")
def build_group(ins: Instruction, c: Decoder) -> Step:
    """wgmma.commit_group closes a group; wait_group N waits until at most N are unfinished."""
    m = Modifiers(ins, skip=1)
    m.choice("sync")
    m.choice("aligned")
    m.done()
    if ins.mods[0] == "commit_group":

        def commit(warp: Any) -> Any:
            if not gather_lanes(warp, FULL):
                return AGAIN
            warp.wgmma_groups.append(list(warp.wgmma_open))
            warp.wgmma_open.clear()
            return None

        return commit
    limit = _integer(c, ins.operands[0])
    if not 0 <= limit <= 7:
        raise InvalidOperand(f"wgmma.wait_group {limit}: 0..7")

    def wait(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        groups = warp.wgmma_groups
        ops = [op for group in list(groups)[: max(0, len(groups) - limit)] for op in group]
        if all(op.done for op in ops):
            races.waited(warp, ops)
            while len(groups) > limit:
                groups.popleft()
            _deliver(warp)
            warp.wgmma_fenced = False
            return None
        warp.group.wait = Wait(
            lambda: all(op.done for op in ops),
            lambda: f"waits for {len(ops)} wgmmas, the first of line {ops[0].line}",
            ops=ops,
        )
        return AGAIN

    return wait


def _deliver(warp: Any) -> None:
    """Put the results of the groups waited for into the registers."""
    unfinished = {id(op) for group in warp.wgmma_groups for op in group}
    unfinished |= {id(op) for op in warp.wgmma_open}
    r = warp.registers
    for slot, value in enumerate(r):
        if value.__class__ is Pending and id(value.chain.op) not in unfinished:
            r[slot] = value.chain.value[value.number]
