"""Budgets of a thread block: what would hang or fail on a GPU is an error beforehand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from openmsa.kernels.common.budgets import (
    check_arrivals,
    check_columns,
    check_registers,
    check_shared,
)
from openmsa.kernels.sm100.backward import config as backward


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
    backward.Config("bfloat16", group).check()


def test_a_group_that_needs_too_many_scalars_does_not() -> None:
    with pytest.raises(ValueError, match="bytes of shared memory"):
        backward.Config("bfloat16", 4).check()


def test_every_barrier_is_arrived_at_as_often_as_it_waits() -> None:
    """Counted in the source: each name that a role arrives at or commits to, by its warps."""
    folder = Path(backward.__file__).parent
    warps = {"compute": 8, "reduce": 4, "mma": 1, "load": 1, "scalars": 1}
    arriving: dict[str, int] = {}
    for role, count in warps.items():
        found = set()
        for node in ast.walk(ast.parse((folder / f"{role}.py").read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name.endswith(("arrive_warp", "commit", "mbarrier_arrive")) or name in (
                "_rows", "_block",
            ):  # fmt: skip
                found |= {
                    x.attr
                    for x in ast.walk(node)
                    if isinstance(x, ast.Attribute) and ast.unparse(x.value) == "Barrier"
                }
        for name in found:
            arriving[name] = arriving.get(name, 0) + count
    expected = {barrier.name: count for barrier, count in backward.ARRIVERS.items()}
    check_arrivals(expected, arriving)
    assert set(expected) == {b.name for b in backward.Barrier} - {"COUNT"}
