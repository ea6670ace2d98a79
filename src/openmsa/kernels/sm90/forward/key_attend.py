"""The key-major kernel's consumers: a tile's softmax over one block, into its queries' slots.

A warp has 16 rows from the first product to the last store, which it makes for itself. It waits for
the others of its warpgroup once a tile, and long after they came by: Q is read by all of them, and
written over by each.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32, Int64  # noqa: E402
from cutlass.cute.nvgpu import warpgroup  # noqa: E402
from cutlass.cutlass_dsl import select_  # noqa: E402

from openmsa.kernels.common.ptx import arrive_lanes, bulk_store  # noqa: E402
from openmsa.kernels.sm90.forward import forms, softmax  # noqa: E402
from openmsa.kernels.sm90.forward.config import (  # noqa: E402
    BLOCK,
    CLOSES,
    CONSUMERS,
    HEAD_DIM,
    MASKED,
    PARITY,
    ROWS,
    STAGES,
    TILE_BYTES,
    UNFIT,
    WARPS,
    KeyMajor,
    Meta,
)
from openmsa.kernels.sm90.forward.context import Context  # noqa: E402

__all__ = ["run"]

_WARP_ROWS = ROWS // WARPS
_INFINITY = float("inf")


@cute.jit
def run(c: Context, consumer: Int32) -> None:
    """Every `CONSUMERS`-th tile, from ``consumer`` on."""
    q = forms.q_operand(c.dtype, c.rows, STAGES)
    k, v = forms.k_operand(c.dtype, c.k), forms.v_operand(c.dtype, c.v)
    tile, held = Int32(consumer), Int32(-1)
    c.wait(KeyMajor.ROWS_FULL, tile // STAGES, tile % STAGES)
    flags = c.words[tile % STAGES, int(Meta.FLAGS)]
    while flags >= 0:
        stage, buffer, parity = tile % STAGES, flags % 2, flags // PARITY
        c.wait(KeyMajor.K_FULL, parity, buffer)
        s = forms.zeros(forms.scores(c.dtype))
        forms.multiply(
            forms.scores(c.dtype), q[None, None, None, stage], k[None, None, None, buffer], s, False
        )
        _give_back(c, held)
        warpgroup.wait_group(0)
        if cute.arch.lane_idx() == 0:
            c.arrive(KeyMajor.ROWS_READ, consumer)
        places = _places(c, stage)
        highs, masses, p = _softmax(c, s, stage, flags)
        c.wait(KeyMajor.V_FULL, parity, buffer)
        o = s  # the scores' registers are free once P is rounded
        forms.multiply(forms.sums(c.dtype), p, v[None, None, None, buffer], o, False)
        factors, lses = _close(highs, masses)
        warpgroup.wait_group(0)
        if (flags & CLOSES) != 0 and cute.arch.lane_idx() == 0:
            c.arrive(KeyMajor.BLOCK_EMPTY, buffer)
        for row in cutlass.range_constexpr(2):
            softmax.scaled(o, row, factors[row])
        if (flags & UNFIT) != 0:
            _add_unfit(c, o, stage)
        c.wait(KeyMajor.ROWS_READ, tile // CONSUMERS, consumer)
        _store(c, o, stage, places)
        # Last: the fence in the store would wait for these to have arrived.
        _store_lse(c, lses, places)
        held = stage
        tile += CONSUMERS
        c.wait(KeyMajor.ROWS_FULL, tile // STAGES, tile % STAGES)
        flags = c.words[tile % STAGES, int(Meta.FLAGS)]
    _give_back(c, held)


@cute.jit
def _visible(c: Context, stage: Int32, row: Int32) -> Int32:
    return c.words[stage, int(Meta.COUNT) + (row >> c.config.shift)]


@cute.jit
def _softmax(c: Context, s: Any, stage: Int32, flags: Int32) -> Any:
    """Base-2 maxima and this thread's sums of its two rows, and P in 16 bits."""
    first, column = softmax.lane_rows()
    if (flags & MASKED) != 0:
        for row in cutlass.range_constexpr(2):
            softmax.hide(s, row, column, _visible(c, stage, first + 8 * row))
    highs = cute.make_rmem_tensor(2, Float32)
    masses = cute.make_rmem_tensor(2, Float32)
    for row in cutlass.range_constexpr(2):
        high = softmax.highest(s, row) * c.numbers.scale_log2
        if high == -_INFINITY:  # sees nothing, which gives its sum no part
            high = Float32(0.0)
        highs[row] = high
        masses[row] = softmax.exponentials(s, row, c.numbers.scale_log2, high)
    p = forms.weights(c.dtype)
    rounded = cute.make_tensor(p.iterator, s.layout)
    rounded.store(s.load().to(c.dtype))
    return highs, masses, p


