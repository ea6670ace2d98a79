"""Which code a device runs, and how many multiprocessors share the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from openmsa import kernels
from openmsa.errors import UnsupportedProblem

__all__ = ["ARCHITECTURES", "arch_of", "assume", "sm_count_of"]

ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capability -> target; ``a`` targets run on their own capability only."""

_assumed: tuple[str, int] | None = None


def arch_of(device: torch.device) -> str:
    """The target of ``device``.

    Raises:
        UnsupportedProblem: none of these kernels is built for it.
    """
    if _assumed is not None:
        return _assumed[0]
    found = kernels.sm_capability(device) if device.type == "cuda" else None
    try:
        return ARCHITECTURES[found]  # type: ignore[index]
    except KeyError:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise UnsupportedProblem(
            f"the CuTe DSL kernels are built for compute capability {known}, but {device} has "
            f"{'none' if found is None else '.'.join(map(str, found))}"
        ) from None


def sm_count_of(device: torch.device) -> int:
    """Multiprocessors of ``device``."""
    return kernels.sm_count(device) if _assumed is None else _assumed[1]


@contextmanager
def assume(arch: str, num_sms: int = 148) -> Iterator[None]:
    """Launch as on a device of target ``arch`` with ``num_sms`` multiprocessors, whatever is here:
    for a simulator. Not for threads that launch at the same time."""
    global _assumed
    before, _assumed = _assumed, (arch, num_sms)
    try:
        yield
    finally:
        _assumed = before
