"""Two warpgroups multiply, and turn scores into P and dS.

A thread has two keys and a quarter of the 64 rows of a tile::

    S^T = K Q^T        P^T  = exp2(scale * log2(e) * S^T - lse * log2(e))     dV += P^T dO
    dP^T = V dO^T      dS^T = P^T * (scale * dP^T - scale * delta)            dK += dS^T Q
                                                                              dQ  = dS K

in fp32, P and dS each rounded once to 16 bits. A key that a row does not see has P = dS = 0 by
selection, not by multiplication: what follows a short block in memory may be anything. (A NaN in a
later key of the same block still reaches dQ, as 0 times NaN in the sum over the block's keys.)
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402
from cutlass.cute.nvgpu import warp, warpgroup  # noqa: E402

from openmsa.kernels.common.ptx import arrive_warp  # noqa: E402
from openmsa.kernels.sm90.backward import forms, store  # noqa: E402
from openmsa.kernels.sm90.backward.config import (  # noqa: E402
    BLOCK,
    CONSUMERS,
    HEAD_DIM,
    TILE_ROWS,
    Barrier,
    Meta,
)
from openmsa.kernels.sm90.backward.context import Context, Maps, Tiles  # noqa: E402

__all__ = ["run"]

_THREADS = CONSUMERS * 128
_DS_WRITTEN = 1
"""The named barrier of both warpgroups: all of a tile's dS is written."""

_PIECES = TILE_ROWS // 8
"""Groups of eight rows; a thread has two rows of each, for each of its two keys."""


@cute.jit
def run(c: Context, maps: Maps, tiles: Tiles) -> None:
    """All tiles of the thread block, until the loader says stop."""
    thread = cute.arch.thread_idx()[0]
    dk = _zeros((BLOCK, HEAD_DIM), forms.sums(c.dtype))
    dv = _zeros((BLOCK, HEAD_DIM), forms.sums(c.dtype))
    tile, turn = Int32(0), Int32(0)
    c.wait(Barrier.Q_FULL, 0, 0)
    going = c.meta(0, Meta.STOP) == 0
    while going:
        stage, used = c.stage(tile)
        if c.meta(stage, Meta.OPENS) != 0:
            dk.fill(0.0)
            dv.fill(0.0)
            c.wait(Barrier.K_FULL, turn)
            c.wait(Barrier.V_FULL, turn)
        dq = _tile(c, tiles, thread, stage, used, tile, dk, dv)
        closes = c.meta(stage, Meta.CLOSES)
        head, start, keys = (c.meta(stage, at) for at in (Meta.HEAD, Meta.START, Meta.KEYS))
        store.add_rows(c, maps, tiles.dq, thread, stage, head, dq)
        warpgroup.wait_group(0)
        arrive_warp(c.barrier(Barrier.Q_EMPTY, stage))
        if closes != 0:
            arrive_warp(c.barrier(Barrier.KV_EMPTY))
            turn += 1
            store.add_block(c, maps.dv, maps.dv_at, tiles.dq, thread, head, start, keys, dv)
            store.add_block(c, maps.dk, maps.dk_at, tiles.dq, thread, head, start, keys, dk)
        tile += 1
        stage, used = c.stage(tile)
        c.wait(Barrier.Q_FULL, used, stage)
        going = c.meta(stage, Meta.STOP) == 0
    store.drain()


@cute.jit
def _tile(
    c: Context, tiles: Tiles, thread: Int32, stage: Any, used: Any, tile: Int32, dk: Any, dv: Any
) -> Any:
    """One tile; leaves with its dQ, while dK is still being summed."""
    scores, sums, parts = forms.scores(c.dtype), forms.sums(c.dtype), forms.parts(c.dtype)
    mine = scores.get_slice(thread)
    k = mine.make_fragment_A(mine.partition_A(_last(forms.block(c.dtype, tiles.k), 0)))
    v = mine.make_fragment_A(mine.partition_A(_last(forms.block(c.dtype, tiles.v), 0)))
    q = mine.make_fragment_B(mine.partition_B(_last(forms.rows(c.dtype, tiles.q), stage)))
    g = mine.make_fragment_B(mine.partition_B(_last(forms.rows(c.dtype, tiles.d_out), stage)))
    p = cute.make_rmem_tensor(scores.partition_shape_C((BLOCK, TILE_ROWS)), Float32)
    d_p = cute.make_rmem_tensor(scores.partition_shape_C((BLOCK, TILE_ROWS)), Float32)
    forms.multiply(scores, k, q, p, adds=False)
    c.wait(Barrier.DO_FULL, used, stage)
    forms.multiply(scores, v, g, d_p, adds=False)
    warpgroup.wait_group(1)
    masked = c.meta(stage, Meta.MASKED)
    _probabilities(c, p, stage, thread, masked)

    columns = sums.get_slice(thread)
    q_columns = _last(forms.columns(c.dtype, tiles.q), stage)
    g_columns = _last(forms.columns(c.dtype, tiles.d_out), stage)
    q_columns = columns.make_fragment_B(columns.partition_B(q_columns))
    g_columns = columns.make_fragment_B(columns.partition_B(g_columns))
    p_rounded = _rounded(c, p, sums)
    warpgroup.wait_group(0)
    forms.multiply(sums, p_rounded, g_columns, dv, adds=True)
    _gradients(c, p, d_p, stage, thread, masked)
    ds = _rounded(c, d_p, sums)
    buffer = tile % 2
    _write_ds(c, scores, tiles, ds, thread, buffer)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=_DS_WRITTEN, number_of_threads=_THREADS)

    half = parts.get_slice(thread)
    ds_columns = _last(forms.ds_columns(c.dtype, tiles.ds), buffer)
    k_columns = _last(forms.block_columns(c.dtype, tiles.k), 0)
    dq = cute.make_rmem_tensor(parts.partition_shape_C((TILE_ROWS, HEAD_DIM)), Float32)
    forms.multiply(
        parts,
        half.make_fragment_A(half.partition_A(ds_columns)),
        half.make_fragment_B(half.partition_B(k_columns)),
        dq,
        adds=False,
    )
    forms.multiply(sums, ds, q_columns, dk, adds=True)
    warpgroup.wait_group(1)
    arrive_warp(c.barrier(Barrier.DO_EMPTY, stage))
    return dq


