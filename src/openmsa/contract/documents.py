"""Packed documents: which token belongs to which document, and where its keys lie.

Every constructor reads its tensor once: one device-to-host copy in total, then the offsets are
checked and laid out on the host and sent back. Forward and backward never wait for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openmsa.contract import offsets
from openmsa.contract.layout import Layout
from openmsa.errors import InvalidInput, invalid_input

__all__ = ["Documents"]

_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "fragment_indices")


@dataclass(frozen=True, eq=False)
class Documents:
    """Packed documents (or fragments of them) and the ``[B, S]`` rows they came from.

    Build one with a ``from_*`` constructor; it is then valid for every layer of the step.

    Attributes:
        layout: the offsets that kernels read.
        positions: int64 ``[Tq]``, each query's key position inside its document. Negative only
            where an entry has more queries than keys: such a query sees nothing.
        token_rows: int64 ``[Tq]``, flat ``B * S`` row of each packed token.
        batch_shape: ``(B, S)`` of the unpacked tensors; ``(1, Tq)`` where built from lengths.
        key_columns: on the host, the column of each entry's first key in its row of keys.
    """

    layout: Layout
    positions: Tensor
    token_rows: Tensor
    batch_shape: tuple[int, int]
    key_columns: tuple[int, ...]

    @property
    def num_documents(self) -> int:
        """Entries: documents, or query fragments of them."""
        return self.layout.num_entries

    @property
    def num_queries(self) -> int:
        return self.layout.num_queries

    @property
    def num_keys(self) -> int:
        return self.layout.num_keys

    @property
    def max_seqlen_q(self) -> int:
        return self.layout.max_seqlen_q

    @property
    def max_seqlen_k(self) -> int:
        """Longest key run an entry sees, counted from its document's first key."""
        return self.layout.max_seqlen_k

    @property
    def device(self) -> torch.device:
        return self.layout.cu_seqlens_q.device

    @property
    def cu_seqlens_q(self) -> Tensor:
        """int32 ``[documents + 1]`` packed query offsets."""
        return self.layout.cu_seqlens_q

    @property
    def cu_seqlens_k(self) -> Tensor:
        """int32 ``[documents + 1]``, end of each entry's keys after a leading 0."""
        ends = self.layout.spans[:, 0] + self.layout.spans[:, 1]
        return torch.cat([ends.new_zeros(1), ends])

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Tensor,
        *,
        device: torch.device | str | None = None,
    ) -> Documents:
        """Documents of the given lengths, one after the other.

        Args:
            lengths: ``[N]`` token counts, 0 allowed.
            device: where the offsets live; by default the tensor's device, or the CPU.
        """
        host, source = offsets.host_ints(lengths, "lengths")
        if host.dim() != 1:
            invalid_input("lengths", "a 1-D sequence", f"shape {tuple(host.shape)}")
        if host.numel() and int(host.min()) < 0:
            invalid_input("lengths", "0 or more", int(host.min()), "a document cannot be shorter")
        offsets.check_tokens(float(host.double().sum()))
        ends = torch.cat([host.new_zeros(1), host.cumsum(0)])
        return _from_offsets(ends, ends, None, device if device is not None else source)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None = None,
        *,
        fragment_indices: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Documents:
        """Documents or query fragments from packed offsets.

        Args:
            cu_seqlens_q: int32 or int64 ``[N + 1]``, starting at 0, never falling; any device, any
                stride.
            cu_seqlens_k: the same for the keys; by default equal to ``cu_seqlens_q``. The queries
                of an entry are the causal suffix of its keys.
            fragment_indices: ``[N]``, for each entry the first entry of the same document. The keys
                of entry ``b`` start at ``cu_seqlens_k[fragment_indices[b]]`` and end at
                ``cu_seqlens_k[b + 1]``, so later fragments see the earlier fragments' keys.
            device: where the offsets live; by default that of ``cu_seqlens_q``.

        Raises:
            InvalidInput: offsets that are not integers, do not start at 0, fall, or disagree in
                number; fragments that interrupt or overlap another document.
        """
        given = zip(_OFFSETS, (cu_seqlens_q, cu_seqlens_k, fragment_indices), strict=True)
        parts = {name: value for name, value in given if value is not None}
        host, source = offsets.host_parts(parts)
        for name in _OFFSETS[:2]:
            if name in host:
                offsets.check_offsets(name, host[name])
        offsets_q = host["cu_seqlens_q"]
        offsets_k = host.get("cu_seqlens_k", offsets_q)
        if offsets_k.numel() != offsets_q.numel():
            invalid_input(
                "cu_seqlens_k",
                f"as many offsets as cu_seqlens_q ({offsets_q.numel()})",
                offsets_k.numel(),
            )
        return _from_offsets(
            offsets_q,
            offsets_k,
            host.get("fragment_indices"),
            device if device is not None else source,
        )

    @classmethod
    def from_ids(cls, ids: Tensor) -> Documents:
        """Documents from a map of document ids.

        Args:
            ids: integer ``[B, S]``; 0 is padding, each positive id is one contiguous run in its
                row. Equal ids in different rows are different documents; ids need not be ordered.

        Raises:
            InvalidInput: not an integer ``[B, S]`` tensor, a negative id, or an interrupted
                document.
        """
        host = offsets.host_map(ids, "ids", offsets.INTEGERS, "an integer tensor")
        if host.numel() and int(host.min()) < 0:
            row, column = divmod(int((host < 0).flatten().nonzero()[0]), host.shape[1])
            invalid_input(
                "ids",
                "0 (padding) or positive ids",
                f"{int(host[row, column])} at row {row}, column {column}",
            )
        return _from_id_map(host.long(), ids.device, "ids")

    @classmethod
    def from_attention_mask(cls, attention_mask: Tensor) -> Documents:
        """One document per row from a ``[B, S]`` padding mask, nonzero meaning a real token.

        Left and right padding are both fine; a row without a real token is no document.

        Raises:
            InvalidInput: not ``[B, S]``, interrupted real tokens, or values below 0 or not finite.
        """
        host = offsets.host_map(attention_mask, "attention_mask", None, "a tensor")
        offsets.check_padding_mask(host)
        return _from_id_map((host != 0).long(), attention_mask.device, "attention_mask")

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> Documents:
        """Documents from ``[B, S]`` (or ``[1, T]``) position ids, as padding-free collators give.

        A new document starts in each row and wherever a position does not follow its predecessor,
        so positions need not start at 0. Every token counts as real: for a padded batch use
        :meth:`from_attention_mask` or :meth:`from_ids`.

        Raises:
            InvalidInput: not an integer ``[B, S]`` tensor (3-D multimodal positions included).
        """
        host = offsets.host_map(
            position_ids, "position_ids", offsets.INTEGERS, "an integer tensor"
        ).long()
        starts = torch.ones_like(host, dtype=torch.bool)
        starts[:, 1:] = host[:, 1:] != host[:, :-1] + 1
        return _from_id_map(starts.long().cumsum(1), position_ids.device, "position_ids")

    @classmethod
    def from_block_causal_mask(cls, mask: Tensor) -> Documents:
        """Documents from a 4-D mask, verified whole.

        Args:
            mask: bool ``[B, 1, S, S]``, True where row ``i`` may attend to column ``j``.

        Raises:
            InvalidInput: the mask is anything but causal attention within contiguous documents,
                with padding rows and columns all False.
        """
        return _from_id_map(offsets.mask_document_starts(mask) + 1, mask.device, "mask")

    def pack(self, x: Tensor) -> Tensor:
        """``[B, S, ...] -> [T, ...]``: the real tokens, document after document. Differentiable."""
        if x.dim() < 2 or tuple(x.shape[:2]) != self.batch_shape:
            invalid_input("x", f"leading shape {self.batch_shape}", f"shape {tuple(x.shape)}")
        flat = x.flatten(0, 1)
        if self.num_queries == flat.shape[0]:
            return flat
        return flat.index_select(0, self.token_rows)

    def unpack(self, packed: Tensor) -> Tensor:
        """``[T, ...] -> [B, S, ...]``, zeros at padding. Differentiable; slack rows are dropped."""
        if packed.dim() < 1 or packed.shape[0] < self.num_queries:
            rows = f"at least {self.num_queries} rows"
            invalid_input("packed", rows, f"shape {tuple(packed.shape)}")
        batch, length = self.batch_shape
        real = packed[: self.num_queries]
        if self.num_queries != batch * length:
            empty = packed.new_zeros((batch * length, *packed.shape[1:]))
            real = empty.index_copy(0, self.token_rows, real)
        return torch.unflatten(real, 0, self.batch_shape)

    def to(self, device: torch.device | str) -> Documents:
        """The same documents on another device."""
        return replace(
            self,
            layout=self.layout.to(device),
            positions=self.positions.to(device),
            token_rows=self.token_rows.to(device),
        )

    def __repr__(self) -> str:
        return (
            f"Documents(num_documents={self.num_documents}, num_queries={self.num_queries}, "
            f"num_keys={self.num_keys}, max_seqlen_k={self.max_seqlen_k}, device={self.device})"
        )


