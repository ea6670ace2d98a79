"""A query's partial outputs become its output::

    lse2 = log2 sum_s 2^(lse2_s)          out = sum_s 2^(lse2_s - lse2) out_s

A thread has 16 bytes of every slot of one (query, query head). The eight pieces of a half row lie
in the order in which shared memory held them, piece ``i`` of row r at ``i ^ (r % 8)``, which is the
same in every slot: only the place in the output has to be found.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

import math  # noqa: E402
from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402

from openmsa.kernels.common.compile import ANY, Build, fake  # noqa: E402
from openmsa.kernels.sm90.forward.config import EIGHT, HALVES, HEAD_DIM, Config  # noqa: E402
from openmsa.kernels.sm90.forward.setup import dtype_of  # noqa: E402
from openmsa.kernels.sm90.forward.walk import union_wins  # noqa: E402

__all__ = ["Merge", "build"]

_THREADS = 256
_PIECE = 8  # elements of 16 bytes
_PIECES = HEAD_DIM // HALVES // _PIECE  # of a half row
_LANES = HALVES * _PIECES  # of a (query, query head)
_BATCH = 16
"""Slots that a thread loads before it adds the first."""

_INFINITY = float("inf")


class Merge:
    """16 lanes for each (query, query head) of a window."""

    def __init__(self, config: Config) -> None:
        self.group = config.group
        self.cost = config.union_cost

    @cute.jit
    def __call__(
        self, indices: cute.Tensor, tally: cute.Tensor, slots: cute.Tensor, slot_lse: cute.Tensor,
        out: cute.Tensor, lse: cute.Tensor, window: Int32, first: Int32, queries: Int32,
        stream: Any,
    ) -> None:  # fmt: skip
        """indices ``[Hkv, Tq, topk]``; ``queries`` of ``window`` from ``first`` on. Slots as of
        `context.KeyTensors`; out ``[Tq, Hq, D]`` and lse ``[Tq, Hq]``, contiguous."""
        lanes = queries * indices.shape[0] * (self.group * _LANES)
        self.kernel(indices, tally, slots, slot_lse, out, lse, window, first, queries).launch(
            grid=(cute.ceil_div(lanes, _THREADS), 1, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, indices: cute.Tensor, tally: cute.Tensor, slots: cute.Tensor, slot_lse: cute.Tensor,
        out: cute.Tensor, lse: cute.Tensor, window: Int32, first: Int32, queries: Int32,
    ) -> None:  # fmt: skip
        thread = cute.arch.thread_idx()[0]
        heads, topk = indices.shape[0], indices.shape[2]
        row = cute.arch.block_idx()[0] * (_THREADS // _LANES) + thread // _LANES
        member = row % self.group
        head = row // self.group % heads
        local = row // self.group // heads
        if local < queries and not union_wins(tally, window, head, self.cost):
            query = first + local
            lane = thread % _LANES
            count = _count(indices[head, query, None], lane)
            place = (local * heads + head) * topk
            parts = cute.make_rmem_tensor((_PIECE, _BATCH), slots.element_type)
            eight = member // EIGHT * HALVES + lane // _PIECES
            inside = (eight * EIGHT + member % EIGHT) * _PIECES + lane % _PIECES
            self.load(slots, parts, place, count, inside)
            scale, total = self.weights(slot_lse, place, member, lane, count)
            if lane == 0:
                lse[query, head * self.group + member] = total
            found = cute.make_rmem_tensor(_PIECE, Float32)
            found.fill(0.0)
            self.add(found, parts, slot_lse, (place, count, member, lane), scale)
            for base in cutlass.range(_BATCH, count, _BATCH, unroll=1):
                self.load(slots, parts, place + base, count - base, inside)
                at = (place + base, count - base, member, lane)
                self.add(found, parts, slot_lse, at, scale)
            piece = lane % _PIECES ^ member % _PIECES
            line = out[query, head * self.group + member, None]
            target = cute.local_tile(line, (_PIECE,), (lane // _PIECES * _PIECES + piece,))
            rounded = cute.make_rmem_tensor(_PIECE, out.element_type)
            rounded.store(found.load().to(out.element_type))
            cute.autovec_copy(rounded, target)

    @cute.jit
    def weights(
        self, slot_lse: cute.Tensor, place: Int32, member: Int32, lane: Int32, count: Int32
    ) -> tuple[tuple[Float32, Float32], Float32]:
        """The greatest partial lse (or 0) and one over the sum of the weights beside it; the
        natural lse of all."""
        high = Float32(-_INFINITY)
        for base in cutlass.range(0, count, _LANES, unroll=1):
            if base + lane < count:
                high = cute.arch.fmax(high, slot_lse[place + base + lane, member])
        for power in cutlass.range_constexpr(4):
            high = cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, 1 << power))
        shift = high
        if high == -_INFINITY:
            shift = Float32(0.0)
        mass = Float32(0.0)
        for base in cutlass.range(0, count, _LANES, unroll=1):
            if base + lane < count:
                mass += cute.math.exp2(slot_lse[place + base + lane, member] - shift, fastmath=True)
        for power in cutlass.range_constexpr(4):
            mass += cute.arch.shuffle_sync_bfly(mass, 1 << power)
        total = (shift + cute.math.log2(mass, fastmath=True)) * math.log(2.0)
        inverse = 1.0 / mass
        if mass == 0.0:
            total, inverse = Float32(-_INFINITY), Float32(0.0)
        return (shift, inverse), total

    @cute.jit
    def load(
        self, slots: cute.Tensor, parts: Any, place: Int32, count: Int32, inside: Int32
    ) -> None:
        """This lane's 16 bytes of up to `_BATCH` of ``count`` slots from ``place`` on."""
        for i in cutlass.range_constexpr(_BATCH):
            if i < count:
                piece = cute.local_tile(slots[place + i, None], (_PIECE,), (inside,))
                cute.autovec_copy(piece, parts[None, i])

    @cute.jit
    def add(
        self, found: Any, parts: Any, slot_lse: cute.Tensor, at: tuple[Int32, ...],
        scale: tuple[Float32, Float32],
    ) -> None:  # fmt: skip
        """Add what was loaded, each with its weight."""
        place, count, member, lane = at
        shift, inverse = scale
        weight = Float32(0.0)
        if lane < count:
            weight = cute.math.exp2(slot_lse[place + lane, member] - shift, fastmath=True) * inverse
        # Lanes of a warp share a query and a KV head, so they have the same slots.
        first = cute.arch.lane_idx() & _LANES
        for i in cutlass.range_constexpr(_BATCH):
            factor = cute.arch.shuffle_sync(weight, first + i)
            if i < count:
                found.store(found.load() + factor * parts[None, i].load().to(Float32))


@cute.jit
def _count(chosen: cute.Tensor, lane: Int32) -> Int32:
    """Blocks of a selection; half a warp looks at it."""
    found = Int32(0)
    for base in cutlass.range(0, chosen.shape[0], _LANES, unroll=1):
        at = base + lane
        if at < chosen.shape[0] and chosen[min(at, chosen.shape[0] - 1)] >= 0:
            found += 1
    for power in cutlass.range_constexpr(4):
        found += cute.arch.shuffle_sync_bfly(found, 1 << power)
    return found


def build(arch: str, config: Config) -> Build:
    """The kernel of ``config``."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        dtype = dtype_of(config)
        return Merge(config), (
            fake(torch.int32, (ANY, ANY, ANY)),
            fake(torch.int32, (ANY, ANY, 3)),
            fake(dtype, (ANY, config.group * HEAD_DIM), align=16),
            fake(torch.float32, (ANY, config.group)),
            fake(dtype, (ANY, ANY, HEAD_DIM), strides=(ANY, ANY, 1), align=16),
            fake(torch.float32, (ANY, ANY)),
            Int32(0), Int32(0), Int32(0),
        )  # fmt: skip

    return Build("forward_merge", arch, (("config", config),), make)
