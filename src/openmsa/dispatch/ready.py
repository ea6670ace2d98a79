"""What starts before its turn: compiling takes longer than anything a step computes."""

from __future__ import annotations

from functools import lru_cache

import torch

from openmsa.dispatch.probe import device_facts, toolchain
from openmsa.dispatch.table import HOPPER
from openmsa.kernels.catalogue import MODULES

__all__ = ["expect_attention"]


@lru_cache(maxsize=64)
def expect_attention(device: torch.device, backend: str) -> None:
    """A selection is about to run, and attention will read it. Where that compiles large CuTe DSL
    kernels and none has ever been compiled, a process imports what it takes while this one compiles
    the selection's own kernels; see :mod:`openmsa.kernels.common.workers`."""
    here = toolchain().cute_dsl is not None and device_facts(device).capability == HOPPER
    if here and backend in ("auto", "cute"):
        # Not with this module: openmsa loads on systems that the DSL, and so its cache, is not for.
        from openmsa.kernels.common import workers

        workers.get_ready(*MODULES["sm_90a"])
