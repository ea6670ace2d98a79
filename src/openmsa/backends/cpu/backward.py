"""Sparse attention backward, key-major: five GEMMs per key block and query tile.

With ``k2 = k * scale * log2(e)``, ``L = lse * log2(e)`` and fp32 accumulation throughout::

    P  = 2^(Q k2^T - L)              dV += P^T dO
    dS = P * (dO V^T - delta)        dK += scale * dS^T Q        dQ += scale * dS K

L and delta enter as the bias of their GEMM. Every key block has one owner and every sum one order,
so gradients are bitwise repeatable.
"""

from __future__ import annotations

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
from openmsa.contract.layout import Layout
from openmsa.contract.problem import AttentionConfig, Saved
from openmsa.contract.tasks import BackwardTasks

__all__ = ["backward", "backward_preprocess"]

_CHUNK_BYTES = 4 * 2**20

_SUM_BYTES = 256 * 2**20
"""Most bytes for the lanes' own sums of dk and dv."""


def backward_preprocess(out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor | None) -> Tensor:
    """``delta [Tq, Hq] = sum_d(out * d_out) - d_lse``, a few rows at a time."""
    delta = torch.empty_like(lse)
    step = max(1, _CHUNK_BYTES // max(1, out.shape[1] * out.shape[2] * lse.itemsize))

    def chunk(first: int) -> None:
        rows = slice(first, first + step)
        torch.sum(out[rows].to(lse.dtype) * d_out[rows], -1, out=delta[rows])

    run_jobs([partial(chunk, first) for first in range(0, out.shape[0], step)])
    return delta if d_lse is None else delta.sub_(d_lse)


@dataclass(frozen=True, eq=False)
class _Head:
    """One KV head: keys, scaled keys and values ``[Tk, D]``, and the tiles."""

    k: Tensor
    k2: Tensor
    v: Tensor
    tiles: list[list[Tile]]


@dataclass(frozen=True, eq=False)
class _Rows:
    """One window's operands: ``[size, group * D]``, and ``[size, group]`` for the two biases."""

    q: Tensor
    d_out: Tensor
    minus_lse2: Tensor
    minus_delta: Tensor


class _Scratch:
    """Buffers of one thread, sized for the largest tile and window."""

    def __init__(
        self, q: Tensor, dtype: torch.dtype, group: int, windows: Windows, need_q: bool
    ) -> None:
        width = group * q.shape[2]
        scores = windows.tile * group * windows.schedule.block_size
        self.rows_q, self.rows_d_out, self.acc, self.q, self.d_out, self.p, self.ds = carve(
            q,
            dtype,
            (windows.size, width),
            (windows.size, width),
            (windows.size if need_q else 0, width),
            (windows.tile, width),
            (windows.tile, width),
            (scores,),
            (scores,),
        )


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
    dq = advise_huge_pages(torch.empty_like(q, memory_format=torch.contiguous_format))
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    dq[layout.num_queries if needs[0] else 0 :] = 0
    windows = Windows(saved.schedule, layout, group * dim * dtype.itemsize, group)
    scratch = PerThread(lambda: _Scratch(q, dtype, group, windows, needs[0]))
    # A lane is a run of windows that one job works through. Lanes of one head share its keys, so
    # each has its own sums.
    most = max(1, _SUM_BYTES // max(1, 2 * k.numel() * dtype.itemsize))
    lanes = min(most, windows.parts, max(1, len(windows.bounds)))
    sums = advise_huge_pages(k.new_empty((2, k.shape[1], lanes, k.shape[0], dim), dtype=dtype))
    heads: dict[int, _Head] = {}

    def prepare(h: int) -> None:
        keys = k[:, h].to(dtype).contiguous()
        values = v[:, h].to(dtype).contiguous()
        sums[:, h].zero_()
        tiles = apart_from_future(windows.tiles(h), layout, keys, values)
        heads[h] = _Head(keys, keys * (config.scale * LOG2E), values, tiles)

    def differentiate(h: int, lane: int) -> None:
        head, own = heads[h], scratch.get()
        q_heads = slice(h * group, (h + 1) * group)
        for w in range(lane, len(windows.bounds), lanes):
            window = windows.bounds[w]
            rows = _Rows(
                head_rows(q, window, h, group, own.rows_q),
                head_rows(d_out, window, h, group, own.rows_d_out),
                saved.lse[window, q_heads] * -LOG2E,
                delta[window, q_heads].neg(),
            )
            own.acc.zero_()
            for tile in head.tiles[w]:
                ds = _tile(head, rows, tile, own, sums[:, h, lane] if needs[1] else None)
                if needs[0]:
                    # The tile's queries were read for the last time, so their buffer is free.
                    add_product(own.acc, tile, ds, head.k[tile.keys], own.q)
            if needs[0]:
                size = window.stop - window.start
                part = own.acc[:size].mul_(config.scale)
                dq[window, q_heads] = part.view(size, group, dim)

    def finish(h: int) -> None:
        dk[:, h] = sums[0, h].sum(0).mul_(config.scale)
        dv[:, h] = sums[1, h].sum(0)

    run_jobs([partial(prepare, h) for h in range(k.shape[1])])
    run_jobs([partial(differentiate, h, i) for i in range(lanes) for h in range(k.shape[1])])
    run_jobs([partial(finish, h) for h in range(k.shape[1])])
    return dq, dk, dv


def _tile(head: _Head, rows: _Rows, tile: Tile, scratch: _Scratch, sums: Tensor | None) -> Tensor:
    """Add a tile to ``sums [2, Tk, D]`` (dK unscaled, dV) where given; returns its dS (unscaled)
    ``[n * group, keys]``."""
    dim, index = head.k.shape[1], tile.queries
    q = take(rows.q, tile, scratch.q).view(-1, dim)
    d_out = take(rows.d_out, tile, scratch.d_out).view(-1, dim)
    group = q.shape[0] // index.numel()
    width = tile.keys.stop - tile.keys.start
    p = scratch.p[: q.shape[0] * width].view(-1, width)
    ds = scratch.ds[: q.shape[0] * width].view(-1, width)
    bias = rows.minus_lse2.index_select(0, index).view(-1, 1)
    torch.addmm(bias, q, head.k2[tile.keys].t(), out=p)
    if tile.visible is not None:
        mask_future(p, tile.visible, group)
    p.exp2_()
    bias = rows.minus_delta.index_select(0, index).view(-1, 1)
    torch.addmm(bias, d_out, head.v[tile.keys].t(), out=ds)
    ds.mul_(p)
    if sums is not None:
        sums[1, tile.keys].addmm_(p.t(), d_out)
        sums[0, tile.keys].addmm_(ds.t(), q)
    return ds
