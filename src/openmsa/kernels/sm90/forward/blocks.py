"""How the loader's warp brings a key block's K or V, and makes V fit for products.

Zero times infinity is NaN, so that a key which a row does not see must be finite in V: rows behind
a short block are set to zero, and values that are not finite, where there are some, too. (Scores of
such keys are replaced, so K needs none of that.)
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Int32  # noqa: E402

from openmsa.kernels.common.ptx import arrive_lanes  # noqa: E402
from openmsa.kernels.sm90.forward import forms  # noqa: E402
from openmsa.kernels.sm90.forward.config import (  # noqa: E402
    BLOCK,
    BLOCK_BYTES,
    BUFFERS,
    CHANNELS,
    HALVES,
)
from openmsa.kernels.sm90.forward.context import Context, Maps  # noqa: E402

__all__ = ["ask_k", "ask_v"]

_WORDS = CHANNELS * 2 // 4  # of a half row
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""The bits that are all set in what is not finite."""


@cute.jit
def ask_k(c: Context, maps: Maps, full: Any, buffer: Int32, start: Int32, head: Int32) -> None:
    """K of the block into ``buffer``; ``full`` completes with it."""
    barrier = c.barrier(full, buffer)
    arrive_lanes(barrier, BLOCK_BYTES)
    _ask(c, maps.k, maps.k_at, c.k, barrier, (buffer, start, head))


@cute.jit
def ask_v(
    c: Context, maps: Maps, barriers: Any, buffer: Int32, start: Int32, head: Int32, keys: Int32,
    unfit: Int32, landed: Int32,
) -> Int32:  # fmt: skip
    """V of the block into ``buffer``; ``barriers.V_FULL`` completes with what is fit for products.
    Gives the number of times that this warp has changed a block, ``landed`` before."""
    place = (buffer, start, head)
    if keys == BLOCK and unfit == 0:
        _expect(c.barrier(barriers.V_FULL, buffer))
        _ask(c, maps.v, maps.v_at, c.v, c.barrier(barriers.V_FULL, buffer), place)
    else:
        _expect(c.barrier(barriers.V_LANDED))
        _ask(c, maps.v, maps.v_at, c.v, c.barrier(barriers.V_LANDED), place)
        c.wait(barriers.V_LANDED, landed)
        landed += 1
        _repair(c, buffer, keys, unfit)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            c.arrive(barriers.V_FULL, buffer)
    return landed


@cute.jit
def _expect(barrier: Any) -> None:
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, BLOCK_BYTES)


@cute.jit
def _ask(c: Context, atom: Any, at: Any, pointer: Any, barrier: Any, place: Any) -> None:
    buffer, start, head = place
    moved = cute.domain_offset((0, 0, start), at)
    target, source = forms.block_box(atom, moved, pointer)
    for half in cutlass.range_constexpr(HALVES):
        cute.copy(
            atom, source[None, half, head, 0], target[None, half, buffer], tma_bar_ptr=barrier
        )


@cute.jit
def _repair(c: Context, buffer: Int32, keys: Int32, unfit: Int32) -> None:
    """Zeros for the rows from ``keys`` on, and, if ``unfit``, for what is not finite before them. A
    half row is 128 bytes, within which swizzling permutes pieces of 16."""
    words = cute.make_tensor(
        cute.make_ptr(Int32, c.v.toint(), cute.AddressSpace.smem, assumed_align=128),
        cute.make_layout(
            (_WORDS, BLOCK, HALVES, BUFFERS),
            stride=(1, _WORDS, BLOCK * _WORDS, HALVES * BLOCK * _WORDS),
        ),
    )
    lane = cute.arch.lane_idx()
    bits = _EXPONENTS[c.config.dtype]
    first = keys
    if unfit != 0:
        first = Int32(0)
    for key in cutlass.range(first, BLOCK, unroll=1):
        for half in cutlass.range_constexpr(HALVES):
            word = words[lane, key, half, buffer]
            low, high = word & 0xFFFF, word & ~0xFFFF
            if key >= keys or (low & bits) == bits:
                low = Int32(0)
            if key >= keys or (high >> 16 & bits) == bits:
                high = Int32(0)
            words[lane, key, half, buffer] = low | high
