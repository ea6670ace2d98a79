"""Thin adapters to training frameworks; each imports its framework on first use only."""

from __future__ import annotations

import importlib
from typing import Any

_ADAPTERS = ("automodel", "transformers")


def __getattr__(name: str) -> Any:
    if name in _ADAPTERS:
        return importlib.import_module(f"openmsa.integrations.{name}")
    raise AttributeError(f"module 'openmsa.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ADAPTERS})
