"""The CuTe DSL launchers, bound on first use and cached once for the process.

Nothing is imported when this module loads. :func:`kernels` imports the DSL and the kernel modules
the first time a CuTe stage runs. A bind that fails is not cached: once the toolchain is installed,
the next call binds.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from threading import RLock
from types import MappingProxyType
from typing import Any

from openmsa.contract.problem import STAGES
from openmsa.errors import UnavailableError, invalid_input
from openmsa.kernels import require_cute_dsl
from openmsa.kernels.launchers import FAMILIES, LAUNCHERS

__all__ = ["FAMILIES", "LAUNCHERS", "KernelLaunchers", "kernels"]

_STAGES = sum(STAGES.values(), ())


@dataclass(frozen=True, eq=False)
class KernelLaunchers:
    """The bound launchers of a family of devices, each also an attribute under its stage's name.

    Attributes:
        by_stage: read-only mapping, stage -> launcher.
        family: whose they are.

    Raises:
        UnavailableError: on access to a stage that this version ships no launcher for.
        AttributeError: on access to what is no stage.
    """

    by_stage: Mapping[str, Callable[..., Any]]
    family: str = "sm100"

    def __getattr__(self, stage: str) -> Callable[..., Any]:
        bound = vars(self).get("by_stage", {})  # a copy in the making has none yet
        if stage in bound:
            launcher: Callable[..., Any] = bound[stage]
            return launcher
        # A class cannot be an ImportError and an AttributeError at once: ``hasattr`` is False for
        # what is no stage, and a stage that is not shipped says what to use instead.
        if stage in _STAGES:
            raise UnavailableError(_missing(stage, self.family, bound))
        raise AttributeError(f"{stage!r} is no stage; stages: {', '.join(_STAGES)}")


class _BoundOnce:
    """A function of a family whose first result for each is kept; safe to race, forgettable.

    ``functools.lru_cache`` would let two threads bind at once, and compile every kernel twice. An
    exception leaves nothing behind.
    """

    def __init__(self, bind: Callable[[str], KernelLaunchers]) -> None:
        self._bind = bind
        self._bound: dict[str, KernelLaunchers] = {}
        # Reentrant, so that a kernel module that calls back fails with a traceback, not a deadlock.
        self._lock = RLock()
        update_wrapper(self, bind)

    def __call__(self, family: str = "sm100") -> KernelLaunchers:
        if family not in tuple(FAMILIES):
            invalid_input("family", f"one of {', '.join(FAMILIES)}", repr(family))
        bound = self._bound.get(family)
        if bound is None:
            with self._lock:
                bound = self._bound.get(family)
                if bound is None:
                    bound = self._bound[family] = self._bind(family)
        return bound

    def cache_clear(self) -> None:
        """Forget the launchers of every family; the next call binds anew."""
        with self._lock:
            self._bound.clear()


@_BoundOnce
def kernels(family: str = "sm100") -> KernelLaunchers:
    """The launchers of the CuTe DSL kernels; ``kernels.cache_clear()`` forgets them.

    Args:
        family: whose, of :data:`FAMILIES`: ``"sm100"`` (B200 and B300) or ``"sm90"`` (Hopper). A
            family's modules are imported when it is first asked for, whatever device is here.

    Raises:
        InvalidInput: there is no such family.
        UnavailableError: the CuTe DSL cannot be imported (a later call tries again), or, on access
            to a stage, this version ships no kernel for it.
    """
    require_cute_dsl()
    by_stage = {}
    for stage, path in FAMILIES[family].items():
        module, function = path.split(":")
        by_stage[stage] = getattr(importlib.import_module(module), function)
    return KernelLaunchers(MappingProxyType(by_stage), family)


def _missing(stage: str, family: str, shipped: Mapping[str, object]) -> str:
    names = ", ".join(sorted(shipped)) or "none"
    backends = ['"reference"', '"cpu"']
    if _has_triton():
        backends.append('"triton"')
    return (
        f"this version of openmsa ships no CuTe DSL kernel for {stage!r} in family "
        f"{family!r} (shipped: {names}); backends that do it: {', '.join(backends)}"
    )


def _has_triton() -> bool:
    """Whether Triton is installed, without importing it."""
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):  # a finder refuses it, or a half-built module is loaded
        return False
