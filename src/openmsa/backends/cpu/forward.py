"""Sparse attention forward, key-major.

Per key block, with the queries that read it, in base 2 (``k2 = k * scale * log2(e)``)::

    S = Q k2^T        P = 2^(S - reference)        total += sum P        acc += P V

and at the end of a window ``out = acc / total``, ``lse = (reference + log2 total) * ln 2``. Any
reference gives the same result in exact arithmetic; it only has to keep ``2^(S - reference)`` in
range. Where ``|q| |k|`` bounds every logit of a document the reference is 0 and one pass does. Else
a first pass finds each query's log-sum-exp, which is then the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openmsa.backends.cpu.memory import advise_huge_pages, carve
from openmsa.backends.cpu.tiles import (
    LOG2E,
    Tile,
    Windows,
    add_product,
    apart_from_future,
    head_rows,
    mask_future,
    take,
)
from openmsa.backends.cpu.workers import PerThread, run_jobs
from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.layout import Layout
from openmsa.contract.problem import AttentionConfig, accumulate_dtype

__all__ = ["forward"]

_SAFE_LOG2 = 32.0
"""Largest base-2 logit for which no reference is needed: 2^32 per key, times any number of keys and
any bf16 or fp32 value below 2^80, stays far from fp32's 2^128, and 2^-32 far from its 2^-126."""


class _Scratch:
    """Buffers of one thread, sized for the largest tile and window."""

    def __init__(self, q: Tensor, group: int, windows: Windows) -> None:
        dtype = accumulate_dtype(q.dtype)
        width = group * q.shape[2]
        scores = windows.tile * group * windows.schedule.block_size
        self.rows, self.acc, self.q, self.out, self.scores = carve(
            q,
            dtype,
            (windows.size, width),
            (windows.size, width),
            (windows.tile, width),
            (windows.tile, width),
            (scores,),
        )


@dataclass(frozen=True, eq=False)
class _Head:
    """One KV head: scaled keys and values ``[Tk, D]``, each range's longest key, the tiles."""

    k2: Tensor
    values: Tensor
    key_norms: list[float]
    tiles: list[list[Tile]]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    schedule: KeySchedule,
    layout: Layout,
    config: AttentionConfig,
) -> tuple[Tensor, Tensor]:
    """``out [Tq, Hq, D]`` in q's dtype and ``lse [Tq, Hq]``; see :mod:`openmsa.pipeline`."""
    group, dim = q.shape[1] // k.shape[1], q.shape[2]
    dtype = accumulate_dtype(q.dtype)
    out = advise_huge_pages(torch.empty_like(q, memory_format=torch.contiguous_format))
    lse = q.new_empty(q.shape[:2], dtype=dtype)
    out[layout.num_queries :] = 0
    lse[layout.num_queries :] = float("-inf")
    windows = Windows(schedule, layout, group * dim * dtype.itemsize, group)
    scratch = PerThread(lambda: _Scratch(q, group, windows))
    heads: dict[int, _Head] = {}

    def prepare(h: int) -> None:
        k2 = k[:, h].to(dtype) * (config.scale * LOG2E)
        values = v[:, h].to(dtype).contiguous()
        key_norms = _range_max(torch.linalg.vector_norm(k2, dim=1), layout)
        tiles = apart_from_future(windows.tiles(h), layout, k2, values)
        heads[h] = _Head(k2, values, key_norms, tiles)

    def attend(h: int, w: int) -> None:
        head, window, own = heads[h], windows.bounds[w], scratch.get()
        tiles = head.tiles[w]
        rows = head_rows(q, window, h, group, own.rows)
        shifted = _needs_reference(rows, head.key_norms, window, layout, group)
        reference = None
        if any(shifted[tile.range] for tile in tiles):
            reference = _log2_sum(rows, head.k2, window, tiles, shifted, own, group)
        size = window.stop - window.start
        acc = own.acc[:size].zero_()
        total = _apply(rows, head, tiles, reference, shifted, own, acc)
        seen = total > 0
        weight = torch.where(seen, total, 1.0).reciprocal_()
        part = acc.view(size, group, dim)
        q_heads = slice(h * group, (h + 1) * group)
        out[window, q_heads] = part.mul_(weight[..., None])
        log2_sum = total.log2_()
        if reference is not None:
            log2_sum += reference
        lse[window, q_heads] = log2_sum.mul_(math.log(2.0))

    run_jobs([partial(prepare, h) for h in range(k.shape[1])])
    # Later windows have the more tiles; the longest jobs first keep the end short.
    order = reversed(range(len(windows.bounds)))
    run_jobs([partial(attend, h, w) for w in order for h in range(k.shape[1])])
    return out, lse


