"""Checks of user tensors; each message names the argument, what was expected and what came."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openmsa.contract.documents import Documents
from openmsa.contract.selection import Selection
from openmsa.contract.topology import check_forced_blocks
from openmsa.errors import invalid_input

__all__ = ["check_attention", "check_scale", "check_selection_inputs"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MAX_GROUP = 64


def check_attention(q: Tensor, k: Tensor, v: Tensor, sel: Selection, docs: Documents) -> None:
    """Raise :class:`InvalidInput` unless the operands of sparse attention fit together."""
    _check_record("sel", sel, Selection, "use Selection.from_indices")
    _check_record("docs", docs, Documents, "use a Documents.from_* constructor")
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_float(name, x, 3, "[tokens, heads, head_dim]")
        _check_device(name, x, docs)
        if x.dtype != q.dtype:
            invalid_input(f"{name}.dtype", f"q's dtype ({q.dtype})", x.dtype)
    if k.shape != v.shape:
        invalid_input("v", f"k's shape {tuple(k.shape)}", f"shape {tuple(v.shape)}")
    if q.shape[2] != k.shape[2]:
        invalid_input("k.shape[2]", f"q's head_dim ({q.shape[2]})", k.shape[2])
    if q.shape[2] < 1:
        invalid_input("q.shape[2] (head_dim)", "1 or more", q.shape[2])
    if k.shape[1] < 1 or q.shape[1] < 1 or q.shape[1] % k.shape[1]:
        invalid_input("q.shape[1]", f"a multiple of k's heads ({k.shape[1]})", q.shape[1])
    if q.shape[1] // k.shape[1] > _MAX_GROUP:
        invalid_input("query heads per KV head", f"1..{_MAX_GROUP}", q.shape[1] // k.shape[1])
    _check_rows("q", q, docs.num_queries, "queries")
    _check_rows("k", k, docs.num_keys, "keys")
    if sel.num_kv_heads != k.shape[1]:
        invalid_input(
            "sel",
            f"one list per KV head ({k.shape[1]})",
            f"{sel.num_kv_heads}",
        )
    if sel.num_queries < docs.num_queries or sel.num_queries > q.shape[0]:
        invalid_input(
            "sel",
            f"{docs.num_queries} queries, as the documents have",
            sel.num_queries,
            "was it made for other documents?",
        )
    if sel.indices.dtype != torch.int32:
        invalid_input(
            "sel.indices",
            "int32",
            sel.indices.dtype,
            "use Selection.from_indices",
        )
    _check_device("sel.indices", sel.indices, docs)


def check_selection_inputs(
    index_q: Tensor,
    index_k: Tensor,
    docs: Documents,
    *,
    topk: int,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
) -> None:
    """Raise :class:`InvalidInput` unless the index operands and sizes fit together.

    ``index_k`` is ``[Tk, Di]`` here; the caller drops the single head.
    """
    _check_record("docs", docs, Documents, "use a Documents.from_* constructor")
    if block_size < 1:
        invalid_input("block_size", "a positive integer", block_size)
    check_forced_blocks(topk, init_blocks, local_blocks)
    _check_float("index_q", index_q, 3, "[queries, kv_heads, index_dim]")
    _check_float("index_k", index_k, 2, "[keys, index_dim] or [keys, 1, index_dim]")
    if index_k.dtype != index_q.dtype:
        invalid_input("index_k.dtype", f"index_q's dtype ({index_q.dtype})", index_k.dtype)
    if index_k.shape[1] != index_q.shape[2] or index_q.shape[2] < 1:
        invalid_input("index_k", f"index_q's index_dim ({index_q.shape[2]})", index_k.shape[1])
    if index_q.shape[1] < 1:
        invalid_input("index_q.shape[1] (kv_heads)", "1 or more", index_q.shape[1])
    for name, x in (("index_q", index_q), ("index_k", index_k)):
        _check_device(name, x, docs)
    _check_rows("index_q", index_q, docs.num_queries, "queries")
    _check_rows("index_k", index_k, docs.num_keys, "keys")


def check_scale(name: str, scale: float | None, width: int) -> float:
    """``scale``, or ``width ** -0.5`` for None; it must be a positive finite number."""
    if scale is None:
        return 1.0 / math.sqrt(width)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        invalid_input(name, "a Python number", type(scale).__name__)
    if not (math.isfinite(scale) and scale > 0):
        invalid_input(name, "a positive finite number", scale)
    return float(scale)


def _check_record(name: str, value: object, kind: type, hint: str) -> None:
    if not isinstance(value, kind):
        invalid_input(name, f"a {kind.__name__}", type(value).__name__, hint)


def _check_float(name: str, x: Tensor, rank: int, form: str) -> None:
    if not isinstance(x, Tensor):
        invalid_input(name, f"a tensor of shape {form}", type(x).__name__)
    if x.dim() != rank:
        invalid_input(name, f"shape {form}", f"shape {tuple(x.shape)}")
    if x.dtype not in _FLOATS:
        invalid_input(f"{name}.dtype", "bfloat16, float16, float32 or float64", x.dtype)


def _check_device(name: str, x: Tensor, docs: Documents) -> None:
    if x.device != docs.device:
        invalid_input(f"{name}.device", f"the documents' device ({docs.device})", x.device)


def _check_rows(name: str, x: Tensor, rows: int, kind: str) -> None:
    if x.shape[0] < rows:
        invalid_input(
            f"{name}.shape[0]",
            f"at least {rows} {kind}, as the documents have",
            x.shape[0],
        )
