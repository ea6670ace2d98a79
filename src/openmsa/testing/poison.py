"""Poisoned memory: uninitialised tensors full of NaN, so that reading one shows in the result.

A kernel that reads workspace nobody wrote often passes its tests, since fresh memory is usually
zero. Under :func:`poisoned_memory` such a read gives NaN, or an index far out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["poison", "poisoned_memory"]

_FACTORIES = ("empty", "empty_like", "empty_strided", "empty_permuted")
_METHODS = ("new_empty", "new_empty_strided")


def poison(x: Tensor) -> Tensor:
    """Fill ``x`` in place with NaN, the largest integer or True, and return it."""
    with torch.no_grad():
        if x.is_floating_point() or x.is_complex():
            return x.fill_(float("nan"))
        if x.dtype == torch.bool:
            return x.fill_(True)
        return x.fill_(torch.iinfo(x.dtype).max)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """While active, ``torch.empty`` and its kin (``empty_like``, ``Tensor.new_empty``, ...) return
    poisoned tensors, on every device.

    It replaces attributes of ``torch`` and ``torch.Tensor``, so it reaches Python code that looks
    them up at call time, in every thread. Memory that torch's own operators allocate inside is not
    reached. May be nested.
    """
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, names in ((torch, _FACTORIES), (torch.Tensor, _METHODS)):
            for name in names:
                # Tensor inherits its methods; restoring must uncover them, not pin them down.
                before.append((owner, name, vars(owner).get(name)))
                setattr(owner, name, _poisoning(getattr(owner, name)))
        yield
    finally:
        for owner, name, original in reversed(before):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
        return poison(allocate(*args, **kwargs))

    return allocate_poisoned
