"""Work tiles of the key-major backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["TILE_ROWS", "WINDOW", "BackwardTasks", "queries_per_task", "task_capacity"]

TILE_ROWS = 128
"""Rows of one work tile: queries times the query heads of a group."""

WINDOW = 512
"""Queries per window of the work order; a window's dq stays in cache while it is summed."""


@dataclass(frozen=True, eq=False)
class BackwardTasks:
    """Tiles of at most ``queries_per_task`` queries that read one key block.

    Ordered by (KV head, window of queries, schedule row, query). Tiles of one row and window are
    neighbours, so a worker that walks the order keeps the row's dk and dv on chip for the run.

    Attributes:
        tasks: int32 ``[capacity, 4]``: KV head, schedule row, first edge (an index into
            ``KeySchedule.queries[head]``), number of queries. Rows past ``count`` are -1.
        count: int32 ``[1]``, live tasks.
        owners: int32 ``[Hkv, rows]``, runs that write a row's dk and dv: 0 leaves zeros, 1 may
            store directly, more must accumulate.
        queries_per_task: queries of a full tile.
        window: queries per window.
        bounds: int32 ``[Hkv * windows + 1]``, the first task of each KV head and window, and the
            end; a by-product that not every backend's builder has (None).
    """

    tasks: Tensor
    count: Tensor
    owners: Tensor
    queries_per_task: int
    window: int
    bounds: Tensor | None = None


def queries_per_task(group: int) -> int:
    """Queries whose ``group`` heads fill a tile of :data:`TILE_ROWS` rows."""
    return max(1, TILE_ROWS // group)


def task_capacity(
    kv_heads: int, edges: int, rows: int, queries: int, per_task: int, window: int | None = None
) -> int:
    """Tasks that can arise, from sizes alone: full tiles and a ragged one per row and window."""
    windows = -(-queries // (window or WINDOW))
    return kv_heads * (edges // per_task + min(edges, rows * windows))
