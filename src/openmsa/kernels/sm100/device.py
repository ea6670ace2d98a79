"""Which code a device of the 10.x family runs."""

from __future__ import annotations

import torch

from openmsa.errors import UnsupportedProblem
from openmsa.kernels import sm_capability

__all__ = ["ARCHITECTURES", "arch_of"]

ARCHITECTURES = {(10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capability -> target; ``a`` targets run on their own capability only."""


def arch_of(device: torch.device) -> str:
    """The target of ``device``.

    Raises:
        UnsupportedProblem: none of these kernels is built for it.
    """
    found = sm_capability(device) if device.type == "cuda" else None
    try:
        return ARCHITECTURES[found]  # type: ignore[index]
    except KeyError:
        known = " and ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise UnsupportedProblem(
            f"the SM100 kernels are built for compute capability {known}, but {device} has "
            f"{'none' if found is None else '.'.join(map(str, found))}"
        ) from None
