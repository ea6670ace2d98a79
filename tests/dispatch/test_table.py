"""The table itself: every cell says what it is, and what it names exists."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from openmsa.dispatch.choose import choose_with, supports
from openmsa.dispatch.probe import toolchain
from openmsa.dispatch.table import BACKENDS, ORDER, STAGES, TABLE, launcher
from openmsa.errors import UnsupportedProblem
from openmsa.kernels.launchers import FAMILIES

from .fakes import (
    A100,
    ATTENTION,
    B200,
    B300,
    BOTH,
    CPU,
    CUTE,
    H200,
    RTX5090,
    SELECT,
    TRITON,
)

STAGE_CELLS = [(backend, stage) for backend in TABLE for stage in TABLE[backend]]
CELLS = [
    (backend, stage, cell)
    for backend, stage in STAGE_CELLS
    for cell in TABLE[backend][stage].families
]
LAUNCHERS = [at for at in CELLS if at[2].launcher is not None]
FUSED = [at for at in CELLS if at[2].fused]


def ids(cells):
    return [f"{backend}-{stage}-{cell.where or 'nowhere'}" for backend, stage, cell in cells]


def test_every_backend_has_every_stage():
    """A backend that is named and then lacks a row would fail in the middle of a step."""
    stages = set(sum(STAGES.values(), ()))
    assert len(stages) == sum(map(len, STAGES.values())), "a stage belongs to one piece of work"
    assert set(TABLE) == set(ORDER) == {"cute", "triton", "cpu", "reference"}
    assert len(ORDER) == len(set(ORDER))
    for backend in TABLE:
        assert set(TABLE[backend]) == stages, backend


def test_the_public_names():
    assert set(BACKENDS) == {"auto", "reference", "cpu", "triton", "cute"}
    assert ORDER[-1] == "reference", "the definition of right is the last resort"


def test_the_pieces_of_work():
    assert STAGES == {
        "select": ("block_scores", "select_blocks"),
        "attention": (
            "key_schedule",
            "forward",
            "backward_preprocess",
            "task_build",
            "backward",
            "backward_postprocess",
        ),
    }


@pytest.mark.parametrize(("backend", "stage", "cell"), CELLS, ids=ids(CELLS))
def test_a_cell_is_a_launcher_or_fused_or_has_a_reason(backend, stage, cell):
    kinds = [cell.launcher is not None, bool(cell.fused), bool(cell.reason)]
    assert sum(kinds) == 1, cell
    if cell.launcher is not None:
        assert cell.evidence in ("ran", "simulated", "compiled only")
        assert cell.where, "evidence says where"
    else:
        assert not cell.evidence, "what does not exist has not run"


@pytest.mark.parametrize(("backend", "stage", "cell"), FUSED, ids=ids(FUSED))
def test_a_fused_stage_is_done_by_a_stage_that_exists(backend, stage, cell):
    """Of the same backend and the same work, with a launcher of its own."""
    other = TABLE[backend][cell.fused]
    assert all(one.launcher is not None for one in other.families)
    assert any(stage in stages and cell.fused in stages for stages in STAGES.values())


@pytest.mark.parametrize(
    ("backend", "stage"), STAGE_CELLS, ids=[f"{backend}-{stage}" for backend, stage in STAGE_CELLS]
)
def test_no_device_belongs_to_two_families(backend, stage):
    """Else stages of two families could meet in one plan."""
    taken = [c for cell in TABLE[backend][stage].families for c in cell.offer.exact or ()]
    assert len(taken) == len(set(taken))
    if len(TABLE[backend][stage].families) > 1:
        assert all(cell.offer.exact for cell in TABLE[backend][stage].families)


@pytest.mark.parametrize(("backend", "stage", "cell"), LAUNCHERS, ids=ids(LAUNCHERS))
def test_a_launcher_is_a_function(backend, stage, cell):
    module, _, function = cell.launcher.partition(":")
    package = cell.offer.package
    if package is None or toolchain().version(package) is not None:
        assert callable(launcher(cell.launcher))
        return
    # The toolchain is not here, so the module cannot be imported; its source can be read.
    spec = importlib.util.find_spec(module.rpartition(".")[0])
    folder = Path(spec.submodule_search_locations[0])
    name = module.rpartition(".")[2]
    source = next(x for x in (folder / f"{name}.py", folder / name / "__init__.py") if x.exists())
    defined = {getattr(node, "name", None) for node in ast.parse(source.read_text()).body}
    assert function in defined


def test_the_oracle_works_anywhere():
    """The reference restricts nothing and needs no toolchain: auto always finds something."""
    for stage, cell in TABLE["reference"].items():
        assert cell.fused or cell.offer.devices is None, stage
        assert cell.offer.package is None, stage
        assert cell.offer.capabilities is None, stage


@pytest.mark.parametrize(
    ("facts", "problem", "missing"),
    [
        (B200, ATTENTION, None),
        (B300, ATTENTION, None),
        (H200, ATTENTION, None),
        (dataclasses.replace(B200, capability=(10, 1)), ATTENTION, "compute capability"),
        (dataclasses.replace(H200, capability=(9, 1)), ATTENTION, "compute capability"),
        (A100, ATTENTION, "compute capability"),
        (RTX5090, ATTENTION, "compute capability"),
        (CPU, ATTENTION, "device"),
        (B200, dataclasses.replace(ATTENTION, q_heads=16), "group"),
        (B200, dataclasses.replace(ATTENTION, dtype=torch.float32), "dtype"),
        (B200, dataclasses.replace(ATTENTION, head_dim=64), "head_dim"),
        (B200, dataclasses.replace(ATTENTION, block_size=64), "block_size"),
        (B200, dataclasses.replace(ATTENTION, deterministic=True), None),
        (B200, SELECT, "no CuTe DSL kernel"),
        (H200, dataclasses.replace(ATTENTION, q_heads=16), "group"),
        (H200, dataclasses.replace(ATTENTION, dtype=torch.float32), "dtype"),
        (H200, dataclasses.replace(ATTENTION, head_dim=96), "head_dim"),
        (H200, dataclasses.replace(ATTENTION, block_size=64), "block_size"),
        (H200, dataclasses.replace(ATTENTION, topk=65), "topk"),
        (H200, dataclasses.replace(ATTENTION, topk=64, dtype=torch.float16), None),
        (H200, dataclasses.replace(ATTENTION, q_heads=256), None),
        (H200, dataclasses.replace(ATTENTION, deterministic=True), None),
        (dataclasses.replace(H200, shared_memory=232_447), ATTENTION, "shared memory"),
        (H200, SELECT, "no CuTe DSL kernel"),
    ],
)
def test_what_the_cute_kernels_take(facts, problem, missing):
    answers = supports("cute", problem, facts, BOTH)
    if missing is None:
        assert all(answer.ok for answer in answers.values()), answers
    else:
        reasons = [reason for answer in answers.values() for reason in answer.reasons]
        assert any(missing in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("facts", "family", "where"), [(H200, "sm90", "H200"), (B200, "sm100", "10.0, 10.3")]
)
def test_a_plan_has_the_launchers_of_one_family(facts, family, where):
    """But for those that are Triton's."""
    cells = dict(choose_with(ATTENTION, "cute", facts, BOTH).cells)
    own = {stage: cell.launcher for stage, cell in cells.items() if cell.where == where}
    assert own == FAMILIES[family]
    for stage in set(cells) - set(own):
        assert cells[stage].launcher == TABLE["triton"][stage].launcher
        assert "by Triton" in cells[stage].where


def test_on_hopper_auto_takes_the_kernels_that_ran_there():
    """With the DSL and Triton, whose key schedule they borrow; else the next in order."""
    assert choose_with(ATTENTION, "auto", H200, BOTH).backend == "cute"
    assert choose_with(SELECT, "auto", H200, BOTH).backend == "triton"
    assert choose_with(ATTENTION, "auto", H200, TRITON).backend == "triton"
    assert choose_with(ATTENTION, "auto", H200, CUTE).backend == "reference"
    for tools, package in ((TRITON, "cute_dsl"), (CUTE, "triton")):
        with pytest.raises(UnsupportedProblem, match=f"toolchain: needs {package}"):
            choose_with(ATTENTION, "cute", H200, tools)


def test_auto_prefers_what_has_run_to_what_was_simulated():
    """Nothing here has met a Blackwell chip; Triton's kernels have met another."""
    assert choose_with(ATTENTION, "auto", B200, BOTH).backend == "triton"
    assert choose_with(ATTENTION, "cute", B200, BOTH).backend == "cute"
