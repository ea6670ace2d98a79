"""The choice: a written order, no fallback from a name, and a refusal that helps."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

import openmsa
from openmsa import Documents, InvalidInput, Selection, UnsupportedProblem
from openmsa.dispatch import choose as dispatch
from openmsa.dispatch.choose import choose, choose_with, supports
from openmsa.dispatch.support import Offer, support
from openmsa.dispatch.table import ORDER, STAGES, TABLE, Cell, launcher

from .fakes import (
    A100,
    ATTENTION,
    B200,
    BARE,
    BLACKWELL,
    BOTH,
    CPU,
    CUTE,
    DEVICES,
    H200,
    HOPPER,
    PORTABLE,
    PROBLEMS,
    SELECT,
    TOOLS,
    TRITON,
    row,
)


def able(problem, facts, tools):
    return [
        name
        for name in ORDER
        if all(answer.ok for answer in supports(name, problem, facts, tools).values())
    ]


def has_run(name, problem, facts, tools):
    cells = choose_with(problem, name, facts, tools).cells
    return {cell.evidence for _, cell in cells if cell.launcher} == {"ran"}


@pytest.mark.parametrize("work", PROBLEMS)
@pytest.mark.parametrize("tools", TOOLS.values(), ids=TOOLS)
@pytest.mark.parametrize("facts", DEVICES.values(), ids=DEVICES)
@pytest.mark.filterwarnings("ignore:openmsa. backend")
def test_auto_takes_the_first_supported_row(facts, tools, work):
    """Of those that ran; a row that did not is only taken when it stands alone."""
    problem = PROBLEMS[work]
    names = able(problem, facts, tools)
    assert names, "the reference does anything"
    plan = choose_with(problem, "auto", facts, tools)
    assert plan.backend in names
    ran = [name for name in names if has_run(name, problem, facts, tools)]
    assert plan.backend == (ran or names)[0]
    assert tuple(stage for stage, _ in plan.cells) == STAGES[work]
    for stage, cell in plan.cells:
        accepting = [
            one
            for one in TABLE[plan.backend][stage].families
            if one.fused or support(problem, one.offer, facts, tools).ok
        ]
        assert cell == accepting[0], "the first family that accepts"
        assert not cell.others, "a plan has one cell a stage"


@pytest.mark.parametrize("work", PROBLEMS)
@pytest.mark.parametrize("backend", ["cute", "triton", "cpu", "reference"])
@pytest.mark.parametrize("tools", TOOLS.values(), ids=TOOLS)
@pytest.mark.parametrize("facts", DEVICES.values(), ids=DEVICES)
def test_a_named_backend_never_falls_back(facts, tools, backend, work):
    """The named one or a refusal with every reason; never another one."""
    problem = PROBLEMS[work]
    if backend in able(problem, facts, tools):
        assert choose_with(problem, backend, facts, tools).backend == backend
        return
    with pytest.raises(UnsupportedProblem) as error:
        choose_with(problem, backend, facts, tools)
    message = str(error.value)
    assert backend in message
    assert facts.name in message
    assert str(tools) in message
    for need in ("bfloat16", "head dim 128", "block 128", "top-16"):
        assert need in message
    for answer in supports(backend, problem, facts, tools).values():
        assert all(reason in message for reason in answer.reasons)
    instead = able(problem, facts, tools)[0]
    assert f"instead: backend={instead!r}" in message


@pytest.mark.parametrize("work", PROBLEMS)
def test_on_a_cpu_the_cpu_backend_comes_first(work):
    assert choose_with(PROBLEMS[work], "auto", CPU, BARE).backend == "cpu"


@pytest.mark.parametrize("facts", [A100, H200, B200], ids=["sm80", "sm90", "sm100"])
@pytest.mark.parametrize("work", PROBLEMS)
def test_a_gpu_without_toolchains_gets_the_reference(facts, work):
    """No Triton, no DSL: right results, slowly, instead of an import error."""
    assert choose_with(PROBLEMS[work], "auto", facts, BARE).backend == "reference"
    with pytest.raises(UnsupportedProblem, match="device: needs cuda, offers cpu"):
        choose_with(PROBLEMS[work], "cpu", facts, BARE)


@pytest.mark.parametrize("backend", ["cuda", "", "REFERENCE", None])
def test_unknown_names_are_invalid_input(backend):
    with pytest.raises(InvalidInput, match=r"backend: expected one of .*cute.*, got"):
        choose_with(SELECT, backend, CPU, BARE)


@pytest.mark.usefixtures("two_rows")
@pytest.mark.parametrize(
    ("device", "tools", "expected"),
    [
        ("sm90", BOTH, "cute"),
        ("sm90", CUTE, "cute"),
        ("sm90", TRITON, "triton"),
        ("sm90", BARE, "reference"),
        ("sm80", BOTH, "triton"),
        ("sm86", BOTH, "triton"),
        ("sm100", BOTH, "triton"),
        ("sm103", BOTH, "triton"),
        ("sm120", BOTH, "triton"),
        ("sm120", CUTE, "reference"),
        ("no_capability", BOTH, "reference"),
        ("xpu", BOTH, "reference"),
        ("cpu", BOTH, "cpu"),
    ],
    ids=lambda value: {id(t): name for name, t in TOOLS.items()}.get(id(value), str(value)),
)
def test_the_order_on_every_device(device, tools, expected):
    """flash-attention#2572, fla#113: new, old and unknown devices get the portable path."""
    for problem in PROBLEMS.values():
        assert choose_with(problem, "auto", DEVICES[device], tools).backend == expected


