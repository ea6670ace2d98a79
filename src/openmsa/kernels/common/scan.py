"""Prefix sums over the threads of a block, and searches in ascending lists."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import cutlass.utils as utils  # noqa: E402
from cutlass import Int32  # noqa: E402

__all__ = ["block_scan", "last_not_above", "lower_bound", "scratch", "warp_scan"]

_WARPS = 32
_ALL = -1


@cute.jit
def scratch() -> cute.Tensor:
    """Shared memory that :func:`block_scan` needs, for one block of up to 1,024 threads."""
    return utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(_WARPS), 16)


@cute.jit
def block_scan(value: Int32, words: cute.Tensor) -> tuple[Int32, Int32]:
    """The sum of ``value`` over the threads before this one, and over all 1,024 of them.

    ``words`` may be used again after the block's next barrier.
    """
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    inclusive = warp_scan(value, lane)
    if lane == 31:
        words[warp] = inclusive
    cute.arch.sync_threads()
    sums = warp_scan(words[lane], lane)
    before = cute.arch.shuffle_sync(sums, warp) - words[warp]
    total = cute.arch.shuffle_sync(sums, 31)
    return before + inclusive - value, total


@cute.jit
def warp_scan(value: Int32, lane: Int32) -> Int32:
    """The sum of ``value`` over the lanes up to and with this one."""
    total = value
    for power in cutlass.range_constexpr(5):
        # Lanes below the offset read themselves, and leave it.
        below = cute.arch.shuffle_sync_up(total, 1 << power, mask_and_clamp=0)
        if lane >= 1 << power:
            total += below
    return total


@cute.jit
def lower_bound(values: Any, begin: Int32, end: Int32, wanted: Int32) -> Int32:
    """The first index in ``[begin, end)`` whose value is at least ``wanted``; ``end`` if none is.
    ``values`` ascend there."""
    low, high = begin, end
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@cute.jit
def last_not_above(values: Any, count: Int32, wanted: Int32) -> Int32:
    """The last index of the ascending ``values[:count]`` whose value is at most ``wanted``; 0 where
    there is none."""
    low, high = Int32(0), count
    while high - low > 1:
        middle = (low + high) // 2
        if values[middle] <= wanted:
            low = middle
        else:
            high = middle
    return low
