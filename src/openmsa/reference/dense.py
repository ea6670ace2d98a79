"""The dense definition, for small problems: a mask over every (query, key) pair, then softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.contract.layout import Layout
from openmsa.contract.problem import accumulate_dtype

__all__ = ["dense_attention", "dense_mask"]


def dense_mask(indices: Tensor, layout: Layout, num_keys: int, block_size: int) -> Tensor:
    """bool ``[Hkv, Tq, num_keys]``: may the query read the key? O(T^2) memory."""
    total = indices.shape[1]
    mask = torch.zeros((indices.shape[0], total, num_keys), dtype=torch.bool, device=indices.device)
    offsets = layout.cu_seqlens_q.tolist()
    for entry, (start, length, _) in enumerate(layout.spans.tolist()):
        rows = slice(offsets[entry], offsets[entry + 1])
        position = torch.arange(length, device=indices.device)
        query = torch.arange(rows.start, rows.stop, device=indices.device) + length - rows.stop
        chosen = (indices[:, rows, :, None] == position // block_size).any(2)
        mask[:, rows, start : start + length] = chosen & (position <= query[:, None])
    return mask


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Masked softmax attention as eager PyTorch code writes it: products in the inputs' dtype,
    softmax in fp32 and its result rounded back. ``mask`` is ``[Hkv, Tq, Tk]``."""
    group = q.shape[1] // k.shape[1]
    dtype = accumulate_dtype(q.dtype)
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    mask = mask.repeat_interleave(group, dim=0)
    logits = (q.transpose(0, 1) @ k.transpose(1, 2)).to(dtype) * scale
    logits = logits.masked_fill(~mask, float("-inf"))
    lse = logits.logsumexp(-1)
    seen = mask.any(-1, keepdim=True)
    p = torch.where(seen, logits, 0.0).softmax(-1)
    p = torch.where(seen, p, 0.0).to(q.dtype)
    out = (p @ v).transpose(0, 1)
    lse = torch.where(seen.squeeze(-1), lse, float("-inf"))
    return out, lse.transpose(0, 1)
