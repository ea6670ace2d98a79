"""Budgets of a thread block: what would hang or fail on a GPU is an error beforehand."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from openmsa.kernels.common.budgets import (
    check_arrivals,
    check_columns,
    check_registers,
    check_shared,
)
from openmsa.kernels.sm90.backward import config as sm90
from openmsa.kernels.sm100.backward import config as sm100


def test_registers() -> None:
    check_registers({"a": (8, 144), "b": (4, 144), "c": (4, 80)})
    with pytest.raises(ValueError, match=r"67584 registers of the 65536 .* wait for ever"):
        check_registers({"a": (8, 152), "b": (4, 144), "c": (4, 80)})
    with pytest.raises(ValueError, match="'a': 3 warps"):
        check_registers({"a": (3, 64)})
    with pytest.raises(ValueError, match="'a': 100 registers, not a multiple of 8"):
        check_registers({"a": (4, 100)})
    with pytest.raises(ValueError, match="'a': 256 registers"):
        check_registers({"a": (4, 256)})
    # 384 threads start with 168 each, not with 170.67: 1,024 registers are nobody's.
    with pytest.raises(ValueError, match="65536 registers of the 64512"):
        check_registers({"a": (8, 216), "b": (4, 80)})


def test_shared_memory() -> None:
    check_shared(232_448)
    with pytest.raises(ValueError, match="232449 bytes of shared memory, at most 232448"):
        check_shared(232_449)


def test_columns() -> None:
    check_columns({"a": (0, 128), "b": (128, 384)}, 512)
    with pytest.raises(ValueError, match="'b' begin at 127, within those of 'a'"):
        check_columns({"a": (0, 128), "b": (127, 128)}, 512)
    with pytest.raises(ValueError, match="'b' end at 288, of 256"):
        check_columns({"a": (0, 128), "b": (160, 128)}, 256)
    with pytest.raises(ValueError, match="power of two"):
        check_columns({}, 100)


def test_arrivals() -> None:
    check_arrivals({"a": 4}, {"a": 4, "b": 1})
    with pytest.raises(ValueError, match="'a' waits for 4 arrivals, 3 come: a hang"):
        check_arrivals({"a": 4}, {"a": 3})
    with pytest.raises(ValueError, match="'a' waits for 4 arrivals, 8 come: a race"):
        check_arrivals({"a": 4}, {"a": 8})
    with pytest.raises(ValueError, match="nobody arrives at barrier 'a'"):
        check_arrivals({"a": 4}, {})


@pytest.mark.parametrize("group", [8, 16, 32, 64])
def test_the_backward_fits(group: int) -> None:
    sm100.Config("bfloat16", group).check()


def test_a_group_that_needs_too_many_scalars_does_not() -> None:
    with pytest.raises(ValueError, match="bytes of shared memory"):
        sm100.Config("bfloat16", 4).check()


WAITS = ("wait", "wait_free")


def arrived_at(source: str) -> set[str]:
    """Barriers that a role's source names outside of waits: it arrives there, itself or through
    what it hands the barrier to (a copy, a commit, a shared loader)."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in WAITS:
            return
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Barrier":
            found.add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


@pytest.mark.parametrize(
    ("config", "warps"),
    [
        (sm90, {"compute": 8, "load": 1}),
        (sm100, {"compute": 8, "reduce": 4, "mma": 1, "load": 1, "scalars": 1}),
    ],
    ids=["sm90", "sm100"],
)
def test_every_barrier_is_arrived_at_as_often_as_it_waits(
    config: ModuleType, warps: dict[str, int]
) -> None:
    """Counted in the source: each barrier of a role, by the role's warps."""
    folder = Path(str(config.__file__)).parent
    arriving: dict[str, int] = {}
    for role, count in warps.items():
        for name in arrived_at((folder / f"{role}.py").read_text()):
            arriving[name] = arriving.get(name, 0) + count
    expected = {barrier.name: count for barrier, count in config.ARRIVERS.items()}
    check_arrivals(expected, arriving)
    assert set(arriving) == set(expected) == {b.name for b in config.Barrier} - {"COUNT"}


def test_tasks_of_the_sm90_backward_are_neither_short_nor_cut_in_two() -> None:
    """A document of 16,384 queries, one of 32,768, and a rank's 12,288 of 196,608 keys."""
    for queries, keys, window in (
        (16384, 16384, 1024),
        (32768, 32768, 2048),
        (12288, 196608, 4096),
    ):
        edges, rows = queries * 16, keys // 128
        assert sm90.window_of(1024 * edges / (rows * queries)) == window
