"""dq summed as integers, for gradients that are equal to the bit from call to call.

Up to 64 thread blocks add to a query's dq, in whatever order they come. Additions of integers give
the same sum in every order. So each row of dq (a query and a head) has a unit, a power of two, and
parts of dq are rounded to int32 multiples of it before the copy engine adds them. The unit follows
from a bound on every sum of parts::

    |sum_j scale P_j (dP_j - delta) K_jd|  <=  scale (|dO| max_j |V_j| + |delta|) max_j |K_jd|

by dP_j = V_j . dO, Cauchy-Schwarz and sum_j P_j <= 1; j runs over the keys of the blocks that the
query chose. With the bound below 2^e the unit is 2^(e - 29): a factor of four is left for rounded P
and dS. A part is then off by at most half a unit, 2^-29 of the bound. The bound is far above a
usual element, as dP_j is seldom near |dO| |V_j| and the terms differ in sign; the errors of P and
dS, which are rounded to 16 bits, are larger still. Where a row's squares leave the range of fp32,
its length is bounded by its largest element.

Every part carries the same bias, an integer that the way of rounding leaves (`store`), so that the
number of a query's parts times the bias is taken off in the end; all of it modulo 2^32.

A row whose bound is not finite becomes NaN.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

import math  # noqa: E402
import struct  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import cutlass.utils as utils  # noqa: E402
import torch  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402
from torch import Tensor  # noqa: E402

from openmsa.contract.layout import Layout  # noqa: E402
from openmsa.kernels.common.compile import ANY, Build, fake, function  # noqa: E402
from openmsa.kernels.common.scan import last_not_above  # noqa: E402
from openmsa.kernels.sm90.backward.config import BLOCK, HEAD_DIM  # noqa: E402

__all__ = ["BIAS", "HIGH", "LOW", "SHIFT", "FixedPoint", "builds", "units"]

_WARPS = 4
_THREADS = _WARPS * 32
_VECTOR = 8  # channels of a load: 16 bytes of the inputs
_LARGEST = 3.0e38
_SMALLEST = 1.0e-30
"""Of a sum of squares: those that vanish in fp32 do not count beside it."""

_INFINITE = float("inf")
_BITS = 29
_EXPONENT = 127
_MANTISSA = 23

HIGH, LOW, SHIFT = 1.5 * 2.0**31, 1.5 * 2.0**23, 8
"""Numbers of which a sum with less than 2^30, or 2^22, has a last bit of 2^SHIFT, or of 1."""


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


_MODULUS = 2**32
_SUM = ((_bits(HIGH) << SHIFT) + _bits(LOW)) % _MODULUS
BIAS = _SUM - _MODULUS if _SUM >= _MODULUS // 2 else _SUM
"""What a part is too large by, as int32."""


class FixedPoint(NamedTuple):
    """A dq that :mod:`openmsa.kernels.sm90.backward_postprocess` turns into numbers.

    Attributes:
        sums: int32 ``[Tq, Hq, 128]``, in units of a row, with the bias of its parts.
        factors: one over the unit of each row, fp32 ``[Tq, Hq]``.
        parts: how many parts were added, int32 ``[Tq, Hkv]``.
    """

    sums: Tensor
    factors: Tensor
    parts: Tensor


class Maxima:
    """Of each key block: the longest V row, and the largest element of K. A key to a thread."""

    @cute.jit
    def __call__(
        self, k: cute.Tensor, v: cute.Tensor, blocks: cute.Tensor, maxima: cute.Tensor, stream: Any
    ) -> None:
        """k, v ``[Tk, Hkv, 128]``; maxima fp32 ``[Hkv, rows, 2]``."""
        self.kernel(k, v, blocks, maxima).launch(
            grid=(blocks.shape[0], k.shape[1], 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, k: cute.Tensor, v: cute.Tensor, blocks: cute.Tensor, maxima: cute.Tensor
    ) -> None:
        row, head, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        squares, longest = Float32(0.0), Float32(0.0)
        largest, total = Float32(0.0), Float32(0.0)
        if thread < blocks[row, 1]:
            key = blocks[row, 0] + thread
            for at in cutlass.range(HEAD_DIM // _VECTOR, unroll=4):
                a, b = _channels(v, key, head, at), _channels(k, key, head, at)
                for i in cutlass.range_constexpr(_VECTOR):
                    squares += a[i] * a[i]
                    longest = cute.arch.fmax(longest, _size(a[i]))
                    size = _size(b[i])
                    total += size
                    largest = cute.arch.fmax(largest, size)
        longest = _length(squares, longest)
        # What is not finite is infinite here: a maximum would drop NaN.
        if not longest <= _LARGEST:
            longest = Float32(_INFINITE)
        if not total <= _LARGEST:
            largest = Float32(_INFINITE)
        for power in cutlass.range_constexpr(5):
            longest = cute.arch.fmax(longest, cute.arch.shuffle_sync_bfly(longest, 1 << power))
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << power))
        found = utils.SmemAllocator().allocate_tensor(Float32, cute.make_layout((2, _WARPS)), 16)
        if thread % 32 == 0:
            found[0, thread // 32] = longest
            found[1, thread // 32] = largest
        cute.arch.sync_threads()
        if thread == 0:
            for warp in cutlass.range_constexpr(1, _WARPS):
                longest = cute.arch.fmax(longest, found[0, warp])
                largest = cute.arch.fmax(largest, found[1, warp])
            maxima[head, row, 0] = longest
            maxima[head, row, 1] = largest


class Selected(NamedTuple):
    """Where the blocks that a query chose lie: the selection ``[Hkv, Tq, topk]``, and offsets,
    spans and first schedule rows of the layout."""

    indices: cute.Tensor
    cu_seqlens_q: cute.Tensor
    spans: cute.Tensor
    first: cute.Tensor
    maxima: cute.Tensor


class Units:
    """The factor ``1 / unit`` of each row, and the parts of each query and KV head, which are a
    warp's work."""

    def __init__(self, group: int) -> None:
        self.group = group

    @cute.jit
    def __call__(
        self, d_out: cute.Tensor, delta: cute.Tensor, factors: cute.Tensor, parts: cute.Tensor,
        selected: Selected, scale: Float32, queries: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """d_out ``[Tq, Hq, 128]``, delta and factors ``[Tq, Hq]``, parts ``[Tq, Hkv]``; rows past
        ``queries`` get the factor 1 and no parts."""
        selected = Selected(*selected)
        warps = d_out.shape[0] * selected.indices.shape[0]
        self.kernel(d_out, delta, factors, parts, selected, scale, queries).launch(
            grid=(cute.ceil_div(warps, _WARPS), 1, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, d_out: cute.Tensor, delta: cute.Tensor, factors: cute.Tensor, parts: cute.Tensor,
        selected: Selected, scale: Float32, queries: Int32,
    ) -> None:  # fmt: skip
        s = Selected(*selected)
        heads = s.indices.shape[0]
        warp = cute.arch.block_idx()[0] * _WARPS + cute.arch.warp_idx()
        lane = cute.arch.lane_idx()
        query, head = warp // heads, warp % heads
        if query < d_out.shape[0]:
            longest, largest, count = Float32(0.0), Float32(0.0), Int32(0)
            if query < queries:
                entry = last_not_above(s.cu_seqlens_q, s.spans.shape[0], query)
                base = s.first[s.spans[entry, 2]]
                for slot in cutlass.range(lane, s.indices.shape[2], 32, unroll=1):
                    block = s.indices[head, query, slot]
                    if block >= 0:
                        count += 1
                        longest = cute.arch.fmax(longest, s.maxima[head, base + block, 0])
                        largest = cute.arch.fmax(largest, s.maxima[head, base + block, 1])
            for power in cutlass.range_constexpr(5):
                longest = cute.arch.fmax(longest, cute.arch.shuffle_sync_bfly(longest, 1 << power))
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << power))
                count += cute.arch.shuffle_sync_bfly(count, 1 << power)
            if lane == 0:
                parts[query, head] = count
            # Two heads at a time: 16 lanes have a row of 128 channels.
            for pair in cutlass.range_constexpr(self.group // 2):
                q_head = head * self.group + pair * 2 + lane // 16
                values = _channels(d_out, query, q_head, lane % 16)
                total, top = Float32(0.0), Float32(0.0)
                for i in cutlass.range_constexpr(_VECTOR):
                    total += values[i] * values[i]
                    top = cute.arch.fmax(top, _size(values[i]))
                for power in cutlass.range_constexpr(4):
                    total += cute.arch.shuffle_sync_bfly(total, 1 << power)
                    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << power))
                if lane % 16 == 0:
                    term = _length(total, top) * longest + _size(delta[query, q_head])
                    factors[query, q_head] = _factor(scale * term * largest, count > 0)


