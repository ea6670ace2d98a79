"""Sparse attention forward in Triton, key-major.

A program keeps one key block's K and V and walks the queries that chose it. What it finds for a
query is softmax over one block only; it goes to the query's slot for that block as a normalised
partial output and its base-2 log-sum-exp, and a second kernel merges a query's slots::

    lse2 = log2 sum_s 2^(lse2_s)          out = sum_s 2^(lse2_s - lse2) out_s

Slots exist for one window of queries at a time, which bounds the workspace for any token count.
Windows whose neighbouring queries agree go another way, see :mod:`openmsa.backends.triton.union`;
which windows do is known on the device only, so both kernels are launched for all of them and one
returns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.backends.triton.common import (
    LN2,
    LOG2E,
    lower_bound,
    padded,
    queries_per_tile,
    spread,
    tables,
)
from openmsa.backends.triton.schedule import key_schedule
from openmsa.backends.triton.sizes import sizes
from openmsa.backends.triton.union import (
    attend_union,
    survey,
    union_queries,
    union_wins,
)
from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.layout import Layout
from openmsa.contract.problem import AttentionConfig

__all__ = ["forward"]

_SLOT_BYTES = 2**30
"""Partial outputs held at a time. Measured on an H200 at 16,384 tokens: 4,096 queries at a time (1
GiB) cost no more than all at once; 1,024 at a time cost 30% for want of work per launch."""

_CHUNK = 512
"""Queries of one program; a block that more queries chose is shared by several programs."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    schedule: KeySchedule,
    layout: Layout,
    config: AttentionConfig,
) -> tuple[Tensor, Tensor]:
    """``out [Tq, Hq, D]`` in q's dtype and fp32 ``lse [Tq, Hq]``; see :mod:`openmsa.pipeline`."""
    total, heads, dim = q.shape
    kv_heads, topk = k.shape[1], indices.shape[2]
    group = heads // kv_heads
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((total, heads), dtype=torch.float32, device=q.device)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    indices = indices.contiguous()
    if not layout.num_queries:
        return out.zero_(), lse.fill_(float("-inf"))
    lookup = tables(layout, config.block_size)
    if schedule.slots is None:
        schedule = key_schedule(indices, layout, config.block_size)
    window = max(1, min(total, _SLOT_BYTES // (topk * heads * dim * q.itemsize)))
    shape = {"GROUP": group, "D": dim, "D_PAD": padded(dim), "TOPK": topk}
    tally, cost = indices, 0
    per_tile = union_queries(group, topk)
    if per_tile:
        window = triton.cdiv(window, per_tile) * per_tile
        unions = survey(indices, v, layout, lookup, config.block_size, group, window)
        tally, cost = unions.tally, unions.cost
        attend_union(q, k, v, unions, lookup, out, lse, layout.num_queries, config)
    slots = torch.empty((window, kv_heads, topk, group, dim), dtype=q.dtype, device=q.device)
    slot_lse = torch.empty((window, kv_heads, topk, group), dtype=torch.float32, device=q.device)
    for first in range(0, layout.num_queries, window):
        last = min(first + window, layout.num_queries)
        grid = (schedule.num_rows, kv_heads, triton.cdiv(last - first, _CHUNK))
        if schedule.num_rows:
            _attend[grid](
                q, k, v, schedule.row_ptr, schedule.queries, schedule.slots, lookup.positions,
                lookup.blocks, tally, slots, slot_lse,
                first, last, first // window, schedule.num_rows, schedule.queries.shape[1],
                *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
                config.scale * LOG2E,
                **shape,
                GROUP_PAD=triton.next_power_of_2(group),
                QUERIES=max(queries_per_tile(group), 16 // triton.next_power_of_2(group)),
                BLOCK=config.block_size, CHUNK=_CHUNK,
                COST=cost,
                num_warps=sizes(q.device).attend_warps,
            )  # fmt: skip
        _merge[(last - first, kv_heads)](
            indices, tally, slots, slot_lse, out, lse, first, first // window, total, heads, LN2,
            **shape, GROUP_PAD=triton.next_power_of_2(group),
            TOPK_PAD=triton.next_power_of_2(topk),
            COST=cost, num_warps=4,
        )  # fmt: skip
    out[layout.num_queries :] = 0
    lse[layout.num_queries :] = float("-inf")
    return out, lse


@triton.jit(do_not_specialize=["first", "last", "window", "num_rows", "edges"])
def _attend(
    q, k, v, row_ptr, queries, slot_of, positions, blocks, tally, slots, slot_lse,
    first, last, window, num_rows, edges,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    scale_log2,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TOPK: tl.constexpr,
    GROUP_PAD: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, COST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    if COST > 0 and union_wins(tally, window, head, COST):
        return
    begin = tl.load(row_ptr + head * (num_rows + 1) + row)
    end = tl.load(row_ptr + head * (num_rows + 1) + row + 1)
    readers = queries + head.to(tl.int64) * edges
    slot_of += head.to(tl.int64) * edges
    begin = lower_bound(readers, begin, end, first) + tl.program_id(2) * CHUNK
    end = tl.minimum(lower_bound(readers, begin, end, last), begin + CHUNK)
    if begin < end:
        start = tl.load(blocks + row * 3).to(tl.int64)
        keys = tl.load(blocks + row * 3 + 1)
        position = tl.load(blocks + row * 3 + 2)
        d = tl.arange(0, D_PAD)
        key = tl.arange(0, BLOCK)
        key_mask = (key < keys)[:, None] & (d < D)[None, :]
        k_tile = tl.load(
            k + (start + key)[:, None] * stride_kt + head * stride_kh + d[None, :],
            mask=key_mask, other=0.0,
        )  # fmt: skip
        # Transposed out here, it enters shared memory once and not in every turn of the loop.
        k_t = tl.trans(k_tile)
        v_rows = v + start * stride_vt + head * stride_vh
        v_at = v_rows + key[:, None].to(tl.int64) * stride_vt + d[None, :]
        v_tile = tl.load(v_at, mask=key_mask, other=0.0)
        # Only queries inside the block need a mask; they come first, so that two walks will do.
        edge = begin + tl.arange(0, CHUNK)
        reader = tl.load(readers + edge, mask=edge < end, other=0)
        within = (tl.load(positions + reader) < position + BLOCK) & (edge < end)
        seen_whole = tl.max(tl.where(within, edge + 1, begin), 0)
        if seen_whole > begin:
            finite = tl.abs(v_tile.to(tl.float32)) < float("inf")
            infinite_rows = tl.where(tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0, keys, 0)
            _walk(
                q, positions, readers, slot_of, slots, slot_lse, k_t,
                tl.where(finite, v_tile, 0.0), v_rows, infinite_rows,
                begin, seen_whole, first, head, position, keys,
                stride_qt, stride_qh, stride_vt, scale_log2,
                GROUP, D, D_PAD, TOPK, GROUP_PAD, QUERIES, BLOCK, True,
            )  # fmt: skip
            v_tile = tl.load(v_at, mask=key_mask, other=0.0)
            begin = seen_whole
        _walk(
            q, positions, readers, slot_of, slots, slot_lse, k_t, v_tile, v_rows, 0,
            begin, end, first, head, position, keys, stride_qt, stride_qh, stride_vt, scale_log2,
            GROUP, D, D_PAD, TOPK, GROUP_PAD, QUERIES, BLOCK, False,
        )  # fmt: skip


@triton.jit
def _walk(
    q, positions, readers, slot_of, slots, slot_lse, k_t, v_tile, v_rows, infinite_rows,
    begin, end, first, head, position, keys, stride_qt, stride_qh, stride_vt, scale_log2,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TOPK: tl.constexpr,
    GROUP_PAD: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend from the queries of ``readers[begin:end]`` to one block, into their slots.

    Triton's own pipeline would issue a tile's loads at the end of a turn and await them at the
    start of the next (H200, Triton 3.6: 3.7 ms at 16,384 tokens instead of 3.1). Here a tile is
    loaded in registers one turn ahead, and its queries' numbers two.
    """
    member = tl.arange(0, QUERIES * GROUP_PAD) % GROUP_PAD
    q_head = head * GROUP + member
    d = tl.arange(0, D_PAD)
    key = tl.arange(0, BLOCK)
    edge = begin + tl.arange(0, QUERIES)
    reader = tl.load(readers + edge, mask=edge < end, other=0)
    coming = tl.load(readers + edge + QUERIES, mask=edge + QUERIES < end, other=0)
    q_next = _queries(q, reader, q_head, stride_qt, stride_qh, GROUP, GROUP_PAD, QUERIES, D, D_PAD)
    for at in tl.range(begin, end, QUERIES, num_stages=1):
        edge = at + tl.arange(0, QUERIES)
        inside = edge < end
        live = spread(inside, QUERIES, GROUP_PAD) & (member < GROUP)
        q_tile = q_next
        q_next = _queries(
            q, coming, q_head, stride_qt, stride_qh, GROUP, GROUP_PAD, QUERIES, D, D_PAD
        )
        query = spread(reader, QUERIES, GROUP_PAD)
        if MASKED:
            visible = tl.minimum(tl.load(positions + reader) - position + 1, keys)
            visible = spread(visible, QUERIES, GROUP_PAD)
        reader = coming
        coming = tl.load(readers + edge + 2 * QUERIES, mask=edge + 2 * QUERIES < end, other=0)
        slot = tl.load(slot_of + edge, mask=inside, other=0)
        s = tl.dot(q_tile, k_t)
        if MASKED:
            s = tl.where(key[None, :] < visible[:, None], s, float("-inf"))
        high = tl.max(s, 1) * scale_log2
        p = tl.math.exp2(s * scale_log2 - high[:, None])
        mass = tl.sum(p, 1)
        part = tl.dot(p.to(v_tile.dtype), v_tile) * (1.0 / mass)[:, None]
        if MASKED:
            # Zero times infinity is NaN: what is not finite joins only those that see it.
            for i in range(infinite_rows):
                value = tl.load(v_rows + i * stride_vt + d, mask=d < D, other=0.0).to(tl.float32)
                value = tl.where(tl.abs(value) < float("inf"), 0.0, value)
                part += tl.where((i < visible)[:, None], value[None, :], 0.0)
        slot = spread(slot.to(tl.int32), QUERIES, GROUP_PAD)
        place = ((query - first).to(tl.int64) * tl.num_programs(1) + head) * TOPK + slot
        place = place * GROUP + member
        tl.store(
            slots + place[:, None] * D + d[None, :], part.to(slots.dtype.element_ty),
            mask=live[:, None] & (d < D)[None, :],
        )  # fmt: skip
        tl.store(slot_lse + place, high + tl.math.log2(mass), mask=live)


@triton.jit
def _queries(
    q, reader, q_head, stride_qt, stride_qh,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """``[QUERIES * GROUP_PAD, D_PAD]`` of q: the heads of ``reader``, zeros where padded."""
    d = tl.arange(0, D_PAD)
    at = spread(reader, QUERIES, GROUP_PAD).to(tl.int64) * stride_qt + q_head * stride_qh
    if GROUP == GROUP_PAD and D == D_PAD:
        tile = tl.load(q + at[:, None] + d[None, :])
    else:
        member = tl.arange(0, QUERIES * GROUP_PAD) % GROUP_PAD
        mask = (member < GROUP)[:, None] & (d < D)[None, :]
        tile = tl.load(q + at[:, None] + d[None, :], mask=mask, other=0.0)
    return tile


@triton.jit(do_not_specialize=["first", "window", "total"])
def _merge(
    indices, tally, slots, slot_lse, out, lse, first, window, total, heads, ln2,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TOPK: tl.constexpr,
    GROUP_PAD: tl.constexpr, TOPK_PAD: tl.constexpr, COST: tl.constexpr,
):  # fmt: skip
    local = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if COST > 0 and union_wins(tally, window, head, COST):
        return
    query = first + local
    member = tl.arange(0, GROUP_PAD)
    slot = tl.arange(0, TOPK_PAD)
    d = tl.arange(0, D_PAD)
    chosen = tl.load(
        indices + (head.to(tl.int64) * total + query) * TOPK + slot, mask=slot < TOPK, other=-1
    )
    base = (local * tl.num_programs(1) + head) * TOPK
    parts = tl.load(
        slot_lse + (base + slot)[:, None] * GROUP + member[None, :],
        mask=(chosen >= 0)[:, None] & (member < GROUP)[None, :], other=float("-inf"),
    )  # fmt: skip
    high = tl.max(parts, 0)
    shift = tl.where(high == float("-inf"), 0.0, high)
    mass = tl.sum(tl.math.exp2(parts - shift[None, :]), 0)
    empty = mass == 0
    lse2 = tl.where(empty, float("-inf"), shift + tl.math.log2(tl.where(empty, 1.0, mass)))
    live = (member < GROUP)[:, None] & (d < D)[None, :]
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    count = tl.sum((chosen >= 0).to(tl.int32), 0)
    inverse = 1.0 / tl.where(empty, 1.0, mass)
    for s in range(count):
        part_lse = tl.load(
            slot_lse + (base + s) * GROUP + member, mask=member < GROUP, other=float("-inf")
        )
        weight = tl.math.exp2(part_lse - shift) * inverse
        part = tl.load(
            slots + ((base + s) * GROUP + member)[:, None] * D + d[None, :], mask=live, other=0.0
        )
        acc += weight[:, None] * part.to(tl.float32)
    place = query * heads + head * GROUP + member
    tl.store(out + place[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=live)
    tl.store(lse + place, lse2 * ln2, mask=member < GROUP)
