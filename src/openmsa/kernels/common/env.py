"""The environment variables that openmsa reads: this one.

``OPENMSA_CACHE``
    Where compiled kernels are kept: a folder, or ``off`` to keep none. By default
    ``$XDG_CACHE_HOME/openmsa/kernels``, or ``~/.cache/openmsa/kernels``. What lies there is
    executed: a folder that somebody else owns or may write to is refused.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE", "cache_folder"]

CACHE = "OPENMSA_CACHE"


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
