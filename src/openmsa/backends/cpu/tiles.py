"""The work list of the key-major passes, and the views and buffers they share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from openmsa.backends.cpu.workers import job_threads
from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.layout import Layout

__all__ = [
    "LOG2E",
    "Tile",
    "Windows",
    "add_product",
    "apart_from_future",
    "head_rows",
    "mask_future",
    "take",
    "tile_queries",
]

LOG2E = 1.4426950408889634

_TILE_ROWS = 2048
"""Rows (query, head) of a GEMM: enough for full GEMM speed, few enough to stay in the caches.
Measured on 2 cores of an EPYC 7003 (AVX2, 2026-12): 512..8192 rows by 128 keys by 128 channels run
at 156..177 GFLOP/s, 32768 rows at 112."""

_WINDOW_BYTES = 8 * 2**20
"""Bytes of one window's rows in the accumulation dtype. Each row is read and added to ``topk``
times, so a window should stay in the caches. Measured as above, forward and backward of 8,192
tokens: 19.1 s with 2 MiB, 17.7 s with 8 MiB, 18.7 s with 32 MiB."""

_WINDOW_BYTES_MAX = 128 * 2**20
"""Most bytes for windows that long documents make larger; bounds memory for any token count."""

_TILE_QUERIES = 64
"""Queries that the average tile should have: below, operator calls outweigh the arithmetic."""

_JOBS_PER_THREAD = 8
"""Cores of a shared machine differ by a tenth in speed, so jobs are dealt out in small pieces."""

_JOB_QUERIES = 512
"""Fewest queries worth a job of their own: below that their tiles are mostly empty."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Some queries that read one key block.

    Attributes:
        row: schedule row.
        keys: slice of packed key rows.
        queries: int32 ``[n]`` query rows, ascending, counted from their window's first.
        run: the same rows as a slice where they follow each other without a gap (the queries of
            short documents and of a block's own tokens do), else None.
        visible: int64 ``[n]`` keys of the block each query sees, or None where all see all.
        range: key range (document) the block belongs to.
    """

    row: int
    keys: slice
    queries: Tensor
    run: slice | None
    visible: Tensor | None
    range: int


class Windows:
    """The tiles of one schedule, grouped by KV head and window of queries.

    A window's rows are the only large workspace, so their size is bounded by bytes. Within a window
    every key block is visited once, with the window's queries that read it.

    Attributes:
        bounds: the windows, slices of packed query rows.
        size: queries of a window, the last one excepted.
        tile: most queries of a tile.
        parts: jobs that each KV head should be split into to keep the threads busy.
    """

    def __init__(self, schedule: KeySchedule, layout: Layout, row_bytes: int, group: int) -> None:
        self.schedule = schedule
        self.layout = layout
        self.tile = tile_queries(group)
        heads, threads = schedule.row_ptr.shape[0], job_threads()
        wanted = -(-_JOBS_PER_THREAD * threads // max(heads, 1)) if threads > 1 else 1
        self.parts = max(1, min(wanted, layout.num_queries // _JOB_QUERIES))
        longest = int(layout.ranges[:, 1].amax()) if layout.num_ranges else 0
        most_blocks = -(-longest // schedule.block_size)
        topk = schedule.queries.shape[1] // max(layout.num_queries, 1)
        limit = max(_WINDOW_BYTES // row_bytes, _TILE_QUERIES * most_blocks // max(topk, 1))
        limit = max(1, min(limit, _WINDOW_BYTES_MAX // (threads * row_bytes)))
        count = max(self.parts, -(-layout.num_queries // limit))
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

    def tiles(self, head: int) -> list[list[Tile]]:
        """One KV head's tiles, window by window."""
        bounds = self.bounds
        if not bounds:
            return []
        queries = self.schedule.queries[head]
        row_ptr = self.schedule.row_ptr[head].long()
        rows = self.row_start.numel()
        live = queries[: int(row_ptr[-1])]
        local = live % self.size
        row = torch.repeat_interleave(torch.arange(rows), row_ptr[1 : rows + 1] - row_ptr[:rows])
        visible = self.positions[live.long()] - self.row_position[row] + 1
        partial = (visible < self.row_keys[row]).long().cumsum(0)
        masked_before = torch.nn.functional.pad(partial, (1, 0)).tolist()
        local_list = local.tolist()
        # Edges ascend by (row, query), so one search finds every window's share of every row.
        span = self.layout.num_queries + 1
        edges = row * span + live
        firsts = torch.tensor([window.start for window in bounds] + [bounds[-1].stop])
        wanted = (torch.arange(rows)[:, None] * span + firsts).flatten()
        cuts = torch.searchsorted(edges, wanted).view(rows, -1).t().tolist()
        starts, sizes = self.row_start.tolist(), self.row_keys.tolist()
        ranges = self.row_range.tolist()
        found: list[list[Tile]] = []
        for window_cuts, next_cuts in pairwise(cuts):
            found.append([])
            for r, (begin, end) in enumerate(zip(window_cuts, next_cuts, strict=True)):
                keys = slice(starts[r], starts[r] + sizes[r])
                # Tiles of one row are equally full, and at most self.tile.
                tiles = -(-(end - begin) // self.tile)
                for part in range(tiles):
                    first = begin + (end - begin) * part // tiles
                    last = begin + (end - begin) * (part + 1) // tiles
                    masked = masked_before[last] > masked_before[first]
                    low, high = local_list[first], local_list[last - 1] + 1
                    found[-1].append(
                        Tile(
                            r,
                            keys,
                            local[first:last],
                            slice(low, high) if high - low == last - first else None,
                            visible[first:last] if masked else None,
                            ranges[r],
                        )
                    )
        return found


def tile_queries(group: int) -> int:
    """Queries of a tile whose ``group`` heads fill :data:`_TILE_ROWS` rows."""
    return max(1, _TILE_ROWS // group)


def head_rows(x: Tensor, window: slice, head: int, group: int, out: Tensor) -> Tensor:
    """``x [T, Hq, D]`` at a window and one KV head's query heads as ``[size, group * D]``, in
    ``out``'s memory and dtype."""
    rows = x[window, head * group : (head + 1) * group]
    out = out[: rows.shape[0]]
    out.view(rows.shape).copy_(rows)
    return out


def apart_from_future(
    windows: list[list[Tile]], layout: Layout, *keys_or_values: Tensor
) -> list[list[Tile]]:
    """The tiles, cut so that no product holds a hidden key, in documents where a key or value is
    not finite.

    A masked weight is zero, but zero times NaN is NaN: a hidden token would reach queries before
    it. One query each with the keys it sees is slow, and only where the numbers are broken anyway.
    """
    if all(bool(x.isfinite().all()) for x in keys_or_values):
        return windows
    broken = [
        not all(bool(x[start : start + length].isfinite().all()) for x in keys_or_values)
        for start, length in layout.ranges.tolist()
    ]
    return [
        [
            part
            for tile in tiles
            for part in (_single_queries(tile) if broken[tile.range] else (tile,))
        ]
        for tiles in windows
    ]


def _single_queries(tile: Tile) -> list[Tile]:
    if tile.visible is None:
        return [tile]
    found = []
    width = tile.keys.stop - tile.keys.start
    queries, visible = tile.queries.tolist(), tile.visible.clamp(max=width).tolist()
    for i, (query, seen) in enumerate(zip(queries, visible, strict=True)):
        keys = slice(tile.keys.start, tile.keys.start + seen)
        own = tile.queries[i : i + 1]
        found.append(Tile(tile.row, keys, own, slice(query, query + 1), None, tile.range))
    return found


def take(rows: Tensor, tile: Tile, buffer: Tensor) -> Tensor:
    """A tile's ``rows [size, C]``: a view where they follow each other, else gathered."""
    if tile.run is not None:
        return rows[tile.run]
    return torch.index_select(rows, 0, tile.queries, out=buffer[: tile.queries.numel()])


def add_product(acc: Tensor, tile: Tile, a: Tensor, b: Tensor, buffer: Tensor) -> None:
    """Add ``a [n * group, K] @ b [K, D]`` to the tile's rows of ``acc [size, group * D]``."""
    if tile.run is not None:
        acc[tile.run].view(-1, b.shape[1]).addmm_(a, b)
        return
    part = buffer[: tile.queries.numel()]
    torch.mm(a, b, out=part.view(-1, b.shape[1]))
    acc.index_add_(0, tile.queries, part)


def mask_future(scores: Tensor, visible: Tensor, group: int) -> None:
    """Set ``scores [n * group, keys]`` to -inf past each query's ``visible [n]`` keys."""
    keys = torch.arange(scores.shape[1])
    hidden = keys >= visible[:, None]
    scores.view(-1, group, scores.shape[1]).masked_fill_(hidden[:, None, :], float("-inf"))
