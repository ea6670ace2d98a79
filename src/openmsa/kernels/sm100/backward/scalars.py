"""One warp gathers what belongs to a tile's rows and to the tile as a whole."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402

from openmsa.contract.tasks import TILE_ROWS  # noqa: E402
from openmsa.kernels.sm100.backward.config import BLOCK, Barrier, Meta  # noqa: E402
from openmsa.kernels.sm100.backward.context import Context  # noqa: E402

__all__ = ["run"]

_LOG2E = 1.4426950408889634
_ROWS_A_LANE = TILE_ROWS // 32


@cute.jit
def run(c: Context) -> None:
    """Fill a stage of ``c.floats`` and ``c.ints`` for each tile."""
    for tile in cutlass.range(c.begin, c.end, unroll=1):
        _gather(c, tile)


@cute.jit
def _gather(c: Context, tile: Int32) -> None:
    tasks, blocks = c.tensors.tasks, c.tensors.blocks
    task = c.task(tile)
    head, row, edge, count = tasks[task, 0], tasks[task, 1], tasks[task, 2], tasks[task, 3]
    start, keys, position = blocks[row, 0], blocks[row, 1], blocks[row, 2]
    opens, closes = Int32(1), Int32(1)
    if tile > 0:
        before = c.task(tile - 1)
        if tasks[before, 0] == head and tasks[before, 1] == row:
            # A run that another CTA began opens here, too, but has a place of its own (2).
            opens = Int32(0)
            if tile == c.begin:
                opens = Int32(2)
    if tile + 1 < c.end:
        after = c.task(tile + 1)
        if tasks[after, 0] == head and tasks[after, 1] == row:
            closes = Int32(0)
    lane = cute.arch.lane_idx()
    query, limit, slot = Int32(-1), Int32(-1), Int32(0)
    if lane < count:
        query = c.tensors.queries[head, edge + lane]
        limit = c.tensors.positions[query] - position
        if limit > keys - 1:
            limit = keys - 1
        if cutlass.const_expr(c.config.deterministic):
            slot = _slot(c, head, query, position // BLOCK)
    # An empty row has no probability whatever its limit.
    partly = Int32(0)
    if query >= 0 and limit < BLOCK - 1:
        partly = Int32(1)
    masked = Int32(0)
    if cute.arch.vote_any_sync(partly != 0):
        masked = Int32(1)

    stage, used = c.stage(tile - c.begin)
    ints, floats = c.ints, c.floats
    c.wait_free(Barrier.SCALARS_EMPTY, used, stage)
    if lane < c.config.queries:
        ints[stage, c.query_at(lane)] = query
        ints[stage, c.limit_at(lane)] = limit
        ints[stage, c.slot_at(lane)] = slot
    if lane == 0:
        for at, value in (
            (Meta.HEAD, head), (Meta.START, start), (Meta.KEYS, keys), (Meta.OPENS, opens),
            (Meta.CLOSES, closes), (Meta.MASKED, masked),
        ):  # fmt: skip
            ints[stage, int(at)] = value
    for turn in cutlass.range_constexpr(_ROWS_A_LANE):
        at = lane + 32 * turn
        of = cute.arch.shuffle_sync(query, at // c.config.group)
        # exp2(score - inf) is 0: an empty row adds nothing.
        lse, delta = Float32(float("-inf")), Float32(0.0)
        if of >= 0:
            q_head = head * c.config.group + at % c.config.group
            lse = c.tensors.lse[of, q_head] * -_LOG2E
            delta = c.tensors.delta[of, q_head] * -c.numbers.scale
        floats[stage, 0, at] = lse
        floats[stage, 1, at] = delta
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(c.barrier(Barrier.SCALARS_FULL, stage))


@cute.jit
def _slot(c: Context, head: Int32, query: Int32, block: Int32) -> Int32:
    """Which of the query's blocks ``block`` is: the number of smaller ones, as they ascend."""
    found = Int32(0)
    for at in cutlass.range(c.tensors.indices.shape[2], unroll=1):
        other = c.tensors.indices[head, query, at]
        if other >= 0 and other < block:
            found += 1
    return found