def _size(value: Any) -> Any:
    """The absolute value; of NaN, NaN."""
    return cute.math.absf(value)


@cute.jit
def _length(squares: Float32, largest: Float32) -> Float32:
    """The length of a row, or a bound of it, by the sum of its squares and its largest element; NaN
    where there is one."""
    found = cute.math.sqrt(squares)
    # Not so of NaN, which a maximum would have dropped.
    if squares < _SMALLEST or squares > _LARGEST:
        found = largest * Float32(math.sqrt(HEAD_DIM))
    return found


@cute.jit
def _factor(bound: Float32, reads: Any) -> Float32:
    """2^(29 - e) for a bound below 2^e; 1 where nothing is read, NaN for a bound that is none."""
    bits = bound.bitcast(Int32)
    power = _BITS - ((bits >> _MANTISSA) - _EXPONENT + 1)
    if power > _EXPONENT - 1:
        power = Int32(_EXPONENT - 1)
    if power < 1 - _EXPONENT:
        power = Int32(1 - _EXPONENT)
    found = ((power + _EXPONENT) << _MANTISSA).bitcast(Float32)
    if not bound <= _LARGEST:
        found = Float32(float("nan"))
    if not reads:
        found = Float32(1.0)
    return found


@cute.jit
def _channels(x: cute.Tensor, row: Int32, head: Int32, at: Any) -> Any:
    """Eight channels of a row in fp32."""
    found = cute.make_rmem_tensor(_VECTOR, x.element_type)
    cute.autovec_copy(cute.local_tile(x[row, head, None], (_VECTOR,), (at,)), found)
    return found.load().to(Float32)


