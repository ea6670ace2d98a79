"""One warp issues the five products of each tile, a tile's scores ahead of the sums before them.

Order within tile n, and what each product waits for::

    dV += P^T dO      P of n; the sums of the run before are stored, where n opens a run
    dK += dS^T Q      dS of n
    S of n+1          its Q (and K); dV of n is done, which reads P where S goes
    dQ^T = K^T dS^T   dK of n is done, which reads dS where dQ^T goes
    dP of n+1         its dO (and V); dQ^T of n is read

While P and dS are computed for one tile the tensor cores do dQ and dP of its neighbours. Where n+1
has other keys, S of n+1 comes after dQ of n, the last product to read K.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Boolean, Int32  # noqa: E402
from cutlass.cute.nvgpu import tcgen05  # noqa: E402

from openmsa.kernels.common.ptx import fence_tmem_after  # noqa: E402
from openmsa.kernels.sm100.backward import forms  # noqa: E402
from openmsa.kernels.sm100.backward.config import (  # noqa: E402
    COLUMN_DK,
    COLUMN_DP,
    COLUMN_DV,
    COLUMN_S,
    Barrier,
    Meta,
)
from openmsa.kernels.sm100.backward.context import Context, Operands  # noqa: E402

__all__ = ["run"]

_STEPS = 4  # of 16 rows in a half of a tile
_SECOND_HALF = 64  # columns from the first warpgroup's P or dS to the second's


@cute.jit
def run(c: Context, o: Operands) -> None:
    """Issue the products of the CTA's tiles."""
    runs = Int32(0)
    c.wait(Barrier.SCALARS_FULL, 0, 0)
    closes = c.meta(0, Meta.CLOSES)
    opens = Int32(1)
    c.wait(Barrier.K_FULL, 0)
    _scores(c, o, Int32(0))
    c.wait(Barrier.V_FULL, 0)
    _d_probabilities(c, o, Int32(0), closes)
    for tile in cutlass.range(c.end - c.begin, unroll=1):
        stage = c.stage(tile)[0]
        more = tile + 1 < c.end - c.begin
        next_opens, next_closes = Int32(0), Int32(0)
        if more:
            ahead, ahead_used = c.stage(tile + 1)
            c.wait(Barrier.SCALARS_FULL, ahead_used, ahead)
            next_opens = c.meta(ahead, Meta.OPENS)
            next_closes = c.meta(ahead, Meta.CLOSES)

        c.wait(Barrier.P_READY, tile)
        if opens != 0:
            c.wait_free(Barrier.SUMS_EMPTY, runs)
        fence_tmem_after()
        _sums(c, o, COLUMN_S, COLUMN_DV, o.d_out_columns, stage, opens)
        with cute.arch.elect_one():
            tcgen05.commit(c.barrier(Barrier.DO_EMPTY, stage))
            tcgen05.commit(c.barrier(Barrier.DV_DONE))

        c.wait(Barrier.DS_READY, tile)
        fence_tmem_after()
        _sums(c, o, COLUMN_DP, COLUMN_DK, o.q_columns, stage, opens)
        with cute.arch.elect_one():
            tcgen05.commit(c.barrier(Barrier.Q_EMPTY, stage))
            tcgen05.commit(c.barrier(Barrier.DK_DONE))
        if closes != 0:
            with cute.arch.elect_one():
                tcgen05.commit(c.barrier(Barrier.SUMS_FULL))

        if more and next_opens == 0:
            c.wait(Barrier.DV_DONE, tile)
            _scores(c, o, tile + 1)

        c.wait(Barrier.DK_DONE, tile)
        fence_tmem_after()
        _product(c, forms.parts(c.dtype), COLUMN_DP, o.k_columns, o.ds, 0)
        with cute.arch.elect_one():
            tcgen05.commit(c.barrier(Barrier.DQ_FULL))
        if closes != 0:
            with cute.arch.elect_one():
                tcgen05.commit(c.barrier(Barrier.K_EMPTY))

        if more:
            if next_opens != 0:
                runs += 1
                c.wait(Barrier.K_FULL, runs)
                c.wait(Barrier.DV_DONE, tile)
                _scores(c, o, tile + 1)
                c.wait(Barrier.V_FULL, runs)
            c.wait(Barrier.DQ_EMPTY, tile)
            _d_probabilities(c, o, tile + 1, next_closes)
        opens, closes = next_opens, next_closes
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(c.barrier(Barrier.SCALARS_EMPTY, stage))
    # None of what was committed may arrive after the CTA's end.
    stage, used = c.stage(c.end - c.begin - 1)
    c.wait(Barrier.DO_EMPTY, used, stage)
    c.wait(Barrier.Q_EMPTY, used, stage)
    c.wait(Barrier.V_EMPTY, runs)
    c.wait(Barrier.K_EMPTY, runs)


@cute.jit
def _scores(c: Context, o: Operands, tile: Int32) -> None:
    """S^T = K Q^T of a tile."""
    stage, used = c.stage(tile)
    c.wait(Barrier.Q_FULL, used, stage)
    fence_tmem_after()
    _product(c, forms.scores(c.dtype), COLUMN_S, o.k_rows, o.q_rows, stage)
    with cute.arch.elect_one():
        tcgen05.commit(c.barrier(Barrier.S_FULL))


@cute.jit
def _d_probabilities(c: Context, o: Operands, tile: Int32, closes: Int32) -> None:
    """dP^T = V dO^T of a tile; the last reader of V where the tile closes a run."""
    stage, used = c.stage(tile)
    c.wait(Barrier.DO_FULL, used, stage)
    fence_tmem_after()
    _product(c, forms.scores(c.dtype), COLUMN_DP, o.v_rows, o.d_out_rows, stage)
    with cute.arch.elect_one():
        tcgen05.commit(c.barrier(Barrier.DP_FULL))
    if closes != 0:
        with cute.arch.elect_one():
            tcgen05.commit(c.barrier(Barrier.V_EMPTY))


@cute.jit
def _sums(
    c: Context, o: Operands, source: Any, target: Any, rows: Any, stage: Any, opens: Int32
) -> None:
    """dV or dK += a 16-bit matrix in tensor memory, of which either warpgroup wrote half, times
    rows of a tile; from zero in the first tile of a run."""
    form = forms.sums(c.dtype)
    total = _accumulator(c, form, target)
    for half in cutlass.range_constexpr(2):
        first = c.tensor_memory + (source + half * _SECOND_HALF)
        pointer = cute.recast_ptr(first, dtype=c.dtype)
        # A fragment in tensor memory starts at column 0, whatever it was made from.
        layout = form.make_fragment_A(cute.make_tensor(pointer, o.halves)).layout
        matrix = cute.make_tensor(pointer, layout)
        for step in cutlass.range_constexpr(_STEPS):
            at = _STEPS * half + step
            form.set(tcgen05.Field.ACCUMULATE, Boolean(True) if at else opens == 0)
            cute.gemm(form, total, matrix[None, None, step, 0], rows[None, None, at, stage], total)


@cute.jit
def _product(c: Context, form: Any, column: Any, a: Any, b: Any, b_stage: Any) -> None:
    """A whole product into tensor memory, over what was there."""
    target = _accumulator(c, form, column)
    for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
        form.set(tcgen05.Field.ACCUMULATE, Boolean(step > 0))
        cute.gemm(form, target, a[None, None, step, 0], b[None, None, step, b_stage], target)


@cute.jit
def _accumulator(c: Context, form: Any, column: Any) -> Any:
    layout = form.make_fragment_C(form.partition_shape_C((128, 128))).layout
    return cute.make_tensor(c.tensor_memory + column, layout)
