"""Sizes that keep files readable, held for every file of the packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import openmsa
import ptxsim

PACKAGE = Path(openmsa.__file__).parent
SIMULATOR = Path(ptxsim.__file__).parent

FILE_LINES = 300
KERNEL_FILE_LINES = 600
SIMULATOR_FILE_LINES = 450  # a family of instructions stays together
FUNCTION_LINES = 80
PARAMETERS = 10

ALLOWED: dict[str, str] = {
    "ptxsim/module.py:Module.launch": "2026-12-02: one keyword for each option of a launch, which "
    "a record would only hide from those who call it",
}
"""What may be over a limit: file, or ``file:function`` (dotted where nested) -> since when, why."""


def oversized(path: str, source: str) -> dict[str, str]:
    """File or ``file:function`` -> what is too large about it. ``path`` is relative, with ``/``;
    the simulator's begin with ``ptxsim/``."""
    found = {}
    limit = FILE_LINES
    if path.startswith(("kernels/", "backends/")):
        limit = KERNEL_FILE_LINES
    elif path.startswith("ptxsim/"):
        limit = SIMULATOR_FILE_LINES
    lines = len(source.splitlines())
    if lines > limit:
        found[path] = f"{lines} lines, at most {limit}"
    for name, node in functions(ast.parse(source)):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        parameters = count_parameters(node)
        if length > FUNCTION_LINES:
            found[f"{path}:{name}"] = f"{length} lines, at most {FUNCTION_LINES}"
        elif parameters > PARAMETERS:
            found[f"{path}:{name}"] = f"{parameters} parameters, at most {PARAMETERS}"
    return found


def functions(
    node: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function below ``node`` with its qualified name."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield name, child
        yield from functions(child, name)


def count_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of a definition: ``*args`` and ``**kwargs`` one each, ``self`` and ``cls`` none.

    A Triton kernel counts none: it takes no records, so each pointer, stride and constant is one.
    """
    if any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list):
        return 0
    given = node.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args)]
    receiver = names[:1] in (["self"], ["cls"])
    extra = sum(arg is not None for arg in (given.vararg, given.kwarg))
    return len(names) - receiver + len(given.kwonlyargs) + extra


def measured() -> dict[str, str]:
    found = {}
    for root, base in ((PACKAGE, PACKAGE), (SIMULATOR, SIMULATOR.parent)):
        for path in sorted(root.rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            found.update(oversized(path.relative_to(base).as_posix(), source))
    return found


def test_nothing_is_over_its_limit() -> None:
    over = {place: why for place, why in measured().items() if place not in ALLOWED}
    assert over == {}


def test_no_entry_of_the_allow_list_is_stale() -> None:
    stale = sorted(set(ALLOWED) - set(measured()))
    assert stale == [], "within the limits now, or gone: strike them from ALLOWED"


def test_every_entry_of_the_allow_list_has_a_date_and_a_reason() -> None:
    assert all(re.match(r"20\d\d-\d\d-\d\d: \S", reason) for reason in ALLOWED.values())


def test_the_measurement_reaches_the_files() -> None:
    assert (PACKAGE / "kernels" / "schedule.py") in set(PACKAGE.rglob("*.py"))
    assert (SIMULATOR / "isa" / "tcgen05.py") in set(SIMULATOR.rglob("*.py"))


def test_a_triton_kernel_may_take_many_parameters_but_not_many_lines() -> None:
    many = ", ".join(f"x{n}" for n in range(36))
    for decorator in ("@triton.jit", "@triton.jit(do_not_specialize=['x0'])"):
        assert oversized("api.py", f"{decorator}\n{body(80, 'f', many)}") == {}
        assert set(oversized("api.py", f"{decorator}\n{body(81, 'f', many)}")) == {"api.py:f"}
    assert set(oversized("api.py", f"@cute.jit\n{body(8, 'f', many)}")) == {"api.py:f"}


def body(lines: int, name: str = "f", parameters: str = "") -> str:
    """A function of ``lines`` lines."""
    return f"def {name}({parameters}):\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("path", "lines", "fits"),
    [
        ("api.py", 300, True),
        ("api.py", 301, False),
        ("contract/layout.py", 301, False),
        ("backends/cpu/forward.py", 600, True),
        ("backends/cpu/forward.py", 601, False),
        ("kernels/sm90/mma.py", 600, True),
        ("kernels/sm90/mma.py", 601, False),
        ("ptxsim/isa/tcgen05.py", 450, True),
        ("ptxsim/isa/tcgen05.py", 451, False),
    ],
)
def test_a_long_file_is_found(path: str, lines: int, fits: bool) -> None:
    assert (path not in oversized(path, "x = 1\n" * lines)) is fits


def test_a_long_function_is_found() -> None:
    assert oversized("api.py", body(80)) == {}
    assert oversized("api.py", body(81)) == {"api.py:f": "81 lines, at most 80"}
    assert oversized("api.py", "async " + body(81)) == {"api.py:f": "81 lines, at most 80"}


def test_a_long_function_inside_others_is_found_by_its_qualified_name() -> None:
    indented = "".join(f"    {line}\n" for line in body(81, "g", "self").splitlines())
    assert set(oversized("api.py", f"class A:\n{indented}")) == {"api.py:A.g"}
    assert set(oversized("api.py", f"def f():\n{indented}")) == {"api.py:f", "api.py:f.g"}
    assert set(oversized("api.py", f"if True:\n{indented}")) == {"api.py:g"}


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        ("a, b, c, d, e, f, g, h, i, j", True),
        ("a, b, c, d, e, f, g, h, i, j, k", False),
        ("a, b, /, c, d, *, e, f, g, h, i, j", True),
        ("a, b, /, c, d, *, e, f, g, h, i, j, k", False),
        ("a, b, c, d, e, f, g, h, *args, **kwargs", True),
        ("a, b, c, d, e, f, g, h, i, *args, **kwargs", False),
        ("self, a, b, c, d, e, f, g, h, i, j", True),
        ("cls, a, b, c, d, e, f, g, h, i, j, k", False),
    ],
)
def test_many_parameters_are_found(parameters: str, fits: bool) -> None:
    assert ("api.py:f" not in oversized("api.py", body(2, "f", parameters))) is fits
