"""Which key blocks each query reads: the canonical selection and its converters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.contract.documents import Documents
from openmsa.contract.offsets import INTEGERS
from openmsa.errors import invalid_input

__all__ = ["Selection", "canonical_indices", "own_blocks"]


@dataclass(frozen=True, eq=False)
class Selection:
    """Selected key blocks in canonical form.

    Attributes:
        indices: int32 ``[Hkv, Tq, topk]``, contiguous; document-local block ids, ascending and
            unique, -1 only at the tail.
        block_size: keys per block.
        lse: fp32 ``[Hkv, Tq]`` or None: natural-log sum of exp of the scaled index logits over the
            visible keys of the selected blocks (fp64 where the index inputs are fp64).
    """

    indices: Tensor
    block_size: int = 128
    lse: Tensor | None = None

    @property
    def topk(self) -> int:
        return self.indices.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.indices.shape[0]

    @property
    def num_queries(self) -> int:
        return self.indices.shape[1]

    @classmethod
    def from_indices(
        cls,
        indices: Tensor,
        docs: Documents,
        *,
        block_size: int = 128,
        validate: bool = False,
    ) -> Selection:
        """Read block ids by value: any order, -1 anywhere, duplicates counted once.

        Args:
            indices: integer ``[Hkv, Tq, topk]``, any strides; document-local block ids.
            docs: the documents the ids refer to.
            block_size: keys per block.
            validate: also raise where an id is neither -1 nor a block the query can see (reads the
                tensor on the host). Without it such an id selects nothing.

        Raises:
            InvalidInput: wrong rank, dtype, device or query count; with ``validate`` an id that is
                out of range or in the query's future, naming head and query.
        """
        _check_indices("indices", indices, docs, block_size)
        if validate:
            _check_visible(indices, own_blocks(docs, block_size))
        return cls(canonical_indices(indices, docs, block_size), block_size)

    @classmethod
    def from_minimax(cls, indices: Tensor, docs: Documents, *, block_size: int = 128) -> Selection:
        """Read MiniMax-AI/MSA's order: ``[Hkv, Tq, topk]``, the own block last, then -1."""
        return cls.from_indices(indices, docs, block_size=block_size)

    @classmethod
    def from_flashinfer(
        cls, indices: Tensor, docs: Documents, *, block_size: int = 128
    ) -> Selection:
        """Read FlashInfer's token-major ``[Tq, Hkv, topk]``, ascending, -1 at the tail."""
        if isinstance(indices, Tensor) and indices.dim() != 3:
            invalid_input(
                "indices",
                "shape [queries, kv_heads, topk]",
                f"shape {tuple(indices.shape)}",
            )
        return cls.from_indices(indices.transpose(0, 1), docs, block_size=block_size)

    @classmethod
    def from_transformers(
        cls, block_indices: Tensor, docs: Documents, *, block_size: int = 128
    ) -> Selection:
        """Read Transformers' ``[B, Hkv, S, topk]``, whose blocks count from the start of the row.

        A row-anchored block is a document-anchored one only where the document starts on a multiple
        of ``block_size`` in its row (unpadded or right-padded rows always do).

        Raises:
            InvalidInput: wrong shape or dtype, or a document that starts inside a row-anchored
                block, since no selection of document-anchored blocks reads the same keys.
        """
        batch, length = docs.batch_shape
        if not isinstance(block_indices, Tensor) or block_indices.dtype not in INTEGERS:
            got = getattr(block_indices, "dtype", type(block_indices).__name__)
            invalid_input("block_indices", "an integer tensor", got)
        if block_indices.dim() != 4 or (
            block_indices.shape[0],
            block_indices.shape[2],
        ) != (
            batch,
            length,
        ):
            invalid_input(
                "block_indices",
                f"shape [{batch}, kv_heads, {length}, topk]",
                f"shape {tuple(block_indices.shape)}",
            )
        _check_block_size(block_size)
        columns = docs.key_columns
        for document, column in enumerate(columns):
            if column % block_size:
                invalid_input(
                    "docs",
                    f"documents that start on multiples of {block_size} in their row",
                    f"document {document} at column {column}",
                    "row-anchored blocks would span two documents; select per document instead",
                )
        packed = docs.pack(block_indices.transpose(1, 2)).transpose(0, 1)
        column_blocks = torch.tensor(
            [column // block_size for column in columns],
            device=docs.device,
            dtype=torch.int64,
        )
        shift = column_blocks[docs.layout.entry_of_query()]
        indices = packed.long()
        indices = torch.where(indices < 0, -1, indices - shift[None, :, None])
        return cls.from_indices(indices, docs, block_size=block_size)

    def to_minimax(self) -> Tensor:
        """int32 ``[Hkv, Tq, topk]`` in MiniMax-AI/MSA's order: the own block last, then -1.

        The own block has the highest id a query can select, so the ascending order already ends
        with it.
        """
        return self.indices.clone()

    def to_flashinfer(self) -> Tensor:
        """int32 ``[Tq, Hkv, topk]``, FlashInfer's token-major order."""
        return self.indices.transpose(0, 1).contiguous()

    def to(self, device: torch.device | str) -> Selection:
        """The same selection on another device."""
        lse = None if self.lse is None else self.lse.to(device)
        return Selection(self.indices.to(device), self.block_size, lse)


def own_blocks(docs: Documents, block_size: int) -> Tensor:
    """int64 ``[Tq]``: the block that holds each query's own position; -1 where it sees no key."""
    return torch.div(docs.positions.clamp(min=-1), block_size, rounding_mode="floor")


def canonical_indices(indices: Tensor, docs: Documents, block_size: int) -> Tensor:
    """Canonical int32 ``[Hkv, Tq, topk]`` of any readable ids, without a host read."""
    last = own_blocks(docs, block_size)
    slack = indices.shape[1] - docs.num_queries
    if slack:
        last = torch.cat([last, last.new_full((slack,), -1)])
    wide = indices.long()
    nothing = torch.iinfo(torch.int64).max
    wide = torch.where((wide < 0) | (wide > last[None, :, None]), nothing, wide)
    wide = wide.sort(dim=-1).values
    repeated = torch.zeros_like(wide, dtype=torch.bool)
    repeated[..., 1:] = wide[..., 1:] == wide[..., :-1]
    wide = torch.where(repeated, nothing, wide).sort(dim=-1).values
    return torch.where(wide == nothing, -1, wide).to(torch.int32).contiguous()


def _check_block_size(block_size: int) -> None:
    if block_size < 1:
        invalid_input("block_size", "a positive integer", block_size)


def _check_indices(argument: str, indices: Tensor, docs: Documents, block_size: int) -> None:
    _check_block_size(block_size)
    if not isinstance(indices, Tensor):
        invalid_input(argument, "an integer tensor", type(indices).__name__)
    if indices.dim() != 3:
        invalid_input(argument, "shape [kv_heads, queries, topk]", f"shape {tuple(indices.shape)}")
    if indices.dtype not in INTEGERS:
        invalid_input(argument, "int32 or int64", indices.dtype)
    if indices.device != docs.device:
        invalid_input(argument, f"the documents' device ({docs.device})", indices.device)
    if indices.shape[1] < docs.num_queries:
        hint = "is it [queries, kv_heads, topk]? then use from_flashinfer"
        token_major = indices.shape[0] == docs.num_queries
        invalid_input(
            f"{argument}.shape[1]",
            f"{docs.num_queries} queries",
            f"{indices.shape[1]} in shape {tuple(indices.shape)}",
            hint if token_major else "",
        )
    if not 1 <= indices.shape[2] <= 64:
        invalid_input(f"{argument}.shape[2] (topk)", "1..64", indices.shape[2])


def _check_visible(indices: Tensor, last: Tensor) -> None:
    wide = indices[:, : last.shape[0]].long()
    wrong = (wide != -1) & ((wide < 0) | (wide > last[None, :, None]))
    if bool(wrong.any()):
        head, query, slot = wrong.nonzero()[0].tolist()
        own = int(last[query])
        invalid_input(
            "indices",
            f"-1 or 0..{own}" if own >= 0 else "-1 (the query sees no key)",
            f"{int(wide[head, query, slot])} at kv head {head}, query {query}",
        )
