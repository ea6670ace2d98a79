"""Work is taken in order by whichever thread block is free; which windows go which way."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Boolean, Int32  # noqa: E402

from openmsa.kernels.common.scan import warp_scan  # noqa: E402
from openmsa.kernels.sm90.forward.context import Context  # noqa: E402

__all__ = ["next_task", "take", "union_wins"]


@cute.jit
def union_wins(
    tally: cute.Tensor, window: Int32, head: Int32, cost: int, fit: bool = True
) -> Boolean:
    """Is the union way cheaper for this window and KV head, and ``fit`` for its values of V? For
    ``cost`` see `Config.union_cost`."""
    found = tally[window, head, 0] * cost < tally[window, head, 1]
    if cutlass.const_expr(fit):
        found = found and tally[window, head, 2] == 0
    return found


@cute.jit
def take(counter: Any) -> Int32:
    """The warp's next number of a global counter: 0, 1, ... over all who take."""
    found = Int32(0)
    if cute.arch.lane_idx() == 0:
        found = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(found, 0)


@cute.jit
def next_task(c: Context) -> Int32:
    """The warp's next task of the launch's window, or -1.

    Tasks are ordered by head, window and row, so that a window's are a run of each head. Those of a
    head whose window goes the union way are left out.
    """
    bounds, tally = c.tensors.bounds, c.tensors.tally
    left = take(c.tensors.counter.iterator + c.numbers.window)
    lane = cute.arch.lane_idx()
    heads = tally.shape[1]
    found = Int32(-1)
    for base in cutlass.range(0, heads, 32, unroll=1):
        head = base + lane
        first, size = Int32(0), Int32(0)
        if head < heads:
            run = head * c.numbers.windows + c.numbers.window
            first = bounds[run]
            if not union_wins(tally, c.numbers.window, head, c.config.union_cost):
                size = bounds[run + 1] - first
        upto = warp_scan(size, lane)
        within = left - (upto - size)
        mine = Int32(-1)
        if within >= 0 and within < size:
            mine = first + within
        found = cute.arch.warp_redux_sync(max(found, mine), kind="max")
        left -= cute.arch.shuffle_sync(upto, 31)
    return found
