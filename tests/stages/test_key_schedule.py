"""The inverse schedule: CSR from key block to queries."""

from __future__ import annotations

import pytest
import torch

from openmsa import Documents, Selection
from openmsa.contract import KeySchedule
from openmsa.reference.schedule import invert, key_schedule
from openmsa.testing import Case, assert_exact, poisoned_memory, problems


def build(selection: Selection, docs: Documents) -> KeySchedule:
    with poisoned_memory():
        return key_schedule(selection.indices, docs.layout, selection.block_size)


def row_tables(docs: Documents, size: int) -> dict[tuple[int, int], int]:
    """(key range, block) -> row, from the definition: ranges in order, blocks in order."""
    lengths = docs.layout.ranges[:, 1].tolist()
    pairs = [(r, b) for r, length in enumerate(lengths) for b in range(-(-length // size))]
    return {pair: row for row, pair in enumerate(pairs)}


def test_worked_example():
    # Two documents of 3 and 2 tokens in blocks of two: rows are (0, 0), (0, 1), (1, 0).
    docs = Documents.from_lengths([3, 2])
    ids = torch.tensor([[[0, -1], [0, -1], [1, 0], [0, -1], [-1, -1]]])
    schedule = build(Selection.from_indices(ids, docs, block_size=2), docs)
    assert schedule.num_rows == docs.layout.block_capacity(2) == 4
    assert schedule.row_ptr.tolist() == [[0, 3, 4, 5, 5]]
    assert schedule.queries.tolist() == [[0, 1, 2, 2, 3, -1, -1, -1, -1, -1]]


@pytest.mark.parametrize("case", problems("full"), ids=str)
def test_rows_hold_exactly_the_readers(case: Case):
    docs = case.documents()
    selection = case.selection(case.inputs(torch.float32), docs)
    schedule = build(selection, docs)
    indices = selection.indices
    heads, total, topk = indices.shape
    assert schedule.row_ptr.dtype == schedule.queries.dtype == torch.int32
    assert schedule.queries.shape == (heads, total * topk)
    rows = row_tables(docs, selection.block_size)
    assert len(rows) <= schedule.num_rows == docs.layout.block_capacity(selection.block_size)
    entry, spans = docs.layout.entry_of_query().tolist(), docs.layout.spans.tolist()
    for head in range(heads):
        readers: list[list[int]] = [[] for _ in range(schedule.num_rows)]
        for query, blocks in enumerate(indices[head, : docs.num_queries].tolist()):
            for block in blocks:
                if block >= 0:
                    readers[rows[spans[entry[query]][2], block]].append(query)
        row_ptr = schedule.row_ptr[head].tolist()
        queries = schedule.queries[head].tolist()
        assert row_ptr[0] == 0
        for row, expected in enumerate(readers):
            assert queries[row_ptr[row] : row_ptr[row + 1]] == expected, (head, row)
        assert set(queries[row_ptr[-1] :]) <= {-1}


@pytest.mark.parametrize("case", problems("full"), ids=str)
def test_inverting_twice_gives_the_selection(case: Case):
    docs = case.documents()
    selection = case.selection(case.inputs(torch.float32), docs)
    schedule = build(selection, docs)
    _, total, topk = selection.indices.shape
    with poisoned_memory():
        back = invert(schedule, docs.layout, total, topk)
    assert_exact("indices", back, selection.indices)


def test_fragments_share_rows():
    docs = Documents.from_cu_seqlens([0, 2, 4], [0, 2, 4], fragment_indices=[0, 0])
    assert docs.num_documents == 2
    ids = torch.zeros(1, 4, 1, dtype=torch.int32)
    schedule = build(Selection.from_indices(ids, docs, block_size=4), docs)
    assert schedule.row_ptr[0].tolist()[:2] == [0, 4]
    assert schedule.queries.tolist() == [[0, 1, 2, 3]]
