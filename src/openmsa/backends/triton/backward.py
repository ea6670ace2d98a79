"""Sparse attention backward in Triton, key-major.

A program keeps one key block with its dk and dv on chip and walks those queries of one window that
chose it. Keys are the rows of every product, so that P and dS need no transposition for dv and dk::

    S^T = K Q^T     P^T = 2^(scale2 S^T - lse2)     dV += P^T dO
    dP^T = V dO^T   dS^T = scale P^T (dP^T - delta) dK += dS^T Q     dQ += dS K

dq leaves through fp32 atomics. Windows of queries are the outer loop of the work order, so that a
window's dq stays in the L2 cache while it is summed. The repeatable variant adds nothing to dq:
each program writes its part of a query's dq into that query's slot for the block, other programs of
the same launch add up the slots of a window in order once it is complete, and the windows after it
reuse the memory. dk and dv are added window after window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.backends.triton.common import (
    LOG2E,
    lower_bound,
    padded,
    spread,
    tables,
)
from openmsa.backends.triton.schedule import key_schedule
from openmsa.backends.triton.sizes import sizes
from openmsa.contract.layout import Layout
from openmsa.contract.problem import AttentionConfig, Saved
from openmsa.contract.tasks import BackwardTasks

__all__ = ["backward", "backward_postprocess", "backward_preprocess"]

_SHORT, _LONG = 1024, 2048
"""Queries of a window up to 16,384 queries, and beyond. On an H200 (2026-12) with 512, 1,024 and
2,048 of them an earlier version of the kernel took at 16,384 8.2, 7.7, 7.7 ms for a random
selection and 8.2, 8.0, 8.2 for a coherent one, at 32,768 18.2, 16.9, 16.8 for a coherent one; 4,096
were slower everywhere."""

_SLOT_BYTES = 2**30
"""Memory for the parts of dq that the repeatable variant holds at a time."""

_SUM_QUERIES = 16
"""Queries whose parts of dq one program adds up."""


def backward_preprocess(out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor | None) -> Tensor:
    """fp32 ``delta [Tq, Hq] = sum_d(out * d_out) - d_lse``."""
    total, heads, dim = out.shape
    delta = torch.empty((total, heads), dtype=torch.float32, device=out.device)
    if not delta.numel():
        return delta
    out = out if out.stride(2) == 1 else out.contiguous()
    has_lse = d_lse is not None
    d_lse = lse if d_lse is None else d_lse
    rows = 32
    _delta[(triton.cdiv(total * heads, rows),)](
        out, d_out, d_lse, delta, total * heads, heads,
        *out.stride()[:2], *d_out.stride(), *d_lse.stride(),
        D=dim, D_PAD=triton.next_power_of_2(dim), ROWS=rows, HAS_LSE=has_lse, num_warps=4,
    )  # fmt: skip
    return delta


def backward(
    d_out: Tensor,
    delta: Tensor,
    saved: Saved,
    tasks: BackwardTasks | None,
    layout: Layout,
    config: AttentionConfig,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 dq, dk, dv; what ``needs`` (dq, dk and dv) leaves out is zero.

    ``config.deterministic`` makes repeated calls equal to the bit.
    """
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (saved.q, saved.k, saved.v))
    d_out = d_out if d_out.stride(2) == 1 else d_out.contiguous()
    total, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    schedule = saved.schedule
    work = schedule.num_rows > 0 and layout.num_queries > 0
    # The repeatable variant writes every query of the layout, and adds to none.
    written = layout.num_queries if work and config.deterministic and needs[0] else 0
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    for sums in (dq[written:], dk, dv):
        sums.zero_()
    if not work:
        return dq, dk, dv
    window = _SHORT if layout.num_queries <= 16384 else _LONG
    lookup, fit = tables(layout, config.block_size), sizes(q.device)
    group_pad = triton.next_power_of_2(group)
    tile_heads = min(group_pad, fit.grads_rows)
    edges = schedule.queries.shape[1]
    tensors = (
        q, k, v, d_out, saved.lse, delta, schedule.row_ptr, schedule.queries, lookup.positions,
        lookup.blocks, dq, dk, dv, schedule.num_rows, edges, total, heads,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *d_out.stride()[:2],
        config.scale, config.scale * LOG2E, LOG2E,
    )  # fmt: skip
    sizes_of = {
        "GROUP": group, "HEADS": tile_heads, "SPLIT": group_pad // tile_heads,
        "QUERIES": fit.grads_rows // tile_heads, "D": dim, "D_PAD": padded(dim),
        "KV_HEADS": kv_heads, "BLOCK": config.block_size, "NEED_Q": needs[0], "NEED_KV": needs[1],
        "num_warps": fit.grads_warps, "num_stages": fit.grads_stages,
    }  # fmt: skip
    if not config.deterministic:
        grid = (schedule.num_rows, kv_heads, triton.cdiv(layout.num_queries, window))
        _grads[grid](*tensors, window, **sizes_of)
        return dq, dk, dv
    if schedule.slots is None:
        schedule = key_schedule(saved.indices, layout, config.block_size)
    ring = _ring(saved.indices, schedule.num_rows, group * dim, layout.num_queries, needs[0])
    tickets = ring.steps * schedule.num_rows
    if needs[0]:
        adding = triton.cdiv(ring.window, _SUM_QUERIES)
        tickets = (ring.steps + ring.lag) * (schedule.num_rows + adding)
    _grads_in_order[(tickets,)](
        *tensors, saved.indices.contiguous(), schedule.slots, ring.slots, ring.counters,
        ring.window, ring.steps, ring.units, ring.lag, layout.num_queries,
        TOPK=saved.indices.shape[2], SUM_QUERIES=_SUM_QUERIES, **sizes_of,
    )  # fmt: skip
    return dq, dk, dv


