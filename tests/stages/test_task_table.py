"""What the check of task tables accepts and what it notices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openmsa import Documents
from openmsa.reference.schedule import key_schedule, task_build
from openmsa.testing.task_table import task_pairs


@pytest.fixture
def built():
    docs = Documents.from_lengths([700, 0, 130, 1])
    own = docs.positions // 64
    indices = torch.stack([own, own - 3, own - 1, own - 2]).sort(0).values.T
    indices = torch.where(indices < 0, 2**30, indices).sort(1).values
    indices = torch.where(indices == 2**30, -1, indices).int().expand(2, -1, -1).contiguous()
    indices[0, 10:20] = -1
    schedule = key_schedule(indices, docs.layout, 64)
    return task_build(schedule, 16, docs.num_queries), schedule, docs.num_queries


def wrong(tasks, schedule, queries):
    pairs = task_pairs(tasks, schedule, queries)
    return {name for name, (found, wanted) in pairs.items() if not torch.equal(found, wanted)}


def test_the_reference_s_table_is_right(built):
    assert wrong(*built) == set()
    tasks, schedule, queries = built
    assert int(tasks.count) > 20
    smaller = task_build(schedule, 64, queries)
    assert wrong(smaller, schedule, queries) == set()


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (lambda t: t.tasks[[0, 1]].flip(0), {"edges"}),
        (lambda t: t.tasks[:2] + torch.tensor([0, 0, 1, 0]), {"edges"}),
        (lambda t: t.tasks[:2] * torch.tensor([1, 1, 1, 0]), {"edges", "sizes"}),
        (lambda t: t.tasks[:2] + torch.tensor([0, 0, 0, 9]), {"edges", "sizes"}),
    ],
    ids=["order", "edge", "empty", "size"],
)
def test_a_changed_task_is_noticed(built, change, noticed):
    tasks, schedule, queries = built
    table = tasks.tasks.clone()
    table[:2] = change(tasks).int()
    assert noticed <= wrong(replace(tasks, tasks=table), schedule, queries)


def test_a_missing_task_a_dead_row_an_owner_and_a_window_are_noticed(built):
    tasks, schedule, queries = built
    assert wrong(replace(tasks, count=tasks.count - 1), schedule, queries) == {"edges", "dead"}
    table = tasks.tasks.clone()
    table[-1, 3] = 1
    assert wrong(replace(tasks, tasks=table), schedule, queries) == {"dead"}
    assert wrong(replace(tasks, owners=tasks.owners + 1), schedule, queries) == {"owners"}
    assert "windows" in wrong(replace(tasks, window=37), schedule, queries)


def test_a_table_of_nothing(built):
    schedule = key_schedule(torch.full((1, 3, 2), -1, dtype=torch.int32),
                            Documents.from_lengths([3]).layout, 64)  # fmt: skip
    assert wrong(task_build(schedule, 16, 3), schedule, 3) == set()
