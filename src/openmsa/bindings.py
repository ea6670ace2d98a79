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

from openmsa.errors import UnavailableError
from openmsa.kernels import require_cute_dsl
from openmsa.kernels.launchers import LAUNCHERS

__all__ = ["LAUNCHERS", "KernelLaunchers", "kernels"]


@dataclass(frozen=True, eq=False)
class KernelLaunchers:
    """The bound launchers, each also an attribute under its stage's name.

    Attributes:
        by_stage: read-only mapping, stage -> launcher.

    Raises:
        UnavailableError: on access to a stage that this version ships no launcher for.
    """

    by_stage: Mapping[str, Callable[..., Any]]

    def __getattr__(self, stage: str) -> Callable[..., Any]:
        # Dunder look-ups (copying, pickling) must fail as attributes do, not as missing kernels.
        if stage.startswith("_"):
            raise AttributeError(stage)
        try:
            return self.by_stage[stage]
        except KeyError:
            raise UnavailableError(_missing(stage, self.by_stage)) from None


class _BoundOnce:
    """A function without arguments whose first result is kept; safe to race, forgettable.

    ``functools.lru_cache`` would let two threads bind at once, and compile every kernel twice. An
    exception leaves nothing behind.
    """

    def __init__(self, bind: Callable[[], KernelLaunchers]) -> None:
        self._bind = bind
        self._bound: KernelLaunchers | None = None
        # Reentrant, so that a kernel module that calls back fails with a traceback, not a deadlock.
        self._lock = RLock()
        update_wrapper(self, bind)

    def __call__(self) -> KernelLaunchers:
        bound = self._bound
        if bound is None:
            with self._lock:
                bound = self._bound
                if bound is None:
                    bound = self._bound = self._bind()
        return bound

    def cache_clear(self) -> None:
        """Forget the launchers; the next call binds anew."""
        with self._lock:
            self._bound = None


@_BoundOnce
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


def _missing(stage: str, shipped: Mapping[str, object]) -> str:
    names = ", ".join(sorted(shipped)) or "none"
    backends = ['"reference"', '"cpu"']
    if _has_triton():
        backends.append('"triton"')
    return (
        f"this version of openmsa ships no CuTe DSL kernel for {stage!r} (shipped: {names}); "
        f"backends that do it: {', '.join(backends)}"
    )


def _has_triton() -> bool:
    """Whether Triton is installed, without importing it."""
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):  # a finder refuses it, or a half-built module is loaded
        return False
