"""The baselines, by PyTorch and entry by entry: dense causal attention, and block selection by a
matrix product, block maxima and a top-k."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from openmsa.cli.measure import Cost, gemm_rate, measure, useful_flops
from openmsa.cli.step import Operands
from openmsa.cli.text import size
from openmsa.contract import Topology

__all__ = [
    "LIMIT_SECONDS",
    "attend",
    "baseline_step",
    "choose_blocks",
    "dense_step",
    "expected_seconds",
    "select_step",
    "why_not",
]

LIMIT_SECONDS = 120.0
"""Dense attention that is expected to take longer is skipped unless it is asked for."""

_SCORE_BYTES = 2**34
"""Selection by PyTorch keeps every score of a document; beyond this it has to be asked for."""

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


def choose_blocks(index_q: Tensor, index_k: Tensor, topology: Topology) -> Tensor:
    """Block selection the way a few lines of PyTorch do it, with every score in memory.

    Args:
        index_q: ``[n, Hkv, Di]`` of the causal suffix of the keys.
        index_k: ``[m, Di]`` with m >= n.
        topology: block size, top-k and forced blocks.

    Returns:
        int64 ``[Hkv, n, k]`` block ids in no order, ``k`` the smaller of top-k and the blocks of
        the keys. Blocks that a query cannot see fill its places where it sees fewer than ``k``.
    """
    n, m = index_q.shape[0], index_k.shape[0]
    scores = index_q.transpose(0, 1) @ index_k.t()
    position = torch.arange(m - n, m, device=index_k.device)[:, None]
    scores.masked_fill_(torch.arange(m, device=index_k.device) > position, float("-inf"))
    count = -(-m // topology.block_size)
    padded = pad(scores, (0, count * topology.block_size - m), value=float("-inf"))
    best = padded.unflatten(2, (count, -1)).amax(3)
    block = torch.arange(count, device=index_k.device)
    own = torch.div(position, topology.block_size, rounding_mode="floor")
    forced = (block < topology.init_blocks) | (block > own - topology.local_blocks)
    best.masked_fill_(forced & (block <= own), float("inf"))
    chosen: Tensor = best.topk(min(topology.topk, count), dim=2).indices
    return chosen


def select_step(x: Operands) -> dict[str, Cost]:
    """:func:`choose_blocks` of every entry."""
    offsets = x.docs.layout.cu_seqlens_q.tolist()

    def choose_all() -> None:
        for entry, (start, length, _) in enumerate(x.docs.layout.spans.tolist()):
            begin, end = max(offsets[entry], offsets[entry + 1] - length), offsets[entry + 1]
            if begin < end:
                keys = x.index_k[start : start + length, 0]
                choose_blocks(x.index_q[begin:end], keys, x.topology)

    _, cost = measure(x.docs.device, choose_all)
    return {"select": cost}


def baseline_step(x: Operands, stage: str) -> dict[str, Cost]:
    """What a stage is compared with: :func:`select_step` or :func:`dense_step`."""
    return select_step(x) if stage == "select" else dense_step(x, backward=stage != "forward")


def why_not(x: Operands, stage: str, causal: int) -> str:
    """Why the baseline is better left out, or an empty string."""
    asked = "--against dense runs it all the same"
    if stage == "select":
        longest = max((length for _, length, _ in x.docs.layout.spans.tolist()), default=0)
        needed = 2 * x.topology.kv_heads * longest**2 * x.q.itemsize
        return "" if needed <= _SCORE_BYTES else f"it would hold about {size(needed)}; {asked}"
    expected = expected_seconds(x, causal, backward=stage != "forward")
    if expected <= LIMIT_SECONDS:
        return ""
    return f"a pass would take about {expected:.0f} s; {asked}"
