"""``delta = sum_d out * d_out - d_lse``, the row term of the softmax gradient.

From ``out = sum_j P_j v_j`` follows ``sum_j P_j dP_j = out . d_out`` with ``dP_j = v_j . d_out``,
and ``d lse / d s_j = P_j``; so ``dS_j = P_j (dP_j - delta)`` takes a gradient of lse along for
nothing.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402
from torch import Tensor  # noqa: E402

from openmsa.kernels.common.compile import ANY, Build, fake, function  # noqa: E402
from openmsa.kernels.common.device import arch_of  # noqa: E402
from openmsa.kernels.common.tensors import aligned  # noqa: E402

__all__ = ["backward_preprocess", "builds"]

_DIM = 128
_VECTOR = 8  # channels of a thread: 16 bytes
_LANES = _DIM // _VECTOR
_THREADS = 256
_ROWS = 4  # one after the other by the same lanes
_BLOCK_ROWS = _THREADS // _LANES * _ROWS


class Preprocess:
    """One row of (query, head) to 16 lanes; rows of a thread block are neighbours."""

    def __init__(self, has_lse: bool) -> None:
        self.has_lse = has_lse

    @cute.jit
    def __call__(
        self, out: cute.Tensor, d_out: cute.Tensor, d_lse: cute.Tensor, delta: cute.Tensor,
        stream: Any,
    ) -> None:  # fmt: skip
        rows = delta.shape[0] * delta.shape[1]
        self.kernel(out, d_out, d_lse, delta).launch(
            grid=(cute.ceil_div(rows, _BLOCK_ROWS), 1, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, out: cute.Tensor, d_out: cute.Tensor, d_lse: cute.Tensor, delta: cute.Tensor
    ) -> None:
        thread = cute.arch.thread_idx()[0]
        lane = thread % _LANES
        heads = delta.shape[1]
        rows = delta.shape[0] * heads
        first = cute.arch.block_idx()[0] * _BLOCK_ROWS + thread // _LANES
        for turn in cutlass.range_constexpr(_ROWS):
            row = first + turn * (_THREADS // _LANES)
            total = Float32(0.0)
            query, head = row // heads, row % heads
            if row < rows:
                o = self.channels(out, query, head, lane)
                g = self.channels(d_out, query, head, lane)
                for i in cutlass.range_constexpr(_VECTOR):
                    total += o[i] * g[i]
            for power in cutlass.range_constexpr(4):
                total += cute.arch.shuffle_sync_bfly(total, 1 << power)
            if row < rows and lane == 0:
                if cutlass.const_expr(self.has_lse):
                    total -= d_lse[query, head]
                delta[query, head] = total

    @cute.jit
    def channels(self, x: cute.Tensor, query: Int32, head: Int32, lane: Int32) -> Any:
        """The lane's channels in fp32."""
        found = cute.make_rmem_tensor(_VECTOR, x.element_type)
        cute.autovec_copy(cute.local_tile(x[query, head, None], (_VECTOR,), (lane,)), found)
        return found.load().to(Float32)


def backward_preprocess(out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor | None) -> Tensor:
    """fp32 ``delta [Tq, Hq] = sum_d(out * d_out) - d_lse``.

    Args:
        out, d_out: ``[Tq, Hq, 128]``, bf16 or fp16.
        lse: fp32 ``[Tq, Hq]``.
        d_lse: fp32 ``[Tq, Hq]``, or None for zeros.
    """
    delta = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    if delta.numel():
        build = _build(arch_of(out.device), out.dtype, d_lse is not None)
        has = lse if d_lse is None else d_lse
        function(build)(aligned(out), aligned(d_out), has.contiguous(), delta)
    return delta


def builds(arch: str) -> tuple[Build, ...]:
    """What :func:`backward_preprocess` compiles for MiniMax-M3 in bf16."""
    return (_build(arch, torch.bfloat16, False),)


def _build(arch: str, dtype: torch.dtype, has_lse: bool) -> Build:
    def make() -> tuple[Any, tuple[Any, ...]]:
        rows = fake(dtype, (ANY, ANY, _DIM), strides=(ANY, ANY, 1), align=16)
        other = fake(dtype, (ANY, ANY, _DIM), strides=(ANY, ANY, 1), align=16)
        table = (ANY, ANY)
        return Preprocess(has_lse), (
            rows, other, fake(torch.float32, table), fake(torch.float32, table)
        )  # fmt: skip

    facts = (("dtype", str(dtype).removeprefix("torch.")), ("has_lse", has_lse))
    return Build("backward_preprocess", arch, facts, make)
