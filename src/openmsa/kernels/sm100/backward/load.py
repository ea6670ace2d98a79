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
from cutlass.cute.nvgpu import cpasync  # noqa: E402

from openmsa.contract.tasks import TILE_ROWS  # noqa: E402
from openmsa.kernels.sm100.backward.config import BLOCK, HEAD_DIM, Barrier  # noqa: E402
from openmsa.kernels.sm100.backward.context import Context, Maps  # noqa: E402

__all__ = ["CHANNELS", "HALVES", "run"]

CHANNELS = 64
"""Channels of a box: 128 bytes, the span of a swizzle."""

HALVES = HEAD_DIM // CHANNELS
_TILE_BYTES = TILE_ROWS * HEAD_DIM * 2
_ROW_WORDS = CHANNELS * 2 // 4


@cute.jit
def run(c: Context, maps: Maps, rows: cute.Tensor, d_rows: cute.Tensor, k: Any, v: Any) -> None:
    """Fill the tiles. ``rows`` and ``d_rows`` are ``[channel, head, 1, slot, half, stage]`` of
    shared memory, ``k`` and ``v`` ``[channel, key, 1, half]``."""
    q_to, q_from = _partition(maps.q, rows, maps.q_at, (CHANNELS, c.config.group, 1))
    g_to, g_from = _partition(maps.d_out, d_rows, maps.d_out_at, (CHANNELS, c.config.group, 1))
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
            _block(c, maps.v, maps.v_at, v, Barrier.V_FULL, start, head)
            c.wait_free(Barrier.K_EMPTY, runs)
            if keys == BLOCK:
                _block(c, maps.k, maps.k_at, k, Barrier.K_FULL, start, head)
            else:
                _block(c, maps.k, maps.k_at, k, Barrier.K_LANDED, start, head)
                c.wait(Barrier.K_LANDED, landed)
                landed += 1
                _clear(c, k, keys)
        c.wait_free(Barrier.DO_EMPTY, used, stage)
        _rows(c, maps.d_out, g_from, g_to, Barrier.DO_FULL, query, head, stage)


@cute.jit
def _partition(atom: Any, shared: Any, at: Any, box: Any) -> Any:
    tiles = cute.local_tile(at, box, (None, None, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
    )


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


@cute.jit
def _block(
    c: Context, atom: Any, at: Any, shared: Any, full: Any, start: Int32, head: Int32
) -> None:
    barrier = c.barrier(full)
    moved = cute.domain_offset((0, start, 0), at)
    target, source = _partition(atom, shared, moved, (CHANNELS, BLOCK, 1))
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, _TILE_BYTES)
    for half in cutlass.range_constexpr(HALVES):
        cute.copy(atom, source[None, half, 0, head], target[None, half], tma_bar_ptr=barrier)


@cute.jit
def _clear(c: Context, k: Any, keys: Int32) -> None:
    """Zero the rows past a short block: they hold other keys, or nothing, and whatever these are,
    times a zero of dS, must add zero to dQ. A row is 128 bytes, within which swizzling permutes."""
    words = cute.make_tensor(
        cute.make_ptr(Int32, k.iterator.toint(), cute.AddressSpace.smem, assumed_align=128),
        cute.make_layout((HALVES, BLOCK, _ROW_WORDS), stride=(BLOCK * _ROW_WORDS, _ROW_WORDS, 1)),
    )
    lane = cute.arch.lane_idx()
    for key in cutlass.range(keys, BLOCK, unroll=1):
        for half in cutlass.range_constexpr(HALVES):
            words[half, key, lane] = 0
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(c.barrier(Barrier.K_FULL))