@cute.jit
def _places(c: Context, stage: Int32) -> Any:
    """The slots of this thread's two rows, -1 where there is none."""
    first, _ = softmax.lane_rows()
    found = cute.make_rmem_tensor(2, Int32)
    for row in cutlass.range_constexpr(2):
        query = first + 8 * row >> c.config.shift
        found[row] = c.words[stage, int(Meta.COUNT) + c.config.queries + query]
    return found


@cute.jit
def _close(highs: Any, masses: Any) -> Any:
    """What the sums of the two rows are to be multiplied with, and their partial lse, base 2."""
    factors = cute.make_rmem_tensor(2, Float32)
    lses = cute.make_rmem_tensor(2, Float32)
    for row in cutlass.range_constexpr(2):
        mass = softmax.total(masses[row])
        lses[row] = highs[row] + cute.math.log2(mass, fastmath=True)
        factors[row] = cute.arch.rcp_approx(mass)
        if mass == 0.0:
            factors[row] = Float32(0.0)
    return factors, lses


@cute.jit
def _store_lse(c: Context, lses: Any, places: Any) -> None:
    """The two rows' partial lse: one lane of each four has it to store."""
    first, column = softmax.lane_rows()
    slot_lse = c.tensors.slot_lse
    for row in cutlass.range_constexpr(2):
        if column == 0 and places[row] >= 0:
            slot_lse[places[row], first + 8 * row & c.config.group - 1] = lses[row]


@cute.jit
def _store(c: Context, o: Any, stage: Int32, places: Any) -> None:
    """This warp's rows, through their place in the stage, into slots. The first lane's rows are the
    warp's first and its ninth: where a warp has two queries, their first rows."""
    group = c.config.group
    address = c.rows.toint().to(Int32) + stage * TILE_BYTES
    softmax.stage_out(o, c.dtype, address)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        first = cute.arch.warp_idx() % WARPS * _WARP_ROWS
        for at in cutlass.range_constexpr(0, _WARP_ROWS, min(_WARP_ROWS, group)):
            row, place = first + at, places[at // 8]
            if place >= 0:
                bulk_store(
                    c.tensors.slots.iterator
                    + (Int64(place) * (group * HEAD_DIM) + (row & group - 1) * HEAD_DIM),
                    address + row * (HEAD_DIM * 2),
                    min(_WARP_ROWS, group) * HEAD_DIM * 2,
                )
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _give_back(c: Context, stage: Int32) -> None:
    """Hand a stage to the loader once its store has read it."""
    if stage >= 0:
        # Of the lanes, one has bulk groups to wait for; the others' are none.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        arrive_lanes(c.barrier(KeyMajor.ROWS_EMPTY, stage))


@cute.jit
def _add_unfit(c: Context, o: Any, stage: Int32) -> None:
    """Add the values of V that are not finite to the rows that see their keys."""
    first, column = softmax.lane_rows()
    words = c.words
    head, start = words[stage, int(Meta.HEAD)], words[stage, int(Meta.START)]
    visible = [_visible(c, stage, first + 8 * row) for row in range(2)]
    for key in cutlass.range(words[stage, int(Meta.KEYS)], unroll=1):
        values = c.tensors.v[start + key, head, None]
        for i in cutlass.range_constexpr(BLOCK // 4):
            value = values[column + (8 * (i // 2) + i % 2)].to(Float32)
            finite = (value < _INFINITY) & (value > -_INFINITY)
            for row in cutlass.range_constexpr(2):
                at = softmax.at(row, i)
                o[at] = select_(finite | (key >= visible[row]), o[at], o[at] + value)
