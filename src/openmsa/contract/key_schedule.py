"""The inverse of a selection: for each key block, the queries that read it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["KeySchedule"]


@dataclass(frozen=True, eq=False)
class KeySchedule:
    """CSR per KV head, from key block to queries.

    A *row* is one key block of one key range; rows of a range follow each other in block order, and
    ranges follow each other. Query fragments that share key storage share its rows, so every key
    belongs to exactly one row and its gradient has one owner.

    Attributes:
        row_ptr: int32 ``[Hkv, rows + 1]``, offsets into ``queries``; ``rows`` is
            :meth:`Layout.block_capacity`, the rows past the last block are empty.
        queries: int32 ``[Hkv, Tq * topk]``, packed query rows, ascending inside a row, -1 past
            ``row_ptr[:, -1]``.
        block_size: keys per block.
        slots: uint8 ``[Hkv, Tq * topk]``, which of its query's blocks each edge is; a by-product
            that not every backend's builder has (None), and that no operator returns.
    """

    row_ptr: Tensor
    queries: Tensor
    block_size: int
    slots: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.row_ptr.shape[1] - 1
