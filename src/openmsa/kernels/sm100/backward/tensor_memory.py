"""Columns of tensor memory to registers and back: a warp reads its 32 lanes, a thread one lane."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402
from cutlass.cute.nvgpu import tcgen05  # noqa: E402

__all__ = ["chunk", "load", "store"]

_LANES = 128
_LANE_STRIDE = 1 << 16  # a tensor memory address is (lane, column), 16 bits each


@cute.jit
def chunk(first: Any, columns: Any) -> Any:
    """``[128 lanes, columns]`` of 32 bits from the column ``first`` on."""
    return cute.make_tensor(first, cute.make_layout((_LANES, columns), stride=(_LANE_STRIDE, 1)))


@cute.jit
def load(source: Any, lane: Int32) -> Any:
    """The thread's lane of ``source`` in registers, there at once. ``lane`` is the thread's index
    in its warpgroup; the warp comes together first, as all of its lanes load."""
    cute.arch.sync_warp()
    columns = source.shape[1]
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(columns)), Float32)
    copy = tcgen05.make_tmem_copy(atom, source).get_slice(lane)
    like = copy.partition_D(cute.make_identity_tensor(source.shape))
    found = cute.make_rmem_tensor(like.shape, Float32)
    cute.copy(copy, copy.partition_S(source), found)
    cute.arch.fence_view_async_tmem_load()
    return cute.make_tensor(found.iterator, cute.make_layout(columns))


@cute.jit
def store(values: Any, target: Any, lane: Int32) -> None:
    """Registers of any type, in the order of memory, to the thread's lane of ``target``."""
    columns = target.shape[1]
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(columns)), Float32)
    copy = tcgen05.make_tmem_copy(atom, target).get_slice(lane)
    like = copy.partition_S(cute.make_identity_tensor(target.shape))
    words = cute.make_tensor(
        cute.recast_ptr(values.iterator, dtype=Float32), cute.make_layout(like.shape)
    )
    cute.copy(copy, words, copy.partition_D(target))
