"""Sparse attention backward, key-major: five GEMMs per key block and query tile.

With ``k2 = k * scale * log2(e)``, ``L = lse * log2(e)`` and fp32 accumulation throughout::

    P  = 2^(Q k2^T - L)              dV += P^T dO
    dS = P * (dO V^T - delta)        dK += scale * dS^T Q        dQ += scale * dS K

L and delta enter as the bias of their GEMM. Every key block has one owner and every sum one order,
so gradients are bitwise repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.backends.cpu.tiles import LOG2E, Tile, Windows, gather, head_rows, mask_future
from openmsa.contract.layout import Layout
from openmsa.contract.problem import AttentionConfig, Saved
from openmsa.contract.tasks import BackwardTasks

__all__ = ["backward", "backward_preprocess"]

_CHUNK_BYTES = 32 * 2**20


def backward_preprocess(out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor | None) -> Tensor:
    """``delta [Tq, Hq] = sum_d(out * d_out) - d_lse``, a few rows at a time."""
    delta = torch.empty_like(lse)
    step = max(1, _CHUNK_BYTES // max(1, out.shape[1] * out.shape[2] * lse.itemsize))
    for first in range(0, out.shape[0], step):
        rows = slice(first, first + step)
        product = out[rows].to(lse.dtype) * d_out[rows]
        torch.sum(product, -1, out=delta[rows])
    return delta if d_lse is None else delta.sub_(d_lse)


@dataclass(frozen=True, eq=False)
class _Head:
    """One KV head's operands. Rows are ``[T, group * D]``; keys and values ``[Tk, D]``."""

    q: Tensor
    d_out: Tensor
    k: Tensor
    k2: Tensor
    v: Tensor
    lse2: Tensor
    delta: Tensor


class _Scratch:
    """Buffers of one call, sized for the largest tile."""

    def __init__(self, q: Tensor, dtype: torch.dtype, group: int, windows: Windows) -> None:
        width = group * q.shape[2]
        self.raw = q.new_empty((windows.tile, width))
        self.q = q.new_empty((windows.tile, width), dtype=dtype)
        self.d_out = q.new_empty((windows.tile, width), dtype=dtype)
        scores = windows.tile * group * windows.schedule.block_size
        self.p = q.new_empty(scores, dtype=dtype)
        self.ds = q.new_empty(scores, dtype=dtype)


def backward(
    d_out: Tensor,
    delta: Tensor,
    saved: Saved,
    tasks: BackwardTasks | None,
    layout: Layout,
    config: AttentionConfig,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the input dtype; what ``needs`` (dq, dk and dv) leaves out is zero."""
    q, k, v = saved.q, saved.k, saved.v
    group, dim, dtype = q.shape[1] // k.shape[1], q.shape[2], saved.lse.dtype
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    dq[layout.num_queries if needs[0] else 0 :] = 0
    windows = Windows(saved.schedule, layout, group * dim * dtype.itemsize, group)
    scratch = _Scratch(q, dtype, group, windows)
    acc = q.new_empty((windows.size if needs[0] else 0, group * dim), dtype=dtype)
    acc_k, acc_v = (k.new_empty((k.shape[0], dim), dtype=dtype) for _ in range(2))
    for h in range(k.shape[1]):
        heads = slice(h * group, (h + 1) * group)
        keys = k[:, h].to(dtype).contiguous()
        operands = _Head(
            q=head_rows(q, h, group),
            d_out=head_rows(d_out.to(q.dtype), h, group),
            k=keys,
            k2=keys * (config.scale * LOG2E),
            v=v[:, h].to(dtype).contiguous(),
            lse2=saved.lse[:, heads] * LOG2E,
            delta=delta[:, heads].contiguous(),
        )
        acc_k.zero_()
        acc_v.zero_()
        for window, tiles in windows.tiles(h):
            acc.zero_()
            for tile in tiles:
                ds = _tile(operands, tile, scratch, acc_k, acc_v, needs[1])
                if needs[0]:
                    part = scratch.q[: tile.queries.numel()]
                    torch.mm(ds, operands.k[tile.keys], out=part.view(-1, dim))
                    acc.index_add_(0, tile.queries - window.start, part)
            if needs[0]:
                size = window.stop - window.start
                dq[window, heads] = acc[:size].mul_(config.scale).view(size, group, dim)
        dk[:, h] = acc_k.mul_(config.scale)
        dv[:, h] = acc_v
    return dq, dk, dv


def _tile(
    head: _Head, tile: Tile, scratch: _Scratch, acc_k: Tensor, acc_v: Tensor, need_kv: bool
) -> Tensor:
    """Add a tile to dK (unscaled) and dV; returns its dS (unscaled) ``[n * group, keys]``."""
    dim, index = head.k.shape[1], tile.queries
    q = gather(head.q, index, scratch.raw, scratch.q).view(-1, dim)
    d_out = gather(head.d_out, index, scratch.raw, scratch.d_out).view(-1, dim)
    group = q.shape[0] // index.numel()
    width = tile.keys.stop - tile.keys.start
    p = scratch.p[: q.shape[0] * width].view(-1, width)
    ds = scratch.ds[: q.shape[0] * width].view(-1, width)
    lse2 = head.lse2.index_select(0, index).neg_().view(-1, 1)
    torch.addmm(lse2, q, head.k2[tile.keys].t(), out=p)
    if tile.visible is not None:
        mask_future(p, tile.visible, group)
    p.exp2_()
    delta = head.delta.index_select(0, index).neg_().view(-1, 1)
    torch.addmm(delta, d_out, head.v[tile.keys].t(), out=ds)
    ds.mul_(p)
    if need_kv:
        acc_v[tile.keys].addmm_(p.t(), d_out)
        acc_k[tile.keys].addmm_(ds.t(), q)
    return ds
