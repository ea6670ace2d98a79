"""explain(): the order, the choice, and a line for every stage of every backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import openmsa
from openmsa import Documents, Selection
from openmsa.dispatch import choose as dispatch
from openmsa.dispatch.choose import choose_with, explain, supports
from openmsa.dispatch.support import Offer, support
from openmsa.dispatch.table import ORDER, STAGES, TABLE

from .fakes import (
    A100,
    ATTENTION,
    B200,
    BARE,
    BOTH,
    CUTE,
    DEVICES,
    H200,
    PROBLEMS,
    RTX5090,
    TRITON,
    row,
)


def lines_of(text):
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize("work", PROBLEMS)
@pytest.mark.parametrize("facts", DEVICES.values(), ids=DEVICES)
def test_explain_mentions_every_stage_of_every_backend(facts, work, monkeypatch):
    monkeypatch.setattr(dispatch, "device_facts", lambda device: facts)
    monkeypatch.setattr(dispatch, "toolchain", lambda: BARE)
    problem = PROBLEMS[work]
    text = explain(problem)
    plan = choose_with(problem, "auto", facts, BARE)
    head, *rows = text.splitlines()
    assert work in head
    assert plan.backend in head
    assert ", ".join(ORDER) in head, "the order itself is printed"
    for name in ORDER:
        for stage, answer in supports(name, problem, facts, BARE).items():
            (line,) = [row for row in rows if name in row.split() and stage in row.split()[:3]]
            assert line.strip().startswith("->") == (name == plan.backend)
            cells = TABLE[name][stage].families
            if cells[0].fused:
                assert f"done inside {cells[0].fused}" in line
            elif answer.ok:
                taken = [c for c in cells if support(problem, c.offer, facts, BARE).ok]
                assert f"yes ({taken[0].evidence}: {taken[0].where})" in line
            else:
                assert all(reason in line for reason in answer.reasons)
    assert len(rows) == len(ORDER) * len(STAGES[work])


@pytest.mark.parametrize(
    ("facts", "tools", "chosen", "forward"),
    [
        (H200, BOTH, "cute", "yes (ran: H200)"),
        (H200, TRITON, "triton", "no: toolchain: needs cute_dsl, which is not installed"),
        (H200, CUTE, "reference", "yes (ran: H200)"),
        (B200, BOTH, "triton", "yes (simulated: 10.0, by Triton)"),
        (B200, CUTE, "reference", "no: toolchain: needs triton, which is not installed"),
        (
            RTX5090,
            BOTH,
            "triton",
            "no: compute capability: needs (12, 0), offers (9, 0); "
            "compute capability: needs (12, 0), offers (10, 0), (10, 3); "
            "shared memory: needs 232448 bytes per thread block, the device has 101376",
        ),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value)[:40],
)
def test_the_family_of_the_device_speaks(facts, tools, chosen, forward, monkeypatch):
    """The table that ships: a Hopper device hears of Hopper's kernels, and only of them."""
    monkeypatch.setattr(dispatch, "device_facts", lambda device: facts)
    monkeypatch.setattr(dispatch, "toolchain", lambda: tools)
    head, *rows = explain(ATTENTION).splitlines()
    assert head.startswith(f"attention: {chosen} ")
    (line,) = [row for row in rows if {"cute", "forward"} <= set(row.split()[:3])]
    assert line.endswith(forward)
    assert line.strip().startswith("->") == (chosen == "cute")


@pytest.mark.usefixtures("two_rows")
def test_explain_gives_the_reasons(monkeypatch):
    monkeypatch.setattr(dispatch, "device_facts", lambda device: A100)
    monkeypatch.setattr(dispatch, "toolchain", lambda: BOTH)
    text = explain(ATTENTION)
    assert text.startswith("attention: triton")
    assert "no: compute capability: needs (8, 0), offers (9, 0) to (9, 0)" in text
    assert "no: device: needs cuda, offers cpu" in text


def test_explain_when_nobody_can(monkeypatch):
    for name in ORDER:
        monkeypatch.setitem(TABLE, name, row(Offer(dtypes=(torch.int8,))))
    text = explain(dataclasses.replace(ATTENTION, device=torch.device("cpu")))
    assert text.startswith("attention: none")
    assert "->" not in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_public_explain(dtype):
    docs = Documents.from_lengths([5, 3])
    q, k, v = (torch.zeros(8, h, 16, dtype=dtype) for h in (4, 2, 2))
    sel = Selection.from_indices(torch.zeros(2, 8, 3, dtype=torch.int32), docs)
    text = openmsa.explain(q, k, v, sel, docs)
    assert isinstance(text, str)
    for work, stages in STAGES.items():
        assert any(line.startswith(f"{work}: cpu") for line in text.splitlines())
        for name in ORDER:
            for stage in stages:
                assert any(name in line and stage in line for line in lines_of(text))


def test_public_explain_follows_determinism(monkeypatch):
    """A row without repeatable sums is out once torch asks for them."""
    offer = Offer(devices=("cpu",), deterministic=False)
    monkeypatch.setitem(TABLE, "triton", row(offer))
    docs = Documents.from_lengths([2])
    x = torch.zeros(2, 1, 4)
    sel = Selection.from_indices(torch.zeros(1, 2, 1, dtype=torch.int32), docs)
    assert "attention: triton" in openmsa.explain(x, x, x, sel, docs)
    torch.use_deterministic_algorithms(True)
    try:
        text = openmsa.explain(x, x, x, sel, docs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "attention: cpu" in text
    assert "no: deterministic" in text
