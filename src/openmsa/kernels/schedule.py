"""What the backward kernels and their host code agree on, without the DSL: testable on any machine.

The kernel is persistent over *task rows* (:class:`openmsa.contract.BackwardTasks`, one row per
128-row tile). Each CTA takes one contiguous interval of rows, because neighbouring rows share a key
block whose dk and dv stay on chip; :func:`cta_walk` says which interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.layout import Layout
from openmsa.contract.tasks import BackwardTasks, queries_per_task
from openmsa.contract.topology import MINIMAX_M3
from openmsa.errors import invalid_input

__all__ = [
    "BLOCK_SIZE",
    "HEAD_DIM",
    "INDEX_DIM",
    "NUM_INDEX_HEADS",
    "NUM_KV_HEADS",
    "NUM_Q_HEADS",
    "QUERIES_PER_TASK",
    "SOFTMAX_SCALE",
    "TOPK_BLOCKS",
    "BackwardSchedule",
    "CtaWalk",
    "cta_walk",
    "grid_launch_bound",
    "rows_per_cta",
]

NUM_Q_HEADS = MINIMAX_M3.q_heads
NUM_KV_HEADS = MINIMAX_M3.kv_heads
NUM_INDEX_HEADS = MINIMAX_M3.kv_heads
HEAD_DIM = MINIMAX_M3.head_dim
INDEX_DIM = MINIMAX_M3.index_dim
BLOCK_SIZE = MINIMAX_M3.block_size
TOPK_BLOCKS = MINIMAX_M3.topk
QUERIES_PER_TASK = queries_per_task(MINIMAX_M3.group)
SOFTMAX_SCALE = 1.0 / HEAD_DIM**0.5

_FEW_ROWS = 2400
_ROWS_FEW = 4
_ROWS_MANY = 64
_SHORTEST_TAIL = 3
"""Below this a CTA's prologue (barriers, tensor memory, first key block) outweighs its rows."""


@dataclass(frozen=True, slots=True, eq=False)
class BackwardSchedule:
    """The integer tensors of one backward launch, checked once. All int32, on one device.

    Attributes:
        row_ptr: ``[Hkv, rows + 1]`` of the key schedule.
        queries: ``[Hkv, edges]`` of the key schedule.
        tasks: ``[capacity, 4]``: KV head, schedule row, first edge, queries.
        count: ``[1]`` live tasks.
        cu_seqlens_q: ``[N + 1]`` packed query offsets.
        spans: ``[N, 3]``: first key, keys, key range of each entry.
        ranges: ``[M, 2]``: first key, keys of each key range.

    Raises:
        InvalidInput: naming the field, the expected form and what came.
    """

    row_ptr: Tensor
    queries: Tensor
    tasks: Tensor
    count: Tensor
    cu_seqlens_q: Tensor
    spans: Tensor
    ranges: Tensor

    def __post_init__(self) -> None:
        heads = self.row_ptr.shape[0] if self.row_ptr.dim() else None
        entries = self.spans.shape[0] if self.spans.dim() else None
        forms: dict[str, tuple[int | None, ...]] = {
            "row_ptr": (heads, None),
            "queries": (heads, None),
            "tasks": (None, 4),
            "count": (1,),
            "cu_seqlens_q": (None if entries is None else entries + 1,),
            "spans": (entries, 3),
            "ranges": (None, 2),
        }
        for name, form in forms.items():
            value: Tensor = getattr(self, name)
            if value.dtype != torch.int32:
                invalid_input(f"BackwardSchedule.{name}", "int32", value.dtype)
            fits = value.dim() == len(form) and all(
                want is None or have == want for have, want in zip(value.shape, form, strict=True)
            )
            if not fits:
                shown = ", ".join("*" if size is None else str(size) for size in form)
                invalid_input(
                    f"BackwardSchedule.{name}", f"shape [{shown}]", f"shape {tuple(value.shape)}"
                )
            if value.device != self.row_ptr.device:
                invalid_input(
                    f"BackwardSchedule.{name}",
                    f"row_ptr's device ({self.row_ptr.device})",
                    value.device,
                )
        if self.row_ptr.shape[1] < 1:
            invalid_input("BackwardSchedule.row_ptr", "at least one offset", "none")

    @classmethod
    def of(cls, schedule: KeySchedule, tasks: BackwardTasks, layout: Layout) -> BackwardSchedule:
        """The schedule of one backward from the records of its stages."""
        return cls(
            schedule.row_ptr,
            schedule.queries,
            tasks.tasks,
            tasks.count,
            layout.cu_seqlens_q,
            layout.spans,
            layout.ranges,
        )


