"""The union kernel's loader: Q of each tile, and K and V of each block of its union."""

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
    BUFFERS,
    LANES,
    STOP,
    TILE_BYTES,
    UNION_CONSUMERS,
    UNION_TILES,
    Union,
    UnionMeta,
)
from openmsa.kernels.sm90.forward.context import Context, Maps  # noqa: E402
from openmsa.kernels.sm90.forward.walk import take, union_wins  # noqa: E402

__all__ = ["run"]


@cute.jit
def run(c: Context, maps: Maps) -> None:
    """Take tiles while there are some, the last queries first: their unions are the longest."""
    t = c.tensors
    tiles, heads = t.counts.shape[0], t.counts.shape[1]
    turn, done, landed = Int32(0), Int32(0), Int32(0)
    taken = take(t.counter.iterator)
    while taken < tiles * heads:
        tile, head = tiles - 1 - taken // heads, taken % heads
        if union_wins(t.tally, tile // c.numbers.first, head, c.config.union_cost):
            _rows(c, maps, tile, head, done)
            done += 1
            count = t.counts[tile, head, 1]
            if count == 0:
                _name(c, turn, tile * heads + head, count)
                _nothing(c, turn)
                turn += 1
            for first in cutlass.range(0, count, LANES, unroll=1):
                turn, landed = _blocks(c, maps, (tile, head, first), turn, landed)
        taken = take(t.counter.iterator)
    _name(c, turn, Int32(STOP), Int32(0))
    arrive_lanes(c.barrier(Union.K_FULL, turn % BUFFERS))


@cute.jit
def _name(c: Context, turn: Int32, tile: Int32, left: Int32) -> None:
    """Once the turn's words are free: write the tile's, and how many turns it has."""
    words, buffer = c.words, turn % BUFFERS
    c.wait_free(Union.K_EMPTY, turn // BUFFERS, buffer)
    if cute.arch.lane_idx() == 0:
        words[buffer, int(UnionMeta.TILE)] = tile
        words[buffer, int(UnionMeta.LEFT)] = left


@cute.jit
def _nothing(c: Context, turn: Int32) -> None:
    """A turn without a block."""
    buffer = turn % BUFFERS
    arrive_lanes(c.barrier(Union.K_FULL, buffer))
    c.wait_free(Union.V_EMPTY, turn // BUFFERS, buffer)
    with cute.arch.elect_one():
        c.arrive(Union.V_FULL, buffer)


@cute.jit
def _blocks(
    c: Context, maps: Maps, at: tuple[Int32, Int32, Int32], turn: Int32, landed: Int32
) -> tuple[Int32, Int32]:
    """The blocks of a (tile, head) from the one at ``first`` on, 32 at most; a lane has one."""
    tile, head, first = at
    t, words, lane = c.tensors, c.words, cute.arch.lane_idx()
    heads = t.counts.shape[1]
    count, unmasked = t.counts[tile, head, 1], t.counts[tile, head, 0]
    mine = min(first + lane, count - 1)
    row, members = t.lists[tile, head, mine, 0], t.lists[tile, head, mine, 1]
    start, keys, position = t.blocks[row, 0], t.blocks[row, 1], t.blocks[row, 2]
    for i in cutlass.range(min(count - first, LANES), unroll=1):
        buffer = turn % BUFFERS
        _name(c, turn, tile * heads + head, count - first - i)
        if lane == i:
            words[buffer, int(UnionMeta.MASKED)] = Int32(1) if first + i >= unmasked else Int32(0)
            words[buffer, int(UnionMeta.MEMBERS)] = members
            words[buffer, int(UnionMeta.KEYS)] = keys
            words[buffer, int(UnionMeta.POSITION)] = position
        its_start, its_keys = cute.arch.shuffle_sync(start, i), cute.arch.shuffle_sync(keys, i)
        ask_k(c, maps, Union.K_FULL, buffer, its_start, head)
        c.wait_free(Union.V_EMPTY, turn // BUFFERS, buffer)
        # Windows with values that are not finite are none of this kernel's.
        landed = ask_v(c, maps, Union, buffer, its_start, head, its_keys, Int32(0), landed)
        turn += 1
    return turn, landed


@cute.jit
def _rows(c: Context, maps: Maps, tile: Int32, head: Int32, done: Int32) -> None:
    """Ask for the rows of a tile; rows past the last query are whatever is there."""
    stage = done % UNION_TILES
    c.wait_free(Union.ROWS_EMPTY, done // UNION_TILES, stage)
    box = (c.config.group, c.config.queries)
    tiles = UNION_TILES * UNION_CONSUMERS
    target, source = forms.rows_box(maps.q, maps.q_at, c.rows, box, tiles)
    barrier = c.barrier(Union.ROWS_FULL, stage)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, UNION_CONSUMERS * TILE_BYTES)
    for consumer in cutlass.range_constexpr(UNION_CONSUMERS):
        cute.copy(
            maps.q, source[None, head, tile * UNION_CONSUMERS + consumer],
            target[None, 0, stage * UNION_CONSUMERS + consumer], tma_bar_ptr=barrier,
        )  # fmt: skip
