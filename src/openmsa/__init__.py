"""openmsa: training with MiniMax Sparse Attention over packed documents.

Names are bound on first use (PEP 562): importing this package touches no GPU, no Triton and no CuTe
DSL. See :mod:`openmsa.api` for the functions and :mod:`openmsa.contract` for the records.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from openmsa.api import explain as explain
    from openmsa.api import select_blocks as select_blocks
    from openmsa.api import sparse_attention as sparse_attention
    from openmsa.contract import MINIMAX_M3 as MINIMAX_M3
    from openmsa.contract import Documents as Documents
    from openmsa.contract import Selection as Selection
    from openmsa.contract import Topology as Topology
    from openmsa.errors import InvalidInput as InvalidInput
    from openmsa.errors import OpenMSAError as OpenMSAError
    from openmsa.errors import UnavailableError as UnavailableError
    from openmsa.errors import UnsupportedProblem as UnsupportedProblem

_HOME = {
    "Documents": "openmsa.contract",
    "MINIMAX_M3": "openmsa.contract",
    "Selection": "openmsa.contract",
    "Topology": "openmsa.contract",
    "InvalidInput": "openmsa.errors",
    "OpenMSAError": "openmsa.errors",
    "UnavailableError": "openmsa.errors",
    "UnsupportedProblem": "openmsa.errors",
    "explain": "openmsa.api",
    "select_blocks": "openmsa.api",
    "sparse_attention": "openmsa.api",
}
_SUBMODULES = ("bindings", "contract", "errors", "integrations", "kernels", "testing")

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"openmsa.{name}")
    raise AttributeError(f"module 'openmsa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES})
