"""Triton kernels: Ampere, Ada, Hopper and consumer Blackwell, and Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib

from openmsa.errors import UnavailableError

try:
    importlib.import_module("triton")
except ImportError as error:
    raise UnavailableError(
        f'the triton backend needs Triton (Linux); install it with: pip install "openmsa[triton]" '
        f"({error})"
    ) from error
