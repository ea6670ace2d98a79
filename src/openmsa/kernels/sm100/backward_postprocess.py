"""fp32 sums to the input's type: a launch each for dq, dk and dv."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from openmsa.kernels.common.compile import Build  # noqa: E402
from openmsa.kernels.stages import rounding  # noqa: E402

__all__ = ["backward_postprocess", "builds"]


def backward_postprocess(
    dq: Tensor, dk: Tensor, dv: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The fp32 accumulators in the input dtype, each rounded once; shapes stay."""
    return rounding.rounded(dq, dtype), rounding.rounded(dk, dtype), rounding.rounded(dv, dtype)


def builds(arch: str) -> tuple[Build, ...]:
    """What :func:`backward_postprocess` compiles for bf16."""
    return (rounding.build(arch, torch.bfloat16),)
