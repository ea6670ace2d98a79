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
from cutlass.cutlass_dsl import select_  # noqa: E402

from openmsa.kernels.common.ptx import arrive_lanes, arrive_warp  # noqa: E402
from openmsa.kernels.sm90.backward import forms, store  # noqa: E402
from openmsa.kernels.sm90.backward.config import (  # noqa: E402
    BLOCK,
    BUFFERS,
    HEAD_DIM,
    TILE_ROWS,
    Barrier,
    Meta,
)
from openmsa.kernels.sm90.backward.context import Context, Maps, Tiles  # noqa: E402

__all__ = ["run"]

_PIECES = TILE_ROWS // 8
"""Groups of eight rows; a thread has two rows of each, for each of its two keys."""


@cute.jit
def run(c: Context, maps: Maps, tiles: Tiles) -> None:
    """All tasks of the thread block, until the loader says that there are no more."""
    thread = cute.arch.thread_idx()[0]
    dk, dv = (_sums(forms.sums(c.dtype), (BLOCK, HEAD_DIM)) for _ in range(2))
    tile, turn = Int32(0), Int32(0)
    c.wait(Barrier.Q_FULL, 0, 0)
    left = c.meta(0, Meta.TILES)
    while left > 0:
        dk.fill(0.0)
        dv.fill(0.0)
        c.wait(Barrier.K_FULL, turn)
        c.wait(Barrier.V_FULL, turn)
        s = _scores(c, tiles, thread, tile)
        _first_half(c, maps, tiles, thread, tile, (s, dk, dv), None)
        for _ in cutlass.range(left - 1, unroll=1):
            stage, used = c.stage(tile + 1)
            c.wait(Barrier.Q_FULL, used, stage)
            s = _scores(c, tiles, thread, tile + 1)
            rows = _second_half(c, tiles, thread, tile)
            arrive_lanes(c.barrier(Barrier.Q_EMPTY, c.stage(tile)[0]))
            tile += 1
            _first_half(c, maps, tiles, thread, tile, (s, dk, dv), rows)
        rows = _second_half(c, tiles, thread, tile)
        arrive_warp(c.barrier(Barrier.KV_EMPTY))
        store.send_rows(c, maps, tiles.dq, thread, rows)
        stage, used = c.stage(tile)
        task = store.task_of(c, stage)
        arrive_lanes(c.barrier(Barrier.Q_EMPTY, stage))
        turn += 1
        tile += 1
        store.await_turn(c, thread, task)
        store.add_block(c, maps.dv, maps.dv_at, tiles.dq, thread, task, dv)
        store.add_block(c, maps.dk, maps.dk_at, tiles.dq, thread, task, dk)
        store.end_turn(c, thread, task)
        stage, used = c.stage(tile)
        c.wait(Barrier.Q_FULL, used, stage)
        left = c.meta(stage, Meta.TILES)
    store.drain()


@cute.jit
def _scores(c: Context, tiles: Tiles, thread: Int32, tile: Int32) -> Any:
    """Issue S^T of a tile."""
    form = forms.scores(c.dtype)
    mine = form.get_slice(thread)
    rows = _last(forms.rows(c.dtype, tiles.q), c.stage(tile)[0])
    k = mine.make_fragment_A(mine.partition_A(_last(forms.block(c.dtype, tiles.k), 0)))
    q = mine.make_fragment_B(mine.partition_B(rows))
    s = _sums(form, (BLOCK, TILE_ROWS))
    forms.multiply(form, k, q, s, adds=False)
    return s


@cute.jit
def _first_half(
    c: Context, maps: Maps, tiles: Tiles, thread: Int32, tile: Int32, sums: Any, rows: Any
) -> None:
    """From S to dV and dS; leaves while dK is being summed. Products are issued before what does
    not wait for them: dP before P, dV before dS. On the way it hands over the dQ ``rows`` of the
    tile before, if there is one."""
    s, dk, dv = sums
    stage, used = c.stage(tile)
    scores, adds = forms.scores(c.dtype), forms.sums(c.dtype)
    mine, columns = scores.get_slice(thread), adds.get_slice(thread)
    v = mine.make_fragment_A(mine.partition_A(_last(forms.block(c.dtype, tiles.v), 0)))
    g = mine.make_fragment_B(mine.partition_B(_last(forms.rows(c.dtype, tiles.d_out), stage)))
    d_p = _sums(scores, (BLOCK, TILE_ROWS))
    c.wait(Barrier.DO_FULL, used, stage)
    forms.multiply(scores, v, g, d_p, adds=False)
    masked = c.meta(stage, Meta.MASKED)
    if cutlass.const_expr(rows is None):
        warpgroup.wait_group(1)
    _probabilities(c, s, stage, thread, masked)
    if cutlass.const_expr(rows is not None):
        store.send_rows(c, maps, tiles.dq, thread, rows)
    p = _rounded(c, s, adds)
    warpgroup.wait_group(0)
    g_columns = columns.partition_B(_last(forms.columns(c.dtype, tiles.d_out), stage))
    forms.multiply(adds, p, columns.make_fragment_B(g_columns), dv, adds=True)
    _gradients(c, s, d_p, stage, thread, masked)
    # Only now, as registers do not last for P beside dS.
    warpgroup.wait_group(0)
    arrive_warp(c.barrier(Barrier.DO_EMPTY, stage))
    ds = _rounded(c, d_p, adds)
    buffer, turn = tile % BUFFERS, tile // BUFFERS
    c.wait_free(Barrier.DS_EMPTY, turn, buffer)
    _write_ds(c, scores, tiles, ds, thread, buffer)
    cute.arch.fence_proxy("async.shared", space="cta")
    arrive_warp(c.barrier(Barrier.DS_FULL, buffer))
    q_columns = columns.partition_B(_last(forms.columns(c.dtype, tiles.q), stage))
    forms.multiply(adds, ds, columns.make_fragment_B(q_columns), dk, adds=True)


@cute.jit
def _second_half(c: Context, tiles: Tiles, thread: Int32, tile: Int32) -> Any:
    """dQ of a tile, once the other warpgroup has its dS, too, to shared memory. All products that
    were issued before it are done then."""
    buffer, turn = tile % BUFFERS, tile // BUFFERS
    form = forms.parts(c.dtype)
    mine = form.get_slice(thread)
    ds = mine.partition_A(_last(forms.ds_columns(c.dtype, tiles.ds), buffer))
    k = mine.partition_B(_last(forms.block_columns(c.dtype, tiles.k), 0))
    dq = _sums(form, (TILE_ROWS, HEAD_DIM))
    c.wait(Barrier.DS_FULL, turn, buffer)
    forms.multiply(form, mine.make_fragment_A(ds), mine.make_fragment_B(k), dq, adds=False)
    warpgroup.wait_group(0)
    arrive_warp(c.barrier(Barrier.DS_EMPTY, buffer))
    return store.write_rows(c, tiles.dq, thread, c.stage(tile)[0], dq)


def _sums(form: Any, shape: Any) -> Any:
    """The thread's registers for a product of ``shape``."""
    return cute.make_rmem_tensor(form.partition_shape_C(shape), Float32)


def _last(x: Any, at: Any) -> Any:
    return x[None, None, at]


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
                at = piece * 4 + key * 2 + i
                values[at] = select_(first + key * 8 < visible, values[at], Float32(0.0))


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