@dataclass(frozen=True, eq=False)
class _Ring:
    """Memory for parts of dq. A unit is one KV head's share of a window.

    Attributes:
        window: queries.
        units: those that ``slots`` holds.
        lag: units between the programs that write a unit's slots and those that add them up.
        steps: units of the whole call.
        slots: fp32 ``[units, window, topk, group * D]``.
        counters: int32: the next ticket; for each row of each KV head the edges that dk and dv
            hold; for each step the programs that have written its slots, then those that have added
            them up.
    """

    window: int
    units: int
    lag: int
    steps: int
    slots: Tensor
    counters: Tensor


def _ring(indices: Tensor, rows: int, width: int, num_queries: int, needs_q: bool) -> _Ring:
    heads, _, topk = indices.shape
    window = min(_SHORT, num_queries)
    # At least four units, so that no program waits for sums that have only just begun.
    while window > 128 and 4 * window * topk * width * 4 > _SLOT_BYTES:
        window //= 2
    steps = int(triton.cdiv(num_queries, window)) * heads
    units = min(max(4, _SLOT_BYTES // (window * topk * width * 4)), steps)
    held = units if needs_q else 0
    slots = torch.empty((held, window, topk, width), dtype=torch.float32, device=indices.device)
    counters = torch.zeros(1 + heads * rows + 2 * steps, dtype=torch.int32, device=indices.device)
    # The later the sums, the fewer of them wait for a long row; the memory is needed again, too.
    return _Ring(window, units, units * 3 // 4, steps, slots, counters)


def backward_postprocess(
    dq: Tensor, dk: Tensor, dv: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The fp32 accumulators in the input dtype."""
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


@triton.jit(do_not_specialize=["rows"])
def _delta(
    out, d_out, d_lse, delta, rows, heads,
    stride_ot, stride_oh, stride_gt, stride_gh, stride_gd, stride_lt, stride_lh,
    D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD)
    query = row // heads
    head = row % heads
    live = (row < rows)[:, None] & (d < D)[None, :]
    o = tl.load(
        out + (query * stride_ot + head * stride_oh)[:, None] + d[None, :], mask=live, other=0.0
    )
    g = tl.load(
        d_out + (query * stride_gt + head * stride_gh)[:, None] + d[None, :] * stride_gd,
        mask=live, other=0.0,
    )  # fmt: skip
    found = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if HAS_LSE:
        found -= tl.load(d_lse + query * stride_lt + head * stride_lh, mask=row < rows, other=0.0)
    tl.store(delta + row, found, mask=row < rows)


@triton.jit(do_not_specialize=["num_rows", "edges", "total", "window"])
def _grads(
    q, k, v, d_out, lse, delta, row_ptr, queries, positions, blocks, dq, dk, dv,
    num_rows, edges, total, heads,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh,
    scale, scale_log2, log2e, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    NEED_Q: tl.constexpr, NEED_KV: tl.constexpr,
):  # fmt: skip
    """One program for a key block and a window of queries; dq, dk and dv by atomics."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.program_id(2) * window
    begin = tl.load(row_ptr + head * (num_rows + 1) + row)
    end = tl.load(row_ptr + head * (num_rows + 1) + row + 1)
    readers = queries + head.to(tl.int64) * edges
    begin = lower_bound(readers, begin, end, first)
    end = lower_bound(readers, begin, end, first + window)
    if begin < end:
        acc_k, acc_v = _walk(
            q, k, v, d_out, lse, delta, readers, positions, blocks, dq, readers, row, head,
            begin, end, 0, heads,
            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh,
            scale, scale_log2, log2e,
            GROUP, HEADS, SPLIT, QUERIES, D, D_PAD, BLOCK, NEED_Q, NEED_KV, 0,
        )  # fmt: skip
        if NEED_KV:
            _add_block(acc_k, acc_v, dk, dv, blocks, row, head, KV_HEADS, D, D_PAD, BLOCK)


@triton.jit(
    do_not_specialize=[
        "num_rows", "edges", "total", "window", "steps", "units", "lag", "num_queries",
    ]
)  # fmt: skip
def _grads_in_order(
    q, k, v, d_out, lse, delta, row_ptr, queries, positions, blocks, dq, dk, dv,
    num_rows, edges, total, heads,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh,
    scale, scale_log2, log2e,
    indices, slot_of, slots, counters, window, steps, units, lag, num_queries,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    NEED_Q: tl.constexpr, NEED_KV: tl.constexpr,
    TOPK: tl.constexpr, SUM_QUERIES: tl.constexpr,
):  # fmt: skip
    """``_grads`` with one order for every sum: parts of dq go into slots, and after the programs of
    a step come those that add up the slots of ``lag`` steps before."""
    sums = tl.cdiv(window, SUM_QUERIES) if NEED_Q else 0
    # In the order of tickets a program waits only for programs that have begun.
    ticket = tl.atomic_add(counters, 1)
    step = ticket // (num_rows + sums)
    row = ticket % (num_rows + sums)
    row_turns = counters + 1
    written = row_turns + KV_HEADS * num_rows
    summed = written + steps
    if row >= num_rows:
        step -= lag
        if step >= 0:
            _await(written + step, num_rows)
            head = step % KV_HEADS
            part = step // KV_HEADS
            first = _window_of(part, steps // KV_HEADS) * window
            local = (row - num_rows) * SUM_QUERIES
            last = tl.minimum(tl.minimum(first + window, num_queries), first + local + SUM_QUERIES)
            unit = slots + (step % units).to(tl.int64) * window * (TOPK * GROUP * D)
            _sum_slots(
                indices + head.to(tl.int64) * total * TOPK, unit, dq + head * (GROUP * D),
                first, first + local, last, heads * D, TOPK, GROUP * D,
            )  # fmt: skip
            tl.debug_barrier()
            tl.atomic_add(summed + step, 1, sem="release")
    elif step < steps:
        row = num_rows - 1 - row
        head = step % KV_HEADS
        part = step // KV_HEADS
        windows = steps // KV_HEADS
        first = _window_of(part, windows) * window
        row_begin = tl.load(row_ptr + head * (num_rows + 1) + row)
        row_end = tl.load(row_ptr + head * (num_rows + 1) + row + 1)
        readers = queries + head.to(tl.int64) * edges
        begin = lower_bound(readers, row_begin, row_end, first)
        end = lower_bound(readers, begin, row_end, first + window)
        if begin < end:
            if NEED_Q and step >= units:
                _await(summed + step - units, sums)
            unit = slots + (step % units).to(tl.int64) * window * (TOPK * GROUP * D)
            acc_k, acc_v = _walk(
                q, k, v, d_out, lse, delta, readers, positions, blocks, unit,
                slot_of + head.to(tl.int64) * edges, row, head, begin, end, first, heads,
                stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt,
                stride_gh, scale, scale_log2, log2e,
                GROUP, HEADS, SPLIT, QUERIES, D, D_PAD, BLOCK, NEED_Q, NEED_KV, TOPK,
            )  # fmt: skip
            if NEED_KV:
                turn = row_turns + head * num_rows + row
                low = (part + 1) // 2
                high = windows - part // 2
                _await(
                    turn,
                    lower_bound(readers, row_begin, row_end, low * window) - row_begin
                    + row_end - lower_bound(readers, row_begin, row_end, high * window),
                )  # fmt: skip
                _add_block(acc_k, acc_v, dk, dv, blocks, row, head, KV_HEADS, D, D_PAD, BLOCK)
                tl.debug_barrier()
                tl.atomic_add(turn, end - begin, sem="release")
        tl.debug_barrier()
        tl.atomic_add(written + step, 1, sem="release")


@triton.jit
def _walk(
    q, k, v, d_out, lse, delta, readers, positions, blocks, dq, slot_of, row, head,
    begin, end, first, heads,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh,
    scale, scale_log2, log2e,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
    NEED_Q: tl.constexpr, NEED_KV: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """dk and dv of a key block from the queries of ``readers[begin:end]``; their parts of dq are
    added to ``dq [Tq, Hq, D]``, or with ``TOPK`` written to the slots ``dq`` of a window that
    begins at query ``first``. A tile is ``QUERIES`` queries with ``HEADS`` heads each, or one query
    of which it takes ``SPLIT`` turns."""
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
    v_tile = tl.load(
        v + (start + key)[:, None] * stride_vt + head * stride_vh + d[None, :],
        mask=key_mask, other=0.0,
    )  # fmt: skip
    acc_k = tl.zeros([BLOCK, D_PAD], tl.float32)
    acc_v = tl.zeros([BLOCK, D_PAD], tl.float32)
    lane = tl.arange(0, QUERIES * HEADS)
    for at in range(begin * SPLIT, end * SPLIT, QUERIES):
        edge = at // SPLIT + tl.arange(0, QUERIES)
        member = lane % HEADS + at % SPLIT * HEADS
        inside = edge < end
        reader = tl.load(readers + edge, mask=inside, other=0)
        query = spread(reader, QUERIES, HEADS)
        live = spread(inside, QUERIES, HEADS) & (member < GROUP)
        wide = live[:, None] & (d < D)[None, :]
        q_head = head * GROUP + member
        line = query.to(tl.int64)
        q_tile = tl.load(
            q + (line * stride_qt + q_head * stride_qh)[:, None] + d[None, :], mask=wide, other=0.0
        )
        g_tile = tl.load(
            d_out + (line * stride_gt + q_head * stride_gh)[:, None] + d[None, :],
            mask=wide, other=0.0,
        )  # fmt: skip
        flat = line * heads + q_head
        # A lane without a reader gets lse +inf, so that its P is exactly 0.
        lse2 = tl.load(lse + flat, mask=live, other=float("inf")) * log2e
        dot = tl.load(delta + flat, mask=live, other=0.0)
        visible = tl.minimum(tl.load(positions + reader) - position + 1, keys)
        seen = spread(visible, QUERIES, HEADS)
        s = tl.dot(k_tile, tl.trans(q_tile))
        p = tl.math.exp2(s * scale_log2 - lse2[None, :])
        p = tl.where(key[:, None] < seen[None, :], p, 0.0)
        dp = tl.dot(v_tile, tl.trans(g_tile))
        ds = (p * (dp - dot[None, :]) * scale).to(q_tile.dtype)
        if NEED_KV:
            acc_v = tl.dot(p.to(g_tile.dtype), g_tile, acc_v)
            acc_k = tl.dot(ds, q_tile, acc_k)
        if NEED_Q:
            part = tl.dot(tl.trans(ds), k_tile)
            if TOPK:
                slot = tl.load(slot_of + edge, mask=inside, other=0).to(tl.int32)
                place = (reader - first) * TOPK + slot
                place = spread(place, QUERIES, HEADS).to(tl.int64) * GROUP + member
                sums = dq + place[:, None] * D + d[None, :]
                tl.store(sums, part, mask=wide, eviction_policy="evict_first")
            else:
                tl.atomic_add(dq + flat[:, None] * D + d[None, :], part, mask=wide, sem="relaxed")
    return acc_k, acc_v


@triton.jit
def _add_block(
    acc_k, acc_v, dk, dv, blocks, row, head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a block's sums to dk and dv."""
    start = tl.load(blocks + row * 3).to(tl.int64)
    d = tl.arange(0, D_PAD)
    key = tl.arange(0, BLOCK)
    mask = (key < tl.load(blocks + row * 3 + 1))[:, None] & (d < D)[None, :]
    place = ((start + key) * KV_HEADS + head)[:, None] * D + d[None, :]
    tl.atomic_add(dk + place, acc_k, mask=mask, sem="relaxed")
    tl.atomic_add(dv + place, acc_v, mask=mask, sem="relaxed")


@triton.jit
def _window_of(part, windows):
    """Windows from both ends in turn, since the first of a document have few but long rows."""
    return tl.where(part % 2 == 0, part // 2, windows - 1 - part // 2)


@triton.jit
def _sum_slots(
    indices, slots, dq, first, begin, end, stride_dq, TOPK: tl.constexpr, WIDTH: tl.constexpr
):
    """dq of one KV head's queries ``[begin, end)``: their slots in order, those in use."""
    CHUNK: tl.constexpr = 2048
    slot = tl.arange(0, triton.next_power_of_2(TOPK))
    chosen = tl.load(indices + begin.to(tl.int64) * TOPK + slot, mask=slot < TOPK, other=-1)
    for local in range(end - begin):
        query = begin + local
        used = tl.sum((chosen >= 0).to(tl.int32), 0)
        coming = tl.minimum(query + 1, end - 1).to(tl.int64)
        chosen = tl.load(indices + coming * TOPK + slot, mask=slot < TOPK, other=-1)
        parts = slots + (query - first).to(tl.int64) * (TOPK * WIDTH)
        for base in tl.static_range(0, WIDTH, CHUNK):
            at = base + tl.arange(0, CHUNK)
            found = tl.zeros([CHUNK], tl.float32)
            for i in tl.static_range(TOPK):
                part = parts + i * WIDTH + at
                live = at < tl.where(i < used, WIDTH, 0)
                found += tl.load(part, mask=live, other=0.0, eviction_policy="evict_first")
            tl.store(dq + query.to(tl.int64) * stride_dq + at, found, mask=at < WIDTH)


@triton.jit
def _await(counter, wanted):
    """Return once ``counter`` has reached ``wanted``, with all that was released with it."""
    while tl.atomic_add(counter, 0, sem="acquire") < wanted:
        pass