def _last(x: Any, at: Any) -> Any:
    return x[None, None, at]


def _zeros(shape: Any, form: Any) -> Any:
    found = cute.make_rmem_tensor(form.partition_shape_C(shape), Float32)
    found.fill(0.0)
    return found


@cute.jit
def _probabilities(c: Context, p: Any, stage: Any, thread: Int32, masked: Int32) -> None:
    for piece in cutlass.range_constexpr(_PIECES):
        lse = _pair(c, stage, 0, piece, thread)
        for key in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                at = piece * 4 + key * 2 + i
                p[at] = cute.math.exp2(p[at] * c.numbers.scale_log2 + lse[i], fastmath=True)
    if masked != 0:
        _hide(c, p, stage, thread)


@cute.jit
def _gradients(c: Context, p: Any, d_p: Any, stage: Any, thread: Int32, masked: Int32) -> None:
    for piece in cutlass.range_constexpr(_PIECES):
        delta = _pair(c, stage, 1, piece, thread)
        for key in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                at = piece * 4 + key * 2 + i
                d_p[at] = p[at] * (d_p[at] * c.numbers.scale + delta[i])
    if masked != 0:
        _hide(c, d_p, stage, thread)


@cute.jit
def _hide(c: Context, values: Any, stage: Any, thread: Int32) -> None:
    """Zero what a row does not see."""
    first = thread // 128 * 64 + thread % 128 // 32 * 16 + thread % 32 // 4
    for piece in cutlass.range_constexpr(_PIECES):
        for i in cutlass.range_constexpr(2):
            row = piece * 8 + thread % 4 * 2 + i
            visible = c.ints[stage, c.visible_at(row // c.config.group)]
            for key in cutlass.range_constexpr(2):
                if first + key * 8 >= visible:
                    values[piece * 4 + key * 2 + i] = Float32(0.0)


def _pair(c: Context, stage: Any, which: int, piece: int, thread: Any) -> Any:
    """A row term of the thread's two neighbouring rows."""
    found = cute.make_rmem_tensor(2, Float32)
    row = cute.local_tile(c.floats[stage, which, None], (2,), (piece * 4 + thread % 4,))
    cute.autovec_copy(row, found)
    return found


def _rounded(c: Context, values: Any, form: Any) -> Any:
    """The thread's values as the first operand of `forms.sums`: the same registers in order."""
    found = cute.make_rmem_tensor(values.layout, c.dtype)
    found.store(values.load().to(c.dtype))
    shape = form.partition_shape_A((BLOCK, TILE_ROWS))
    return cute.make_tensor(found.iterator, cute.make_layout(shape))


@cute.jit
def _write_ds(c: Context, form: Any, tiles: Tiles, ds: Any, thread: Int32, buffer: Int32) -> None:
    """dS^T to ``[key, row]`` of shared memory, four 8 x 8 pieces at a time."""
    target = _last(forms.ds_columns(c.dtype, tiles.ds), buffer)
    turned = cute.make_tensor(target.iterator, cute.select(target.layout, mode=[1, 0]))
    op = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), c.dtype)
    copy = cute.make_tiled_copy_C(op, form)
    mine = copy.get_slice(thread)
    flat = cute.make_tensor(
        ds.iterator, cute.make_layout(form.partition_shape_C((BLOCK, TILE_ROWS)))
    )
    cute.copy(copy, mine.retile(flat), mine.partition_D(turned))
