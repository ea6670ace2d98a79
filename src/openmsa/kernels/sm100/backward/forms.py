"""The three forms of a 128 x 128 x 128 product with fp32 sums.

A form is made anew wherever it is used: setting whether it adds to its sums changes the object, and
what a loop or a branch has changed cannot be used outside of it.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass.cute as cute  # noqa: E402
from cutlass import Float32  # noqa: E402
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05  # noqa: E402

from openmsa.contract.tasks import TILE_ROWS  # noqa: E402
from openmsa.kernels.sm100.backward.config import BLOCK  # noqa: E402

__all__ = ["parts", "scores", "sums"]


def scores(dtype: Any) -> Any:
    """S^T = K Q^T and dP^T = V dO^T: both operands have channels contiguous."""
    return _form(dtype, OperandMajorMode.K, OperandMajorMode.K)


def sums(dtype: Any) -> Any:
    """dV += P^T dO and dK += dS^T Q: the first operand is in tensor memory."""
    source = tcgen05.OperandSource.TMEM
    return _form(dtype, OperandMajorMode.K, OperandMajorMode.MN, source)


def parts(dtype: Any) -> Any:
    """dQ^T = K^T dS^T: both operands are transposed in shared memory."""
    return _form(dtype, OperandMajorMode.MN, OperandMajorMode.MN)


def _form(dtype: Any, a: Any, b: Any, source: Any = tcgen05.OperandSource.SMEM) -> Any:
    shape = (TILE_ROWS, BLOCK, 16)
    op = tcgen05.MmaF16BF16Op(dtype, Float32, shape, tcgen05.CtaGroup.ONE, source, a, b)
    return cute.make_tiled_mma(op)
