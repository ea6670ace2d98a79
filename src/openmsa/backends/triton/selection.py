"""Block scores fused with a running top-k, in Triton.

A program holds 64 queries with all their index heads and walks its share of the key blocks. Each
block costs one product and a row maximum; after as many blocks as a row keeps, the new ranks and
the best so far are merged by a sorting network in registers, so no score reaches memory. Long
documents are cut into segments that run side by side, and a second kernel merges their winners.

A block's rank is one integer, so that every tie has one answer: forced, then score, then lower id::

    rank = order(score) * 2^31 + (2^31 - 1 - id)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.backends.triton.common import LN2, LOG2E, padded
from openmsa.backends.triton.sizes import sizes
from openmsa.contract.layout import Layout
from openmsa.contract.problem import SelectionConfig

__all__ = ["select_blocks", "selected_lse"]

_SEGMENT_KEYS = 32768
"""Keys of a segment: long enough to amortise a program, short enough to fill a large GPU with the
few but long query tiles of a context-parallel rank."""


def select_blocks(
    index_q: Tensor, index_k: Tensor, layout: Layout, config: SelectionConfig
) -> tuple[Tensor, Tensor | None]:
    """Canonical int32 ``[Hkv, Tq, topk]`` and, on request, the fp32 selected lse ``[Hkv, Tq]``."""
    total, heads, dim = index_q.shape
    device = index_q.device
    indices = torch.full((heads, total, config.topk), -1, dtype=torch.int32, device=device)
    index_q, index_k = (x if x.stride(-1) == 1 else x.contiguous() for x in (index_q, index_k))
    head_pad = triton.next_power_of_2(heads)
    fit = sizes(device)
    per_tile = max(1, fit.rank_rows // head_pad)
    tiles = layout.num_queries // per_tile + layout.num_entries
    if layout.num_queries == 0 or layout.max_seqlen_k == 0:
        lse = torch.full((heads, total), float("-inf"), dtype=torch.float32, device=device)
        return indices, lse if config.return_lse else None
    keep = max(16, triton.next_power_of_2(config.topk))
    segment = max(keep, _SEGMENT_KEYS // config.block_size)
    segments = triton.cdiv(triton.cdiv(layout.max_seqlen_k, config.block_size), segment)
    best = torch.empty(
        (segments, total, heads, keep) if segments > 1 else (1,), dtype=torch.int64, device=device
    )
    _rank_blocks[(tiles, segments)](
        index_q, index_k, layout.cu_seqlens_q, layout.spans, best, indices,
        total, heads, layout.num_entries, *index_q.stride()[:2], index_k.stride(0),
        HEAD_PAD=head_pad, QUERIES=per_tile, D=dim, D_PAD=padded(dim),
        BLOCK=config.block_size, TOPK=config.topk, KEEP=keep, SEGMENT=segment,
        INIT=config.init_blocks, LOCAL=config.local_blocks, ALONE=segments == 1,
        num_warps=fit.rank_warps, num_stages=2,
    )  # fmt: skip
    if segments > 1:
        lines = 32
        _merge[(triton.cdiv(total * heads, lines),)](
            best, indices, layout.num_queries, total, heads, segments,
            TOPK=config.topk, KEEP=keep, LINES=lines, num_warps=4,
        )  # fmt: skip
    if not config.return_lse:
        return indices, None
    return indices, selected_lse(index_q, index_k, indices, layout, config)


def selected_lse(
    index_q: Tensor, index_k: Tensor, indices: Tensor, layout: Layout, config: SelectionConfig
) -> Tensor:
    """fp32 ``[Hkv, Tq]``: log-sum-exp of the causal index logits in the selected blocks, times
    ``config.scale``; -inf where there are none. ``indices`` are contiguous, the last dimension of
    ``index_q [Tq, Hkv, Di]`` and ``index_k [Tk, Di]``, too."""
    total, heads, dim = index_q.shape
    lse = torch.full((heads, total), float("-inf"), dtype=torch.float32, device=index_q.device)
    if layout.num_queries:
        _selected_lse[(layout.num_queries, heads)](
            index_q, index_k, indices, layout.positions(), layout.entry_of_query(), layout.spans,
            lse, total, *index_q.stride()[:2], index_k.stride(0), config.scale * LOG2E, LN2,
            D=dim, D_PAD=padded(dim), BLOCK=config.block_size, TOPK=config.topk, num_warps=4,
        )  # fmt: skip
    return lse


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_ids(best, indices, place, live, TOPK: tl.constexpr, KEEP: tl.constexpr):
    """Write ranks ``[rows, KEEP]`` as ascending ids, -1 at the tail."""
    LIMIT: tl.constexpr = 2147483647
    column = tl.arange(0, KEEP)
    # Ranks come largest first; the ones past TOPK must not be stored.
    wanted = (best != -9223372036854775808) & (column < TOPK)[None, :]
    ids = tl.where(wanted, LIMIT - (best & LIMIT), LIMIT).to(tl.int32)
    ids = tl.sort(ids, 1)
    ids = tl.where(ids == LIMIT, -1, ids)
    tl.store(
        indices + place[:, None] * TOPK + column[None, :], ids,
        mask=live[:, None] & (column < TOPK)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["total", "entries"])
def _rank_blocks(
    index_q, index_k, cu_seqlens_q, spans, best_out, indices,
    total, heads, entries, stride_qt, stride_qh, stride_kt,
    HEAD_PAD: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK: tl.constexpr, TOPK: tl.constexpr, KEEP: tl.constexpr, SEGMENT: tl.constexpr,
    INIT: tl.constexpr, LOCAL: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = QUERIES * HEAD_PAD
    NO_BLOCK: tl.constexpr = -9223372036854775808
    # Late tiles first: a causal tile's work grows with its position. Entry e owns the tiles from
    # cu_seqlens_q[e] // QUERIES + e on, which are enough for it and need no table.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    low = 0
    high = entries
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    entry = low
    begin_q = tl.load(cu_seqlens_q + entry)
    stop = tl.load(cu_seqlens_q + entry + 1)
    first = begin_q + (tile - begin_q // QUERIES - entry) * QUERIES
    if first < stop:
        start = tl.load(spans + entry * 3).to(tl.int64)
        length = tl.load(spans + entry * 3 + 1)
        lane = tl.arange(0, ROWS)
        head = lane % HEAD_PAD
        query = first + lane // HEAD_PAD
        live = (query < stop) & (head < heads)
        position = query + length - stop
        own = tl.where(position >= 0, position // BLOCK, -1)
        d = tl.arange(0, D_PAD)
        q_tile = tl.load(
            index_q + (query.to(tl.int64) * stride_qt + head * stride_qh)[:, None] + d[None, :],
            mask=live[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        last_seen = tl.minimum(first + QUERIES, stop) - 1 + length - stop
        blocks = tl.maximum(last_seen + BLOCK, 0) // BLOCK
        begin = tl.program_id(1) * SEGMENT
        end = tl.minimum(blocks, begin + SEGMENT)
        earliest = first + length - stop
        key = tl.arange(0, BLOCK)
        column = tl.arange(0, KEEP)
        best = tl.full([ROWS, KEEP], NO_BLOCK, tl.int64)
        for base in range(begin, end, KEEP):
            fresh = tl.full([ROWS, KEEP], NO_BLOCK, tl.int64)
            for block in range(base, tl.minimum(base + KEEP, end)):
                at = block * BLOCK + key
                k_tile = tl.load(
                    index_k + (start + at)[:, None] * stride_kt + d[None, :],
                    mask=(at < length)[:, None] & (d < D)[None, :], other=0.0,
                )  # fmt: skip
                s = tl.dot(q_tile, tl.trans(k_tile))
                if block * BLOCK + BLOCK - 1 > earliest:
                    s = tl.where(at[None, :] <= position[:, None], s, float("-inf"))
                score = tl.reduce(s, 1, _larger_or_nan)
                # NaN ranks as -inf; adding +0 turns -0 into +0.
                score = tl.where(score != score, float("-inf"), score) + 0.0
                bits = score.to(tl.int32, bitcast=True)
                # Negative floats order backwards by their bits; flipping all but the sign mends it.
                bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
                forced = (block < INIT) | (block > own - LOCAL)
                bits = tl.where(forced, 0x7FFFFFFF, bits)
                rank = (bits.to(tl.int64) << 31) + (2147483647 - tl.cast(block, tl.int64))
                rank = tl.where(block <= own, rank, NO_BLOCK)
                fresh = tl.where((column == block - base)[None, :], rank[:, None], fresh)
            both = tl.reshape(tl.join(best, fresh), [ROWS, 2 * KEEP])
            best = tl.topk(both, KEEP, 1)
        if ALONE:
            place = head.to(tl.int64) * total + query
            _store_ids(best, indices, place, live, TOPK, KEEP)
        else:
            place = (tl.program_id(1).to(tl.int64) * total + query) * heads + head
            tl.store(best_out + place[:, None] * KEEP + column[None, :], best, mask=live[:, None])


@triton.jit(do_not_specialize=["queries", "total", "segments"])
def _merge(
    best_in, indices, queries, total, heads, segments,
    TOPK: tl.constexpr, KEEP: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    line = tl.cast(tl.program_id(0), tl.int64) * LINES + tl.arange(0, LINES)
    live = line // heads < queries
    column = tl.arange(0, KEEP)
    best = tl.full([LINES, KEEP], -9223372036854775808, tl.int64)
    for segment in range(segments):
        fresh = tl.load(
            best_in + (tl.cast(segment, tl.int64) * total * heads + line)[:, None] * KEEP
            + column[None, :],
            mask=live[:, None], other=-9223372036854775808,
        )  # fmt: skip
        best = tl.topk(tl.reshape(tl.join(best, fresh), [LINES, 2 * KEEP]), KEEP, 1)
    place = (line % heads) * total + line // heads
    _store_ids(best, indices, place, live, TOPK, KEEP)


@triton.jit(do_not_specialize=["total"])
def _selected_lse(
    index_q, index_k, indices, positions, entries, spans, lse,
    total, stride_qt, stride_qh, stride_kt, scale_log2, ln2,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D_PAD)
    key = tl.arange(0, BLOCK)
    q = tl.load(index_q + query * stride_qt + head * stride_qh + d, mask=d < D, other=0.0)
    position = tl.load(positions + query)
    start = tl.load(spans + tl.load(entries + query) * 3).to(tl.int64)
    place = head.to(tl.int64) * total + query
    # The sum's reference: the largest finite logit so far. Infinite ones are left to exp2.
    shift = tl.full([], 0.0, tl.float32)
    mass = tl.full([], 0.0, tl.float32)
    for slot in range(TOPK):
        block = tl.load(indices + place * TOPK + slot)
        if block >= 0:
            at = block * BLOCK + key
            k_tile = tl.load(
                index_k + (start + at)[:, None] * stride_kt + d[None, :],
                mask=(at <= position)[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            s = tl.sum(k_tile.to(tl.float32) * q.to(tl.float32)[None, :], 1) * scale_log2
            s = tl.where(at <= position, s, float("-inf"))
            top = tl.max(s, 0)
            after = tl.where(mass > 0, tl.maximum(shift, top), top)
            after = tl.where(tl.abs(after) < float("inf"), after, shift)
            kept = tl.where(mass > 0, mass * tl.math.exp2(shift - after), mass)
            mass = kept + tl.sum(tl.math.exp2(s - after), 0)
            shift = after
    tl.store(lse + place, (shift + tl.math.log2(mass)) * ln2)
