"""One warp asks the copy engine for tiles: rows of q and dO for each tile, K and V for each run.

A tile's rows are gathered, one box per query of ``group`` heads and 64 channels; a row without a
query has the index -1, which lies outside the tensor and so is filled with zeros.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Int32  # noqa: E402

from openmsa.contract.tasks import TILE_ROWS  # noqa: E402
from openmsa.kernels.common.tiles import (  # noqa: E402
    CHANNELS,
    clear_rows,
    load_block,
    partition,
)
from openmsa.kernels.sm100.backward.config import BLOCK, HEAD_DIM, Barrier  # noqa: E402
from openmsa.kernels.sm100.backward.context import Context, Maps  # noqa: E402

__all__ = ["HALVES", "run"]

HALVES = HEAD_DIM // CHANNELS
_TILE_BYTES = TILE_ROWS * HEAD_DIM * 2


@cute.jit
def run(c: Context, maps: Maps, rows: cute.Tensor, d_rows: cute.Tensor, k: Any, v: Any) -> None:
    """Fill the tiles. ``rows`` and ``d_rows`` are ``[channel, head, 1, slot, half, stage]`` of
    shared memory, ``k`` and ``v`` ``[channel, key, 1, half]``."""
    q_to, q_from = partition(maps.q, rows, maps.q_at, (CHANNELS, c.config.group, 1))
    g_to, g_from = partition(maps.d_out, d_rows, maps.d_out_at, (CHANNELS, c.config.group, 1))
    runs, landed = Int32(-1), Int32(0)
    last_head, last_row = Int32(-1), Int32(-1)
    tasks, blocks = c.tensors.tasks, c.tensors.blocks
    for tile in cutlass.range(c.begin, c.end, unroll=1):
        task = c.task(tile)
        head, row, edge, count = tasks[task, 0], tasks[task, 1], tasks[task, 2], tasks[task, 3]
        lane = cute.arch.lane_idx()
        query = Int32(-1)
        if lane < count:
            query = c.tensors.queries[head, edge + lane]
        stage, used = c.stage(tile - c.begin)
        opens = head != last_head or row != last_row
        last_head, last_row = head, row

        c.wait_free(Barrier.Q_EMPTY, used, stage)
        _rows(c, maps.q, q_from, q_to, Barrier.Q_FULL, query, head, stage)
        if opens:
            runs += 1
            start, keys = blocks[row, 0], blocks[row, 1]
            c.wait_free(Barrier.V_EMPTY, runs)
            load_block(maps.v, maps.v_at, v, c.barrier(Barrier.V_FULL), start, head)
            c.wait_free(Barrier.K_EMPTY, runs)
            if keys == BLOCK:
                load_block(maps.k, maps.k_at, k, c.barrier(Barrier.K_FULL), start, head)
            else:
                load_block(maps.k, maps.k_at, k, c.barrier(Barrier.K_LANDED), start, head)
                c.wait(Barrier.K_LANDED, landed)
                landed += 1
                # They hold other keys, or nothing: whatever it is must add zero to dQ.
                clear_rows(k, keys, c.barrier(Barrier.K_FULL))
        c.wait_free(Barrier.DO_EMPTY, used, stage)
        _rows(c, maps.d_out, g_from, g_to, Barrier.DO_FULL, query, head, stage)


@cute.jit
def _rows(
    c: Context,
    atom: Any,
    source: Any,
    target: Any,
    full: Any,
    query: Int32,
    head: Int32,
    stage: Any,
) -> None:
    barrier = c.barrier(full, stage)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, _TILE_BYTES)
    for slot in cutlass.range_constexpr(c.config.queries):
        of = cute.arch.shuffle_sync(query, slot)
        for half in cutlass.range_constexpr(HALVES):
            cute.copy(
                atom, source[None, half, head, of], target[None, slot, half, stage],
                tma_bar_ptr=barrier,
            )  # fmt: skip
