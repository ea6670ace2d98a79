"""Sparse attention backward in Triton, key-major.

A program keeps one key block with its dk and dv on chip and walks those queries of one window that
chose it. Keys are the rows of every product, so that P and dS need no transposition for dv and dk::

    S^T = K Q^T     P^T = 2^(scale2 S^T - lse2)     dV += P^T dO
    dP^T = V dO^T   dS^T = scale P^T (dP^T - delta) dK += dS^T Q     dQ += dS K

dq leaves through fp32 atomics. Windows of queries are the outer loop of the work order, so that a
window's dq stays in the L2 cache while it is summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.backends.triton.common import (
    LOG2E,
    lower_bound,
    padded,
    queries_per_tile,
    spread,
    tables,
)
from openmsa.contract.layout import Layout
from openmsa.contract.problem import AttentionConfig, Saved
from openmsa.contract.tasks import BackwardTasks

__all__ = ["backward", "backward_postprocess", "backward_preprocess"]

_SHORT, _LONG = 1024, 2048
"""Queries of a window up to 16,384 queries, and beyond. On an H200 (2026-12) with 512, 1,024 and
2,048 of them the kernel takes at 16,384 8.2, 7.7, 7.7 ms for a random selection and 8.2, 8.0, 8.2
for a coherent one, at 32,768 18.2, 16.9, 16.8 for a coherent one; 4,096 are slower everywhere."""


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
    """fp32 dq, dk, dv; what ``needs`` (dq, dk and dv) leaves out is zero."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (saved.q, saved.k, saved.v))
    d_out = d_out if d_out.stride(2) == 1 else d_out.contiguous()
    heads, dim = q.shape[1:]
    kv_heads = k.shape[1]
    group = heads // kv_heads
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    schedule = saved.schedule
    if not (schedule.num_rows and layout.num_queries):
        return dq, dk, dv
    lookup = tables(layout, config.block_size)
    group_pad = triton.next_power_of_2(group)
    window = _SHORT if layout.num_queries <= 16384 else _LONG
    grid = (schedule.num_rows, kv_heads, triton.cdiv(layout.num_queries, window))
    _grads[grid](
        q, k, v, d_out, saved.lse, delta, schedule.row_ptr, schedule.queries, lookup.positions,
        lookup.blocks, dq, dk, dv,
        schedule.num_rows, schedule.queries.shape[1], window, heads,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *d_out.stride()[:2],
        config.scale, config.scale * LOG2E, LOG2E,
        GROUP=group, GROUP_PAD=group_pad, D=dim, D_PAD=padded(dim),
        QUERIES=max(queries_per_tile(group), 16 // group_pad),
        BLOCK=config.block_size, NEED_Q=needs[0], NEED_KV=needs[1],
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return dq, dk, dv


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


@triton.jit(do_not_specialize=["num_rows", "edges", "window"])
def _grads(
    q, k, v, d_out, lse, delta, row_ptr, queries, positions, blocks, dq, dk, dv,
    num_rows, edges, window, heads,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh,
    scale, scale_log2, log2e,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    NEED_Q: tl.constexpr, NEED_KV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(row_ptr + head * (num_rows + 1) + row)
    end = tl.load(row_ptr + head * (num_rows + 1) + row + 1)
    readers = queries + head.to(tl.int64) * edges
    begin = lower_bound(readers, begin, end, tl.program_id(2) * window)
    end = lower_bound(readers, begin, end, (tl.program_id(2) + 1) * window)
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
        v_tile = tl.load(
            v + (start + key)[:, None] * stride_vt + head * stride_vh + d[None, :],
            mask=key_mask, other=0.0,
        )  # fmt: skip
        acc_k = tl.zeros([BLOCK, D_PAD], tl.float32)
        acc_v = tl.zeros([BLOCK, D_PAD], tl.float32)
        ROWS: tl.constexpr = QUERIES * GROUP_PAD
        lane = tl.arange(0, ROWS)
        member = lane % GROUP_PAD
        for at in range(begin, end, QUERIES):
            edge = at + tl.arange(0, QUERIES)
            inside = edge < end
            reader = tl.load(readers + edge, mask=inside, other=0)
            query = spread(reader, QUERIES, GROUP_PAD)
            live = spread(inside, QUERIES, GROUP_PAD) & (member < GROUP)
            wide = live[:, None] & (d < D)[None, :]
            q_head = head * GROUP + member
            line = query.to(tl.int64)
            q_tile = tl.load(
                q + (line * stride_qt + q_head * stride_qh)[:, None] + d[None, :],
                mask=wide, other=0.0,
            )  # fmt: skip
            g_tile = tl.load(
                d_out + (line * stride_gt + q_head * stride_gh)[:, None] + d[None, :],
                mask=wide, other=0.0,
            )  # fmt: skip
            flat = line * heads + q_head
            # A lane without a reader gets lse +inf, so that its P is exactly 0.
            lse2 = tl.load(lse + flat, mask=live, other=float("inf")) * log2e
            dot = tl.load(delta + flat, mask=live, other=0.0)
            visible = tl.minimum(tl.load(positions + reader) - position + 1, keys)
            seen = spread(visible, QUERIES, GROUP_PAD)
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
                tl.atomic_add(dq + flat[:, None] * D + d[None, :], part, mask=wide, sem="relaxed")
        if NEED_KV:
            kv = ((start + key) * tl.num_programs(1) + head)[:, None] * D + d[None, :]
            tl.atomic_add(dk + kv, acc_k, mask=key_mask, sem="relaxed")
            tl.atomic_add(dv + kv, acc_v, mask=key_mask, sem="relaxed")
