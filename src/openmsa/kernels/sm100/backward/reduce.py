"""One warpgroup takes sums out of tensor memory: dQ of each tile, dV and dK of each run.

dQ^T has a channel to a lane, so that a warp's lanes are neighbours in memory: one instruction adds
128 contiguous bytes. dV and dK have a key to a lane, and a thread adds 16 bytes at a time.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Int32, Int64  # noqa: E402

from openmsa.kernels.common.ptx import (  # noqa: E402
    add_f32,
    add_f32x4,
    arrive_warp,
    fence_tmem_after,
    fence_tmem_before,
)
from openmsa.kernels.sm100.backward.config import (  # noqa: E402
    COLUMN_DK,
    COLUMN_DP,
    COLUMN_DV,
    HEAD_DIM,
    Barrier,
    Meta,
)
from openmsa.kernels.sm100.backward.context import Context  # noqa: E402
from openmsa.kernels.sm100.backward.tensor_memory import chunk, load  # noqa: E402

__all__ = ["run"]

_HALF = 64
_CHUNK = 32
_VECTOR = 4


@cute.jit
def run(c: Context) -> None:
    """Add up the CTA's tiles and runs in global memory."""
    lane = cute.arch.thread_idx()[0] % 128
    runs, owner = Int32(0), Int32(1)
    for tile in cutlass.range(c.end - c.begin, unroll=1):
        stage, used = c.stage(tile)
        c.wait(Barrier.SCALARS_FULL, used, stage)
        head, start, keys = (
            c.meta(stage, which) for which in (Meta.HEAD, Meta.START, Meta.KEYS)
        )  # fmt: skip
        opens, closes = c.meta(stage, Meta.OPENS), c.meta(stage, Meta.CLOSES)
        if opens != 0:
            owner = opens
        c.wait(Barrier.DQ_FULL, tile)
        fence_tmem_after()
        _add_tile(c, stage, head, lane)
        arrive_warp(c.barrier(Barrier.SCALARS_EMPTY, stage))
        if closes != 0:
            c.wait(Barrier.SUMS_FULL, runs)
            runs += 1
            fence_tmem_after()
            _store_block(c, COLUMN_DV, 0, head, start, keys, owner, lane)
            _store_block(c, COLUMN_DK, 1, head, start, keys, owner, lane)
            fence_tmem_before()
            arrive_warp(c.barrier(Barrier.SUMS_EMPTY))


@cute.jit
def _add_tile(c: Context, stage: Any, head: Int32, lane: Int32) -> None:
    """dQ of a tile. All of it is read before any of it is added, as the next tile's dP waits for
    these columns; in order, where registers are short, half of it."""
    queries = c.config.queries
    halves: list[Any] = []
    for half in cutlass.range_constexpr(2):
        halves.append(load(chunk(c.tensor_memory + (COLUMN_DP + half * _HALF), _HALF), lane))
        if cutlass.const_expr(half == 1):
            fence_tmem_before()
            arrive_warp(c.barrier(Barrier.DQ_EMPTY))
        elif cutlass.const_expr(c.config.deterministic):
            for slot in cutlass.range_constexpr(queries // 2):
                _add_query(c, halves, stage, slot, head, lane)
    for slot in cutlass.range_constexpr(queries // 2 if c.config.deterministic else 0, queries):
        _add_query(c, halves, stage, slot, head, lane)


@cute.jit
def _add_query(c: Context, halves: Any, stage: Any, slot: Any, head: Int32, lane: Int32) -> None:
    """One query's part of dq: its rows of the tile are the heads of the group."""
    group = c.config.group
    query = c.ints[stage, c.query_at(slot)]
    if query >= 0:
        at = Int64(query)
        if cutlass.const_expr(c.config.deterministic):
            topk = c.tensors.indices.shape[2]
            at = Int64(query - c.numbers.first_query) * topk
            at += c.ints[stage, c.slot_at(slot)]
        q_heads = c.tensors.lse.shape[1]
        first = c.tensors.dq.iterator + ((at * q_heads + head * group) * HEAD_DIM + lane)
        for i in cutlass.range_constexpr(group):
            row = slot * group + i
            value = halves[row // _HALF][row % _HALF]
            if cutlass.const_expr(c.config.deterministic):
                target = cute.make_tensor(first + i * HEAD_DIM, cute.make_layout(1))
                target[0] = value
            else:
                add_f32(first + i * HEAD_DIM, value)


@cute.jit
def _store_block(
    c: Context, column: Any, which: Any, head: Int32, start: Int32, keys: Int32, owner: Int32,
    lane: Int32,
) -> None:  # fmt: skip
    """dV (0) or dK (1) of a run. In order, a run has one writer: whoever began it adds to the
    result; whoever goes on with it keeps a part of its own, added later in the order of CTAs."""
    result = c.tensors.dv if which == 0 else c.tensors.dk
    kv_heads = result.shape[1]
    first = result.iterator + (Int64(start + lane) * kv_heads + head) * HEAD_DIM
    cta = cute.arch.block_idx()[0]
    part = c.tensors.parts.iterator + ((Int64(cta) * 2 + which) * 128 + lane) * HEAD_DIM
    if cutlass.const_expr(c.config.deterministic):
        part_rows = c.tensors.part_rows
        if owner == 2 and lane == 0:
            for at, value in enumerate((head, start, keys)):
                part_rows[cta, at] = value
    for at in cutlass.range_constexpr(HEAD_DIM // _CHUNK):
        values = load(chunk(c.tensor_memory + (column + at * _CHUNK), _CHUNK), lane)
        if lane < keys:
            if cutlass.const_expr(c.config.deterministic):
                place = first
                if owner == 2:
                    place = part
                target = cute.make_tensor(place + at * _CHUNK, cute.make_layout(_CHUNK))
                if owner == 1:
                    for i in cutlass.range_constexpr(_CHUNK):
                        values[i] += target[i]
                cute.autovec_copy(values, target)
            else:
                for i in cutlass.range_constexpr(0, _CHUNK, _VECTOR):
                    add_f32x4(first + (at * _CHUNK + i), [values[i + j] for j in range(_VECTOR)])