@pytest.mark.usefixtures("two_rows")
@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"dtype": torch.float16}, "reference"),
        ({"deterministic": True}, "reference"),
        ({"dtype": torch.bfloat16}, "triton"),
    ],
    ids=["dtype", "deterministic", "all_right"],
)
def test_problems_beyond_a_row_go_to_the_next(facts, expected):
    problem = dataclasses.replace(ATTENTION, **facts)
    assert choose_with(problem, "auto", A100, BOTH).backend == expected


@pytest.mark.usefixtures("two_rows")
def test_a_refusal_names_everything():
    """Needed, offered, the device, the versions, and what to use instead."""
    problem = dataclasses.replace(ATTENTION, dtype=torch.float16, deterministic=True)
    with pytest.raises(UnsupportedProblem) as error:
        choose_with(problem, "triton", A100, CUTE)
    message = str(error.value)
    for word in (
        "attention",
        "float16",
        "64/4 heads",
        "head dim 128",
        "block 128",
        "top-16",
        "deterministic",
        "NVIDIA A100",
        "8.0",
        "python 3.11.7",
        "torch 2.13.0",
        "triton not installed",
        "4.6.2",
        "needs float16, offers bfloat16",
        "forward",
        "instead: backend='reference'",
    ):
        assert word in message, word


@pytest.mark.usefixtures("two_rows")
def test_the_way_out_is_the_first_able_backend():
    with pytest.raises(UnsupportedProblem, match="instead: backend='triton', or backend='auto'"):
        choose_with(ATTENTION, "cute", A100, BOTH)
    with pytest.raises(UnsupportedProblem, match="instead: backend='cute', or backend='auto'"):
        choose_with(dataclasses.replace(ATTENTION, deterministic=True), "triton", H200, BOTH)


def test_one_stage_that_lacks_is_enough_to_refuse(monkeypatch):
    """A backend is chosen for the whole work or not at all; the refusal names the stage."""
    missing = Cell(reason="nobody wrote it")
    monkeypatch.setitem(TABLE, "triton", row(PORTABLE, task_build=missing))
    assert choose_with(SELECT, "triton", A100, TRITON).backend == "triton"
    assert choose_with(ATTENTION, "auto", A100, TRITON).backend == "reference"
    with pytest.raises(UnsupportedProblem, match=r"nobody wrote it \[task_build\]"):
        choose_with(ATTENTION, "triton", A100, TRITON)


def test_a_fused_stage_lacks_nothing(monkeypatch):
    fused = Cell(fused="backward")
    monkeypatch.setitem(TABLE, "triton", row(PORTABLE, task_build=fused))
    plan = choose_with(ATTENTION, "auto", A100, TRITON)
    assert plan.backend == "triton"
    assert plan.stage("task_build") is None
    assert plan.stage("backward") is launcher("math:sqrt")
    with pytest.raises(KeyError, match="task_build"):
        plan.run("task_build")


def test_a_row_may_borrow_anothers_stage(monkeypatch):
    """Borrowing is a cell that names the other's launcher, with its own offer."""
    borrowed = Cell("openmsa.reference.schedule:key_schedule", Offer(), "ran", "x86 CPU")
    monkeypatch.setitem(TABLE, "triton", row(PORTABLE, key_schedule=borrowed))
    plan = choose_with(ATTENTION, "triton", A100, TRITON)
    assert plan.stage("key_schedule") is launcher("openmsa.reference.schedule:key_schedule")


def two_families(monkeypatch, **odd):
    """CuTe for Hopper, which ran, and for Blackwell, which did not; Triton for any GPU."""
    hopper = Cell("math:sqrt", HOPPER, "ran", "H200")
    blackwell = Cell("math:cos", BLACKWELL, "simulated", "10.0")
    cells = dict.fromkeys(sum(STAGES.values(), ()), hopper | blackwell)
    monkeypatch.setitem(TABLE, "cute", cells | odd)
    monkeypatch.setitem(TABLE, "triton", row(PORTABLE))
    return hopper, blackwell


