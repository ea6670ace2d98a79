"""One warp takes tasks and asks the copy engine for tiles: K and V of a task, q and dO of a tile.

A tile's rows are gathered, one box per query of ``group`` heads and 64 channels; a row without a
query has the index -1, which lies outside the tensor and so is filled with zeros, and sees no key.
What a tile needs besides (lse, delta, visible keys) the warp reads one tile ahead, and takes the
next task while it works on this one; but where tasks of a key block wait for each other, only when
it needs one: a task taken early begins late, when what waits for it has begun long since.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

import math  # noqa: E402
from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402

from openmsa.kernels.common.ptx import arrive_lanes  # noqa: E402
from openmsa.kernels.common.tiles import (  # noqa: E402
    CHANNELS,
    clear_rows,
    load_block,
    partition,
)
from openmsa.kernels.sm90.backward.config import (  # noqa: E402
    BLOCK,
    BY_LANE,
    HEAD_DIM,
    LANES,
    TILE_ROWS,
    Barrier,
    Meta,
)
from openmsa.kernels.sm90.backward.context import Context, Maps  # noqa: E402

__all__ = ["HALVES", "run"]

HALVES = HEAD_DIM // CHANNELS
_ROWS_BYTES = TILE_ROWS * HEAD_DIM * 2
_LOG2E = math.log2(math.e)


@cute.jit
def run(c: Context, maps: Maps, rows: Any, d_rows: Any, k: Any, v: Any) -> None:
    """Fill the tiles. ``rows`` and ``d_rows`` are ``[channel, head, 1, slot, half, stage]`` of
    shared memory, ``k`` and ``v`` ``[channel, key, 1, half]``."""
    box = (CHANNELS, c.config.group, 1)
    q_to, q_from = partition(maps.q, rows, maps.q_at, box)
    g_to, g_from = partition(maps.d_out, d_rows, maps.d_out_at, box)
    count = c.tensors.count[0]
    task, coming = _ticket(c), Int32(0)
    if cutlass.const_expr(not c.config.deterministic):
        coming = _ticket(c)
    tile, turn, landed = Int32(0), Int32(0), Int32(0)
    while task < count:
        head, row, edge, size = (c.tensors.tasks[task, i] for i in range(4))
        start, keys, first = (c.tensors.blocks[row, i] for i in range(3))
        lane = cute.arch.lane_idx()
        query, visible = _edges(c, head, edge, size, lane, first, keys)
        before = Int32(0)
        if cutlass.const_expr(c.config.deterministic):
            before = edge - c.tensors.row_ptr[head, row]
        terms = _scalars(c, query, head, 0)
        for at in cutlass.range(0, size, c.config.queries, unroll=1):
            stage, used = c.stage(tile)
            c.wait_free(Barrier.Q_EMPTY, used, stage)
            within = at % LANES
            _write(c, stage, query, visible, terms, within)
            _write_meta(c, stage, (head, row, size, start, keys, before), visible, within)
            _rows(c, maps.q, q_from, q_to, Barrier.Q_FULL, query, within, head, stage)
            if at == 0:
                c.wait_free(Barrier.KV_EMPTY, turn)
                turn += 1
                load_block(maps.v, maps.v_at, v, c.barrier(Barrier.V_FULL), start, head)
                if keys == BLOCK:
                    load_block(maps.k, maps.k_at, k, c.barrier(Barrier.K_FULL), start, head)
                else:
                    load_block(maps.k, maps.k_at, k, c.barrier(Barrier.K_LANDED), start, head)
                    c.wait(Barrier.K_LANDED, landed)
                    landed += 1
                    # They hold other keys, or nothing: whatever it is must add zero to dQ.
                    clear_rows(k, keys, c.barrier(Barrier.K_FULL))
            c.wait_free(Barrier.DO_EMPTY, used, stage)
            _rows(c, maps.d_out, g_from, g_to, Barrier.DO_FULL, query, within, head, stage)
            tile += 1
            ahead = at + c.config.queries
            if ahead < size:
                if ahead % LANES == 0:
                    query, visible = _edges(c, head, edge + ahead, size - ahead, lane, first, keys)
                terms = _scalars(c, query, head, ahead % LANES)
        if cutlass.const_expr(c.config.deterministic):
            task = _ticket(c)
        else:
            task, coming = coming, _ticket(c)
    stage, used = c.stage(tile)
    c.wait_free(Barrier.Q_EMPTY, used, stage)
    ints = c.ints
    with cute.arch.elect_one():
        ints[stage, int(Meta.TILES)] = Int32(0)
    arrive_lanes(c.barrier(Barrier.Q_FULL, stage))


@cute.jit
def _ticket(c: Context) -> Int32:
    """A task of one's own; beyond the last one where there is none left."""
    found = Int32(0)
    if cute.arch.lane_idx() == 0:
        found = cute.arch.atomic_add(
            c.tensors.ticket.iterator, Int32(1), sem="relaxed", scope="gpu"
        )
    return cute.arch.shuffle_sync(found, 0)


