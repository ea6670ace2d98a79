"""The three torch operators: schemas, fake kernels, and the way into :mod:`openmsa.pipeline`.

An operator takes tensors and plain numbers, so records are flattened here and nowhere else:
``layout`` is ``[cu_seqlens_q, spans, ranges]`` and ``sizes`` is
``[num_queries, num_keys, max_seqlen_q, max_seqlen_k]`` of :class:`openmsa.contract.Layout`. The
work of a direction is one operator, not one per stage: what lies between its stages is workspace,
which must not become a value that a compiler may keep, copy or hand to another call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openmsa import pipeline
from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.layout import Layout
from openmsa.contract.problem import AttentionConfig, Saved, SelectionConfig, accumulate_dtype

__all__ = ["LIBRARY", "attention_backward", "attention_forward", "flatten", "select_blocks"]

LIBRARY = torch.library.Library("openmsa", "DEF")
"""Registered through the library object rather than ``custom_op``, whose first call imports all of
TorchDynamo: two seconds that an eager program need not pay."""


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]

    def run(first: Tensor, *rest: Any) -> Any:
        if first.device.type != "cuda":
            return function(first, *rest)
        # Kernels launch on the current device, which need not be the tensors' own.
        with torch.cuda.device(first.device):
            return function(first, *rest)

    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"openmsa::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.openmsa, name).default


def flatten(layout: Layout) -> tuple[list[Tensor], list[int]]:
    """The tensors and sizes that stand for ``layout`` in an operator's arguments."""
    tensors = [layout.cu_seqlens_q, layout.spans, layout.ranges]
    return tensors, [
        layout.num_queries,
        layout.num_keys,
        layout.max_seqlen_q,
        layout.max_seqlen_k,
    ]


def _layout(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Layout:
    """The inverse of :func:`flatten`."""
    cu_seqlens_q, spans, ranges = tensors
    num_queries, num_keys, max_seqlen_q, max_seqlen_k = sizes
    return Layout(cu_seqlens_q, spans, ranges, num_queries, num_keys, max_seqlen_q, max_seqlen_k)


def _select_blocks(
    index_q: Tensor,
    index_k: Tensor,
    layout: Sequence[Tensor],
    sizes: Sequence[int],
    topk: int,
    block_size: int,
    forced_blocks: Sequence[int],
    scale: float,
    return_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    config = SelectionConfig(
        topk, block_size, forced_blocks[0], forced_blocks[1], scale, return_lse
    )
    indices, lse = pipeline.select(index_q, index_k, _layout(layout, sizes), config, backend)
    if lse is None:
        lse = index_q.new_empty(0, dtype=accumulate_dtype(index_q.dtype))
    return indices, lse


def _fake_select_blocks(
    index_q: Tensor,
    index_k: Tensor,
    layout: Sequence[Tensor],
    sizes: Sequence[int],
    topk: int,
    block_size: int,
    forced_blocks: Sequence[int],
    scale: float,
    return_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    rows = (index_q.shape[1], index_q.shape[0])
    indices = index_q.new_empty((*rows, topk), dtype=torch.int32)
    dtype = accumulate_dtype(index_q.dtype)
    return indices, index_q.new_empty(rows if return_lse else (0,), dtype=dtype)


select_blocks = _define(
    "select_blocks(Tensor index_q, Tensor index_k, Tensor[] layout, SymInt[] sizes, int topk, "
    "int block_size, int[] forced_blocks, float scale, bool return_lse, str backend) "
    "-> (Tensor indices, Tensor lse)",
    _select_blocks,
    _fake_select_blocks,
)


def _attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    layout: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    scale: float,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = AttentionConfig(block_size, scale, deterministic)
    out, lse, schedule = pipeline.forward(q, k, v, indices, _layout(layout, sizes), config, backend)
    return out, lse, schedule.row_ptr, schedule.queries


def _fake_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    layout: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    scale: float,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, queries, topk = indices.shape
    rows = _layout(layout, sizes).block_capacity(block_size)
    return (
        q.new_empty(q.shape),
        q.new_empty(q.shape[:2], dtype=accumulate_dtype(q.dtype)),
        indices.new_empty((heads, rows + 1)),
        indices.new_empty((heads, queries * topk)),
    )


attention_forward = _define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor indices, Tensor[] layout, "
    "SymInt[] sizes, int block_size, float scale, bool deterministic, str backend) "
    "-> (Tensor out, Tensor lse, Tensor row_ptr, Tensor queries)",
    _attention_forward,
    _fake_attention_forward,
)


def _attention_backward(
    d_out: Tensor,
    d_lse: Tensor,
    saved: Sequence[Tensor],
    layout: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    scale: float,
    deterministic: bool,
    needs: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse, indices, row_ptr, queries = saved
    return pipeline.backward(
        d_out,
        d_lse,
        Saved(q, k, v, out, lse, indices, KeySchedule(row_ptr, queries, block_size)),
        _layout(layout, sizes),
        AttentionConfig(block_size, scale, deterministic),
        (needs[0], needs[1]),
        backend,
    )


def _fake_attention_backward(
    d_out: Tensor,
    d_lse: Tensor,
    saved: Sequence[Tensor],
    layout: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    scale: float,
    deterministic: bool,
    needs: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = saved[:3]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


attention_backward = _define(
    "attention_backward(Tensor d_out, Tensor d_lse, Tensor[] saved, Tensor[] layout, "
    "SymInt[] sizes, int block_size, float scale, bool deterministic, bool[] needs, str backend) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    _attention_backward,
    _fake_attention_backward,
)