@dataclass(frozen=True, slots=True)
class CtaWalk:
    """Which task rows each CTA of a persistent grid takes.

    The first ``full_ctas`` take ``rows_per_cta`` rows each, in whole waves over the machine; the
    others share what is left, ``tail_rows`` each. Device code evaluates the same formula.

    Attributes:
        rows: task rows in all.
        rows_per_cta: rows of a full CTA.
        full_ctas: CTAs with a full interval.
        tail_rows: rows of a tail CTA; the last one may have fewer.
        grid: CTAs with work.
    """

    rows: int
    rows_per_cta: int
    full_ctas: int
    tail_rows: int
    grid: int

    def interval(self, cta: int) -> range:
        """The rows of CTA ``cta``; empty past the grid."""
        full = self.full_ctas * self.rows_per_cta
        if cta < self.full_ctas:
            first, size = cta * self.rows_per_cta, self.rows_per_cta
        else:
            first, size = full + (cta - self.full_ctas) * self.tail_rows, self.tail_rows
        return range(min(first, self.rows), min(first + size, self.rows))


def rows_per_cta(rows: int) -> int:
    """Rows of a full CTA: few where every SM must find work, many where dk and dv should stay on
    chip for long. Switch and sizes are the ones published for a B200, not measured here."""
    return _ROWS_FEW if rows <= _FEW_ROWS else _ROWS_MANY


def cta_walk(rows: int, num_sms: int) -> CtaWalk:
    """Whole waves of full CTAs, then a tail that is spread evenly over the SMs.

    A wave is ``num_sms`` full intervals. Only complete intervals may count towards a wave: counting
    the last, partial one would end the walk before the rows do. What the waves leave, fewer than
    ``num_sms`` intervals (plus a fraction), is cut into equal parts, one per SM, so that the last
    wave takes as long as its rows need and not as long as a full interval. If the parts would be
    shorter than a CTA's prologue is worth, the tail keeps full intervals instead.

    Args:
        rows: task rows, 0 or more.
        num_sms: streaming multiprocessors, 1 or more.
    """
    if rows < 0:
        invalid_input("rows", "0 or more", rows)
    if num_sms < 1:
        invalid_input("num_sms", "1 or more", num_sms)
    size = rows_per_cta(rows)
    full = rows // size // num_sms * num_sms
    left = rows - full * size
    tail = -(-left // num_sms)
    if tail < _SHORTEST_TAIL:
        tail = size
    return CtaWalk(rows, size, full, tail, full + -(-left // tail))


def grid_launch_bound(capacity: int, num_sms: int) -> int:
    """CTAs that cover :func:`cta_walk` for every row count up to ``capacity``.

    The host does not know the row count, so it launches this many and the surplus exits at once.
    A walk has at most ``ceil(rows / rows_per_cta)`` CTAs where its tail keeps full intervals, and
    full ones plus ``num_sms`` where the tail is spread; ``rows // rows_per_cta + num_sms`` bounds
    both, and its maximum over the row counts is at the largest count of either interval size.

    Args:
        capacity: most task rows there can be.
        num_sms: streaming multiprocessors, 1 or more.
    """
    if capacity < 0:
        invalid_input("capacity", "0 or more", capacity)
    if num_sms < 1:
        invalid_input("num_sms", "1 or more", num_sms)
    return max(min(capacity, _FEW_ROWS) // _ROWS_FEW, capacity // _ROWS_MANY) + num_sms
