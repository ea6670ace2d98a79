"""Sparse attention forward and backward, query by query over the selected blocks.

Forward, over the visible keys ``j`` of the selected blocks of query ``i``::

    s = scale * q . k          lse = log sum exp(s)          out = sum exp(s - lse) v

Backward, with ``P = exp(s - lse)``::

    delta = sum_d(out * d_out) - d_lse
    dS = P * (d_out . v - delta)
    dq = scale * dS k          dk = scale * dS^T q (over the group's heads)          dv = P^T d_out

``d_lse`` joins ``delta`` because d lse / d s = P and d out / d s = P * (v - out): both enter dS as
a term ``P *`` (something constant along the row). A query with no visible key has out 0, lse -inf
and zero gradients. The forward is differentiable by autograd, so the written-out backward can be
checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.layout import Layout
from openmsa.contract.problem import AttentionConfig, Saved, accumulate_dtype
from openmsa.contract.tasks import BackwardTasks
from openmsa.reference.walk import Chunk, chunks

__all__ = ["backward", "backward_postprocess", "backward_preprocess", "forward"]

_CHUNK = 32


def gather_rows(indices: Tensor, chunk: Chunk, block_size: int) -> tuple[Tensor, Tensor]:
    """Packed key rows ``[n, topk * block]`` of one head's chunk, and which of them are visible."""
    blocks = indices[chunk.rows].long()
    inside = torch.arange(block_size, device=blocks.device)
    positions = (blocks[:, :, None] * block_size + inside).flatten(1)
    selected = (blocks >= 0).repeat_interleave(block_size, dim=1)
    visible = selected & (positions <= chunk.positions[:, None])
    length = chunk.keys.stop - chunk.keys.start
    visible &= positions < length
    return chunk.keys.start + positions.clamp(0, max(length - 1, 0)), visible


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    schedule: KeySchedule | None,
    layout: Layout,
    config: AttentionConfig,
) -> tuple[Tensor, Tensor]:
    """``out [Tq, Hq, D]`` in q's dtype and ``lse [Tq, Hq]``; ``schedule`` is not read."""
    group = q.shape[1] // k.shape[1]
    dtype = accumulate_dtype(q.dtype)
    outs, lses = [], []
    for chunk in chunks(layout, _CHUNK):
        heads = [
            _attend(
                q[chunk.rows, h * group : (h + 1) * group],
                k[:, h],
                v[:, h],
                indices[h],
                chunk,
                config,
            )
            for h in range(k.shape[1])
        ]
        outs.append(torch.cat([out for out, _ in heads], 1))
        lses.append(torch.cat([lse for _, lse in heads], 1))
    slack = q.shape[0] - layout.num_queries
    outs.append(q.new_zeros((slack, *q.shape[1:])))
    lses.append(q.new_full((slack, q.shape[1]), float("-inf"), dtype=dtype))
    return torch.cat(outs), torch.cat(lses)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, chunk: Chunk, config: AttentionConfig
) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(q.dtype)
    if chunk.keys.stop == chunk.keys.start:
        return torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"), dtype=dtype)
    rows, visible = gather_rows(indices, chunk, config.block_size)
    # What is not visible must not be read at all: a zero weight does not silence a NaN.
    keys, values = (x[rows].to(dtype).masked_fill(~visible[..., None], 0.0) for x in (k, v))
    logits = torch.einsum("ngd,nkd->ngk", q.to(dtype), keys) * config.scale
    logits = logits.masked_fill(~visible[:, None], float("-inf"))
    # The shift by the row maximum cancels, so no gradient needs to pass through it.
    shift = logits.detach().amax(-1, keepdim=True)
    shift = torch.where(shift == float("-inf"), 0.0, shift)
    p = (logits - shift).exp()
    total = p.sum(-1, keepdim=True)
    seen = total > 0
    safe = torch.where(seen, total, 1.0)
    out = torch.einsum("ngk,nkd->ngd", p / safe, values)
    lse = torch.where(seen, shift + safe.log(), float("-inf"))
    return out.to(q.dtype), lse.squeeze(-1)


def backward_preprocess(out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor | None) -> Tensor:
    """``delta [Tq, Hq] = sum_d(out * d_out) - d_lse`` in the accumulation dtype."""
    delta = (out.to(lse.dtype) * d_out.to(lse.dtype)).sum(-1)
    return delta if d_lse is None else delta - d_lse.to(lse.dtype)


def backward(
    d_out: Tensor,
    delta: Tensor,
    saved: Saved,
    tasks: BackwardTasks | None,
    layout: Layout,
    config: AttentionConfig,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the accumulation dtype. ``needs`` spares no work here: all three come."""
    q, k, v = saved.q, saved.k, saved.v
    group = q.shape[1] // k.shape[1]
    dtype = saved.lse.dtype
    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
    for chunk in chunks(layout, _CHUNK):
        if chunk.keys.stop == chunk.keys.start:
            continue
        for h in range(k.shape[1]):
            heads = (chunk.rows, slice(h * group, (h + 1) * group))
            rows, visible = gather_rows(saved.indices[h], chunk, config.block_size)
            keys, values = (
                x[rows, h].to(dtype).masked_fill(~visible[..., None], 0.0) for x in (k, v)
            )
            blind = ~visible.any(-1)[:, None, None]
            queries, grads = (x[heads].to(dtype).masked_fill(blind, 0.0) for x in (q, d_out))
            s = torch.einsum("ngd,nkd->ngk", queries, keys) * config.scale
            p = (s - saved.lse[heads][..., None]).exp().masked_fill(~visible[:, None], 0.0)
            dp = torch.einsum("ngd,nkd->ngk", grads, values)
            ds = p * (dp - delta[heads][..., None]) * config.scale
            ds = ds.masked_fill(~visible[:, None], 0.0)
            dq[heads] = torch.einsum("ngk,nkd->ngd", ds, keys)
            dk[:, h].index_add_(
                0, rows.flatten(), torch.einsum("ngk,ngd->nkd", ds, queries).flatten(0, 1)
            )
            dv[:, h].index_add_(
                0, rows.flatten(), torch.einsum("ngk,ngd->nkd", p, grads).flatten(0, 1)
            )
    return dq, dk, dv


def backward_postprocess(
    dq: Tensor, dk: Tensor, dv: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The accumulators in the input dtype."""
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
