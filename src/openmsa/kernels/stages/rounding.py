"""fp32 sums to the input's type."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass import Float32, Int64  # noqa: E402
from torch import Tensor  # noqa: E402

from openmsa.kernels.common.compile import ANY, TYPES, Build, fake, function  # noqa: E402
from openmsa.kernels.common.device import arch_of  # noqa: E402

__all__ = ["build", "rounded"]

_THREADS = 256
_VECTOR = 4  # elements of a thread: 16 bytes read, 8 written


class Rounding:
    """``target = source`` in another type; the numbers of elements are multiples of 4."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    @cute.jit
    def __call__(self, source: cute.Tensor, target: cute.Tensor, stream: Any) -> None:
        self.kernel(source, target).launch(
            grid=(cute.ceil_div(source.shape[0], _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, source: cute.Tensor, target: cute.Tensor) -> None:
        """Both ``[elements / 4, 4]``."""
        # 64 bits: four times it passes 2^31 beyond 262,144 queries of 64 heads.
        at = Int64(cute.arch.block_idx()[0]) * _THREADS + cute.arch.thread_idx()[0]
        if at < source.shape[0]:
            values = cute.make_rmem_tensor(_VECTOR, Float32)
            cute.autovec_copy(source[at, None], values)
            found = cute.make_rmem_tensor(_VECTOR, self.dtype)
            found.store(values.load().to(self.dtype))
            cute.autovec_copy(found, target[at, None])


def rounded(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous fp32 ``sums`` in ``dtype``; the shape stays."""
    found = torch.empty(sums.shape, dtype=dtype, device=sums.device)
    if sums.numel():
        convert = function(build(arch_of(sums.device), dtype))
        convert(sums.view(-1, _VECTOR), found.view(-1, _VECTOR))
    return found


def build(arch: str, dtype: torch.dtype) -> Build:
    """What :func:`rounded` compiles."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        shape = (ANY, _VECTOR)
        return Rounding(TYPES[dtype]), (
            fake(torch.float32, shape, align=16), fake(dtype, shape, align=_VECTOR * dtype.itemsize)
        )  # fmt: skip

    facts = (("dtype", str(dtype).removeprefix("torch.")),)
    return Build("backward_postprocess", arch, facts, make)
