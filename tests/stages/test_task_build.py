"""Work tiles of the key-major backward: every edge once, in the promised order."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from openmsa.contract import BackwardTasks, KeySchedule, tasks
from openmsa.contract.tasks import queries_per_task, task_capacity
from openmsa.reference import schedule as stage
from openmsa.testing import poisoned_memory, problem

NAMES = (
    "no_documents",
    "no_tokens",
    "one_token",
    "ragged_lengths",
    "rows_without_block",
    "raw_ids",
    "hot_block",
    "few_candidates",
    "more_blocks_than_topk",
    "fragment_end_cuts_own_block",
    "fragments_with_hot_block",
    "topk_32",
    "topk_64",
)


def build(name: str, group: int) -> tuple[KeySchedule, BackwardTasks, int]:
    case = problem(name)
    docs = case.documents()
    selection = case.selection(case.inputs(torch.float32), docs)
    schedule = stage.key_schedule(selection.indices, docs.layout, selection.block_size)
    with poisoned_memory():
        built = stage.task_build(schedule, group, docs.num_queries)
    return schedule, built, docs.num_queries


@pytest.fixture(params=[512, 32], ids="window{}".format)
def window(request, monkeypatch):
    """The real window, and one so short that small problems have many."""
    monkeypatch.setattr(tasks, "WINDOW", request.param)
    monkeypatch.setattr(stage, "WINDOW", request.param)
    return request.param


@pytest.mark.parametrize("group", [1, 3, 16, 64])
@pytest.mark.parametrize("name", NAMES)
def test_contract(name, group, window):
    schedule, built, num_queries = build(name, group)
    per_task = queries_per_task(group)
    heads, edges = schedule.queries.shape
    assert (built.queries_per_task, built.window) == (per_task, window)
    assert built.tasks.dtype == built.count.dtype == built.owners.dtype == torch.int32
    assert built.count.shape == (1,)
    capacity = task_capacity(heads, edges, schedule.num_rows, num_queries, per_task)
    assert built.tasks.shape == (capacity, 4)
    count = int(built.count)
    assert count <= capacity
    assert (built.tasks[count:] == -1).all()

    queries, row_ptr = schedule.queries.tolist(), schedule.row_ptr.tolist()
    covered: Counter[tuple[int, int]] = Counter()
    order, runs = [], Counter()
    previous = None
    for head, row, first, size in built.tasks[:count].tolist():
        assert 1 <= size <= per_task
        assert row_ptr[head][row] <= first
        assert first + size <= row_ptr[head][row + 1], "a tile reads past its row"
        windows = {queries[head][edge] // window for edge in range(first, first + size)}
        assert len(windows) == 1, "a tile spans two windows"
        at = windows.pop()
        covered.update((head, edge) for edge in range(first, first + size))
        order.append((head, at, row, first))
        if previous != (head, at, row):
            runs[head, row] += 1
        previous = (head, at, row)
    live = {(head, edge) for head in range(heads) for edge in range(row_ptr[head][-1])}
    assert set(covered) == live
    assert set(covered.values()) <= {1}
    assert order == sorted(order)
    for head in range(heads):
        for row in range(schedule.num_rows):
            assert int(built.owners[head, row]) == runs[head, row], (head, row)


def test_tiles_are_full_where_a_row_and_window_allow():
    # 520 queries read block 0, one window of 512 and one of 8; a group of 16 has tiles of 8.
    queries = torch.arange(520, dtype=torch.int32)[None]
    schedule = KeySchedule(torch.tensor([[0, 520]], dtype=torch.int32), queries, 128)
    built = stage.task_build(schedule, 16, 520)
    assert int(built.count) == 65
    assert built.tasks[:65, 3].tolist() == [8] * 65
    assert built.owners.tolist() == [[2]]


def test_capacity_is_reached():
    # One query per (row, window) leaves no tile full: the ragged tiles alone fill the capacity.
    queries = torch.tensor([[0, 600, 0, 600]], dtype=torch.int32)
    schedule = KeySchedule(torch.tensor([[0, 2, 4]], dtype=torch.int32), queries, 128)
    built = stage.task_build(schedule, 1, 700)
    assert built.tasks.shape[0] == int(built.count) == 4
    assert built.tasks.tolist() == [[0, 0, 0, 1], [0, 1, 2, 1], [0, 0, 1, 1], [0, 1, 3, 1]]
    assert built.owners.tolist() == [[2, 2]]