def _scores(
    rows: Tensor,
    k2: Tensor,
    tile: Tile,
    group: int,
    scratch: _Scratch,
    bias: Tensor | None = None,
) -> Tensor:
    """``[n * group, keys]`` base-2 logits of a tile plus ``bias [n * group, 1]``; hidden: -inf."""
    queries = take(rows, tile, scratch.q).view(-1, k2.shape[1])
    keys = k2[tile.keys]
    scores = scratch.scores[: queries.shape[0] * keys.shape[0]].view(-1, keys.shape[0])
    if bias is None:
        torch.mm(queries, keys.t(), out=scores)
    else:
        torch.addmm(bias, queries, keys.t(), out=scores)
    if tile.visible is not None:
        mask_future(scores, tile.visible, group)
    return scores


def _apply(
    rows: Tensor,
    head: _Head,
    tiles: list[Tile],
    reference: Tensor | None,
    shifted: list[bool],
    scratch: _Scratch,
    acc: Tensor,
) -> Tensor:
    """Add every tile's ``P V`` to ``acc [size, group * D]``; returns the sums ``[size, group]``."""
    group = rows.shape[1] // head.k2.shape[1]
    total = acc.new_zeros((acc.shape[0], group))
    for tile in tiles:
        local = tile.queries
        bias = None
        if reference is not None and shifted[tile.range]:
            bias = reference.index_select(0, local).neg_().view(-1, 1)
        p = _scores(rows, head.k2, tile, group, scratch, bias).exp2_()
        total.index_add_(0, local, p.sum(1).view(-1, group))
        add_product(acc, tile, p, head.values[tile.keys], scratch.out)
    return total


def _log2_sum(
    rows: Tensor,
    k2: Tensor,
    window: slice,
    tiles: list[Tile],
    shifted: list[bool],
    scratch: _Scratch,
    group: int,
) -> Tensor:
    """Base-2 log-sum-exp ``[size, group]`` with a running maximum; 0 where it is not needed."""
    size = window.stop - window.start
    high = k2.new_full((size, group), float("-inf"))
    total = k2.new_zeros((size, group))
    for tile in tiles:
        if not shifted[tile.range]:
            continue
        local = tile.queries
        scores = _scores(rows, k2, tile, group, scratch).view(-1, group, _width(tile))
        before = high.index_select(0, local)
        after = torch.maximum(before, scores.amax(-1))
        # A row of -inf logits would subtract -inf from -inf; any finite shift leaves its sum at 0.
        shift = torch.where(after == float("-inf"), 0.0, after)
        fresh = scores.sub_(shift[..., None]).exp2_().sum(-1)
        kept = total.index_select(0, local) * (before - shift).exp2_()
        total.index_copy_(0, local.long(), kept + fresh)
        high.index_copy_(0, local.long(), after)
    return torch.where(high == float("-inf"), 0.0, high + total.log2())


def _width(tile: Tile) -> int:
    return int(tile.keys.stop - tile.keys.start)


def _range_max(per_key: Tensor, layout: Layout) -> list[float]:
    """Largest value of ``per_key [Tk]`` within each key range; 0 for an empty one."""
    return [
        float(per_key[start : start + length].amax()) if length else 0.0
        for start, length in layout.ranges.tolist()
    ]


def _needs_reference(
    rows: Tensor, key_norms: list[float], window: slice, layout: Layout, group: int
) -> list[bool]:
    """For each key range, may a base-2 logit of the window's queries pass :data:`_SAFE_LOG2`?

    Decided per document, so that one document's values never change another's rounding.
    """
    shape = (rows.shape[0], group, rows.shape[1] // group)
    norms = torch.linalg.vector_norm(rows.view(shape), dim=2).amax(1)
    longest = norms.new_zeros(max(layout.num_ranges, 1))
    of_query = layout.spans[:, 2].long()[layout.entry_of_query()[window]]
    longest.scatter_reduce_(0, of_query, norms, "amax")
    # Written so that NaN, which no bound holds, counts as unsafe.
    return [
        not norm * key_norm <= _SAFE_LOG2
        for norm, key_norm in zip(longest.tolist(), key_norms, strict=False)
    ]