@pytest.mark.parametrize("work", PROBLEMS)
def test_each_family_of_devices_gets_its_own_cells(work, monkeypatch):
    hopper, blackwell = two_families(monkeypatch)
    for facts, cell, function in ((H200, hopper, "sqrt"), (B200, blackwell, "cos")):
        plan = choose_with(PROBLEMS[work], "cute", facts, CUTE)
        assert {found for _, found in plan.cells} == {cell}
        stage = plan.stage(STAGES[work][-1])
        assert stage is launcher(f"math:{function}")


def test_a_family_is_taken_for_its_own_evidence(monkeypatch):
    """That Hopper's cells ran says nothing about Blackwell's."""
    two_families(monkeypatch)
    assert choose_with(ATTENTION, "auto", H200, BOTH).backend == "cute"
    assert choose_with(ATTENTION, "auto", B200, BOTH).backend == "triton"


def test_a_family_that_lacks_is_refused_for_its_own_reasons(monkeypatch):
    """Only those of the cells that are for such a device; the toolchain's too."""
    two_families(monkeypatch)
    many = dataclasses.replace(ATTENTION, topk=65)
    for problem, facts, tools, reason in (
        (ATTENTION, H200, TRITON, "toolchain: needs cute_dsl, which is not installed"),
        (many, B200, CUTE, "topk: needs 65, offers 1..64"),
    ):
        for answer in supports("cute", problem, facts, tools).values():
            assert answer.reasons == (reason,)


def test_a_device_of_no_family_is_told_all_of_them_once(monkeypatch):
    two_families(monkeypatch)
    for answer in supports("cute", ATTENTION, A100, TRITON).values():
        assert answer.reasons == (
            "compute capability: needs (8, 0), offers (9, 0) to (9, 0)",
            "compute capability: needs (8, 0), offers (10, 0) to (10, 3)",
            "toolchain: needs cute_dsl, which is not installed",
        )
    with pytest.raises(UnsupportedProblem) as error:
        choose_with(ATTENTION, "cute", CPU, CUTE)
    assert str(error.value).count("device: needs cpu, offers cuda") == 1


def test_of_two_cells_for_a_device_the_first_that_accepts_is_taken(monkeypatch):
    """And where none does, the first one speaks."""
    narrow = Cell("math:sqrt", dataclasses.replace(HOPPER, topks=range(1, 9)), "ran", "H200")
    wide = Cell("math:cos", HOPPER, "ran", "H200")
    two_families(monkeypatch, forward=narrow | wide)
    for topk, expected in ((8, narrow), (16, wide)):
        problem = dataclasses.replace(ATTENTION, topk=topk)
        plan = choose_with(problem, "cute", H200, CUTE)
        assert dict(plan.cells)["forward"] == expected
    answer = supports("cute", dataclasses.replace(ATTENTION, topk=65), H200, CUTE)["forward"]
    assert answer.reasons == ("topk: needs 65, offers 1..8",)


def test_a_family_may_fuse_or_lack_what_another_has(monkeypatch):
    here = dataclasses.replace(HOPPER, package=None)
    two = Cell("math:cos", BLACKWELL, "ran", "10.0")
    cells = {
        "task_build": Cell(fused="backward", offer=here) | two,
        "block_scores": two | Cell(reason="nobody wrote it"),
    }
    two_families(monkeypatch, **cells)
    assert choose_with(ATTENTION, "cute", H200, CUTE).stage("task_build") is None
    assert choose_with(ATTENTION, "cute", B200, CUTE).stage("task_build") is launcher("math:cos")
    assert choose_with(SELECT, "cute", B200, CUTE).backend == "cute"
    assert supports("cute", SELECT, H200, CUTE)["block_scores"].reasons == ("nobody wrote it",)


def test_a_fused_stage_of_another_family_is_not_there(monkeypatch):
    odd = Cell(fused="backward", offer=dataclasses.replace(HOPPER, package=None))
    two_families(monkeypatch, task_build=odd)
    with pytest.raises(UnsupportedProblem, match=r"compute capability: .*\[task_build\]"):
        choose_with(ATTENTION, "cute", B200, CUTE)


def test_families_are_joined_in_order():
    one, two, three = (Cell(f"math:{name}") for name in ("sqrt", "cos", "sin"))
    assert one.families == (one,)
    for cell in ((one | two) | three, one | (two | three)):
        assert cell.families == (one, two, three)