def units(
    arch: str, k: Tensor, v: Tensor, d_out: Tensor, delta: Tensor, indices: Tensor,
    blocks: Tensor, layout: Layout, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One over the unit of each row of dq, fp32 ``[Tq, Hq]``; its parts, int32 ``[Tq, Hkv]``."""
    dtype = str(k.dtype).removeprefix("torch.")
    heads, rows = k.shape[1], blocks.shape[0]
    maxima = torch.empty((heads, rows, 2), dtype=torch.float32, device=k.device)
    function(_maxima(arch, dtype))(k, v, blocks, maxima)
    factors = torch.empty(delta.shape, dtype=torch.float32, device=k.device)
    parts = torch.empty((delta.shape[0], heads), dtype=torch.int32, device=k.device)
    first = layout.first_blocks(BLOCK).int()
    function(_units(arch, dtype, d_out.shape[1] // heads))(
        d_out, delta, factors, parts,
        Selected(indices, layout.cu_seqlens_q, layout.spans, first, maxima),
        scale, layout.num_queries,
    )  # fmt: skip
    return factors, parts


def builds(arch: str, dtype: str, group: int) -> tuple[Build, ...]:
    """What a deterministic backward compiles besides the main kernel."""
    return _maxima(arch, dtype), _units(arch, dtype, group)


def _rows(dtype: str) -> Any:
    shape = (ANY, ANY, HEAD_DIM)
    return fake(getattr(torch, dtype), shape, strides=(ANY, ANY, 1), align=16)


def _maxima(arch: str, dtype: str) -> Build:
    def make() -> tuple[Any, tuple[Any, ...]]:
        blocks = fake(torch.int32, (ANY, 3))
        return Maxima(), (
            _rows(dtype), _rows(dtype), blocks, fake(torch.float32, (ANY, ANY, 2))
        )  # fmt: skip

    return Build("block_maxima", arch, (("dtype", dtype),), make)


def _units(arch: str, dtype: str, group: int) -> Build:
    def make() -> tuple[Any, tuple[Any, ...]]:
        table, line = (ANY, ANY), (ANY,)
        selected = Selected(
            fake(torch.int32, (ANY, ANY, ANY)), fake(torch.int32, line),
            fake(torch.int32, (ANY, 3)), fake(torch.int32, line),
            fake(torch.float32, (ANY, ANY, 2)),
        )  # fmt: skip
        return Units(group), (
            _rows(dtype), fake(torch.float32, table), fake(torch.float32, table),
            fake(torch.int32, table), selected, Float32(0), Int32(0),
        )  # fmt: skip

    return Build("dq_units", arch, (("dtype", dtype), ("group", group)), make)
