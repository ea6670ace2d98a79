"""The baseline: dense causal attention by PyTorch, entry by entry."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from openmsa.cli.measure import Cost, gemm_rate, measure, useful_flops
from openmsa.cli.step import Operands

__all__ = ["LIMIT_SECONDS", "attend", "dense_step", "expected_seconds"]

LIMIT_SECONDS = 120.0
"""Dense attention that is expected to take longer is skipped unless it is asked for."""

_SHARE_OF_GEMM = 0.5
"""What dense attention reaches of a square GEMM, roughly: 0.55 on 2 cores of an EPYC 7003 in fp32
(2026-12), 0.7 on an H200 in bf16."""


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of queries that are the causal suffix of their keys.

    Args:
        q: ``[n, Hq, D]``.
        k: ``[m, Hkv, D]`` with m >= n.
        v: as k.

    Returns:
        ``[n, Hq, D]``. On a CPU the mask is a bool ``[n, m]``, never more.
    """
    n, m = q.shape[0], k.shape[0]
    square = n == m
    mask: Tensor | None = None
    if not square and q.device.type == "cuda":
        # A rule instead of a tensor, which keeps the flash kernel.
        mask = causal_lower_right(n, m)
    elif not square:
        mask = torch.ones((n, m), dtype=torch.bool, device=q.device).tril_(m - n)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=square, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


def dense_step(
    x: Operands, backward: bool = True, after: Callable[[int], None] = lambda pairs: None
) -> dict[str, Cost]:
    """Forward and backward of every entry, one entry at a time so that memory stays small.

    Args:
        x: the operands.
        backward: also the gradients.
        after: called with the number of causal pairs of each entry that is done.
    """
    offsets = x.docs.layout.cu_seqlens_q.tolist()
    costs: dict[str, Cost] = {}
    dk, dv = (torch.zeros_like(tensor) for tensor in (x.k, x.v))

    def count(stage: str, cost: Cost) -> None:
        costs[stage] = costs[stage].plus(cost) if stage in costs else cost

    for entry, (start, length, _) in enumerate(x.docs.layout.spans.tolist()):
        # Of more queries than keys the first see nothing.
        begin, end = max(offsets[entry], offsets[entry + 1] - length), offsets[entry + 1]
        if begin == end:
            continue
        rows, keys = slice(begin, end), slice(start, start + length)
        q, k, v = (
            tensor[part].detach().requires_grad_()
            for tensor, part in ((x.q, rows), (x.k, keys), (x.v, keys))
        )
        # Bound as defaults: the loop's names change before a late call would read them.
        out, cost = measure(x.docs.device, lambda q=q, k=k, v=v: attend(q, k, v))  # type: ignore[misc]
        count("forward", cost)
        if backward:
            (_, part_k, part_v), cost = measure(
                x.docs.device,
                lambda out=out, leaves=(q, k, v), d_out=x.d_out[rows]: torch.autograd.grad(  # type: ignore[misc]
                    out, leaves, d_out
                ),
            )
            dk[keys] += part_k
            dv[keys] += part_v
            count("backward", cost)
        n = end - begin
        after(n * length - n * (n - 1) // 2)
    return costs


def expected_seconds(x: Operands, causal: int, backward: bool = True) -> float:
    """How long :func:`dense_step` will take, from the speed of a matrix product here."""
    stages = ("forward", "backward") if backward else ("forward",)
    work = sum(useful_flops(stage, x.topology, causal, causal) for stage in stages)
    return work / (_SHARE_OF_GEMM * gemm_rate(x.docs.device, x.q.dtype))
