"""What kernels ask of their tensors' memory."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["aligned"]

_BYTES = 16


def aligned(x: Tensor) -> Tensor:
    """``x``, or a copy where vectors of 16 bytes, or the copy engine, could not read it: channels
    apart, rows that overlap, or an address or stride that is no multiple of 16 bytes."""
    item = x.element_size()
    steps = [
        stride * item
        for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)
        if size > 1
    ]
    fits = x.stride(-1) == 1 and x.data_ptr() % _BYTES == 0
    if fits and all(step > 0 and step % _BYTES == 0 for step in steps):
        return x
    # Not x.contiguous(): it gives back what is contiguous, at whatever address.
    return x.clone(memory_format=torch.contiguous_format)
