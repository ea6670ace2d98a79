"""tcgen05.mma and tcgen05.commit.  PTX ISA: tcgen05.mma, tcgen05.commit.

mma and commit of a CTA run in issue order in one queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxsim import races
from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.errors import AsyncHazard, InvalidOperand, TensorMemoryError
from ptxsim.isa.async_copy import scalar
from ptxsim.isa.matrix import check_rows, operand_rows, product, read_operand, widen
from ptxsim.isa.sync import barrier_address
from ptxsim.isa.tensor_transfer import group_of, pair_of, use_group
from ptxsim.machine import AsyncOp, Cta
from ptxsim.memory import OFFSET_MASK, split_shared
from ptxsim.ptx import Instruction, Memory, Vector
from ptxsim.tensor_memory import COLUMNS, SLAB, WRITER, TensorMemory
from ptxsim.values import F32, U32, bits32, bits64


@dataclass(frozen=True, slots=True)
class _Form:
    """The 32-bit instruction descriptor of kind::f16 and kind::tf32."""

    m: int
    n: int
    a_kind: str
    b_kind: str
    a_mn: bool
    b_mn: bool
    a_negate: bool
    b_negate: bool
    d_f16: bool

    @property
    def item(self) -> int:
        return 4 if self.a_kind == "tf32" else 2

    @property
    def k(self) -> int:
        return 32 // self.item


_KINDS = {0: "f16", 1: "bf16", 2: "tf32"}


def decode_form(bits: int, kind: str, group: int) -> _Form:
    """Fields of the instruction descriptor, checked against the kind and the group."""
    a, b = bits >> 7 & 7, bits >> 10 & 7
    d = bits >> 4 & 3
    wanted = (2,) if kind == "tf32" else (0, 1)
    if a not in wanted or b not in wanted or d > 1 or bits >> 2 & 3 or bits >> 29:
        raise InvalidOperand(f"instruction descriptor {bits:#010x} is not valid for kind::{kind}")
    m, n = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8
    legal = {1: (64, 128), 2: (128, 256)}[group]
    step = 8 if (m, group) == (64, 1) else 16
    if m not in legal or not step <= n <= 256 or n % step:
        raise InvalidOperand(f"instruction descriptor {bits:#010x}: M {m}, N {n} in group {group}")
    return _Form(
        m,
        n,
        _KINDS[a],
        _KINDS[b],
        bool(bits >> 15 & 1),
        bool(bits >> 16 & 1),
        bool(bits >> 13 & 1),
        bool(bits >> 14 & 1),
        d == 0,
    )


_FORMS: dict[tuple[int, str, int], _Form] = {}


def _form(bits: int, kind: str, group: int) -> _Form:
    key = (bits, kind, group)
    if key not in _FORMS:
        _FORMS[key] = decode_form(bits, kind, group)
    return _FORMS[key]


def result_lanes(m: int, group: int) -> np.ndarray:
    """Tensor-memory lane of each D row of one CTA (relative to the address)."""
    if m == 64 and group == 1:
        i = np.arange(64)
        return 32 * (i // 16) + i % 16
    return np.arange(64 if (m, group) == (128, 2) else 128)


@dataclass(slots=True)
class _Mma:
    """One tcgen05.mma with resolved operands."""

    form: _Form
    group: int
    ctas: list[Cta]
    d: int
    a: int
    a_in_tensor: bool
    b: int
    accumulate: bool
    scale: int
    disabled: np.ndarray | None
    a_rows: list[np.ndarray]
    b_rows: list[np.ndarray]

    def operand(self, rows: list[np.ndarray], a: bool) -> list[np.ndarray]:
        """The operand parts of each CTA as float32 (rows, K)."""
        form = self.form
        kind, mn, negate = (
            (form.a_kind, form.a_mn, form.a_negate)
            if a
            else (form.b_kind, form.b_mn, form.b_negate)
        )
        parts = [
            read_operand(cta.shared, part, kind, mn)
            for cta, part in zip(self.ctas, rows, strict=True)
        ]
        return [-p for p in parts] if negate else parts

    def tensor_a(self, cta: Cta) -> np.ndarray:
        """A from tensor memory: K-major, 16-bit elements two to a cell."""
        form = self.form
        lane, column = self.a >> 16, self.a & 0xFFFF
        block = cta.tensor.cells[_a_lanes(form.m, self.group) + lane, column : column + 8]
        values = widen(block, form.a_kind)
        return -values if form.a_negate else values

    def execute(self) -> None:
        """D = A B^T (+ D), for each CTA its own rows of A against all of B."""
        b = np.concatenate(self.operand(self.b_rows, a=False))
        a_parts = (
            [self.tensor_a(cta) for cta in self.ctas]
            if self.a_in_tensor
            else self.operand(self.a_rows, a=True)
        )
        for number, (cta, a) in enumerate(zip(self.ctas, a_parts, strict=True)):
            self._accumulate(cta.tensor, product(a, b), number)
        self.mark(-1)

    def _accumulate(self, tensor: TensorMemory, result: np.ndarray, number: int) -> None:
        lane, column = self.d >> 16, self.d & 0xFFFF
        form = self.form
        rows = result_lanes(form.m, self.group) + lane
        if (form.m, self.group) == (128, 2):  # 64 rows: the columns' halves lie one below the other
            half = form.n // 2
            self._write(tensor, (rows, column), result[:, :half], number)
            self._write(tensor, (rows + 64, column), result[:, half:], number)
        else:
            self._write(tensor, (rows, column), result, number)

    def _write(
        self, tensor: TensorMemory, place: tuple[np.ndarray, int], new: np.ndarray, number: int
    ) -> None:
        rows, column = place
        if rows[-1] - rows[0] + 1 == len(rows) and self.disabled is None:
            where: Any = (slice(rows[0], rows[-1] + 1), slice(column, column + new.shape[1]))
        else:
            if self.disabled is not None:
                keep = ~self.disabled[number][rows]
                rows, new = rows[keep], new[keep]
            where = np.ix_(rows, np.arange(column, column + new.shape[1]))
        if self.form.d_f16:
            old = tensor.cells[where].astype(np.uint16).view(np.float16).astype(F32)
        else:
            old = tensor.cells[where].view(F32)
        if self.accumulate:
            new = new + (old * F32.type(2.0**-self.scale) if self.scale else old)
        if self.form.d_f16:
            tensor.cells[where] = new.astype(np.float16).view(np.uint16).astype(U32)
        else:
            tensor.cells[where] = np.ascontiguousarray(new, F32).view(U32)
        tensor.written[where] = True

    def touch(self, issued: AsyncOp) -> None:
        """Its accesses, for race detection."""
        d_rows = result_lanes(self.form.m, self.group) + (self.d >> 16)
        if (self.form.m, self.group) == (128, 2):
            d_rows = np.arange(128)
        d_cells = np.ix_(d_rows, np.arange(self.columns()) + (self.d & 0xFFFF))
        for number, cta in enumerate(self.ctas):
            races.operand(issued, cta.shared, self.b_rows[number], False)
            if self.a_in_tensor:
                a_lanes = _a_lanes(self.form.m, self.group) + (self.a >> 16)
                a_cells = np.ix_(a_lanes, np.arange(8) + (self.a & 0xFFFF))
                races.access(issued, cta.tensor.shadow, a_cells, False, "tcgen05.mma (A)")
            else:
                races.operand(issued, cta.shared, self.a_rows[number], False)
            races.access(issued, cta.tensor.shadow, d_cells, True, "tcgen05.mma (D)")

    def columns(self) -> int:
        """Columns of D in each CTA."""
        halved = (self.form.m, self.group) == (128, 2)
        return self.form.n // 2 if halved else self.form.n

    def mark(self, sign: int) -> None:
        """Mark (1) or release (-1) everything the instruction reads and writes."""
        one = np.uint32(sign & 0xFFFFFFFF)
        writer = np.uint32(sign * WRITER & 0xFFFFFFFF)
        column, count = self.d & 0xFFFF, self.columns()
        for number, cta in enumerate(self.ctas):
            for rows in ([] if self.a_in_tensor else [self.a_rows[number]]) + [self.b_rows[number]]:
                cta.shared.busy[rows] += one
            slabs = np.unique(result_lanes(self.form.m, self.group) + (self.d >> 16)) // SLAB
            if (self.form.m, self.group) == (128, 2):
                slabs = np.arange(8)
            cta.tensor.busy[np.unique(slabs), column : column + count] += writer
            if self.a_in_tensor:
                start = self.a & 0xFFFF
                cta.tensor.busy[:, start : start + 8] += one


def _a_lanes(m: int, group: int) -> np.ndarray:
    return result_lanes(m, group)


@instruction("tcgen05.mma")
def build_mma(ins: Instruction, c: Decoder) -> Step:
    """tcgen05.mma.cta_group::G.kind::{f16,tf32} [d], a, b, idesc{, lanes}, enable_d{, scale}."""
    m = Modifiers(ins, skip=1)
    group = group_of(m)
    kind = m.choice("kind::f16", "kind::tf32").split("::")[1]
    m.done()
    d_slot, d_offset = c.address(ins.operands[0])
    a_in_tensor = isinstance(ins.operands[1], Memory)
    if a_in_tensor:
        a_slot, a_offset = c.address(ins.operands[1])
    else:
        a_slot, a_offset = c.read(ins.operands[1], 64), 0
    b_slot, i_slot = c.read(ins.operands[2], 64), c.read(ins.operands[3], 32)
    rest = list(ins.operands[4:])
    mask_slots = None
    if rest and isinstance(rest[0], Vector):
        mask_slots = c.reads(rest.pop(0), 32)
    enable, negated = c.predicate(rest[0])
    scale = rest[1].bits if len(rest) > 1 else 0  # type: ignore[union-attr]

    def run(warp: Any) -> None:
        use_group(warp, group)
        r, cta = warp.registers, warp.cta
        # One thread issues; every operand is read as that thread's value.
        lane_mask = warp.mask
        if lane_mask is None or int(lane_mask.sum()) != 1:
            raise InvalidOperand("tcgen05.mma must be executed by one thread")
        if group == 2 and cta.rank & 1:
            raise InvalidOperand("tcgen05.mma.cta_group::2 is issued by the even CTA of the pair")
        form = _form(scalar(warp, bits32(r[i_slot])), kind, group)
        flag = r[enable]
        if flag.__class__ is not bool:
            flag = bool(flag[np.argmax(lane_mask)])
        op = _Mma(
            form,
            group,
            pair_of(cta, group),
            (scalar(warp, bits32(r[d_slot])) + d_offset) & 0xFFFFFFFF,
            _a_value(warp, r[a_slot], a_in_tensor, a_offset),
            a_in_tensor,
            scalar(warp, bits64(r[b_slot])),
            flag is not negated,
            scale,
            _disabled(warp, mask_slots),
            [],
            [],
        )
        _resolve(op)
        _check(op)
        op.mark(1)
        queue = ("tcgen05", cta.rank)
        issued = cta.cluster.issue(AsyncOp("tcgen05.mma", warp, ins.line, op.execute), queue)
        if issued.vector is not None:
            op.touch(issued)

    return run


def _a_value(warp: Any, value: Any, in_tensor: bool, offset: int) -> int:
    if in_tensor:
        return (scalar(warp, bits32(value)) + offset) & 0xFFFFFFFF
    return scalar(warp, bits64(value))


def _disabled(warp: Any, slots: list[int] | None) -> np.ndarray | None:
    """For each CTA, the lanes that a disable mask names; None for the usual zeros."""
    if slots is None:
        return None
    words = [scalar(warp, bits32(warp.registers[s])) for s in slots]
    if not any(words):
        return None
    bits = np.array(words, U32).view(np.uint8)
    return np.unpackbits(bits, bitorder="little").astype(bool).reshape(-1, 128)


def _resolve(op: _Mma) -> None:
    """Row tables of the operands that lie in shared memory."""
    form, parts = op.form, len(op.ctas)
    b = operand_rows(op.b, True, form.b_mn, form.n // parts, form.item)
    op.b_rows = [b] * parts
    if not op.a_in_tensor:
        a = operand_rows(op.a, True, form.a_mn, form.m // parts, form.item)
        op.a_rows = [a] * parts


def _check(op: _Mma) -> None:
    """What must hold when a matrix instruction is issued."""
    form = op.form
    lane, column, count = op.d >> 16, op.d & 0xFFFF, op.columns()
    rows = result_lanes(form.m, op.group) + lane
    if column + count > COLUMNS or rows[-1] >= 128:
        raise TensorMemoryError(f"tcgen05.mma writes {count} columns at {op.d:#x}")
    for number, cta in enumerate(op.ctas):
        tensor = cta.tensor
        tensor.check_window(int(rows[0]), 1, column, count, "tcgen05.mma (D)")
        check_rows(cta.shared, op.b_rows[number], op.b, "tcgen05.mma (B)")
        if op.a_in_tensor:
            if form.a_mn:
                raise InvalidOperand("tcgen05.mma: A in tensor memory is K-major only")
            start = op.a & 0xFFFF
            a_lanes = _a_lanes(form.m, op.group) + (op.a >> 16)
            tensor.check_window(int(a_lanes[0]), 1, start, 8, "tcgen05.mma (A)")
            # An earlier mma of the queue may still write A: the queue keeps that order.
            if not _in_flight(tensor, start, 8):
                tensor.check_written(a_lanes, start, 8, "tcgen05.mma (A)")
        else:
            check_rows(cta.shared, op.a_rows[number], op.a, "tcgen05.mma (A)")
        if op.accumulate and not _in_flight(tensor, column, count):
            tensor.check_written(rows, column, count, "tcgen05.mma (D)")
        _check_stores(cta, op)


def _in_flight(tensor: TensorMemory, column: int, columns: int) -> bool:
    return bool((tensor.busy[:, column : column + columns] >= WRITER).any())


def _check_stores(cta: Cta, op: _Mma) -> None:
    """tcgen05.st of any warp must have been waited for before its cells are used."""
    ranges = [(op.d & 0xFFFF, op.columns())]
    if op.a_in_tensor:
        ranges.append((op.a & 0xFFFF, 8))
    for warp in cta.warps:
        for _, _, start, size in warp.stores:
            for column, columns in ranges:
                if start < column + columns and column < start + size:
                    raise AsyncHazard(
                        f"tcgen05.mma uses columns {column}..{column + columns - 1} that warp "
                        f"{warp.index} wrote by tcgen05.st without tcgen05.wait::st"
                    )


@instruction("tcgen05.commit")
def build_commit(ins: Instruction, c: Decoder) -> Step:
    """tcgen05.commit: when all earlier tcgen05 operations of the thread are done, arrive once."""
    m = Modifiers(ins, skip=1)
    group = group_of(m)
    m.choice("mbarrier::arrive::one")
    m.flag("shared::cluster")
    multicast = m.flag("multicast::cluster")
    m.type("b64")
    m.done()
    address = barrier_address(c, ins.operands[0], "shared")
    mask_slot = c.read(ins.operands[1], 16) if multicast else None

    def run(warp: Any) -> None:
        use_group(warp, group)
        cta = warp.cta
        if warp.mask is None or int(warp.mask.sum()) != 1:
            raise InvalidOperand("tcgen05.commit must be executed by one thread")
        rank, offset = split_shared(scalar(warp, address(warp)))
        ranks = [rank]
        if mask_slot is not None:
            chosen = scalar(warp, warp.registers[mask_slot])
            ranks = [r for r in range(16) if chosen >> r & 1]
        found = [
            cta.cluster.barrier_at(r << 24 | offset & OFFSET_MASK, None, "tcgen05.commit")
            for r in ranks
        ]

        def finish() -> None:
            for barrier in found:
                races.finish_into(commit, barrier)
                barrier.arrive(1)

        commit = AsyncOp("commit", warp, ins.line, finish, found)
        cta.cluster.issue(commit, ("tcgen05", cta.rank))
        for barrier in found:
            races.use(commit, barrier)

    return run
