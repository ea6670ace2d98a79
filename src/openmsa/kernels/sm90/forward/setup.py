"""How a thread block of the forward's attention kernels begins."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import cutlass.utils as utils  # noqa: E402
import torch  # noqa: E402
from cutlass import Int32, Int64  # noqa: E402

from openmsa.kernels.sm90.forward.config import (  # noqa: E402
    BLOCK,
    BUFFERS,
    HEAD_DIM,
    ROWS,
    Config,
    KeyMajor,
    Union,
    arrivals,
)
from openmsa.kernels.sm90.forward.context import Context, Numbers  # noqa: E402

__all__ = ["context_of", "dtype_of"]

_ALIGNMENT = 1024  # of a tile: eight rows of a 128-byte swizzle
_TYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def dtype_of(config: Config) -> torch.dtype:
    """PyTorch's name of the inputs' type."""
    found: torch.dtype = getattr(torch, config.dtype)
    return found


@cute.jit
def context_of(
    config: Config,
    tensors: Any,
    numbers: Numbers,
    barriers: type[KeyMajor] | type[Union],
    tiles: int,
    words: tuple[int, int],
) -> Context:
    """Allocate ``tiles`` tiles of 64 rows, the buffers of K and V, and ``words`` of shared memory;
    set up the barriers. All threads of the block take part."""
    dtype = _TYPES[config.dtype]
    shared = utils.SmemAllocator()
    k, v, rows = (
        shared.allocate_array(dtype, count * HEAD_DIM, byte_alignment=_ALIGNMENT)
        for count in (BUFFERS * BLOCK, BUFFERS * BLOCK, tiles * ROWS)
    )
    pointer = shared.allocate_array(Int64, int(barriers.COUNT))
    table = shared.allocate_tensor(
        Int32, cute.make_layout(words, stride=(words[1], 1)), byte_alignment=16
    )
    if cute.arch.warp_idx() == 0:
        with cute.arch.elect_one():
            for which in cutlass.range_constexpr(int(barriers.COUNT)):
                cute.arch.mbarrier_init(pointer + which, arrivals(barriers, which))
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return Context(config, dtype, tensors, numbers, pointer, rows, k, v, table)
