"""The key-major kernel's loader: K and V of each task, and the rows of q of each of its tiles.

A tile's rows are gathered, one box per query of ``group`` heads; a ragged tile asks for its last
query again, which then has no slot. The next task's block is asked for after the first
tiles of this one: by then all consumers are done with the task before, whose buffer it takes.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()


import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Int32  # noqa: E402

from openmsa.kernels.common.ptx import arrive_lanes  # noqa: E402
from openmsa.kernels.sm90.forward import forms  # noqa: E402
from openmsa.kernels.sm90.forward.blocks import ask_k, ask_v  # noqa: E402
from openmsa.kernels.sm90.forward.config import (  # noqa: E402
    BLOCK,
    BUFFERS,
    CLOSES,
    CONSUMERS,
    LANES,
    MASKED,
    PARITY,
    STAGES,
    STOP,
    TILE_BYTES,
    UNFIT,
    WARPS,
    KeyMajor,
    Meta,
)
from openmsa.kernels.sm90.forward.context import Context, Maps  # noqa: E402
from openmsa.kernels.sm90.forward.walk import next_task  # noqa: E402

__all__ = ["run"]


@cute.jit
def run(c: Context, maps: Maps) -> None:
    """Fill buffers and stages until there is no task left; then stop the consumers."""
    tasks, words = c.tensors.tasks, c.words
    turn, tile, landed = Int32(0), Int32(0), Int32(0)
    task = next_task(c)
    if task >= 0:
        landed = _block(c, maps, task, turn, landed)
    while task >= 0:
        count = tasks[task, 3]
        tiles = (count + c.config.queries - 1) // c.config.queries
        if tiles < CONSUMERS and cute.arch.lane_idx() == 0:
            # The others' arrivals, for consumers that have no tile of this block.
            c.arrive(KeyMajor.BLOCK_EMPTY, turn % BUFFERS, WARPS * (CONSUMERS - tiles))
        tile = _tiles(c, maps, task, Int32(0), turn, tile)
        # Not within the loop: ptxas then holds all of it for divergent, and issues every copy in a
        # loop over lanes (8 copies a tile kept the loader busy all of the time, H200, 2026-12).
        following = next_task(c)
        if following >= 0:
            landed = _block(c, maps, following, turn + 1, landed)
        for first in cutlass.range(LANES, count, LANES, unroll=1):
            tile = _tiles(c, maps, task, first, turn, tile)
        turn += 1
        task = following
    for _ in cutlass.range(CONSUMERS, unroll=1):
        stage = tile % STAGES
        c.wait_free(KeyMajor.ROWS_EMPTY, tile // STAGES, stage)
        with cute.arch.elect_one():
            words[stage, int(Meta.FLAGS)] = Int32(STOP)
        arrive_lanes(c.barrier(KeyMajor.ROWS_FULL, stage))
        tile += 1


@cute.jit
def _block(c: Context, maps: Maps, task: Int32, turn: Int32, landed: Int32) -> Int32:
    """Ask for K and V of a task."""
    head, row = c.tensors.tasks[task, 0], c.tensors.tasks[task, 1]
    start, keys = c.tensors.blocks[row, 0], c.tensors.blocks[row, 1]
    unfit = c.tensors.unfit[head, row]
    buffer = turn % BUFFERS
    c.wait_free(KeyMajor.BLOCK_EMPTY, turn // BUFFERS, buffer)
    ask_k(c, maps, KeyMajor.K_FULL, buffer, start, head)
    return ask_v(c, maps, KeyMajor, buffer, start, head, keys, unfit, landed)


@cute.jit
def _tiles(c: Context, maps: Maps, task: Int32, first: Int32, turn: Int32, tile: Int32) -> Int32:
    """The tiles of the task's queries from ``first`` on, 32 of them at most; a lane has one."""
    t, words, queries = c.tensors, c.words, c.config.queries
    lane = cute.arch.lane_idx()
    head, row = t.tasks[task, 0], t.tasks[task, 1]
    edge, count = t.tasks[task, 2], t.tasks[task, 3]
    start, keys, position = t.blocks[row, 0], t.blocks[row, 1], t.blocks[row, 2]
    mine = min(first + lane, count - 1)
    query = t.queries[head, edge + mine]
    visible = min(t.positions[query] - position + 1, keys)
    slot = t.slot_of[head, edge + mine].to(Int32)
    place = ((query - c.numbers.first) * t.tally.shape[1] + head) * c.numbers.topk + slot
    if first + lane >= count:
        place = Int32(-1)
    flags = turn % BUFFERS + turn // BUFFERS % 2 * PARITY
    if t.unfit[head, row] != 0:
        flags |= UNFIT
    masked = cute.arch.vote_ballot_sync(visible < BLOCK)
    tiles = (min(count - first, LANES) + queries - 1) // queries
    closing = (count - first + queries - 1) // queries - CONSUMERS
    for i in cutlass.range(tiles, unroll=1):
        stage = tile % STAGES
        c.wait_free(KeyMajor.ROWS_EMPTY, tile // STAGES, stage)
        slot_at = lane - i * queries
        if slot_at >= 0 and slot_at < queries:
            words[stage, int(Meta.COUNT) + slot_at] = visible
            words[stage, int(Meta.COUNT) + queries + slot_at] = place
        if lane == 0:
            now = flags
            if (masked >> (i * queries) & (1 << queries) - 1) != 0:
                now |= MASKED
            if i >= closing:
                now |= CLOSES
            words[stage, int(Meta.FLAGS)] = now
            words[stage, int(Meta.HEAD)] = head
            words[stage, int(Meta.START)] = start
            words[stage, int(Meta.KEYS)] = keys
        _rows(c, maps, query, i, head, stage)
        tile += 1
    return tile


@cute.jit
def _rows(c: Context, maps: Maps, query: Int32, i: Int32, head: Int32, stage: Int32) -> None:
    """Ask for the rows of the lanes' tile ``i``."""
    box = (c.config.group, 1)
    target, source = forms.rows_box(maps.q, maps.q_at, c.rows, box, STAGES)
    barrier = c.barrier(KeyMajor.ROWS_FULL, stage)
    arrive_lanes(barrier, TILE_BYTES)
    for at in cutlass.range_constexpr(c.config.queries):
        of = cute.arch.shuffle_sync(query, i * c.config.queries + at)
        cute.copy(maps.q, source[None, head, of], target[None, at, stage], tma_bar_ptr=barrier)
