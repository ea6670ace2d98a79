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

FEW_ROWS = 2400
ROWS_FEW = 4
ROWS_MANY = 64
SHORTEST_TAIL = 3

_FORMS: dict[str, tuple[str | int, ...]] = {
    "row_ptr": ("Hkv", "rows + 1"),
    "queries": ("Hkv", "capacity"),
    "tasks": ("capacity", 4),
    "count": (1,),
    "cu_seqlens_q": ("N + 1",),
    "spans": ("N", 3),
    "ranges": ("M", 2),
}


@dataclass(frozen=True, slots=True, eq=False)
class BackwardSchedule:
    """The integer tensors of one backward launch, checked once. All int32, on one device.

    Sizes and device only: contents lie on the device, and reading them would wait for it.

    Attributes:
        row_ptr: ``[Hkv, rows + 1]`` of the key schedule.
        queries: ``[Hkv, capacity]`` of the key schedule.
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
        for name, form in _FORMS.items():
            _check_field(name, getattr(self, name), form, self.row_ptr)
        heads, offsets = self.row_ptr.shape
        if offsets < 1:
            invalid_input("BackwardSchedule.row_ptr", "at least one offset", "none")
        if self.queries.shape[0] != heads:
            invalid_input(
                "BackwardSchedule.queries",
                f"shape [{heads}, capacity], with row_ptr's heads",
                f"shape {tuple(self.queries.shape)}",
            )
        if self.spans.shape[0] + 1 != self.cu_seqlens_q.shape[0]:
            invalid_input(
                "BackwardSchedule.spans",
                f"shape [{self.cu_seqlens_q.shape[0] - 1}, 3], one row per entry of cu_seqlens_q",
                f"shape {tuple(self.spans.shape)}",
            )

    @classmethod
    def of(cls, schedule: KeySchedule, tasks: BackwardTasks, layout: Layout) -> BackwardSchedule:
        """The schedule of one backward from the records of its stages; nothing is copied.

        Raises:
            InvalidInput: the records do not fit together.
        """
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
    """Which task rows each CTA of a persistent grid takes. Device code evaluates the same formula.

    Attributes:
        rows: task rows in all.
        rows_per_cta: rows of a full CTA.
        full_ctas: full CTAs, a whole number of waves; they come first.
        tail_rows: rows of each CTA behind them, 1 or more even where there is none, so that device
            code may divide by it; the very last CTA may have fewer.
        grid: CTAs with work.
    """

    rows: int
    rows_per_cta: int
    full_ctas: int
    tail_rows: int
    grid: int

    def interval(self, cta: int) -> range:
        """The rows of CTA ``cta``; empty past the grid.

        Raises:
            InvalidInput: ``cta`` is negative.
        """
        if cta < 0:
            invalid_input("cta", "0 or more", cta)
        full = min(cta, self.full_ctas)
        first = full * self.rows_per_cta + (cta - full) * self.tail_rows
        size = self.rows_per_cta if cta < self.full_ctas else self.tail_rows
        return range(min(first, self.rows), min(first + size, self.rows))


def rows_per_cta(rows: int) -> int:
    """Rows of a full CTA: few where every SM must find work, many where dk and dv should stay on
    chip for long. Switch and sizes are the ones reported for a B200, not measured here."""
    return ROWS_FEW if rows <= FEW_ROWS else ROWS_MANY


def cta_walk(rows: int, num_sms: int) -> CtaWalk:
    """Whole waves of full CTAs, then one wave that shares the rest evenly.

    An SM runs one CTA at a time, so time passes in waves of ``num_sms`` CTAs and a wave lasts as
    long as its longest CTA. A full wave does ``wave = num_sms * rows_per_cta`` rows with no SM
    idle. Dividing *rows* by ``wave`` leaves ``0 <= rest < wave``; a CTA that would be only
    partly full is thus always in the rest, and no row is lost. The rest fits into one more wave,
    which is shortest when every SM has the same share, ``ceil(rest / num_sms)`` rows, at most
    ``rows_per_cta``: giving it to few CTAs with full intervals would keep most SMs waiting.

    The share has a floor: each CTA pays for its prologue (barriers, tensor memory, the first key
    block) and for one flush of dk and dv, which below 3 rows costs more than it spreads. The figure
    is the one reported for a B200, not measured here.

    Args:
        rows: task rows, 0 or more.
        num_sms: streaming multiprocessors, 1 or more.

    Raises:
        InvalidInput: a size is out of range.
    """
    _check_sizes("rows", rows, num_sms)
    size = rows_per_cta(rows)
    waves, rest = divmod(rows, num_sms * size)
    tail = max(SHORTEST_TAIL, _ceil_div(rest, num_sms))
    full = waves * num_sms
    return CtaWalk(rows, size, full, tail, full + _ceil_div(rest, tail))


def grid_launch_bound(capacity: int, num_sms: int) -> int:
    """CTAs that cover :func:`cta_walk` for every row count up to ``capacity``.

    The host does not know the row count, so it launches this many; the surplus finds an empty
    interval and exits. For one interval size, as rows are added, the tail first grows by a CTA per
    3 rows until it has one per SM, then its CTAs get longer and their number stays at or below
    that; a full wave has one per SM too. So the most CTAs up to ``rows`` are the full waves and
    ``min(num_sms, ceil(rest / 3))``. Either interval size may be in use, up to its last row count.

    Args:
        capacity: most task rows there can be.
        num_sms: streaming multiprocessors, 1 or more.

    Raises:
        InvalidInput: a size is out of range.
    """
    _check_sizes("capacity", capacity, num_sms)

    def most(rows: int, size: int) -> int:
        waves, rest = divmod(rows, num_sms * size)
        return waves * num_sms + min(num_sms, _ceil_div(rest, SHORTEST_TAIL))

    few = most(min(capacity, FEW_ROWS), ROWS_FEW)
    return few if capacity <= FEW_ROWS else max(few, most(capacity, ROWS_MANY))


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def _check_sizes(name: str, rows: int, num_sms: int) -> None:
    if rows < 0:
        invalid_input(name, "0 or more", rows)
    if num_sms < 1:
        invalid_input("num_sms", "1 or more", num_sms)


def _check_field(name: str, value: object, form: tuple[str | int, ...], first: Tensor) -> None:
    field = f"BackwardSchedule.{name}"
    if not isinstance(value, Tensor):
        invalid_input(field, "an int32 tensor", type(value).__name__)
    if value.dtype != torch.int32:
        invalid_input(field, "int32", value.dtype)
    fits = value.dim() == len(form) and all(
        isinstance(want, str) or have == want for have, want in zip(value.shape, form, strict=True)
    )
    if not fits:
        shown = ", ".join(str(size) for size in form)
        invalid_input(field, f"shape [{shown}]", f"shape {tuple(value.shape)}")
    if value.device != first.device:
        invalid_input(field, f"row_ptr's device ({first.device})", value.device)
