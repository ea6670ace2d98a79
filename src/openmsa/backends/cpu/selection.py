"""Block scores fused with a running top-k.

A tile of queries meets its keys panel by panel: one GEMM, a maximum per block, and a merge into the
best ``topk`` so far. A block's rank is one integer: forced, then score, then lower id::

    rank = order(score) * 2^31 + (2^31 - 1 - id)

where ``order`` maps floats to integers of the same order. Integers are unique, so every tie has one
answer. With ``return_lse`` each block's log-sum-exp rides along and is summed over the winners.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openmsa.backends.cpu.tiles import LOG2E
from openmsa.backends.cpu.workers import run_jobs
from openmsa.contract.layout import Layout
from openmsa.contract.problem import SelectionConfig, accumulate_dtype

__all__ = ["select_blocks"]

_TILE_ROWS = 1024
"""Rows (query, index head) of a tile. Measured on 2 cores of an EPYC 7003 (2026-12): 1024 rows by
1024 keys run at 133 GFLOP/s, larger panels at 105..124."""

_PANEL_KEYS = 1024

_MERGE_BLOCKS = 512
"""Blocks whose maxima are held before they are merged into the running top-k."""

_ID_BITS = 31
_NO_BLOCK = torch.iinfo(torch.int64).min
_FORCED = torch.iinfo(torch.int32).max


@dataclass(frozen=True, eq=False)
class _Tile:
    """Consecutive queries of one entry: operands, positions and the blocks they can see."""

    q: Tensor
    keys: Tensor
    positions: Tensor
    blocks: int


def select_blocks(
    index_q: Tensor, index_k: Tensor, layout: Layout, config: SelectionConfig
) -> tuple[Tensor, Tensor | None]:
    """Canonical int32 ``[Hkv, Tq, topk]`` and, on request, the selected lse ``[Hkv, Tq]``."""
    total, heads, dim = index_q.shape
    dtype = accumulate_dtype(index_q.dtype)
    indices = torch.full((heads, total, config.topk), -1, dtype=torch.int32)
    lse = index_q.new_full((heads, total), float("-inf"), dtype=dtype)
    keys = index_k.to(dtype)
    offsets = layout.cu_seqlens_q.tolist()
    step = max(1, _TILE_ROWS // heads)

    def select(first: int, last: int, shift: int, key_start: int) -> None:
        positions = torch.arange(first + shift, last + shift)
        seen = last + shift
        tile = _Tile(
            index_q[first:last].to(dtype).reshape(-1, dim),
            keys[key_start : key_start + seen],
            positions.repeat_interleave(heads),
            -(-seen // config.block_size),
        )
        chosen, chosen_lse = _select_tile(tile, config)
        indices[:, first:last] = chosen.view(-1, heads, config.topk).transpose(0, 1)
        if chosen_lse is not None:
            lse[:, first:last] = chosen_lse.view(-1, heads).t()

    jobs = []
    for entry, (key_start, key_len, _) in enumerate(layout.spans.tolist()):
        # Queries before position 0 see nothing and stay at -1.
        shift = key_len - offsets[entry + 1]
        begin = max(offsets[entry], -shift)
        for first in range(begin, offsets[entry + 1], step):
            last = min(first + step, offsets[entry + 1])
            jobs.append(partial(select, first, last, shift, key_start))
    # Tiles grow with the position; the longest first leaves no thread with one at the end.
    run_jobs(jobs[::-1])
    return indices, lse if config.return_lse else None


def _select_tile(tile: _Tile, config: SelectionConfig) -> tuple[Tensor, Tensor | None]:
    """Ascending ids int32 ``[rows, topk]``, -1 at the tail, and the selected lse ``[rows]``."""
    rows = tile.q.shape[0]
    best = torch.full((rows, config.topk), _NO_BLOCK, dtype=torch.int64)
    best_lse = tile.q.new_full((rows, config.topk), float("-inf")) if config.return_lse else None
    # fp64 scores get their order from a sort of the tile's own scores, so they merge only once.
    merge = tile.blocks if tile.q.dtype == torch.float64 else _MERGE_BLOCKS
    for first in range(0, tile.blocks, max(merge, 1)):
        last = min(first + merge, tile.blocks)
        scores, block_lse = _block_scores(tile, first, last, config)
        ranks = torch.cat([best, _ranks(scores, first, tile.positions, config)], 1)
        best, at = ranks.topk(config.topk, dim=1, sorted=False)
        if best_lse is not None and block_lse is not None:
            best_lse = torch.cat([best_lse, block_lse], 1).gather(1, at)
    limit = 2**_ID_BITS - 1
    ids = limit - (best & limit)
    ids = torch.where(best == _NO_BLOCK, limit, ids).to(torch.int32).sort(dim=1).values
    ids = torch.where(ids == limit, -1, ids)
    if best_lse is None:
        return ids, None
    best_lse = torch.where(best == _NO_BLOCK, float("-inf"), best_lse)
    return ids, best_lse.logsumexp(1)


def _block_scores(
    tile: _Tile, first: int, last: int, config: SelectionConfig
) -> tuple[Tensor, Tensor | None]:
    """Maxima ``[rows, blocks]`` of blocks first..last, and their log-sum-exp where asked for."""
    rows, block = tile.q.shape[0], config.block_size
    scores = tile.q.new_empty((rows, last - first))
    block_lse = torch.empty_like(scores) if config.return_lse else None
    panel = max(1, _PANEL_KEYS // block)
    buffer = tile.q.new_empty(rows * panel * block)
    earliest = int(tile.positions[0])
    for begin in range(first, last, panel):
        end = min(begin + panel, last)
        keys = tile.keys[begin * block : end * block]
        width = keys.shape[0]
        logits = buffer[: rows * width].view(rows, width)
        torch.mm(tile.q, keys.t(), out=logits)
        if begin * block + width - 1 > earliest:
            future = torch.arange(begin * block, begin * block + width) > tile.positions[:, None]
            logits.masked_fill_(future, float("-inf"))
        at = slice(begin - first, end - first)
        whole = width // block * block
        parts = [
            (
                logits[:, :whole].unflatten(1, (-1, block)),
                slice(at.start, at.start + whole // block),
            )
        ]
        if whole < width:
            parts.append((logits[:, None, whole:], slice(at.stop - 1, at.stop)))
        for part, blocks in parts:
            scores[:, blocks] = part.amax(2)
            if block_lse is not None:
                block_lse[:, blocks] = _log_sum(part, scores[:, blocks], config.scale)
    return scores, block_lse


def _log_sum(logits: Tensor, high: Tensor, scale: float) -> Tensor:
    """``log sum exp(scale * logits)`` over the last axis, given its maxima; spends ``logits``."""
    # Infinite maxima would subtract infinity from itself; any finite shift leaves the right sum.
    shift = torch.where(high.isinf(), 0.0, high)
    total = logits.sub_(shift[..., None]).mul_(scale * LOG2E).exp2_().sum(2)
    return shift * scale + total.log2_() * math.log(2.0)


def _ranks(scores: Tensor, first: int, positions: Tensor, config: SelectionConfig) -> Tensor:
    """int64 ``[rows, blocks]``: forced, then higher score, then lower id; no-block where unseen."""
    ids = torch.arange(first, first + scores.shape[1])
    own = torch.div(positions, config.block_size, rounding_mode="floor")[:, None]
    # NaN ranks as -inf; adding +0 turns -0 into +0.
    order = _order(torch.where(scores.isnan(), float("-inf"), scores) + 0.0)
    forced = (ids < config.init_blocks) | (ids > own - config.local_blocks)
    order = torch.where(forced, _FORCED, order)
    rank = (order << _ID_BITS) + (2**_ID_BITS - 1 - ids)
    return torch.where(ids <= own, rank, _NO_BLOCK)


def _order(scores: Tensor) -> Tensor:
    """int64 with the order of the floats, below :data:`_FORCED`."""
    if scores.dtype == torch.float64:
        order: Tensor = scores.unique(return_inverse=True)[1]
        return order
    bits = scores.contiguous().view(torch.int32)
    # Negative floats order backwards by their bits; flipping all but the sign mends that.
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