@cute.jit
def _edges(
    c: Context, head: Int32, edge: Int32, left: Int32, lane: Int32, first: Int32, keys: Int32
) -> tuple[Int32, Int32]:
    """The lane's query of the next 32 edges, -1 past the end, and how many keys it sees: none where
    it is no query, as zero times a NaN of K or V is not zero."""
    query, visible = Int32(-1), Int32(0)
    if lane < left:
        query = c.tensors.queries[head, edge + lane]
        visible = c.tensors.positions[query] - first + 1
        if visible > keys:
            visible = keys
    return query, visible


@cute.jit
def _scalars(c: Context, query: Int32, head: Int32, within: Any) -> Any:
    """lse, delta (and the factor of dq) of the lane's rows: one in each 32 rows of the tile."""
    found = cute.make_rmem_tensor((TILE_ROWS // LANES, c.config.floats), Float32)
    found.fill(0.0)
    group = c.config.group
    for i in cutlass.range_constexpr(TILE_ROWS // LANES):
        at = i * LANES + cute.arch.lane_idx()
        of = cute.arch.shuffle_sync(query, within + at // group)
        q_head = head * group + at % group
        if of >= 0:
            found[i, 0], found[i, 1] = c.tensors.lse[of, q_head], c.tensors.delta[of, q_head]
            if cutlass.const_expr(c.config.deterministic):
                found[i, 2] = c.tensors.factors[of, q_head]
    return tuple(found[i] for i in range(cute.size(found)))


@cute.jit
def _write(c: Context, stage: Any, query: Int32, visible: Int32, terms: Any, within: Int32) -> None:
    """A tile's scalars: what is added in the exponent and in dS, queries, visible keys."""
    lane = cute.arch.lane_idx()
    floats, ints = c.floats, c.ints
    parts = TILE_ROWS // LANES
    for i in cutlass.range_constexpr(parts):
        floats[stage, 0, i * LANES + lane] = -terms[i] * Float32(_LOG2E)
        floats[stage, 1, i * LANES + lane] = -terms[parts + i] * c.numbers.scale
        if cutlass.const_expr(c.config.deterministic):
            floats[stage, 2, i * LANES + lane] = terms[2 * parts + i]
    slot = lane - within
    if slot >= 0 and slot < c.config.queries:
        ints[stage, c.query_at(slot)] = query
        ints[stage, c.visible_at(slot)] = visible


@cute.jit
def _write_meta(c: Context, stage: Any, task: Any, visible: Int32, within: Int32) -> None:
    head, row, size, start, keys, before = task
    slot = cute.arch.lane_idx() - within
    short = slot >= 0 and slot < c.config.queries and visible < BLOCK
    masked = cute.arch.vote_any_sync(short)
    ints = c.ints
    with cute.arch.elect_one():
        ints[stage, int(Meta.TILES)] = (size + c.config.queries - 1) // c.config.queries
        ints[stage, int(Meta.MASKED)] = Int32(masked)
        ints[stage, int(Meta.HEAD)] = head
        ints[stage, int(Meta.START)] = start
        ints[stage, int(Meta.KEYS)] = keys
        ints[stage, int(Meta.ROW)] = row
        ints[stage, int(Meta.BEFORE)] = before
        ints[stage, int(Meta.EDGES)] = size


@cute.jit
def _rows(
    c: Context, atom: Any, source: Any, target: Any, full: Any, query: Int32, within: Int32,
    head: Int32, stage: Any,
) -> None:  # fmt: skip
    barrier = c.barrier(full, stage)
    if cutlass.const_expr(full in BY_LANE):
        arrive_lanes(barrier, _ROWS_BYTES)
    else:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, _ROWS_BYTES)
    for slot in cutlass.range_constexpr(c.config.queries):
        of = cute.arch.shuffle_sync(query, within + slot)
        for half in cutlass.range_constexpr(HALVES):
            cute.copy(
                atom, source[None, half, head, of], target[None, slot, half, stage],
                tma_bar_ptr=barrier,
            )  # fmt: skip
