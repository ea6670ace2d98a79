"""The public functions. Names, shapes and errors here are the library's promise."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from openmsa import autograd, ops
from openmsa.contract.checks import check_attention, check_scale, check_selection_inputs
from openmsa.contract.documents import Documents
from openmsa.contract.problem import AttentionConfig, Problem
from openmsa.contract.selection import Selection
from openmsa.dispatch import choose as dispatch
from openmsa.errors import invalid_input
from openmsa.pipeline import attention_problem

__all__ = ["explain", "select_blocks", "sparse_attention"]


def select_blocks(
    index_q: Tensor,
    index_k: Tensor,
    docs: Documents,
    *,
    topk: int = 16,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    index_scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Selection:
    """Choose the key blocks each query reads, one list per KV head.

    The score of a block is the maximum of ``index_q . index_k`` over its keys that the query can
    see, accumulated in fp32 (fp64 for fp64 inputs). The own block is always chosen. Of equal scores
    the lower block id wins; NaN ranks as -inf. No gradient flows through the choice.
    Source: MiniMax Sparse Attention, arXiv 2606.13392, block-max index scores with top-k.

    Args:
        index_q: ``[Tq, Hkv, Di]``, one index query per KV head; bf16, fp16, fp32 or fp64.
        index_k: ``[Tk, 1, Di]`` or ``[Tk, Di]``, the single shared index key.
        docs: the packed documents. Rows past its token counts are padding.
        topk: blocks per query, 1..64, forced blocks included.
        block_size: keys per block, counted from each document's first key.
        init_blocks: leading blocks that are always chosen.
        local_blocks: trailing blocks that are always chosen; 1 is the own block.
        index_scale: scale of the logits in ``lse``; ``Di ** -0.5`` by default. It cannot change the
            choice.
        return_lse: also compute ``Selection.lse``.
        backend: ``"auto"``, ``"reference"``, ``"cpu"``, ``"triton"`` or ``"cute"``.

    Returns:
        A canonical :class:`Selection`: int32 ``[Hkv, Tq, topk]``.

    Raises:
        InvalidInput: shapes, dtypes, devices or sizes that do not fit together.
        UnsupportedProblem: the named backend cannot do this problem on this device.
    """
    dispatch.check_backend(backend)
    if isinstance(index_k, Tensor) and index_k.dim() == 3:
        if index_k.shape[1] != 1:
            invalid_input("index_k.shape[1]", "1 (one shared index key)", index_k.shape[1])
        index_k = index_k.squeeze(1)
    check_selection_inputs(
        index_q,
        index_k,
        docs,
        topk=topk,
        block_size=block_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
    )
    layout, sizes = ops.flatten(docs.layout)
    indices, lse = ops.select_blocks(
        index_q.detach(),
        index_k.detach(),
        layout,
        sizes,
        topk,
        block_size,
        [init_blocks, local_blocks],
        check_scale("index_scale", index_scale, index_q.shape[2]),
        return_lse,
        backend,
    )
    return Selection(indices, block_size, lse if return_lse else None)


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sel: Selection,
    docs: Documents,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor: ...


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sel: Selection,
    docs: Documents,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
    deterministic: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sel: Selection,
    docs: Documents,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of each query over its selected key blocks. Differentiable in q, k and v.

    ``out = softmax(scale * q k^T over the visible keys of the selected blocks) v``. Sums are
    accumulated in fp32 (fp64 for fp64 inputs), gradients included. A query without a visible key
    gives out 0, lse -inf and zero gradients; a key that nobody selected gets exactly zero.

    Args:
        q: ``[Tq, Hq, D]``; bf16, fp16, fp32 or fp64; any strides. Rows past ``docs.num_queries``
            are
            padding: their output and gradient are zero.
        k: ``[Tk, Hkv, D]``, q's dtype and device. ``Hkv`` divides ``Hq``.
        v: as k.
        sel: from :func:`select_blocks` or a ``Selection.from_*`` converter, for the same documents.
        docs: the packed documents.
        scale: softmax scale, ``D ** -0.5`` by default.
        return_lse: also return the log-sum-exp, so that partial results can be merged.
        deterministic: bitwise repeatable gradients; by default what
            ``torch.are_deterministic_algorithms_enabled()`` says.
        backend: ``"auto"``, ``"reference"``, ``"cpu"``, ``"triton"`` or ``"cute"``.

    Returns:
        out ``[Tq, Hq, D]`` in q's dtype, or ``(out, lse)`` with lse ``[Tq, Hq]`` in fp32 (fp64 for
        fp64 inputs), natural log, differentiable.

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit together.
        UnsupportedProblem: the named backend cannot do this problem on this device.
    """
    dispatch.check_backend(backend)
    check_attention(q, k, v, sel, docs)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    indices = sel.indices
    slack = q.shape[0] - indices.shape[1]
    if slack:
        indices = torch.nn.functional.pad(indices, (0, 0, 0, slack), value=-1)
    layout, sizes = ops.flatten(docs.layout)
    out, lse, _, _ = autograd.attention(
        q,
        k,
        v,
        indices,
        layout,
        sizes,
        sel.block_size,
        check_scale("scale", scale, q.shape[2]),
        deterministic,
        backend,
    )
    return (out, lse) if return_lse else out


def explain(q: Tensor, k: Tensor, v: Tensor, sel: Selection, docs: Documents) -> str:
    """Which backend runs each stage of this problem, and the reason against every other.

    Selection is judged for an index dim equal to q's head dim.

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit together.
    """
    check_attention(q, k, v, sel, docs)
    deterministic = torch.are_deterministic_algorithms_enabled()
    config = AttentionConfig(sel.block_size, 1.0, deterministic)
    attention = attention_problem(q, k, sel.indices, config)
    select = Problem(
        "select", q.device, q.dtype, k.shape[1], k.shape[1], q.shape[2], sel.block_size, sel.topk
    )
    return f"{dispatch.explain(select)}\n{dispatch.explain(attention)}"
