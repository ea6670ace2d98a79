"""Where queries and key blocks lie, by their index: what the backward's tiles look up."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass import Int32  # noqa: E402
from torch import Tensor  # noqa: E402

from openmsa.contract.layout import Layout  # noqa: E402
from openmsa.kernels.common.compile import ANY, Build, fake, function  # noqa: E402
from openmsa.kernels.common.device import arch_of  # noqa: E402
from openmsa.kernels.common.scan import last_not_above  # noqa: E402

__all__ = ["builds", "lookup"]

_THREADS = 256


class Lookup:
    """A thread for each query and for each row of the key schedule."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    @cute.jit
    def __call__(
        self, cu_seqlens_q: cute.Tensor, spans: cute.Tensor, ranges: cute.Tensor,
        first: cute.Tensor, positions: cute.Tensor, blocks: cute.Tensor, stream: Any,
    ) -> None:  # fmt: skip
        threads = positions.shape[0] + blocks.shape[0]
        self.kernel(cu_seqlens_q, spans, ranges, first, positions, blocks).launch(
            grid=(cute.ceil_div(threads, _THREADS), 1, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, cu_seqlens_q: cute.Tensor, spans: cute.Tensor, ranges: cute.Tensor,
        first: cute.Tensor, positions: cute.Tensor, blocks: cute.Tensor,
    ) -> None:  # fmt: skip
        at = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
        queries = positions.shape[0]
        if at < queries:
            entry = last_not_above(cu_seqlens_q, spans.shape[0], at)
            positions[at] = at + spans[entry, 1] - cu_seqlens_q[entry + 1]
        row = at - queries
        if row >= 0 and row < blocks.shape[0]:
            # Empty ranges share their first row with the next; the last of them holds the row.
            owner = last_not_above(first, ranges.shape[0], row)
            position = (row - first[owner]) * self.block_size
            keys = ranges[owner, 1] - position
            if keys > self.block_size:
                keys = Int32(self.block_size)
            blocks[row, 0] = ranges[owner, 0] + position
            blocks[row, 1] = keys
            blocks[row, 2] = position


def lookup(layout: Layout, rows: int, block_size: int) -> tuple[Tensor, Tensor]:
    """``positions`` int32 ``[num_queries]``, the key position of each query in its document, and
    ``blocks`` int32 ``[rows, 3]``: first key, number of keys and position of each key block; rows
    past the last block hold nothing of use."""
    device = layout.spans.device
    positions = torch.empty(layout.num_queries, dtype=torch.int32, device=device)
    blocks = torch.empty((rows, 3), dtype=torch.int32, device=device)
    if layout.num_queries and rows:
        first = layout.first_blocks(block_size).int()
        function(_build(arch_of(device), block_size))(
            layout.cu_seqlens_q, layout.spans, layout.ranges, first, positions, blocks
        )
    return positions, blocks


def builds(arch: str) -> tuple[Build, ...]:
    """What :func:`lookup` compiles for MiniMax-M3."""
    return (_build(arch, 128),)


def _build(arch: str, block_size: int) -> Build:
    def make() -> tuple[Any, tuple[Any, ...]]:
        line = (ANY,)
        return Lookup(block_size), (
            fake(torch.int32, line), fake(torch.int32, (ANY, 3)), fake(torch.int32, (ANY, 2)),
            fake(torch.int32, line), fake(torch.int32, line), fake(torch.int32, (ANY, 3)),
        )  # fmt: skip

    return Build("lookup", arch, (("block_size", block_size),), make)
