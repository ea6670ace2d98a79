"""Which queries share a document, chunk by chunk: the loop every reference stage runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.contract.layout import Layout

__all__ = ["Chunk", "chunks"]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive queries of one entry.

    Attributes:
        rows: slice of packed query rows.
        keys: slice of packed key rows the entry sees.
        positions: int64 ``[n]`` key position of each query; negative sees nothing.
    """

    rows: slice
    keys: slice
    positions: Tensor


def chunks(layout: Layout, size: int) -> Iterator[Chunk]:
    """Chunks of at most ``size`` queries, in packed order."""
    offsets = layout.cu_seqlens_q.tolist()
    for entry, (key_start, key_len, _) in enumerate(layout.spans.tolist()):
        begin, end = offsets[entry], offsets[entry + 1]
        shift = key_len - end
        for first in range(begin, end, size):
            last = min(first + size, end)
            positions = torch.arange(first, last, device=layout.spans.device) + shift
            yield Chunk(slice(first, last), slice(key_start, key_start + key_len), positions)
