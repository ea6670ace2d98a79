"""The CuTe DSL launchers, bound on first use and cached once for the process.

Nothing is imported when this module loads. :func:`kernels` imports the DSL and the kernel modules
the first time a CuTe stage runs. A bind that fails is not cached: once the toolchain is installed,
the next call binds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from openmsa.errors import UnavailableError
from openmsa.kernels import require_cute_dsl

__all__ = ["LAUNCHERS", "KernelLaunchers", "kernels"]

LAUNCHERS: dict[str, str] = {}
"""Stage -> ``"module:function"`` of each CuTe DSL launcher. This version ships none yet."""


@dataclass(frozen=True, eq=False)
class KernelLaunchers:
    """The bound launchers by stage; also reachable as attributes."""

    by_stage: Mapping[str, Callable[..., Any]]

    def __getattr__(self, stage: str) -> Callable[..., Any]:
        # Dunder look-ups (copying, pickling) must fail as attributes do, not as missing kernels.
        if stage.startswith("_"):
            raise AttributeError(stage)
        try:
            return self.by_stage[stage]
        except KeyError:
            shipped = ", ".join(sorted(self.by_stage)) or "none"
            raise UnavailableError(
                f"this version of openmsa ships no CuTe DSL kernel for {stage!r} (shipped: "
                f"{shipped}); use backend='auto', 'cpu' or 'reference'"
            ) from None


@lru_cache(maxsize=1)
def kernels() -> KernelLaunchers:
    """The launchers of the CuTe DSL kernels; ``kernels.cache_clear()`` forgets them.

    Raises:
        UnavailableError: the CuTe DSL cannot be imported (a later call tries again), or, on access
            to a stage, this version ships no kernel for it.
    """
    require_cute_dsl()
    by_stage = {}
    for stage, path in LAUNCHERS.items():
        module, function = path.split(":")
        by_stage[stage] = getattr(importlib.import_module(module), function)
    return KernelLaunchers(MappingProxyType(by_stage))
