"""Sums in one order, for gradients that are equal to the bit from call to call.

The main kernel runs once per window of queries. It writes each tile's part of dq to the query's
slot for the tile's key block, and adds a run's dk and dv where it began; a CTA that goes on with
another's run writes a part of its own. Then these two add up: a query's slots by block, and the
parts of runs by CTA. Launches follow each other in the stream, so that nothing waits for anything.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass import Float32, Int32, Int64  # noqa: E402

from openmsa.kernels.common.compile import ANY, Build, fake  # noqa: E402
from openmsa.kernels.sm100.backward.config import BLOCK, HEAD_DIM  # noqa: E402

__all__ = ["add_parts", "sum_slots"]

_THREADS = 128
_VECTOR = 4


class SumSlots:
    """``dq[query] = sum over its blocks, ascending, of slots``; a thread has four channels."""

    @cute.jit
    def __call__(
        self, slots: cute.Tensor, indices: cute.Tensor, dq: cute.Tensor, first: Int32,
        count: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """slots ``[window, topk, Hq * D / 4, 4]``, dq ``[Tq, Hq * D / 4, 4]``, for ``count``
        queries from ``first`` on."""
        grid = (count, cute.ceil_div(dq.shape[1], _THREADS), 1)
        self.kernel(slots, indices, dq, first).launch(
            grid=grid, block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, slots: cute.Tensor, indices: cute.Tensor, dq: cute.Tensor, first: Int32
    ) -> None:
        local = cute.arch.block_idx()[0]
        at = cute.arch.block_idx()[1] * _THREADS + cute.arch.thread_idx()[0]
        width = dq.shape[1]
        if at < width:
            head = at // (width // indices.shape[0])
            total = cute.make_rmem_tensor(_VECTOR, Float32)
            total.fill(0.0)
            for slot in cutlass.range(indices.shape[2], unroll=1):
                if indices[head, first + local, slot] >= 0:
                    part = cute.make_rmem_tensor(_VECTOR, Float32)
                    cute.autovec_copy(slots[local, slot, at, None], part)
                    for i in cutlass.range_constexpr(_VECTOR):
                        total[i] += part[i]
            cute.autovec_copy(total, dq[first + local, at, None])


class AddParts:
    """dv and dk += the parts of runs, in the order of CTAs; a block has one key, a thread one
    channel."""

    @cute.jit
    def __call__(
        self, parts: cute.Tensor, part_rows: cute.Tensor, dv: cute.Tensor, dk: cute.Tensor,
        stream: Any,
    ) -> None:  # fmt: skip
        self.kernel(parts, part_rows, dv, dk).launch(
            grid=(BLOCK, 1, 1), block=(HEAD_DIM, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, parts: cute.Tensor, part_rows: cute.Tensor, dv: cute.Tensor, dk: cute.Tensor
    ) -> None:
        key, channel = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        for cta in cutlass.range(parts.shape[0], unroll=1):
            head, start, keys = part_rows[cta, 0], part_rows[cta, 1], part_rows[cta, 2]
            if head >= 0 and key < keys:
                at = Int64(start + key)
                dv[at, head, channel] = dv[at, head, channel] + parts[cta, 0, key, channel]
                dk[at, head, channel] = dk[at, head, channel] + parts[cta, 1, key, channel]


def sum_slots(arch: str) -> Build:
    """The build of :class:`SumSlots`."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        return SumSlots(), (
            fake(torch.float32, (ANY, ANY, ANY, _VECTOR), strides=(ANY, ANY, _VECTOR, 1), align=16),
            fake(torch.int32, (ANY, ANY, ANY)),
            fake(torch.float32, (ANY, ANY, _VECTOR), strides=(ANY, _VECTOR, 1), align=16),
            Int32(0),
            Int32(0),
        )

    return Build("backward_sum_slots", arch, (), make)


def add_parts(arch: str) -> Build:
    """The build of :class:`AddParts`."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        sums = (ANY, ANY, HEAD_DIM)
        return AddParts(), (
            fake(torch.float32, (ANY, 2, BLOCK, HEAD_DIM)), fake(torch.int32, (ANY, 4)),
            fake(torch.float32, sums), fake(torch.float32, sums),
        )  # fmt: skip

    return Build("backward_add_parts", arch, (), make)
