"""Tiles of 16-bit rows in shared memory, swizzled over 128 bytes, and the barriers around them."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Int32  # noqa: E402
from cutlass.cute.nvgpu import cpasync  # noqa: E402

__all__ = [
    "CHANNELS", "Barriers", "block_layout", "clear_rows", "load_block", "partition", "rows_layout",
    "view",
]  # fmt: skip

CHANNELS = 64
"""Channels of a box: 128 bytes, the span of a swizzle."""

_WORDS = CHANNELS * 2 // 4


class Barriers:
    """Waits at the mbarriers ``barriers``, which an enumeration numbers."""

    barriers: Any

    def barrier(self, which: Any, stage: Any = 0) -> Any:
        return self.barriers + (int(which) + stage)

    def wait(self, which: Any, turn: Any, stage: Any = 0) -> None:
        """Until the phase of ``turn`` (0, 1, ...) has completed."""
        cute.arch.mbarrier_wait(self.barrier(which, stage), turn & 1)

    def wait_free(self, which: Any, turn: Any, stage: Any = 0) -> None:
        """Until the phase before that of ``turn`` has completed; the first turn waits for none."""
        cute.arch.mbarrier_wait(self.barrier(which, stage), (turn & 1) ^ 1)


def view(pointer: Any, layout: Any) -> cute.Tensor:
    """A tile of shared memory under a swizzled layout."""
    return cute.make_tensor(
        cute.recast_ptr(pointer, layout.inner, dtype=pointer.dtype), layout.outer
    )


def rows_layout(rows: int, group: int, halves: int, stages: int) -> Any:
    """``[channel, head, 1, slot, half, stage]`` of gathered tiles: ``rows`` rows, ``group`` heads
    to a slot."""
    half = rows * CHANNELS
    outer = cute.make_layout(
        (CHANNELS, group, 1, rows // group, halves, stages),
        stride=(1, CHANNELS, 0, group * CHANNELS, half, halves * half),
    )
    return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)


def block_layout(rows: int, halves: int) -> Any:
    """``[channel, row, 1, half]`` of a tile whose rows are neighbours in memory."""
    outer = cute.make_layout((CHANNELS, rows, 1, halves), stride=(1, CHANNELS, 0, rows * CHANNELS))
    return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)


@cute.jit
def partition(atom: Any, shared: Any, at: Any, box: Any) -> Any:
    """Boxes of shared memory and of the tensor at ``at``, as the copy engine takes them."""
    tiles = cute.local_tile(at, box, (None, None, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
    )


@cute.jit
def load_block(atom: Any, at: Any, shared: Any, barrier: Any, start: Int32, head: Int32) -> None:
    """Ask for a tile of :func:`block_layout`: the rows from ``start`` on, of ``head``. One warp."""
    _, rows, _, halves = shared.shape
    moved = cute.domain_offset((0, start, 0), at)
    target, source = partition(atom, shared, moved, (CHANNELS, rows, 1))
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, CHANNELS * rows * halves * 2)
    for half in cutlass.range_constexpr(halves):
        cute.copy(atom, source[None, half, 0, head], target[None, half], tma_bar_ptr=barrier)


@cute.jit
def clear_rows(shared: Any, first: Int32, barrier: Any) -> None:
    """Zero the rows of a tile of :func:`block_layout` from ``first`` on, for what reads it through
    the asynchronous proxy, then arrive. One warp; a row is 128 bytes, within which swizzling
    permutes."""
    _, rows, _, halves = shared.shape
    words = cute.make_tensor(
        cute.make_ptr(Int32, shared.iterator.toint(), cute.AddressSpace.smem, assumed_align=128),
        cute.make_layout((halves, rows, _WORDS), stride=(rows * _WORDS, _WORDS, 1)),
    )
    lane = cute.arch.lane_idx()
    for row in cutlass.range(first, rows, unroll=1):
        for half in cutlass.range_constexpr(halves):
            words[half, row, lane] = 0
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)
