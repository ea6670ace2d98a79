"""One attention layer: the indexer's projections, openmsa's selection and attention, or the model's
own path."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmsa.api import select_blocks, sparse_attention
from openmsa.contract import Documents, Selection
from openmsa.errors import UnsupportedProblem
from openmsa.integrations.transformers.framework import framework
from openmsa.integrations.transformers.rows import Rows

__all__ = ["attention", "postpone"]


@dataclass(eq=False)
class Postponed:
    """An indexer's call, until it is known which path the layer takes."""

    indexer: Any
    hidden_states: Tensor
    position_embeddings: tuple[Tensor, Tensor]
    cache: Any
    position_ids: Tensor

    def own_selection(self) -> Tensor:
        """The model's: int64 ``[B, Hkv, S, topk]``, blocks counted from the start of the row."""
        forward = type(self.indexer).forward
        found: Tensor = forward(
            self.indexer,
            self.hidden_states,
            self.position_embeddings,
            self.cache,
            self.position_ids,
        )
        return found

    def projections(self) -> tuple[Tensor, Tensor]:
        """``index_q [B, S, Hkv, Di]`` and ``index_k [B, S, 1, Di]``, normed and rotated."""
        it = self.indexer
        shape = (*self.hidden_states.shape[:2], -1, it.head_dim)
        q = it.q_norm(it.q_proj(self.hidden_states).view(shape)).transpose(1, 2)
        k = it.k_norm(it.k_proj(self.hidden_states).view(shape)).transpose(1, 2)
        cos, sin = (x[..., : it.head_dim] for x in self.position_embeddings)
        q, k = framework().modeling.apply_rotary_pos_emb(q, k, cos, sin)
        if self.cache is not None:
            k = self.cache.layers[it.layer_idx].update_index(k)
        return q.transpose(1, 2), k.transpose(1, 2)


def postpone(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    past_key_values: Any,
    position_ids: Tensor,
) -> Postponed:
    """Stands in for an indexer's ``forward``."""
    return Postponed(self, hidden_states, position_embeddings, past_key_values, position_ids)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    block_indices: Any = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls.

    ``query [B, Hq, S, D]``, ``key`` and ``value [B, Hkv, S, D]``; returns ``[B, S, Hq, D]`` and no
    weights. ``block_indices`` is None in dense layers.
    """
    docs: Documents | None = None
    spans: list[tuple[int, int, int]] = []
    if isinstance(attention_mask, Rows):
        if position_ids is None:
            position_ids = torch.arange(query.shape[2], device=query.device)[None]
        docs, spans = attention_mask.documents(position_ids.to(query.device))
        if docs is None:
            attention_mask = attention_mask.own_mask()
    if docs is None:
        mask = _own_mask(module, query, key, attention_mask, block_indices, position_ids)
        call = functools.partial(framework().attention["sdpa"], module)
        out, _ = call(query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return out, None
    if dropout:
        raise UnsupportedProblem(f"openmsa has no attention dropout; got {dropout}")
    if block_indices is None:
        return _dense(module, query, key, value, spans, scaling), None
    grid, backend = getattr(module, "_openmsa_options", ("document", "auto"))
    if grid == "row" and any(begin for _, begin, _ in spans):
        raise UnsupportedProblem(
            "packed rows have no row-anchored blocks: Transformers' own count would let a block "
            'span two documents; enable(model, grid="document") counts from each document'
        )
    selection = _select(module.indexer, block_indices, docs, backend)
    q, k, v = (docs.pack(x.transpose(1, 2)) for x in _same_dtype(query, key, value))
    found: Tensor = sparse_attention(q, k, v, selection, docs, scale=scaling, backend=backend)
    return docs.unpack(found), None


def _select(indexer: Any, block_indices: Any, docs: Documents, backend: str) -> Selection:
    if not isinstance(block_indices, Postponed):
        return Selection.from_transformers(block_indices, docs, block_size=indexer.block_size)
    with torch.no_grad():
        index_q, index_k = (docs.pack(x) for x in _same_dtype(*block_indices.projections()))
        return select_blocks(
            index_q,
            index_k,
            docs,
            topk=indexer.topk_blocks,
            block_size=indexer.block_size,
            local_blocks=indexer.local_blocks,
            backend=backend,
        )


def _same_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast would do before a product; RoPE in fp32 may have widened q and k."""
    kind = tensors[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[-1].dtype
    return tuple(x.to(dtype) for x in tensors)


def _own_mask(
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    block_indices: Any,
    position_ids: Tensor | None,
) -> Tensor | None:
    """The mask of the model's own path, a sparse layer's blocks included."""
    if block_indices is None:
        return mask
    if isinstance(block_indices, Postponed):
        position_ids = block_indices.position_ids
        block_indices = block_indices.own_selection()
    elif position_ids is None:
        position_ids = torch.arange(key.shape[2] - query.shape[2], key.shape[2])
    position_ids = position_ids.reshape(-1, query.shape[2]).expand(query.shape[0], -1)
    found: Tensor = module.indexer.build_block_mask(
        block_indices, mask, key.shape[2], query.dtype, query.device, position_ids.to(query.device)
    )
    return found


def _dense(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: list[tuple[int, int, int]],
    scaling: float,
) -> Tensor:
    """Causal attention within each document by PyTorch's own kernels: ``[B, S, Hq, D]``."""
    attend = functools.partial(
        framework().attention["sdpa"], module, attention_mask=None, dropout=0.0, scaling=scaling
    )
    if not any(begin for _, begin, _ in spans):
        # Whole rows: padding on the right lies in every real token's future.
        out: Tensor = attend(query, key, value)[0]
        return out
    parts = [
        attend(*(x[row : row + 1, :, begin:end] for x in (query, key, value)))[0]
        for row, begin, end in spans
    ]
    batch, _, length, _ = query.shape
    joined: Tensor = torch.cat([part[0] for part in parts])
    return joined.view(batch, length, *joined.shape[1:])
