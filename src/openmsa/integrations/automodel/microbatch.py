"""What AutoModel's MSA layers call, through openmsa: one microbatch's documents, a layer's
selection and its attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from openmsa.api import select_blocks, sparse_attention
from openmsa.contract import Documents, Selection
from openmsa.errors import UnsupportedProblem, invalid_input
from openmsa.integrations.automodel.framework import framework

__all__ = ["hooks", "replaying"]

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

# Keyed by the offsets rather than by the microbatch: FSDP2 hands each block a copy of the
# microbatch, and the copies share their integer tensors.
_DOCUMENTS = WeakIdKeyDictionary()
# The selections made here, with the version they had: those need not be made canonical again.
_CANONICAL = WeakIdKeyDictionary()


def documents(msa: Any) -> Documents:
    """The documents of a microbatch, read from its offsets with one device-to-host copy, once."""
    offsets = msa.cu_seqlens
    docs: Documents | None = _DOCUMENTS.get(offsets)
    if docs is None:
        docs = _DOCUMENTS[offsets] = Documents.from_cu_seqlens(offsets)
    return docs


def hooks(backend: str) -> tuple[Callable[..., Any], ...]:
    """``prepare_selection``, ``select_blocks`` and ``sparse_attention`` on one backend."""

    def prepare_selection(self: Any) -> None:
        """Read the documents now: inside a checkpointed block the copy to the host would be an
        operation of the forward that its recompute lacks."""
        _init_blocks(self)
        documents(self)

    def select(self: Any, index_q: Tensor, index_k: Tensor) -> Tensor:
        """``index_q [T, 4, 128]`` and ``index_k [T, 1, 128]`` to int32 ``[4, T, 16]``: canonical,
        ascending, -1 at the tail. The recompute of a checkpointed block gets the selection that its
        forward made."""
        recorder, mode = framework().selections.current() or (None, None)
        if mode == "replay" and recorder is not None:
            recorded: Tensor | None = recorder.take()
            if recorded is not None:
                return recorded
        numbers = framework().schedule
        found = select_blocks(
            index_q,
            index_k,
            documents(self),
            topk=numbers.TOPK_BLOCKS,
            block_size=numbers.BLOCK_SIZE,
            init_blocks=_init_blocks(self),
            local_blocks=1,
            backend=backend,
        ).indices
        _CANONICAL[found] = found._version, documents(self)
        if mode == "record" and recorder is not None:
            recorder.record(found)
        return found

    def attention(q: Tensor, k: Tensor, v: Tensor, q2k: Tensor, msa: Any) -> Tensor:
        """``q [T, 64, 128]``, ``k`` and ``v [T, 4, 128]`` after RoPE to ``[T, 64, 128]``."""
        docs = documents(msa)
        out: Tensor = sparse_attention(
            q,
            k,
            v,
            _selection(q2k, docs),
            docs,
            scale=framework().schedule.SOFTMAX_SCALE,
            backend=backend,
        )
        return out

    return prepare_selection, select, attention


def replaying(original: Callable[[Any, ContextFn | None], ContextFn | None]) -> Any:
    """``Block.nemo_checkpoint_context_fn`` that also records the selections of MSA blocks."""

    def nemo_checkpoint_context_fn(self: Any, context_fn: ContextFn | None) -> ContextFn | None:
        context_fn = original(self, context_fn)
        if not isinstance(self.self_attn, framework().MSAAttention):
            return context_fn
        recording: ContextFn = framework().selections.checkpoint_context_fn(context_fn)
        return recording

    return nemo_checkpoint_context_fn


def _selection(q2k: Tensor, docs: Documents) -> Selection:
    numbers = framework().schedule
    shape = (numbers.NUM_INDEX_HEADS, docs.num_queries, numbers.TOPK_BLOCKS)
    if tuple(q2k.shape) != shape:
        invalid_input(
            "q2k",
            f"shape {shape}, a selection of this microbatch",
            f"shape {tuple(q2k.shape)}",
        )
    if _CANONICAL.get(q2k) == (q2k._version, docs):
        return Selection(q2k, numbers.BLOCK_SIZE)
    return Selection.from_indices(q2k, docs, block_size=numbers.BLOCK_SIZE)


def _init_blocks(msa: Any) -> int:
    """Leading blocks that are always chosen. AutoModel forces the own block for any positive number
    of local blocks, and no block before it."""
    init_blocks, local_blocks = msa.forced_blocks
    if local_blocks < 1:
        raise UnsupportedProblem(
            "openmsa always chooses a query's own block: sparse_local_block must be 1 or more; got "
            f"forced_blocks={tuple(msa.forced_blocks)}"
        )
    return int(init_blocks)
