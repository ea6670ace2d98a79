"""Block scores and top-k selection.

Score of block ``b`` for query ``i`` and head ``h``::

    score[h, i, b] = max of index_q[i, h] . index_k[j] over keys j of b, position(j) <= position(i)

in fp32 (fp64 for fp64 inputs). A block is a candidate once it holds a visible key. Forced blocks
come first, then the higher score, then the lower id; NaN ranks as -inf, and a candidate that ranks
as -inf is still taken before a slot is left empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.contract.layout import Layout
from openmsa.contract.problem import SelectionConfig, accumulate_dtype
from openmsa.reference.walk import Chunk, chunks

__all__ = ["block_scores", "select_blocks"]

_CHUNK = 128


def index_logits(index_q: Tensor, index_k: Tensor, chunk: Chunk) -> Tensor:
    """``[H, n, len_k]`` unscaled logits of a chunk, -inf where the key is in the future."""
    dtype = accumulate_dtype(index_q.dtype)
    logits = torch.einsum(
        "nhd,kd->hnk", index_q[chunk.rows].to(dtype), index_k[chunk.keys].to(dtype)
    )
    future = torch.arange(logits.shape[2], device=logits.device) > chunk.positions[:, None]
    return logits.masked_fill(future, float("-inf"))


def block_scores(index_q: Tensor, index_k: Tensor, chunk: Chunk, block_size: int) -> Tensor:
    """``[H, n, blocks]`` block maxima of a chunk; -inf where a block holds no visible key."""
    return _block_max(index_logits(index_q, index_k, chunk), block_size)


def _block_max(logits: Tensor, block_size: int) -> Tensor:
    short = -logits.shape[2] % block_size
    padded = torch.nn.functional.pad(logits, (0, short), value=float("-inf"))
    return torch.unflatten(padded, 2, (-1, block_size)).amax(-1)


def select_blocks(
    index_q: Tensor, index_k: Tensor, layout: Layout, config: SelectionConfig
) -> tuple[Tensor, Tensor | None]:
    """Canonical selection and, on request, the selected lse.

    Args:
        index_q: ``[Tq, Hkv, Di]``; rows past the layout's queries select nothing.
        index_k: ``[Tk, Di]``.

    Returns:
        int32 ``[Hkv, Tq, topk]`` and ``[Hkv, Tq]`` (or None).
    """
    heads, total = index_q.shape[1], index_q.shape[0]
    indices = torch.full((heads, total, config.topk), -1, dtype=torch.int32, device=index_q.device)
    lse = index_q.new_full((heads, total), float("-inf"), dtype=accumulate_dtype(index_q.dtype))
    for chunk in chunks(layout, _CHUNK):
        logits = index_logits(index_q, index_k, chunk)
        scores = _block_max(logits, config.block_size)
        chosen = top_blocks(scores, chunk.positions, config)
        indices[:, chunk.rows] = chosen.int()
        if config.return_lse:
            lse[:, chunk.rows] = _selected_lse(logits, chosen, config)
    return indices, lse if config.return_lse else None


def top_blocks(scores: Tensor, positions: Tensor, config: SelectionConfig) -> Tensor:
    """int64 ``[H, n, topk]``: the canonical top-k of ``[H, n, blocks]`` block maxima."""
    blocks = torch.arange(scores.shape[2], device=scores.device)
    own = torch.div(positions.clamp(min=-1), config.block_size, rounding_mode="floor")[:, None]
    candidate = blocks <= own
    forced = candidate & ((blocks < config.init_blocks) | (blocks > own - config.local_blocks))
    rank = (candidate.long() + forced.long()).expand_as(scores)
    # NaN ranks as -inf; adding +0 turns -0 into +0.
    scores = torch.where(scores.isnan(), float("-inf"), scores) + 0.0
    # Two stable sorts, the later one by the stronger key: ids, then scores, then forced first.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    ranked = rank.gather(2, order).sort(dim=-1, descending=True, stable=True)
    chosen = order.gather(2, ranked.indices)
    nothing = scores.shape[2]
    chosen = torch.where(ranked.values > 0, chosen, nothing)[..., : config.topk]
    chosen = chosen.sort(dim=-1).values
    chosen = torch.where(chosen == nothing, -1, chosen)
    return torch.nn.functional.pad(chosen, (0, config.topk - chosen.shape[2]), value=-1)


def _selected_lse(logits: Tensor, chosen: Tensor, config: SelectionConfig) -> Tensor:
    """``log sum exp(scale * logits)`` over the visible keys of the chosen blocks, ``[H, n]``."""
    block = torch.arange(logits.shape[2], device=logits.device) // config.block_size
    member = (chosen[..., None, :] == block[:, None]).any(-1)
    return (logits * config.scale).masked_fill(~member, float("-inf")).logsumexp(-1)
