"""The environment variables that openmsa reads: these two, and torchrun's ``LOCAL_WORLD_SIZE``.

``OPENMSA_CACHE``
    Where compiled kernels are kept: a folder, or ``off`` to keep none. By default
    ``$XDG_CACHE_HOME/openmsa/kernels``, or ``~/.cache/openmsa/kernels``. What lies there is
    executed: a folder that somebody else owns or may write to is refused.

``OPENMSA_WORKERS``
    Processes that may compile kernels beside this one in a first training step. By default half of
    the cores that this process has for itself, at most five, as a step has five large kernels. With
    fewer than four cores there are none; processes that torchrun has started share a machine's.
"""

from __future__ import annotations

import os
from pathlib import Path

from openmsa.errors import invalid_input

__all__ = ["CACHE", "WORKERS", "cache_folder", "workers"]

CACHE = "OPENMSA_CACHE"
WORKERS = "OPENMSA_WORKERS"

_MOST_WORKERS = 5
_ENOUGH_CORES = 4


def cache_folder() -> Path | None:
    """The folder for compiled kernels, which need not exist; None for no cache."""
    named = os.environ.get(CACHE, "")
    if named.lower() == "off":
        return None
    try:
        if named:
            return Path(named).expanduser().absolute()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():  # the specification: an empty or relative value counts as unset
            base = Path.home() / ".cache"
    except RuntimeError:  # no home
        return None
    return base / "openmsa" / "kernels"


def workers() -> int:
    """Processes that may compile beside this one.

    Raises:
        InvalidInput: the variable is set, and is no number from 0 on.
    """
    named = os.environ.get(WORKERS)
    if not named:
        cores = _cores() // _ranks()
        return min(cores // 2, _MOST_WORKERS) if cores >= _ENOUGH_CORES else 0
    if not named.isdecimal():
        invalid_input(WORKERS, "a number from 0 on", repr(named))
    return int(named)


def _cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _ranks() -> int:
    """Processes of the training on this machine, as torchrun counts them."""
    named = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(named)) if named.isdecimal() else 1
