"""The three forms of the backward's products, and their operands in shared memory.

A form is made anew wherever it is used: setting whether it adds to its sums changes the object, and
what a loop or a branch has changed cannot be used outside of it.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import cutlass.utils.hopper_helpers as hopper  # noqa: E402
from cutlass import Float32  # noqa: E402
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup  # noqa: E402
from cutlass.utils import LayoutEnum  # noqa: E402

from openmsa.kernels.common.tiles import view  # noqa: E402
from openmsa.kernels.sm90.backward.config import BLOCK, BUFFERS, HEAD_DIM, STAGES, TILE_ROWS  # noqa: E402

__all__ = [
    "block", "block_columns", "columns", "ds_columns", "multiply", "parts", "rows", "scores",
    "sums",
]  # fmt: skip

_ROW, _COLUMN = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR


def scores(dtype: Any) -> Any:
    """S^T = K Q^T and dP^T = V dO^T: 128 keys by 64 rows, 64 keys to a warpgroup."""
    return _form(dtype, OperandMajorMode.K, OperandMajorMode.K, (2, 1, 1), TILE_ROWS)


def sums(dtype: Any) -> Any:
    """dV += P^T dO and dK += dS^T Q: 128 keys by 128 channels; the first operand in registers."""
    source = warpgroup.OperandSource.RMEM
    return _form(dtype, OperandMajorMode.K, OperandMajorMode.MN, (2, 1, 1), HEAD_DIM, source)


def parts(dtype: Any) -> Any:
    """dQ = dS K: 64 rows by 128 channels, 64 channels to a warpgroup."""
    return _form(dtype, OperandMajorMode.MN, OperandMajorMode.MN, (1, 2, 1), HEAD_DIM // 2)


def _form(
    dtype: Any,
    a: Any,
    b: Any,
    warpgroups: Any,
    n: int,
    source: Any = warpgroup.OperandSource.SMEM,
) -> Any:
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, a, b, Float32, warpgroups, (64, n), a_source=source
    )


def rows(dtype: Any, pointer: Any) -> cute.Tensor:
    """``[row, channel, stage]`` of the gathered rows: what scores sum over is contiguous."""
    shape = (BLOCK, TILE_ROWS, HEAD_DIM)
    return view(pointer, hopper.make_smem_layout_b(_ROW, shape, dtype, STAGES))


def columns(dtype: Any, pointer: Any) -> cute.Tensor:
    """The same memory as ``[channel, row, stage]``."""
    shape = (BLOCK, HEAD_DIM, TILE_ROWS)
    return view(pointer, hopper.make_smem_layout_b(_COLUMN, shape, dtype, STAGES))


def block(dtype: Any, pointer: Any) -> cute.Tensor:
    """``[key, channel]`` of K or V."""
    shape = (BLOCK, TILE_ROWS, HEAD_DIM)
    return view(pointer, hopper.make_smem_layout_a(_ROW, shape, dtype, 1))


def block_columns(dtype: Any, pointer: Any) -> cute.Tensor:
    """The same memory as ``[channel, key]``."""
    shape = (TILE_ROWS, HEAD_DIM, BLOCK)
    return view(pointer, hopper.make_smem_layout_b(_COLUMN, shape, dtype, 1))


def ds_columns(dtype: Any, pointer: Any) -> cute.Tensor:
    """``[row, key, buffer]`` of dS, rows contiguous."""
    shape = (TILE_ROWS, HEAD_DIM, BLOCK)
    return view(pointer, hopper.make_smem_layout_a(_COLUMN, shape, dtype, BUFFERS))


@cute.jit
def multiply(form: Any, a: Any, b: Any, total: Any, adds: bool) -> None:
    """Issue ``total (+)= a b`` over all steps of its inner dimension, as one group."""
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
        form.set(warpgroup.Field.ACCUMULATE, adds or step > 0)
        cute.gemm(form, total, a[None, None, step], b[None, None, step], total)
    warpgroup.commit_group()
