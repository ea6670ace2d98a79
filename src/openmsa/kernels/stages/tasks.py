"""Work tiles of the key-major kernels, built on the device.

A *bin* is one key block's queries within one window, of one KV head; bins are ordered by head,
window, block, and a bin of n queries has ``ceil(n / per_task)`` tiles. Queries ascend within a
block, so that a bin is found by two searches. Three launches: tiles of each bin and their sums
within a thread block; sums over thread blocks; the table. Nothing waits for the host.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any, NamedTuple  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass import Int32  # noqa: E402

from openmsa.contract.key_schedule import KeySchedule  # noqa: E402
from openmsa.contract.tasks import BackwardTasks, task_capacity  # noqa: E402
from openmsa.errors import UnsupportedProblem  # noqa: E402
from openmsa.kernels.common.compile import ANY, Build, fake, function  # noqa: E402
from openmsa.kernels.common.device import arch_of  # noqa: E402
from openmsa.kernels.common.ptx import add_s32  # noqa: E402
from openmsa.kernels.common.scan import block_scan, lower_bound, scratch  # noqa: E402

__all__ = ["build", "tasks_of"]

THREADS = 1024
"""Threads of a block, and bins that it adds up."""

_MOST_BINS = 2**31 - THREADS
_EVEN = 8


class Schedule(NamedTuple):
    """int32 tensors that the three kernels share.

    Attributes:
        row_ptr: ``[Hkv, rows + 1]`` and ``queries`` ``[Hkv, edges]`` of the key schedule.
        tiles: ``[bins]``: tiles before a bin, within its thread block.
        blocks: ``[thread blocks]``: tiles of each, then tiles before each.
        tasks: ``[capacity, 4]``; ``count`` ``[1]``; ``owners`` ``[Hkv, rows]``.
        bounds: ``[Hkv * windows + 1]``: the first task of each head and window, and the end.
    """

    row_ptr: cute.Tensor
    queries: cute.Tensor
    tiles: cute.Tensor
    blocks: cute.Tensor
    tasks: cute.Tensor
    count: cute.Tensor
    owners: cute.Tensor
    bounds: cute.Tensor


class TaskBuild:
    """The three launches. ``per_task`` queries fill a tile, ``window`` a window; the tiles of a bin
    are full but for the last, or ``even``: alike, rounded up to :data:`_EVEN` queries."""

    def __init__(self, per_task: int, window: int, even: bool = False) -> None:
        self.per_task = per_task
        self.window = window
        self.even = even

    @cute.jit
    def __call__(
        self, first: cute.Tensor, schedule: Schedule, windows: Int32, bins: Int32, stream: Any
    ) -> None:
        """``first`` is ``schedule.row_ptr`` again: the stream is found by a tensor of its own."""
        schedule = Schedule(*schedule)
        grid = (cute.ceil_div(bins, THREADS), 1, 1)
        block = (THREADS, 1, 1)
        self.count(schedule, windows, bins).launch(grid=grid, block=block, stream=stream)
        self.scan(schedule).launch(grid=(1, 1, 1), block=block, stream=stream)
        self.scatter(schedule, windows, bins).launch(grid=grid, block=block, stream=stream)

    @cute.jit
    def bin(self, s: Any, windows: Int32, at: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Head, row, first edge and end of the bin ``at``."""
        rows = s.row_ptr.shape[1] - 1
        row = at % rows
        head = at // rows // windows
        window = at // rows % windows
        queries = s.queries[head, None]
        begin, end = s.row_ptr[head, row], s.row_ptr[head, row + 1]
        begin = lower_bound(queries, begin, end, window * self.window)
        end = lower_bound(queries, begin, end, (window + 1) * self.window)
        return head, row, begin, end

    @cute.kernel
    def count(self, schedule: Schedule, windows: Int32, bins: Int32) -> None:
        s = Schedule(*schedule)
        tiles, blocks = s.tiles, s.blocks
        block = cute.arch.block_idx()[0]
        at = block * THREADS + cute.arch.thread_idx()[0]
        found = Int32(0)
        if at < bins:
            head, row, begin, end = self.bin(s, windows, at)
            found = (end - begin + self.per_task - 1) // self.per_task
            if found > 0:
                add_s32(s.owners.iterator + (head * s.owners.shape[1] + row), Int32(1))
        before, total = block_scan(found, scratch())
        if at < bins:
            tiles[at] = before
        if cute.arch.thread_idx()[0] == 0:
            blocks[block] = total

    @cute.kernel
    def scan(self, schedule: Schedule) -> None:
        s = Schedule(*schedule)
        blocks, count, bounds = s.blocks, s.count, s.bounds
        words = scratch()
        carry = Int32(0)
        thread = cute.arch.thread_idx()[0]
        size = blocks.shape[0]
        for first in cutlass.range(0, size, THREADS, unroll=1):
            at = first + thread
            mine = Int32(0)
            if at < size:
                mine = blocks[at]
            before, total = block_scan(mine, words)
            if at < size:
                blocks[at] = carry + before
            carry += total
            cute.arch.sync_threads()
        if thread == 0:
            count[0] = carry
            bounds[bounds.shape[0] - 1] = carry

    @cute.kernel
    def scatter(self, schedule: Schedule, windows: Int32, bins: Int32) -> None:
        s = Schedule(*schedule)
        tasks, bounds = s.tasks, s.bounds
        block = cute.arch.block_idx()[0]
        at = block * THREADS + cute.arch.thread_idx()[0]
        if at < bins:
            head, row, begin, end = self.bin(s, windows, at)
            to = s.blocks[block] + s.tiles[at]
            if row == 0:
                bounds[at // (s.row_ptr.shape[1] - 1)] = to
            share = Int32(self.per_task)
            if cutlass.const_expr(self.even):
                # As many pieces as there were, since per_task is a multiple of _EVEN.
                pieces = (end - begin + self.per_task - 1) // self.per_task
                if pieces > 1:
                    share = ((end - begin + pieces - 1) // pieces + _EVEN - 1) // _EVEN * _EVEN
            for edge in cutlass.range(begin, end, share, unroll=1):
                size = end - edge
                if size > share:
                    size = share
                tasks[to, 0] = head
                tasks[to, 1] = row
                tasks[to, 2] = edge
                tasks[to, 3] = size
                to += 1


def tasks_of(
    schedule: KeySchedule, per_task: int, num_queries: int, window: int, even: bool = False
) -> BackwardTasks:
    """Cut every row's queries into tiles of ``per_task`` that stay within one window of queries.

    Args:
        schedule: of the selection.
        per_task: queries of a full tile.
        num_queries: queries of the layout.
        window: queries per window.
        even: tiles of a row and window are alike but for less than eight queries, instead of full
            but for the last; ``per_task`` is a multiple of eight.

    Returns:
        The tasks, and ``bounds``.

    Raises:
        UnsupportedProblem: more bins than 32-bit offsets count: some 6 million queries of one
            document, fewer of many short ones.
    """
    heads, edges = schedule.queries.shape
    rows = schedule.num_rows
    windows = -(-num_queries // window)
    bins = heads * windows * rows
    if bins > _MOST_BINS:
        raise UnsupportedProblem(
            f"the CuTe DSL kernels' work order: {heads} KV heads, {windows} windows of {window} "
            f"queries and {rows} key blocks are {bins} bins, at most {_MOST_BINS}; "
            'use backend="triton"'
        )
    device = schedule.row_ptr.device
    capacity = task_capacity(heads, edges, rows, num_queries, per_task, window)
    tasks = torch.full((capacity, 4), -1, dtype=torch.int32, device=device)
    owners = torch.zeros((heads, rows), dtype=torch.int32, device=device)
    numbers = torch.zeros(1 + heads * windows + 1, dtype=torch.int32, device=device)
    count, bounds = numbers[:1], numbers[1:]
    if bins:
        scratch = torch.empty(bins + -(-bins // THREADS), dtype=torch.int32, device=device)
        function(build(arch_of(device), per_task, window, even))(
            schedule.row_ptr,
            Schedule(
                schedule.row_ptr, schedule.queries, scratch[:bins], scratch[bins:], tasks, count,
                owners, bounds,
            ),
            windows,
            bins,
        )  # fmt: skip
    return BackwardTasks(tasks, count, owners, per_task, window, bounds)


def build(arch: str, per_task: int, window: int, even: bool = False) -> Build:
    """What :func:`tasks_of` compiles."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        line, table = (ANY,), (ANY, ANY)
        schedule = Schedule(
            fake(torch.int32, table), fake(torch.int32, table), fake(torch.int32, line),
            fake(torch.int32, line), fake(torch.int32, (ANY, 4), align=16),
            fake(torch.int32, (1,)), fake(torch.int32, table), fake(torch.int32, line),
        )  # fmt: skip
        numbers = (Int32(0), Int32(0))
        return TaskBuild(per_task, window, even), (fake(torch.int32, table), schedule, *numbers)

    facts = (("per_task", per_task), ("window", window), ("even", even))
    return Build("task_build", arch, facts, make)
