"""Sums to the input's type, dq's integers among them."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass import Float32, Int32, Int64  # noqa: E402
from torch import Tensor  # noqa: E402

from openmsa.kernels.common.compile import ANY, TYPES, Build, fake, function  # noqa: E402
from openmsa.kernels.common.device import arch_of  # noqa: E402
from openmsa.kernels.sm90.backward.config import HEAD_DIM  # noqa: E402
from openmsa.kernels.sm90.backward.fixed import BIAS, FixedPoint  # noqa: E402
from openmsa.kernels.stages import rounding  # noqa: E402

__all__ = ["backward_postprocess", "builds"]

_THREADS = 256
_VECTOR = 4  # elements of a thread: 16 bytes read


class Real:
    """The values of integers: without the bias of its parts, times its row's unit."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    @cute.jit
    def __call__(
        self, sums: cute.Tensor, factors: cute.Tensor, parts: cute.Tensor, found: cute.Tensor,
        stream: Any,
    ) -> None:  # fmt: skip
        """sums int32 and found ``[elements / 4, 4]``, factors ``[Tq, Hq]``, parts ``[Tq, Hkv]``."""
        self.kernel(sums, factors, parts, found).launch(
            grid=(cute.ceil_div(sums.shape[0], _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, sums: cute.Tensor, factors: cute.Tensor, parts: cute.Tensor, found: cute.Tensor
    ) -> None:
        # 64 bits: four times it passes 2^31 beyond 262,144 queries of 64 heads.
        at = Int64(cute.arch.block_idx()[0]) * _THREADS + cute.arch.thread_idx()[0]
        if at < sums.shape[0]:
            values = cute.make_rmem_tensor(_VECTOR, Int32)
            cute.autovec_copy(sums[at, None], values)
            heads, kv_heads = factors.shape[1], parts.shape[1]
            row = (at // (HEAD_DIM // _VECTOR)).to(Int32)
            query, q_head = row // heads, row % heads
            unit = Float32(1.0) / factors[query, q_head]
            bias = parts[query, q_head // (heads // kv_heads)] * Int32(BIAS)
            real = cute.make_rmem_tensor(_VECTOR, Float32)
            for i in cutlass.range_constexpr(_VECTOR):
                real[i] = (values[i] - bias).to(Float32) * unit
            result = cute.make_rmem_tensor(_VECTOR, self.dtype)
            result.store(real.load().to(self.dtype))
            cute.autovec_copy(result, found[at, None])


def backward_postprocess(
    dq: Tensor | FixedPoint, dk: Tensor, dv: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of :func:`openmsa.kernels.sm90.backward.launch.backward` in ``dtype``, each rounded
    once; shapes stay."""
    found = _real(dq, dtype) if isinstance(dq, FixedPoint) else rounding.rounded(dq, dtype)
    return found, rounding.rounded(dk, dtype), rounding.rounded(dv, dtype)


def _real(dq: FixedPoint, dtype: torch.dtype) -> Tensor:
    sums = dq.sums
    found = torch.empty(sums.shape, dtype=dtype, device=sums.device)
    convert = function(_build(arch_of(sums.device), dtype))
    convert(sums.view(-1, _VECTOR), dq.factors, dq.parts, found.view(-1, _VECTOR))
    return found


def builds(arch: str) -> tuple[Build, ...]:
    """What :func:`backward_postprocess` compiles for bf16."""
    return rounding.build(arch, torch.bfloat16), _build(arch, torch.bfloat16)


def _build(arch: str, dtype: torch.dtype) -> Build:
    def make() -> tuple[Any, tuple[Any, ...]]:
        shape = (ANY, _VECTOR)
        return Real(TYPES[dtype]), (
            fake(torch.int32, shape, align=16), fake(torch.float32, (ANY, ANY)),
            fake(torch.int32, (ANY, ANY)), fake(dtype, shape, align=_VECTOR * dtype.itemsize),
        )  # fmt: skip

    facts = (("dtype", str(dtype).removeprefix("torch.")),)
    return Build("dq_real", arch, facts, make)
