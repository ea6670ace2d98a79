"""Where each document's queries and keys lie, as the tensors that kernels read.

:class:`openmsa.contract.documents.Documents` is what users build; :class:`Layout` is the part of it
that crosses the operator boundary, so it holds device tensors and Python ints only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.contract.offsets import check_fragments, check_tokens

__all__ = ["Layout"]


@dataclass(frozen=True, eq=False)
class Layout:
    """Packed offsets of ``N`` entries over ``M`` disjoint key ranges.

    An *entry* is one run of queries that is the causal suffix of its keys: a whole document, or one
    fragment of a document under chunked prefill or context parallelism. A *key range* is the key
    storage of one document; the fragments of a document share it. The block grid starts at the key
    range's first key, so a block belongs to one key range and never spans two documents.

    Attributes:
        cu_seqlens_q: int32 ``[N + 1]``, packed query offsets of the entries.
        spans: int32 ``[N, 3]``: first key row, number of keys, and key range of each entry.
        ranges: int32 ``[M, 2]``: first key row and number of keys of each key range.
        num_queries: ``Tq``, the last query offset.
        num_keys: ``Tk``, the last key offset.
        max_seqlen_q: longest entry, in queries.
        max_seqlen_k: longest entry, in keys.
    """

    cu_seqlens_q: Tensor
    spans: Tensor
    ranges: Tensor
    num_queries: int
    num_keys: int
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def from_offsets(
        cls,
        offsets_q: Tensor,
        offsets_k: Tensor,
        heads: Tensor | None,
        device: torch.device | str,
    ) -> Layout:
        """Lay out checked int64 host offsets; ``heads`` are the fragments' first entries.

        Raises:
            InvalidInput: fragments that are no fragments of one document, or more tokens than int32
                offsets can count.
        """
        check_tokens(max(int(offsets_q[-1]), int(offsets_k[-1])))
        count = offsets_q.numel() - 1
        entries = torch.arange(count)
        if heads is None:
            heads = entries
        else:
            check_fragments(heads, count)
        starts, ends = offsets_k[:-1][heads], offsets_k[1:]
        lengths_k, lengths_q = ends - starts, offsets_q[1:] - offsets_q[:-1]
        is_first = heads == entries
        range_of_entry = is_first.long().cumsum(0) - 1
        range_lengths = torch.zeros(int(is_first.sum()), dtype=torch.int64)
        range_lengths.scatter_reduce_(0, range_of_entry, lengths_k, "amax")
        spans = torch.stack([starts, lengths_k, range_of_entry], 1)
        ranges = torch.stack([starts[is_first], range_lengths], 1)
        # One host-to-device copy carries every table.
        tables = torch.cat([offsets_q, spans.flatten(), ranges.flatten()]).to(torch.int32)
        tables = tables.to(device)
        cut = count + 1 + 3 * count
        return cls(
            tables[: count + 1],
            tables[count + 1 : cut].view(count, 3),
            tables[cut:].view(-1, 2),
            num_queries=int(offsets_q[-1]),
            num_keys=int(offsets_k[-1]),
            max_seqlen_q=int(lengths_q.max()) if count else 0,
            max_seqlen_k=int(lengths_k.max()) if count else 0,
        )

    @property
    def num_entries(self) -> int:
        return self.spans.shape[0]

    @property
    def num_ranges(self) -> int:
        return self.ranges.shape[0]

    def block_capacity(self, block_size: int) -> int:
        """Rows a key schedule reserves: at least the number of key blocks, from sizes alone.

        ``sum(ceil(len / block)) <= Tk // block + M``. The exact count needs the lengths, which live
        on the device; the rows past it stay empty.
        """
        return self.num_keys // block_size + self.num_ranges

    def first_blocks(self, block_size: int) -> Tensor:
        """int64 ``[M]``: the global block row of each key range's block 0."""
        blocks = torch.div(
            self.ranges[:, 1].long() + (block_size - 1),
            block_size,
            rounding_mode="floor",
        )
        return blocks.cumsum(0) - blocks

    def entry_of_query(self) -> Tensor:
        """int64 ``[Tq]``: the entry each packed query belongs to."""
        lengths = (self.cu_seqlens_q[1:] - self.cu_seqlens_q[:-1]).long()
        entries = torch.arange(self.num_entries, device=lengths.device)
        return torch.repeat_interleave(entries, lengths, output_size=self.num_queries)

    def positions(self) -> Tensor:
        """int64 ``[Tq]``: key position of each query in its document; negative where it sees none.

        Query row ``i`` of an entry sits at ``i + len_k - len_q`` (bottom-right aligned causality).
        """
        entry = self.entry_of_query()
        starts = self.cu_seqlens_q[:-1].long()
        lengths_q = self.cu_seqlens_q[1:].long() - starts
        offset = self.spans[:, 1].long() - lengths_q - starts
        return torch.arange(self.num_queries, device=entry.device) + offset[entry]

    def to(self, device: torch.device | str) -> Layout:
        """The same layout on another device."""
        return Layout(
            self.cu_seqlens_q.to(device),
            self.spans.to(device),
            self.ranges.to(device),
            self.num_queries,
            self.num_keys,
            self.max_seqlen_q,
            self.max_seqlen_k,
        )
