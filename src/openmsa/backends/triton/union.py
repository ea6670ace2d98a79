"""Union tiles: the forward for neighbouring queries that agree on their blocks.

A tile of neighbouring queries walks the union of their blocks once, with an online softmax and no
partial results. That costs a full tile of work per union member, however few queries chose it, so
it pays where the union is small. :func:`survey` finds every tile's union and how the windows of
queries compare; the kernels of :mod:`openmsa.backends.triton.forward` read its verdict on the
device, so that no value travels to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.backends.triton.common import LN2, LOG2E, Tables, padded
from openmsa.backends.triton.sizes import sizes
from openmsa.contract.layout import Layout
from openmsa.contract.problem import AttentionConfig

__all__ = ["Unions", "attend_union", "survey", "union_queries", "union_wins"]

_TILE_ROWS = 128
_MOST_EDGES = 256

_SAMPLE = 8
"""One tile in this many is surveyed before the verdict."""

EDGES_PER_UNION_BLOCK = 4
"""What one block of a union costs, in (query, block) edges of the key-major way: the two forward
times on an H200 at 16,384 tokens (2026-12), each over the blocks or edges that it walks."""


@dataclass(frozen=True, eq=False)
class Unions:
    """Every tile's union of blocks, and the tally that decides.

    Attributes:
        queries: queries of a tile.
        window: queries of a window, a multiple of a tile's.
        rows: int32 ``[tiles, Hkv, queries * topk_pad]`` schedule rows: first those that every query
            chose and sees whole, then the others.
        starts: int32, same shape: first packed key of each row.
        members: int32, same shape: bit i set where the tile's query i chose the block.
        counts: int32 ``[tiles, Hkv, 2]``: rows that need no mask, and all.
        tally: int32 ``[windows, Hkv, 2]``: union blocks and edges of a sample of a window's tiles.
        cost: edges that one block of a union costs; the verdict's rule.
    """

    queries: int
    window: int
    rows: Tensor
    starts: Tensor
    members: Tensor
    counts: Tensor
    tally: Tensor
    cost: int


def union_queries(group: int, topk: int) -> int:
    """Queries of a union tile, or 0 where such tiles do not fit."""
    queries = max(1, _TILE_ROWS // int(triton.next_power_of_2(group)))
    edges = queries * int(triton.next_power_of_2(topk))
    return queries if queries <= 32 and edges <= _MOST_EDGES else 0


def survey(
    indices: Tensor,
    v: Tensor,
    layout: Layout,
    lookup: Tables,
    block_size: int,
    group: int,
    window: int,
) -> Unions:
    """Find the unions of all tiles; ``window`` is a multiple of a tile's queries.

    A window that reads a value of ``v`` that is not finite goes the key-major way, since a tile's
    product would hand it, as zero times infinity, to queries that did not choose it.
    """
    heads, total, topk = indices.shape
    queries = union_queries(group, topk)
    topk_pad = triton.next_power_of_2(topk)
    tiles = triton.cdiv(layout.num_queries, queries)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=indices.device)

    found = Unions(
        queries,
        window,
        empty(tiles, heads, queries * topk_pad),
        empty(tiles, heads, queries * topk_pad),
        empty(tiles, heads, queries * topk_pad),
        empty(tiles, heads, 2),
        empty(triton.cdiv(layout.num_queries, window), heads, 2).zero_(),
        EDGES_PER_UNION_BLOCK,
    )
    rows = lookup.blocks.shape[0]
    infinite = torch.empty((heads, rows), dtype=torch.uint8, device=v.device)
    if rows:
        _find_infinite[(rows, heads)](
            v, lookup.blocks, infinite, *v.stride()[:2], rows,
            D=v.shape[2], D_PAD=padded(v.shape[2]), BLOCK=block_size, num_warps=4,
        )  # fmt: skip
    # A sample decides; only the windows that it decides for get their lists.
    for sample in (_SAMPLE, 0):
        _survey[(triton.cdiv(tiles, max(sample, 1)), heads)](
            indices, lookup.bases, lookup.positions, lookup.blocks, infinite, found.rows,
            found.starts, found.members, found.counts, found.tally,
            total, layout.num_queries, window // queries, rows,
            TOPK=topk, TOPK_PAD=topk_pad, QUERIES=queries, BLOCK=block_size, SAMPLE=sample,
            COST=found.cost, num_warps=4,
        )  # fmt: skip
    return found


@triton.jit
def union_wins(tally, window, head, EDGES: tl.constexpr):
    """Is the union way cheaper for this window and KV head? False without a survey."""
    place = tally + (window * tl.num_programs(1) + head) * 2
    return tl.load(place) * EDGES < tl.load(place + 1)


@triton.jit(do_not_specialize=["rows"])
def _find_infinite(
    v, blocks, infinite, stride_vt, stride_vh, rows,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(blocks + row * 3).to(tl.int64)
    keys = tl.load(blocks + row * 3 + 1)
    key = tl.arange(0, BLOCK)
    d = tl.arange(0, D_PAD)
    tile = tl.load(
        v + (start + key)[:, None] * stride_vt + head * stride_vh + d[None, :],
        mask=(key < keys)[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    finite = (tl.abs(tile.to(tl.float32)) < float("inf")).to(tl.int32)
    tl.store(infinite + head * rows + row, (1 - tl.min(tl.min(finite, 1), 0)).to(tl.uint8))


@triton.jit(do_not_specialize=["total", "num_queries", "tiles_per_window", "num_rows"])
def _survey(
    indices, bases, positions, blocks, infinite, rows, starts, members, counts, tally,
    total, num_queries, tiles_per_window, num_rows,
    TOPK: tl.constexpr, TOPK_PAD: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr, COST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) * (SAMPLE if SAMPLE > 0 else 1)
    head = tl.program_id(1)
    if SAMPLE == 0 and not union_wins(tally, tile // tiles_per_window, head, COST):
        return
    EDGES: tl.constexpr = QUERIES * TOPK_PAD
    lane = tl.arange(0, EDGES)
    local = lane // TOPK_PAD
    slot = lane % TOPK_PAD
    query = tile * QUERIES + local
    inside = (query < num_queries) & (slot < TOPK)
    line = indices + tl.cast(head, tl.int64) * total * TOPK
    block = tl.load(line + query * TOPK + slot, mask=inside, other=-1)
    base = tl.load(bases + query, mask=inside, other=0)
    row = tl.where(block >= 0, base + block, -1)
    bits = tl.zeros([EDGES], tl.int32)
    whole = tl.full([EDGES], 1, tl.int32)
    other_slot = tl.arange(0, TOPK_PAD)
    for i in tl.static_range(QUERIES):
        other = tile * QUERIES + i
        safe = tl.minimum(other, num_queries - 1)
        theirs = tl.load(line + safe * TOPK + other_slot, mask=other_slot < TOPK, other=-1)
        other_base = tl.load(bases + safe)
        theirs = tl.where(theirs >= 0, other_base + theirs, -2)
        # Summed along the first axis, which a thread has to itself.
        chose = tl.sum((theirs[:, None] == row[None, :]).to(tl.int32), 0)
        position = tl.load(positions + safe)
        sees = tl.where(position >= (block + 1) * BLOCK - 1, chose, 0)
        there = (other < num_queries).to(tl.int32)
        bits += (chose * there) << i
        whole &= tl.where(there > 0, sees, 1)
    fresh = (row >= 0) & ((bits & ((1 << local) - 1)) == 0)
    first = (fresh & (whole > 0)).to(tl.int32)
    second = (fresh & (whole == 0)).to(tl.int32)
    unmasked = tl.sum(first, 0)
    union = unmasked + tl.sum(second, 0)
    verdict = tally + ((tile // tiles_per_window) * tl.num_programs(1) + head) * 2
    if SAMPLE > 0:
        tl.atomic_add(verdict, union, sem="relaxed")
        tl.atomic_add(verdict + 1, tl.sum((row >= 0).to(tl.int32), 0), sem="relaxed")
    else:
        at = tl.where(whole > 0, tl.cumsum(first, 0), unmasked + tl.cumsum(second, 0)) - 1
        place = tl.cast(tile, tl.int64) * tl.num_programs(1) + head
        tl.store(rows + place * EDGES + at, row, mask=fresh)
        start = tl.load(blocks + row * 3, mask=fresh, other=0)
        tl.store(starts + place * EDGES + at, start, mask=fresh)
        tl.store(members + place * EDGES + at, bits, mask=fresh)
        tl.store(counts + place * 2, unmasked)
        tl.store(counts + place * 2 + 1, union)
        unfit = tl.load(infinite + head * num_rows + row, mask=fresh, other=0).to(tl.int32)
        if tl.max(unfit, 0) > 0:
            # No window has so many edges that it would still win.
            tl.atomic_max(verdict, 1 << 28, sem="relaxed")


def attend_union(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    unions: Unions,
    lookup: Tables,
    out: Tensor,
    lse: Tensor,
    num_queries: int,
    config: AttentionConfig,
) -> None:
    """Fill out and lse of the windows where the union way wins. Contiguous ``out`` and ``lse``."""
    heads, dim = q.shape[1:]
    group = heads // k.shape[1]
    fit = sizes(q.device)
    _attend[(triton.cdiv(num_queries, unions.queries), k.shape[1])](
        q, k, v, unions.rows, unions.starts, unions.members, unions.counts, unions.tally,
        lookup.blocks, lookup.positions, out, lse,
        num_queries, unions.window // unions.queries, heads,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], config.scale * LOG2E, LN2,
        GROUP=group, GROUP_PAD=triton.next_power_of_2(group), D=dim,
        D_PAD=padded(dim), QUERIES=unions.queries, EDGES=unions.rows.shape[2],
        BLOCK=config.block_size, KEYS=min(fit.union_keys, config.block_size), COST=unions.cost,
        num_warps=8, num_stages=fit.union_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_queries", "tiles_per_window"])
def _attend(
    q, k, v, rows, starts, members, counts, tally, blocks, positions, out, lse,
    num_queries, tiles_per_window, heads,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, scale_log2, ln2,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    QUERIES: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    COST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    if union_wins(tally, tile // tiles_per_window, head, COST):
        ROWS: tl.constexpr = QUERIES * GROUP_PAD
        PIECES: tl.constexpr = BLOCK // KEYS
        lane = tl.arange(0, ROWS)
        local = lane // GROUP_PAD
        member = lane % GROUP_PAD
        query = (tile * QUERIES + local).to(tl.int64)
        live = (query < num_queries) & (member < GROUP)
        q_head = head * GROUP + member
        d = tl.arange(0, D_PAD)
        key = tl.arange(0, KEYS)
        wide = live[:, None] & (d < D)[None, :]
        q_tile = tl.load(
            q + (query * stride_qt + q_head * stride_qh)[:, None] + d[None, :], mask=wide, other=0.0
        )
        position = tl.load(positions + query, mask=query < num_queries, other=0)
        place = tl.cast(tile, tl.int64) * tl.num_programs(1) + head
        unmasked = tl.load(counts + place * 2)
        union = tl.load(counts + place * 2 + 1)
        k += head * stride_kh
        v += head * stride_vh
        high = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        for at in range(unmasked * PIECES):
            piece = (at % PIECES) * KEYS
            start = tl.load(starts + place * EDGES + at // PIECES).to(tl.int64) + piece
            mask = (d < D)[None, :]
            k_tile = tl.load(k + (start + key)[:, None] * stride_kt + d[None, :], mask, 0.0)
            v_tile = tl.load(v + (start + key)[:, None] * stride_vt + d[None, :], mask, 0.0)
            s = tl.dot(q_tile, tl.trans(k_tile))
            high, mass, acc = _online(s, high, mass, acc, v_tile, scale_log2, False)
        for at in range(unmasked * PIECES, union * PIECES):
            piece = (at % PIECES) * KEYS
            row = tl.load(rows + place * EDGES + at // PIECES)
            bits = tl.load(members + place * EDGES + at // PIECES)
            start = tl.load(blocks + row * 3).to(tl.int64) + piece
            keys = tl.load(blocks + row * 3 + 1) - piece
            offset = tl.load(blocks + row * 3 + 2) + piece
            mask = (key < keys)[:, None] & (d < D)[None, :]
            k_tile = tl.load(k + (start + key)[:, None] * stride_kt + d[None, :], mask, 0.0)
            v_tile = tl.load(v + (start + key)[:, None] * stride_vt + d[None, :], mask, 0.0)
            s = tl.dot(q_tile, tl.trans(k_tile))
            # A row that did not choose the block sees none of its keys.
            chose = ((bits >> local) & 1) != 0
            visible = tl.where(chose, tl.minimum(position - offset + 1, keys), 0)
            s = tl.where(key[None, :] < visible[:, None], s, float("-inf"))
            high, mass, acc = _online(s, high, mass, acc, v_tile, scale_log2, True)
        seen = mass > 0
        inverse = 1.0 / tl.where(seen, mass, 1.0)
        flat = query * heads + q_head
        tl.store(
            out + flat[:, None] * D + d[None, :],
            (acc * inverse[:, None]).to(out.dtype.element_ty), mask=wide,
        )  # fmt: skip
        total = tl.where(seen, high + tl.math.log2(tl.where(seen, mass, 1.0)), float("-inf"))
        tl.store(lse + flat, total * ln2, mask=live)


@triton.jit
def _online(s, high, mass, acc, v_tile, scale_log2, MASKED: tl.constexpr):
    """One step of the online softmax. ``MASKED``: a row may have seen no key, and none now."""
    top = tl.maximum(high, tl.max(s, 1) * scale_log2)
    shift = top
    if MASKED:
        shift = tl.where(top == float("-inf"), 0.0, top)
    p = tl.math.exp2(s * scale_log2 - shift[:, None])
    kept = tl.math.exp2(high - shift)
    mass = mass * kept + tl.sum(p, 1)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * kept[:, None])
    return top, mass, acc
