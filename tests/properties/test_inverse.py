"""Inverting a selection twice gives it back, for any documents, fragments and slack."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from openmsa import Documents, Selection
from openmsa.reference.schedule import invert, key_schedule

from .problems import stable


@st.composite
def selections(draw):
    """A canonical selection over documents or fragments of them, with slack rows."""
    cu_q, cu_k, heads = [0], [0], []
    for _ in range(draw(st.integers(0, 3))):
        first = len(heads)
        for _ in range(draw(st.integers(1, 3))):
            cu_q.append(cu_q[-1] + draw(st.integers(0, 12)))
            cu_k.append(cu_k[-1] + draw(st.integers(0, 12)))
            heads.append(first)
    docs = Documents.from_cu_seqlens(
        torch.tensor(cu_q),
        torch.tensor(cu_k),
        fragment_indices=torch.tensor(heads, dtype=torch.int64),
    )
    shape = (draw(st.integers(1, 3)), cu_q[-1] + draw(st.integers(0, 3)), draw(st.integers(1, 4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    ids = torch.randint(-1, 8, shape, generator=generator)
    return Selection.from_indices(ids, docs, block_size=draw(st.sampled_from([1, 3, 4]))), docs


@stable(150)
@given(selections())
def test_invert_twice_is_identity(case):
    sel, docs = case
    schedule = key_schedule(sel.indices, docs.layout, sel.block_size)
    back = invert(schedule, docs.layout, sel.num_queries, sel.topk)
    assert back.dtype == torch.int32
    assert torch.equal(back, sel.indices)
    again = key_schedule(back, docs.layout, sel.block_size)
    assert torch.equal(again.row_ptr, schedule.row_ptr)
    assert torch.equal(again.queries, schedule.queries)


@stable(80)
@given(selections())
def test_every_edge_is_kept_once(case):
    """The schedule holds exactly the selection's (query, block) pairs, by a loop over both."""
    sel, docs = case
    schedule = key_schedule(sel.indices, docs.layout, sel.block_size)
    # Global row of a range's block 0: the blocks of the ranges before it.
    lengths = docs.layout.ranges[:, 1].tolist()
    first = [0]
    for length in lengths:
        first.append(first[-1] - (-length // sel.block_size))
    cu_q, owner = docs.cu_seqlens_q.tolist(), docs.layout.spans[:, 2].tolist()
    for head in range(sel.num_kv_heads):
        wanted = set()
        for entry in range(docs.num_documents):
            for query in range(cu_q[entry], cu_q[entry + 1]):
                for block in sel.indices[head, query].tolist():
                    if block >= 0:
                        wanted.add((first[owner[entry]] + block, query))
        bounds, queries = schedule.row_ptr[head].tolist(), schedule.queries[head].tolist()
        found = [
            (row, query)
            for row, (begin, end) in enumerate(itertools.pairwise(bounds))
            for query in queries[begin:end]
        ]
        assert found == sorted(wanted), "rows in order, queries ascending in a row, nothing twice"
        assert all(query == -1 for query in queries[bounds[-1] :])
        assert max((row for row, _ in found), default=-1) < first[-1]
