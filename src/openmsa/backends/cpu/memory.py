"""Large tensors on huge pages.

The key-major passes gather and scatter rows of 8 KiB all over a window: with pages of 4 KiB nearly
every row misses the TLB, and every fresh result costs a page fault per 4 KiB. Linux gives pages of
2 MiB to memory that asks for them (``transparent_hugepage`` is ``madvise`` by default).
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["advise_huge_pages", "carve"]

_MADV_HUGEPAGE = 14
_PAGE = 4096
_SMALLEST = 4 * 2**20


def _load_madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_madvise = _load_madvise()


def advise_huge_pages(x: Tensor) -> Tensor:
    """Ask for huge pages under ``x``, whose contents stay as they are; returns ``x``."""
    size = x.numel() * x.itemsize
    if _madvise is not None and size >= _SMALLEST:
        first = -(-x.data_ptr() // _PAGE) * _PAGE
        # Advice only: a kernel without huge pages says no, and nothing changes.
        _madvise(first, (x.data_ptr() + size - first) // _PAGE * _PAGE, _MADV_HUGEPAGE)
    return x


def carve(like: Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Uninitialised tensors of these shapes from one allocation on huge pages."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    # Whole cache lines, so that no two tensors share one.
    steps = [-(-size // 64) * 64 for size in sizes]
    memory = advise_huge_pages(like.new_empty(sum(steps), dtype=dtype))
    parts = memory.split(steps)
    return [p[:n].view(shape) for p, n, shape in zip(parts, sizes, shapes, strict=True)]
