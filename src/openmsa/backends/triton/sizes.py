"""Tile sizes for a device: the largest that its shared memory holds.

Measured on an H200. For the others the sizes are what the compiler fits in with hardly a spilled
register (``benchmarks/compiled.py``, docs/hardware/triton.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

__all__ = ["Sizes", "assume", "sizes", "sizes_for"]


@dataclass(frozen=True)
class Sizes:
    """Rows are (query, head) pairs of a tile, keys those of one step, stages those of the loop.

    Attributes:
        attend_warps: warps of the key-major forward.
        union_keys, union_stages: of the forward over union tiles.
        grads_rows, grads_warps, grads_stages: of the backward.
        rank_rows, rank_warps: of the block selection.
    """

    attend_warps: int
    union_keys: int
    union_stages: int
    grads_rows: int
    grads_warps: int
    grads_stages: int
    rank_rows: int
    rank_warps: int


def sizes_for(capability: tuple[int, int], shared_memory: int) -> Sizes:
    """Sizes for a compute capability and bytes of shared memory of a thread block."""
    # Warps that share a product's accumulator (9.0, 10.x) need half as many as those that do not.
    warpgroups = capability[0] in (9, 10)
    if warpgroups and shared_memory >= 227 * 1024:
        # With 64 rows the accumulators of the backward overflow the 512 columns of tensor memory.
        return Sizes(4, 128, 5, 64 if capability[0] == 9 else 32, 8, 3, 256, 16)
    if shared_memory >= 163 * 1024:
        return Sizes(8, 64, 5, 64, 8, 2, 128, 8)
    if shared_memory >= 99 * 1024:
        return Sizes(8, 64, 5, 32, 8, 2, 128, 8)
    return Sizes(8, 32, 3, 32, 8, 2, 128, 8)


_assumed: list[Sizes] = [sizes_for((9, 0), 227 * 1024)]


@contextmanager
def assume(capability: tuple[int, int], shared_memory: int) -> Iterator[None]:
    """Give CPU tensors, which only the interpreter and compilation ahead of time see, the sizes of
    that device instead of an H200's."""
    _assumed.append(sizes_for(capability, shared_memory))
    try:
        yield
    finally:
        _assumed.pop()


def sizes(device: torch.device) -> Sizes:
    """Sizes for a device."""
    if device.type != "cuda":
        return _assumed[-1]
    return _of_device(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _of_device(index: int) -> Sizes:
    facts: Any = torch.cuda.get_device_properties(index)
    return sizes_for((facts.major, facts.minor), facts.shared_memory_per_block_optin)