def test_nobody_at_all(monkeypatch):
    """Should even the last row refuse, auto says why for each of them."""
    for name in ORDER:
        monkeypatch.setitem(TABLE, name, row(Offer(dtypes=(torch.int8,))))
    with pytest.raises(UnsupportedProblem) as error:
        choose_with(ATTENTION, "auto", CPU, BARE)
    message = str(error.value)
    assert "instead" not in message
    for name in ORDER:
        assert f"{name}: dtype: needs bfloat16, offers int8" in message


@pytest.mark.parametrize("evidence", ["compiled only", "simulated"])
def test_what_ran_is_preferred_to_what_did_not(evidence, monkeypatch):
    """Although it comes later in the order; and nothing needs to be said about it."""
    monkeypatch.setitem(TABLE, "cute", row(BLACKWELL, evidence))
    monkeypatch.setitem(TABLE, "triton", row(PORTABLE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for problem in PROBLEMS.values():
            assert choose_with(problem, "auto", B200, BOTH).backend == "triton"


@pytest.mark.parametrize("evidence", ["compiled only", "simulated"])
def test_one_stage_that_never_ran_is_enough(evidence, monkeypatch):
    odd = Cell("math:sqrt", BLACKWELL, evidence, "nowhere")
    monkeypatch.setitem(TABLE, "cute", row(BLACKWELL, backward=odd))
    monkeypatch.setitem(TABLE, "triton", row(PORTABLE))
    assert choose_with(SELECT, "auto", B200, BOTH).backend == "cute"
    assert choose_with(ATTENTION, "auto", B200, BOTH).backend == "triton"


@pytest.fixture
def only_compiled(monkeypatch):
    """Kernels that were only compiled, on a device for which there is nothing else."""
    monkeypatch.setitem(TABLE, "cute", row(BLACKWELL, "compiled only"))
    for name in ("triton", "cpu", "reference"):
        monkeypatch.setitem(TABLE, name, row(Offer(devices=("cpu",))))
    monkeypatch.setattr(dispatch, "device_facts", lambda device: B200)
    monkeypatch.setattr(dispatch, "toolchain", lambda: BOTH)


@pytest.mark.usefixtures("only_compiled")
def test_what_never_ran_is_taken_where_it_stands_alone_and_says_so_once():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            assert choose(ATTENTION).backend == "cute"
    assert len(said) == 1
    message = str(said[0].message)
    assert "cute" in message
    assert "B200" in message
    assert "not run" in message


@pytest.mark.usefixtures("only_compiled")
def test_it_is_said_once_for_all_problems_by_default():
    """Python shows equal warnings of one place once; a training run meets several problems."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        vars(dispatch).pop("__warningregistry__", None)
        for topk in (4, 8, 16):
            choose(dataclasses.replace(ATTENTION, topk=topk))
            choose(dataclasses.replace(SELECT, topk=topk))
    assert len(said) == 1


@pytest.mark.usefixtures("only_compiled")
def test_who_asks_by_name_knows():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(ATTENTION, "cute").backend == "cute"


@pytest.fixture
def call():
    docs = Documents.from_lengths([5, 3])
    x = torch.randn(8, 2, 4)

    def run(work, backend):
        if work == "select":
            return openmsa.select_blocks(x, x[:, 0], docs, topk=2, block_size=2, backend=backend)
        sel = Selection.from_indices(torch.zeros(2, 8, 2, dtype=torch.int32), docs, block_size=2)
        return openmsa.sparse_attention(x, x, x, sel, docs, backend=backend)

    return run


@pytest.mark.parametrize("work", PROBLEMS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_named_backend_is_the_one_that_runs(call, work, backend, monkeypatch):
    """Every other row is broken here, so anything but the named one would show."""
    for name in ORDER:
        if name != backend:
            broken = {s: Cell("no.such.module:nothing", Offer(), "ran", "") for s in TABLE[name]}
            monkeypatch.setitem(TABLE, name, broken)
    call(work, backend)
    other = "cpu" if backend == "reference" else "reference"
    with pytest.raises(ModuleNotFoundError, match="no"):
        call(work, other)


@pytest.mark.parametrize("work", PROBLEMS)
def test_auto_on_a_cpu_is_the_cpu_backend(call, work, monkeypatch):
    broken = {s: Cell("no.such.module:nothing", Offer(), "ran", "") for s in TABLE["reference"]}
    monkeypatch.setitem(TABLE, "reference", broken)
    call(work, "auto")


@pytest.mark.parametrize("work", PROBLEMS)
def test_a_refused_backend_raises_from_the_public_function(call, work, monkeypatch):
    monkeypatch.setitem(TABLE, "triton", row(PORTABLE))
    with pytest.raises(UnsupportedProblem) as error:
        call(work, "triton")
    message = str(error.value)
    assert "device: needs cpu, offers cuda" in message
    assert f"torch {torch.__version__}" in message
    assert "instead: backend='cpu'" in message
