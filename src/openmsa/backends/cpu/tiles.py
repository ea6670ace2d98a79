"""The work list of the key-major passes, and the views and buffers they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.layout import Layout

__all__ = ["LOG2E", "Tile", "Windows", "gather", "head_rows", "tile_queries"]

LOG2E = 1.4426950408889634

_TILE_ROWS = 2048
"""Rows (query, head) of a GEMM: enough for full GEMM speed, few enough to stay in the caches.
Measured on 2 cores of an EPYC 7003 (AVX2, 2026-12): 512..8192 rows by 128 keys by 128 channels run
at 156..177 GFLOP/s, 32768 rows at 112."""

_WINDOW_BYTES = 128 * 2**20
"""Accumulator bytes of one window of queries; bounds memory for any token count."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Some queries that read one key block.

    Attributes:
        row: schedule row.
        keys: slice of packed key rows.
        queries: int32 ``[n]`` packed query rows, ascending.
        visible: int64 ``[n]`` keys of the block each query sees, or None where all see all.
        range: key range (document) the block belongs to.
    """

    row: int
    keys: slice
    queries: Tensor
    visible: Tensor | None
    range: int


class Windows:
    """The tiles of one schedule, grouped by KV head and window of queries.

    A window's accumulators are the only large workspace, so their size is bounded by bytes. Within
    a window every key block is visited once, with the window's queries that read it.
    """

    def __init__(self, schedule: KeySchedule, layout: Layout, row_bytes: int, group: int) -> None:
        self.schedule = schedule
        self.layout = layout
        self.tile = tile_queries(group)
        limit = max(1, _WINDOW_BYTES // max(row_bytes, 1))
        count = max(1, -(-layout.num_queries // limit))
        self.size = max(1, -(-layout.num_queries // count))
        self.bounds = [
            slice(first, min(first + self.size, layout.num_queries))
            for first in range(0, layout.num_queries, self.size)
        ]
        self.positions = layout.positions()
        block = schedule.block_size
        lengths = layout.ranges[:, 1].long()
        blocks = torch.div(lengths + (block - 1), block, rounding_mode="floor")
        of_range = torch.repeat_interleave(torch.arange(layout.num_ranges), blocks)
        block_id = torch.arange(of_range.numel()) - (blocks.cumsum(0) - blocks)[of_range]
        self.row_position = block_id * block
        self.row_keys = (lengths[of_range] - self.row_position).clamp(max=block)
        self.row_start = layout.ranges[:, 0].long()[of_range] + self.row_position
        self.row_range = of_range

    def tiles(self, head: int) -> Iterator[tuple[slice, list[Tile]]]:
        """Windows of packed query rows with their tiles, for one KV head."""
        if not self.bounds:
            return
        queries = self.schedule.queries[head]
        row_ptr = self.schedule.row_ptr[head].long()
        rows = self.row_start.numel()
        live = queries[: int(row_ptr[-1])]
        row = torch.repeat_interleave(torch.arange(rows), row_ptr[1 : rows + 1] - row_ptr[:rows])
        visible = self.positions[live.long()] - self.row_position[row] + 1
        partial = (visible < self.row_keys[row]).long().cumsum(0)
        masked_before = torch.nn.functional.pad(partial, (1, 0)).tolist()
        # Edges ascend by (row, query), so one search finds every window's share of every row.
        span = self.layout.num_queries + 1
        edges = row * span + live
        firsts = torch.tensor([window.start for window in self.bounds] + [span - 1])
        wanted = (torch.arange(rows)[:, None] * span + firsts).flatten()
        cuts = torch.searchsorted(edges, wanted).view(rows, -1).t().tolist()
        starts, sizes = self.row_start.tolist(), self.row_keys.tolist()
        ranges = self.row_range.tolist()
        for index, window in enumerate(self.bounds):
            found = []
            for r, (begin, end) in enumerate(zip(cuts[index], cuts[index + 1], strict=True)):
                keys = slice(starts[r], starts[r] + sizes[r])
                for first in range(begin, end, self.tile):
                    last = min(first + self.tile, end)
                    masked = masked_before[last] > masked_before[first]
                    found.append(
                        Tile(
                            r,
                            keys,
                            live[first:last],
                            visible[first:last] if masked else None,
                            ranges[r],
                        )
                    )
            yield window, found


def tile_queries(group: int) -> int:
    """Queries of a tile whose ``group`` heads fill :data:`_TILE_ROWS` rows."""
    return max(1, _TILE_ROWS // group)


def head_rows(x: Tensor, head: int, group: int) -> Tensor:
    """``[T, group * D]`` rows of one KV head's query heads; a view where the strides allow."""
    rows = x[:, head * group : (head + 1) * group].flatten(1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def gather(rows: Tensor, index: Tensor, raw: Tensor, wide: Tensor) -> Tensor:
    """``rows[index]`` in ``wide``, through ``raw`` where the dtype must change."""
    n = index.numel()
    if rows.dtype == wide.dtype:
        return torch.index_select(rows, 0, index, out=wide[:n])
    return wide[:n].copy_(torch.index_select(rows, 0, index, out=raw[:n]))


def mask_future(scores: Tensor, visible: Tensor, group: int) -> None:
    """Set ``scores [n * group, keys]`` to -inf past each query's ``visible [n]`` keys."""
    keys = torch.arange(scores.shape[1])
    hidden = keys >= visible[:, None]
    scores.view(-1, group, scores.shape[1]).masked_fill_(hidden[:, None, :], float("-inf"))
