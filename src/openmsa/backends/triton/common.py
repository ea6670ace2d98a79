"""What the Triton stages share: lookup tables of a call, and tile sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.contract.layout import Layout

__all__ = [
    "LN2",
    "LOG2E",
    "Tables",
    "first_rows",
    "last_not_above",
    "lower_bound",
    "padded",
    "queries_per_tile",
    "spread",
    "tables",
]

LOG2E = 1.4426950408889634
LN2 = math.log(2.0)

_TILE_ROWS = 64
"""Rows (query, head) of a tile. With 128 keys of 128 channels on an H200, 64 rows on 4 warps beat
128 rows, whose accumulators leave no registers to prefetch with."""


@dataclass(frozen=True, eq=False)
class Tables:
    """Device look-up tables of one call.

    Attributes:
        positions: int32 ``[Tq]`` key position of each query.
        blocks: int32 ``[rows, 3]`` of each schedule row: first packed key row, keys, and the key
            position of the first; zeros past the last block.
        bases: int32 ``[Tq]`` the schedule row of the first block of each query's key range.
    """

    positions: Tensor
    blocks: Tensor
    bases: Tensor


def tables(layout: Layout, block_size: int) -> Tables:
    """Build the tables on the layout's device, without a host read."""
    device = layout.spans.device
    rows = layout.block_capacity(block_size)
    positions = torch.empty(layout.num_queries, dtype=torch.int32, device=device)
    bases = torch.empty_like(positions)
    first = first_rows(layout, block_size)
    blocks = torch.zeros((rows, 3), dtype=torch.int32, device=device)
    lanes = 256
    if layout.num_queries:
        _positions[(triton.cdiv(layout.num_queries, lanes),)](
            layout.cu_seqlens_q, layout.spans, first, positions, bases, layout.num_queries,
            layout.num_entries, LANES=lanes,
        )  # fmt: skip
    if rows:
        _block_table[(triton.cdiv(rows, lanes),)](
            first, layout.ranges, blocks, rows, layout.num_ranges, BLOCK=block_size, LANES=lanes
        )
    return Tables(positions, blocks, bases)


def first_rows(layout: Layout, block_size: int) -> Tensor:
    """int32 ``[M]``: the schedule row of each key range's block 0, in one launch."""
    first = torch.empty(layout.num_ranges, dtype=torch.int32, device=layout.spans.device)
    if layout.num_ranges:
        _first_rows[(1,)](layout.ranges, first, layout.num_ranges, BLOCK=block_size, LANES=1024)
    return first


def padded(size: int) -> int:
    """The next power of two, at least 16: what a dot's side must be."""
    return max(16, int(triton.next_power_of_2(size)))


def queries_per_tile(group: int) -> int:
    """Queries whose padded ``group`` heads fill a tile."""
    return max(1, _TILE_ROWS // int(triton.next_power_of_2(group)))


@triton.jit
def lower_bound(values, begin, end, wanted):
    """The first index of the ascending ``values[begin:end]`` not below ``wanted``.

    Each turn looks at the ends of 256 pieces at once: what counts is how many loads wait for one
    another.
    """
    low = begin
    high = end
    while low < high:
        step = (high - low + 255) // 256
        at = low + (tl.arange(0, 256) + 1) * step - 1
        last = tl.load(values + at, mask=at < high, other=2147483647)
        low += tl.sum((last < wanted).to(tl.int32), 0) * step
        high = tl.minimum(low + step - 1, high)
    return low


@triton.jit
def spread(per_query, QUERIES: tl.constexpr, GROUP_PAD: tl.constexpr):
    """``[QUERIES] -> [QUERIES * GROUP_PAD]``: a query's value for each of its heads."""
    return tl.reshape(
        tl.broadcast_to(per_query[:, None], [QUERIES, GROUP_PAD]), [QUERIES * GROUP_PAD]
    )


@triton.jit
def last_not_above(starts, count, wanted, LANES: tl.constexpr):
    """For each of ``wanted [LANES]`` the last index of the ascending ``starts[:count]`` whose value
    is not above it; 0 where there is none."""
    low = tl.zeros([LANES], tl.int32)
    high = tl.zeros([LANES], tl.int32) + count
    while tl.max(high - low, 0) > 1:
        middle = (low + high) // 2
        below = tl.load(starts + middle, mask=middle < count, other=2147483647) <= wanted
        low = tl.where(below, middle, low)
        high = tl.where(below, high, tl.maximum(middle, low + 1))
    return low


@triton.jit(do_not_specialize=["queries", "entries"])
def _positions(
    cu_seqlens_q, spans, first, positions, bases, queries, entries, LANES: tl.constexpr
):  # fmt: skip
    query = tl.program_id(0) * LANES + tl.arange(0, LANES)
    entry = last_not_above(cu_seqlens_q, entries, query, LANES)
    stop = tl.load(cu_seqlens_q + entry + 1)
    length = tl.load(spans + entry * 3 + 1)
    tl.store(positions + query, query + length - stop, mask=query < queries)
    base = tl.load(first + tl.load(spans + entry * 3 + 2))
    tl.store(bases + query, base, mask=query < queries)


@triton.jit(do_not_specialize=["count"])
def _first_rows(ranges, first, count, BLOCK: tl.constexpr, LANES: tl.constexpr):
    carry = 0
    lane = tl.arange(0, LANES)
    for base in range(0, count, LANES):
        at = base + lane
        length = tl.load(ranges + at * 2 + 1, mask=at < count, other=0)
        blocks = (length + BLOCK - 1) // BLOCK
        ends = tl.cumsum(blocks, 0) + carry
        tl.store(first + at, ends - blocks, mask=at < count)
        carry += tl.sum(blocks, 0)


@triton.jit(do_not_specialize=["rows", "num_ranges"])
def _block_table(first, ranges, blocks, rows, num_ranges, BLOCK: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    # Empty ranges share their first row with the next one; the last of them holds the row.
    owner = last_not_above(first, num_ranges, row, LANES)
    position = (row - tl.load(first + owner)) * BLOCK
    start = tl.load(ranges + owner * 2)
    keys = tl.minimum(tl.load(ranges + owner * 2 + 1) - position, BLOCK)
    live = (row < rows) & (keys > 0)
    tl.store(blocks + row * 3, start + position, mask=live)
    tl.store(blocks + row * 3 + 1, keys, mask=live)
    tl.store(blocks + row * 3 + 2, position, mask=live)
