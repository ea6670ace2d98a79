"""The arrows between the rooms of the package, read from the source and enforced.

A module imports from lower layers and from its own room only, in functions and under
``TYPE_CHECKING`` too: what may not be known may not be known later either. Modules that are loaded
by name through ``importlib`` are the one way up; that is what the tables are for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import openmsa

PACKAGE = Path(openmsa.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("testing", "integrations"),
    ("api",),
    ("autograd",),
    ("ops",),
    ("pipeline",),
    ("dispatch", "bindings"),
    (
        "reference",
        "backends",
        "backends.cpu",
        "backends.triton",
        "kernels",
        "kernels.common",
        "kernels.stages",
        "kernels.sm90",
        "kernels.sm100",
        "workloads",
    ),
    ("contract",),
    ("errors",),
)
"""The rooms from top to bottom. Rooms of one layer do not know each other."""

WITHIN = {
    "kernels.common": {"kernels"},
    "kernels.stages": {"kernels", "kernels.common"},
    "kernels.sm90": {"kernels", "kernels.common", "kernels.stages"},
    "kernels.sm100": {"kernels", "kernels.common", "kernels.stages"},
}
"""Rooms inside the kernels room may also use its gates, its schedule and its plumbing."""

HEIGHT = {room: -depth for depth, rooms in enumerate(LAYERS) for room in rooms}
EXEMPT = ("openmsa", "openmsa.__main__")


def room_of(path: str) -> str | None:
    """The room a dotted path lies in, the deepest that fits; None for no room."""
    parts = path.split(".")
    prefixes = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
    return next((prefix for prefix in prefixes if prefix in HEIGHT), None)


def home(path: str) -> str:
    """``openmsa.Name`` is where the root package takes Name from; the bare root is the API."""
    if path in ("openmsa", "openmsa.*"):
        return "openmsa.api"
    name = path.removeprefix("openmsa.")
    return f"{openmsa._HOME[name]}.{name}" if name in openmsa._HOME else path


def imports(module: str, is_package: bool, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted path of everything of openmsa's that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join(parts + ([base] if base else []))
            found = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in found:
            if path.partition(".")[0] == "openmsa" and path != "openmsa.__version__":
                yield node.lineno, home(path)


def offences(module: str, source: str, is_package: bool = False) -> list[str]:
    """What in ``source`` breaks the arrows, one line each."""
    room = room_of(module)
    if room is None:
        return [f"{module} lies in no room: give it a layer in LAYERS"]
    found = []
    for line, path in imports(module, is_package, ast.parse(source)):
        target = room_of(path)
        if target is None:
            found.append(f"{module}:{line} imports {path}, which lies in no room")
        elif not (
            target == room or HEIGHT[target] < HEIGHT[room] or target in WITHIN.get(room, ())
        ):
            found.append(f"{module}:{line} imports {path}: {room} may not know {target}")
    return found


def eager(source: str) -> list[int]:
    """Lines that import something of openmsa's when the module loads, type checking aside."""

    def visit(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        yield node
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            children = iter(node.orelse)
        for child in children:
            yield from visit(child)

    return [
        line
        for node in visit(ast.parse(source))
        for line, _ in imports("openmsa", True, ast.Module([node], []))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]


def sources() -> dict[str, tuple[str, bool]]:
    """Module name -> source, and whether it is a package, of every file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("openmsa", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = (path.read_text(encoding="utf-8"), is_package)
    return found


def test_no_module_breaks_the_arrows() -> None:
    found = [
        offence
        for module, (source, is_package) in sources().items()
        if module not in EXEMPT
        for offence in offences(module, source, is_package)
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_root_package_imports_none_of_its_own_when_it_loads() -> None:
    assert eager(sources()["openmsa"][0]) == []


def test_the_reading_sees_the_imports_that_are_there() -> None:
    """An empty reading would pass every rule; these three edges must be in it."""
    edges = set()
    for module, (source, is_package) in sources().items():
        for _, path in imports(module, is_package, ast.parse(source)):
            edges.add((room_of(module), room_of(path)))
    assert {("api", "ops"), ("ops", "pipeline"), ("kernels", "contract")} <= edges
    assert {("pipeline", "dispatch"), ("contract", "errors")} <= edges


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("openmsa.errors", "from openmsa.contract import Documents"),
        ("openmsa.contract.layout", "from openmsa.dispatch import choose"),
        ("openmsa.contract.layout", "import openmsa.kernels.schedule as schedule"),
        ("openmsa.kernels.schedule", "from openmsa.dispatch.probe import toolchain"),
        ("openmsa.reference.walk", "from openmsa.backends.cpu.tiles import Tile"),
        ("openmsa.reference.walk", "from openmsa.kernels import schedule"),
        ("openmsa.backends.cpu.forward", "from openmsa.reference.schedule import invert"),
        ("openmsa.backends.cpu.forward", "from openmsa.backends import triton"),
        ("openmsa.backends.cpu.forward", "from ..triton import forward"),
        ("openmsa.backends.triton.forward", "from openmsa.backends.cpu import tiles"),
        ("openmsa.backends.triton.forward", "import openmsa.reference.schedule"),
        ("openmsa.kernels.sm90.forward", "from openmsa.kernels.sm100.forward import forward"),
        ("openmsa.kernels.sm100.forward", "from openmsa.kernels import sm90"),
        ("openmsa.kernels.sm100.forward", "from ..sm90 import forward"),
        ("openmsa.kernels.sm100.forward", "import openmsa.backends.triton"),
        ("openmsa.kernels.common.copy", "from openmsa.kernels.sm90 import forward"),
        ("openmsa.kernels.schedule", "from openmsa.kernels.common import copy"),
        ("openmsa.bindings", "from openmsa.dispatch.table import TABLE"),
        ("openmsa.dispatch.table", "from openmsa import bindings"),
        ("openmsa.dispatch.table", "from openmsa.pipeline import forward"),
        ("openmsa.pipeline", "from openmsa import ops"),
        ("openmsa.ops", "from openmsa import api, pipeline"),
        ("openmsa.ops", "from openmsa import sparse_attention"),
        ("openmsa.autograd", "import openmsa"),
        ("openmsa.autograd", "from openmsa import *"),
        ("openmsa.autograd", "from . import api"),
        ("openmsa.api", "def f():\n    from openmsa.testing import compare"),
        ("openmsa.api", "if TYPE_CHECKING:\n    from openmsa.cli.main import main"),
        ("openmsa.testing.compare", "from openmsa.cli import text"),
        ("openmsa.integrations.transformers", "from openmsa.testing import compare"),
        ("openmsa.api", "from openmsa.unheard_of import thing"),
        ("openmsa.api", "from openmsa import unheard_of"),
        ("openmsa.unheard_of.deep", "import torch"),
    ],
)
def test_an_arrow_upwards_or_sideways_is_found(module: str, source: str) -> None:
    assert len(offences(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("openmsa.contract.layout", "from openmsa.errors import invalid_input"),
        ("openmsa.contract.layout", "from openmsa.contract import offsets"),
        ("openmsa.contract.layout", "from .offsets import check_offsets"),
        ("openmsa.backends.cpu.forward", "from openmsa.backends.cpu.tiles import Tile"),
        ("openmsa.backends.cpu.forward", "from . import tiles"),
        ("openmsa.kernels.sm90.forward", "from openmsa.kernels import require_cute_dsl"),
        ("openmsa.kernels.sm90.forward", "from openmsa.kernels.schedule import cta_walk"),
        ("openmsa.kernels.sm100.forward", "from ..common import copy"),
        ("openmsa.kernels.common.copy", "from openmsa.kernels import require_cute_dsl"),
        ("openmsa.dispatch.probe", "from openmsa.kernels import sm_count"),
        ("openmsa.dispatch.table", "import importlib\nimportlib.import_module('openmsa.api')"),
        ("openmsa.ops", "from openmsa import Documents, UnavailableError, pipeline"),
        ("openmsa.cli.info", "from openmsa import __version__"),
        ("openmsa.cli.run", "from openmsa.testing import Report\nimport openmsa"),
        ("openmsa.testing.verify", "from openmsa.reference.schedule import invert"),
        ("openmsa.integrations.transformers", "import openmsa"),
        ("openmsa.errors", "import torch\nimport openmsa_plugin\nfrom typing import Any"),
    ],
)
def test_an_arrow_downwards_or_within_is_fine(module: str, source: str) -> None:
    assert offences(module, source) == []


def test_a_relative_import_in_a_package_counts_from_the_package_itself() -> None:
    assert offences("openmsa.backends.cpu", "from . import tiles", is_package=True) == []
    assert len(offences("openmsa.backends.cpu", "from .. import triton", is_package=True)) == 1
    assert len(offences("openmsa.contract", "from .. import api", is_package=True)) == 1


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import importlib\nimport torch", []),
        ("if TYPE_CHECKING:\n    from openmsa.api import explain", []),
        ("if typing.TYPE_CHECKING:\n    from openmsa.api import explain", []),
        ("def __getattr__(name):\n    from openmsa.api import explain", []),
        ("from openmsa.errors import InvalidInput", [1]),
        ("from . import errors", [1]),
        ("import torch\ntry:\n    import openmsa.api\nexcept ImportError:\n    pass", [3]),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from openmsa.api import explain", [4]),
        ("class A:\n    from openmsa.api import explain", [2]),
    ],
)
def test_eager_imports_of_the_root_are_found(source: str, lines: list[int]) -> None:
    assert eager(source) == lines
