"""The union kernel's consumers: 64 rows of a tile each, with an online softmax.

The scores of the next block are computed while the exponentials of this one are, and so are the
sums of the one before::

    issue S of block i + 1, then O += P V of block i; softmax of i + 1 as soon as its S is there

A warp waits for no other warp but the loader's, until it writes its output over Q.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

import math  # noqa: E402
from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402
from cutlass.cute.nvgpu import warpgroup  # noqa: E402

from openmsa.kernels.common.ptx import arrive_lanes, arrive_warp  # noqa: E402
from openmsa.kernels.sm90.forward import forms, softmax  # noqa: E402
from openmsa.kernels.sm90.forward.config import (  # noqa: E402
    BUFFERS,
    CHANNELS,
    EIGHT,
    HALVES,
    HEAD_DIM,
    ROWS,
    TILE_BYTES,
    UNION_CONSUMERS,
    UNION_TILES,
    WARPS,
    Union,
    UnionMeta,
)
from openmsa.kernels.sm90.forward.context import Context  # noqa: E402

__all__ = ["run"]

_INFINITY = float("inf")
_WARP_ROWS = ROWS // WARPS
_PIECE = 8  # elements of 16 bytes
_PIECES = HEAD_DIM // _PIECE  # of a row


@cute.jit
def run(c: Context, consumer: Int32) -> None:
    """The ``consumer``-th 64 rows of each of the thread block's tiles."""
    q = forms.q_operand(c.dtype, c.rows, UNION_TILES * UNION_CONSUMERS)
    turn, done = Int32(0), Int32(0)
    c.wait(Union.K_FULL, turn // BUFFERS, turn % BUFFERS)
    tile = c.words[turn % BUFFERS, int(UnionMeta.TILE)]
    while tile >= 0:
        stage = done % UNION_TILES
        c.wait(Union.ROWS_FULL, done // UNION_TILES, stage)
        place = stage * UNION_CONSUMERS + consumer
        count = c.words[turn % BUFFERS, int(UnionMeta.LEFT)]
        first = tile // c.tensors.counts.shape[1] * UNION_CONSUMERS + consumer
        positions = _positions(c, first)
        o = forms.zeros(forms.sums(c.dtype))
        o.fill(0.0)
        highs = cute.make_rmem_tensor(2, Float32)
        masses = cute.make_rmem_tensor(2, Float32)
        highs.fill(-_INFINITY)
        masses.fill(0.0)
        if count == 0:
            c.wait(Union.V_FULL, turn // BUFFERS, turn % BUFFERS)
            arrive_lanes(c.barrier(Union.K_EMPTY, turn % BUFFERS))
            _release_v(c, turn)
            turn += 1
        else:
            _walk(c, q[None, None, None, place], (o, highs, masses), positions, turn, count)
            turn += count
        head = tile % c.tensors.counts.shape[1]
        factors = _close(c, highs, masses, first, head)
        for row in cutlass.range_constexpr(2):
            softmax.scaled(o, row, factors[row])
        cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=32 * WARPS)
        _store(c, o, place, first, head)
        if cute.arch.lane_idx() == 0:
            c.arrive(Union.ROWS_EMPTY, stage)
        done += 1
        c.wait(Union.K_FULL, turn // BUFFERS, turn % BUFFERS)
        tile = c.words[turn % BUFFERS, int(UnionMeta.TILE)]


@cute.jit
def _query(c: Context, first: Int32, row: Any) -> Int32:
    """The query of this thread's ``row``."""
    return first * c.config.queries + (softmax.lane_rows()[0] + 8 * row >> c.config.shift)


@cute.jit
def _positions(c: Context, first: Int32) -> Any:
    """The position of the query of each of this thread's rows; before every key where there is no
    such query."""
    found = cute.make_rmem_tensor(2, Int32)
    for row in cutlass.range_constexpr(2):
        query = _query(c, first, row)
        found[row] = Int32(-1)
        if query < c.numbers.queries:
            found[row] = c.tensors.positions[query]
    return found


@cute.jit
def _release_v(c: Context, turn: Int32) -> None:
    """The warp is done with V of a turn."""
    arrive_warp(c.barrier(Union.V_EMPTY, turn % BUFFERS))


@cute.jit
def _walk(c: Context, q: Any, sums: Any, positions: Any, turn: Int32, count: Int32) -> None:
    """Attend to the ``count`` blocks from ``turn`` on; ``sums`` are O, and of each row the greatest
    score and this thread's part of the sum."""
    o, highs, masses = sums
    k, v = forms.k_operand(c.dtype, c.k), forms.v_operand(c.dtype, c.v)
    s = forms.zeros(forms.scores(c.dtype))
    p = forms.weights(c.dtype)
    _scores(c, q, k, s, turn)
    warpgroup.wait_group(0)
    _online(c, s, highs, masses, positions, turn)
    _round(c, s, p)
    for last in cutlass.range(turn, turn + count - 1, unroll=1):
        s = forms.zeros(forms.scores(c.dtype))
        _scores(c, q, k, s, last + 1)
        _sum(c, p, v, o, last)
        warpgroup.wait_group(1)
        kept = _online(c, s, highs, masses, positions, last + 1)
        warpgroup.wait_group(0)
        _release_v(c, last)
        for row in cutlass.range_constexpr(2):
            softmax.scaled(o, row, kept[row])
        _round(c, s, p)
    last = turn + count - 1
    _sum(c, p, v, o, last)
    warpgroup.wait_group(0)
    _release_v(c, last)


@cute.jit
def _scores(c: Context, q: Any, k: Any, s: Any, turn: Int32) -> None:
    """Issue S of a turn's block."""
    buffer = turn % BUFFERS
    c.wait(Union.K_FULL, turn // BUFFERS, buffer)
    forms.multiply(forms.scores(c.dtype), q, k[None, None, None, buffer], s, False)


@cute.jit
def _sum(c: Context, p: Any, v: Any, o: Any, turn: Int32) -> None:
    """Issue O += P V of a turn's block."""
    buffer = turn % BUFFERS
    c.wait(Union.V_FULL, turn // BUFFERS, buffer)
    forms.multiply(forms.sums(c.dtype), p, v[None, None, None, buffer], o, True)


@cute.jit
def _round(c: Context, s: Any, p: Any) -> None:
    rounded = cute.make_tensor(p.iterator, s.layout)
    rounded.store(s.load().to(c.dtype))


@cute.jit
def _online(c: Context, s: Any, highs: Any, masses: Any, positions: Any, turn: Int32) -> Any:
    """Exponentials of a turn's scores in place, and K given back. Gives the factors that what was
    summed before is to be multiplied with."""
    buffer = turn % BUFFERS
    row_of, column = softmax.lane_rows()
    words = c.words
    if words[buffer, int(UnionMeta.MASKED)] != 0:
        members, keys = words[buffer, int(UnionMeta.MEMBERS)], words[buffer, int(UnionMeta.KEYS)]
        position = words[buffer, int(UnionMeta.POSITION)]
        consumer = cute.arch.thread_idx()[0] // 128
        for row in cutlass.range_constexpr(2):
            local = consumer * c.config.queries + (row_of + 8 * row >> c.config.shift)
            # A row that did not choose the block sees none of its keys.
            visible = min(positions[row] - position + 1, keys)
            if (members >> local & 1) == 0:
                visible = Int32(0)
            softmax.hide(s, row, column, visible)
    arrive_lanes(c.barrier(Union.K_EMPTY, buffer))
    kept = cute.make_rmem_tensor(2, Float32)
    for row in cutlass.range_constexpr(2):
        top = cute.arch.fmax(highs[row], softmax.highest(s, row) * c.numbers.scale_log2)
        shift = top
        if top == -_INFINITY:  # has seen no key yet
            shift = Float32(0.0)
        kept[row] = cute.math.exp2(highs[row] - shift, fastmath=True)
        part = softmax.exponentials(s, row, c.numbers.scale_log2, shift)
        masses[row] = masses[row] * kept[row] + part
        highs[row] = top
    return kept


@cute.jit
def _close(c: Context, highs: Any, masses: Any, first: Int32, head: Int32) -> Any:
    """Store the two rows' lse; gives what their sums are to be multiplied with."""
    row_of, column = softmax.lane_rows()
    lse = c.tensors.lse
    factors = cute.make_rmem_tensor(2, Float32)
    for row in cutlass.range_constexpr(2):
        mass = softmax.total(masses[row])
        total = (highs[row] + cute.math.log2(mass, fastmath=True)) * math.log(2.0)
        factors[row] = 1.0 / mass
        if mass == 0.0:
            factors[row] = Float32(0.0)
            total = Float32(-_INFINITY)
        query = _query(c, first, row)
        if column == 0 and query < c.numbers.queries:
            lse[query, head * c.config.group + (row_of + 8 * row & c.config.group - 1)] = total
    return factors


@cute.jit
def _store(c: Context, o: Any, place: Int32, first: Int32, head: Int32) -> None:
    """This warp's rows, through their place in the stage, to the output in lines of 256 bytes."""
    softmax.stage_out(o, c.dtype, c.rows.toint().to(Int32) + place * TILE_BYTES)
    cute.arch.sync_warp()
    tiles = UNION_TILES * UNION_CONSUMERS
    pieces = cute.make_tensor(
        cute.make_ptr(c.dtype, c.rows.toint(), cute.AddressSpace.smem, assumed_align=16),
        cute.make_layout(
            (_PIECE, _PIECES // HALVES, (EIGHT, ROWS // EIGHT), HALVES, tiles),
            stride=(1, _PIECE, (CHANNELS, EIGHT * HEAD_DIM), EIGHT * CHANNELS, ROWS * HEAD_DIM),
        ),
    )
    lane, out, group = cute.arch.lane_idx(), c.tensors.out, c.config.group
    piece = lane & _PIECES - 1
    half, inside = piece >> 3, piece & 7
    for i in cutlass.range_constexpr(0, _WARP_ROWS, 2):
        row = (cute.arch.warp_idx() & WARPS - 1) * _WARP_ROWS + (lane >> 4) + i
        query = first * c.config.queries + (row >> c.config.shift)
        if query < c.numbers.queries:
            line = out[query, head * group + (row & group - 1), None]
            cute.autovec_copy(
                pieces[None, inside ^ (lane >> 4) ^ i & 6, row, half, place],
                cute.local_tile(line, (_PIECE,), (piece,)),
            )
    # What comes next into this place is the copy engine's.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
