"""Two warpgroups turn scores into P and dS.

A thread has one key and the 64 rows of its warpgroup's half of the tile::

    P  = exp2(scale * log2(e) * S - lse * log2(e))
    dS = P * (scale * dP - scale * delta)

in fp32, each rounded once to 16 bits. A key that a row does not see has P = dS = 0 by selection,
not by multiplication: what follows a short block in memory may be anything. (A NaN in a later
key of the same block still reaches dQ, as 0 times NaN in the sum over the block's keys.)
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402

from openmsa.kernels.common.ptx import arrive_warp, fence_tmem_after, fence_tmem_before  # noqa: E402
from openmsa.kernels.sm100.backward.config import (  # noqa: E402
    COLUMN_DP,
    COLUMN_S,
    Barrier,
    Meta,
)
from openmsa.kernels.sm100.backward.context import Context  # noqa: E402
from openmsa.kernels.sm100.backward.tensor_memory import chunk, load, store  # noqa: E402

__all__ = ["run"]

_HALF = 64  # rows of a warpgroup
_CHUNK = 32  # rows in registers at a time
_CHUNKS = _HALF // _CHUNK


@cute.jit
def run(c: Context, ds: cute.Tensor) -> None:
    """P and dS of each tile; ``ds`` is ``[row, key, half]`` of shared memory."""
    thread = cute.arch.thread_idx()[0]
    key, half = thread % 128, thread // 128
    for tile in cutlass.range(c.end - c.begin, unroll=1):
        stage, used = c.stage(tile)
        c.wait(Barrier.SCALARS_FULL, used, stage)
        masked = c.meta(stage, Meta.MASKED)
        c.wait(Barrier.S_FULL, tile)
        fence_tmem_after()
        p = cute.make_rmem_tensor((_CHUNK, _CHUNKS), Float32)
        for at in cutlass.range_constexpr(_CHUNKS):
            _probabilities(c, p[None, at], stage, half, at, key, masked)
        cute.arch.fence_view_async_tmem_store()
        fence_tmem_before()
        arrive_warp(c.barrier(Barrier.P_READY))

        c.wait(Barrier.DP_FULL, tile)
        fence_tmem_after()
        for at in cutlass.range_constexpr(_CHUNKS):
            _gradients(c, p[None, at], ds, stage, half, at, key, masked)
        cute.arch.fence_view_async_tmem_store()
        fence_tmem_before()
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive_warp(c.barrier(Barrier.DS_READY))
        arrive_warp(c.barrier(Barrier.SCALARS_EMPTY, stage))


@cute.jit
def _probabilities(
    c: Context, p: Any, stage: Any, half: Int32, at: Any, key: Int32, masked: Int32
) -> None:
    first = half * _HALF + at * _CHUNK
    scores = load(chunk(c.tensor_memory + (COLUMN_S + first), _CHUNK), key)
    scale = (c.numbers.scale_log2, c.numbers.scale_log2)
    for i in cutlass.range_constexpr(0, _CHUNK, 2):
        pair = cute.arch.fma_packed_f32x2(
            (scores[i], scores[i + 1]), scale, _pair(c, stage, 0, first + i)
        )
        p[i] = cute.math.exp2(pair[0], fastmath=True)
        p[i + 1] = cute.math.exp2(pair[1], fastmath=True)
    if masked != 0:
        for i in cutlass.range_constexpr(_CHUNK):
            if key > c.ints[stage, c.limit_at((first + i) // c.config.group)]:
                p[i] = Float32(0.0)
    column = COLUMN_S + half * _HALF + at * (_CHUNK // 2)
    store(_rounded(c, p), chunk(c.tensor_memory + column, _CHUNK // 2), key)


@cute.jit
def _gradients(
    c: Context, p: Any, ds: cute.Tensor, stage: Any, half: Int32, at: Any, key: Int32, masked: Int32
) -> None:
    first = half * _HALF + at * _CHUNK
    d_p = load(chunk(c.tensor_memory + (COLUMN_DP + first), _CHUNK), key)
    scale = (c.numbers.scale, c.numbers.scale)
    for i in cutlass.range_constexpr(0, _CHUNK, 2):
        pair = cute.arch.fma_packed_f32x2(
            (d_p[i], d_p[i + 1]), scale, _pair(c, stage, 1, first + i)
        )
        d_p[i], d_p[i + 1] = cute.arch.mul_packed_f32x2((p[i], p[i + 1]), pair)
    if masked != 0:
        for i in cutlass.range_constexpr(_CHUNK):
            if key > c.ints[stage, c.limit_at((first + i) // c.config.group)]:
                d_p[i] = Float32(0.0)
    found = _rounded(c, d_p)
    column = COLUMN_DP + half * _HALF + at * (_CHUNK // 2)
    store(found, chunk(c.tensor_memory + column, _CHUNK // 2), key)
    rows = cute.local_tile(ds[None, key, half], (_CHUNK,), (at,))
    cute.autovec_copy(found, rows)


def _pair(c: Context, stage: Any, which: Any, row: Any) -> Any:
    """What is added to two neighbouring rows: two fp32 operations take one instruction."""
    return c.floats[stage, which, row], c.floats[stage, which, row + 1]


@cute.jit
def _rounded(c: Context, values: Any) -> Any:
    found = cute.make_rmem_tensor(values.shape, c.dtype)
    found.store(values.load().to(c.dtype))
    return found