def _from_id_map(ids: Tensor, device: torch.device, argument: str) -> Documents:
    """Documents from a host int64 ``[B, S]`` map whose equal neighbours form a document."""
    batch, length = ids.shape
    flat = ids.flatten()
    rows = (flat != 0).nonzero().flatten()
    real = flat[rows]
    line = torch.div(rows, max(length, 1), rounding_mode="floor")
    begins = torch.ones_like(rows, dtype=torch.bool)
    # A run goes on where id, row and neighbourhood all continue; a gap of padding ends it.
    begins[1:] = (real[1:] != real[:-1]) | (line[1:] != line[:-1]) | (rows[1:] != rows[:-1] + 1)
    first = begins.nonzero().flatten()
    runs = torch.stack([line[first], real[first]], 1)
    _, inverse, counts = torch.unique(runs, dim=0, return_inverse=True, return_counts=True)
    repeated = (counts[inverse] > 1).nonzero().flatten()
    if repeated.numel():
        again = runs[repeated] == runs[repeated[0]]
        second = int(rows[first[repeated[again.all(1).nonzero().flatten()[1]]]])
        raise InvalidInput(
            f"{argument}: expected each document in one contiguous run, got document "
            f"{int(runs[repeated[0], 1])} of batch row {int(runs[repeated[0], 0])} interrupted; "
            f"it starts again at flat index {second}"
        )
    ends = torch.cat([first, first.new_tensor([rows.numel()])])
    documents = _from_offsets(ends, ends, None, device)
    return replace(
        documents,
        token_rows=rows.to(device),
        batch_shape=(batch, length),
        key_columns=tuple((rows[first] % max(length, 1)).tolist()),
    )


def _from_offsets(
    offsets_q: Tensor,
    offsets_k: Tensor,
    heads: Tensor | None,
    device: torch.device | str | None,
) -> Documents:
    """Documents from checked int64 host offsets; ``heads`` are the fragments' first entries."""
    layout = Layout.from_offsets(offsets_q, offsets_k, heads, device or "cpu")
    return Documents(
        layout,
        positions=layout.positions(),
        token_rows=torch.arange(layout.num_queries, device=layout.cu_seqlens_q.device),
        batch_shape=(1, layout.num_queries),
        key_columns=tuple(offsets_k[:-1][slice(None) if heads is None else heads].tolist()),
    )
