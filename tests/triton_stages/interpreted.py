"""The Triton stages under Triton's interpreter: the kernels' own code, on a CPU, against float64.

Small on purpose: the interpreter runs a kernel program by program in Python. It must be chosen
before Triton is imported, so test_interpreter.py runs this file in a process of its own.
"""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from openmsa import Documents
from openmsa.contract.problem import AttentionConfig, Saved, SelectionConfig
from openmsa.reference import schedule as reference_schedule
from openmsa.reference import selection as reference_selection
from openmsa.testing import Inputs, assert_ok, attention_truth

TOPK, BLOCK = 3, 16


@pytest.fixture(scope="module")
def stages():
    """The backend's modules."""
    package = "openmsa.backends.triton"
    names = ("common", "selection", "schedule", "union", "forward", "backward")
    return SimpleNamespace(**{n: importlib.import_module(f"{package}.{n}") for n in names})


def packed() -> Documents:
    """Ragged, empty and one-token documents; the longest has more blocks than top-k."""
    return Documents.from_lengths([70, 1, 0, 37])


def fragments() -> Documents:
    """Fragments that share keys, and an entry with more queries than keys."""
    return Documents.from_cu_seqlens(
        torch.tensor([0, 20, 30, 40]),
        torch.tensor([0, 60, 75, 80]),
        fragment_indices=torch.tensor([0, 0, 2]),
    )


@pytest.fixture(scope="module", params=[packed, fragments], ids=lambda make: make.__name__)
def problem(request):
    docs = request.param()
    generator = torch.Generator().manual_seed(0)

    def normal(rows, heads, dim):
        return torch.randn((rows, heads, dim), generator=generator)

    tq, tk = docs.num_queries, docs.num_keys
    inputs = Inputs(
        normal(tq, 6, 24),
        normal(tk, 2, 24),
        normal(tk, 2, 24),
        normal(tq, 2, 16),
        normal(tk, 1, 16),
        normal(tq, 6, 24),
        normal(tq, 6, 1)[..., 0],
    )
    config = SelectionConfig(TOPK, BLOCK, 0, 1, 16**-0.5, True)
    indices, lse = reference_selection.select_blocks(
        inputs.index_q, inputs.index_k[:, 0], docs.layout, config
    )
    return SimpleNamespace(docs=docs, inputs=inputs, config=config, indices=indices, lse=lse)


def test_selection(stages, problem):
    indices, lse = stages.selection.select_blocks(
        problem.inputs.index_q, problem.inputs.index_k[:, 0], problem.docs.layout, problem.config
    )
    assert torch.equal(indices, problem.indices)
    torch.testing.assert_close(lse, problem.lse, rtol=0, atol=16 * 2**-24 * 8)


def test_ties_nan_and_signed_zeros_have_one_answer(stages):
    docs = Documents.from_lengths([80])
    index_q = torch.ones(80, 2, 16)
    index_q[:, 1] = -1.0
    index_k = torch.zeros(80, 16)
    index_k[20] = -0.0
    index_k[40, 0] = float("nan")
    config = SelectionConfig(TOPK, BLOCK, 1, 1, 1.0, False)
    found, _ = stages.selection.select_blocks(index_q, index_k, docs.layout, config)
    wanted, _ = reference_selection.select_blocks(index_q, index_k, docs.layout, config)
    assert torch.equal(found, wanted)


def test_key_schedule_is_the_reference_to_the_bit(stages, problem):
    found = stages.schedule.key_schedule(problem.indices, problem.docs.layout, BLOCK)
    wanted = reference_schedule.key_schedule(problem.indices, problem.docs.layout, BLOCK)
    assert torch.equal(found.row_ptr, wanted.row_ptr)
    assert torch.equal(found.queries, wanted.queries)


def test_every_edge_knows_its_slot(stages, problem):
    found = stages.schedule.key_schedule(problem.indices, problem.docs.layout, BLOCK)
    first = problem.docs.layout.first_blocks(BLOCK)
    range_of_query = problem.docs.layout.spans[problem.docs.layout.entry_of_query(), 2]
    for head, row_ptr in enumerate(found.row_ptr.tolist()):
        for row, (begin, end) in enumerate(itertools.pairwise(row_ptr)):
            for query, slot in zip(
                found.queries[head, begin:end].tolist(),
                found.slots[head, begin:end].tolist(),
                strict=True,
            ):
                block = int(problem.indices[head, query, slot])
                assert row == block + int(first[range_of_query[query]])


def test_survey(stages, problem, monkeypatch):
    """Every tile's union, with its members and those that need no mask in front."""
    monkeypatch.setattr(stages.union, "_SAMPLE", 1)
    # So cheap that every window with two queries that agree is won.
    monkeypatch.setattr(stages.union, "EDGES_PER_UNION_BLOCK", 1)
    docs, layout = problem.docs, problem.docs.layout
    lookup = stages.common.tables(layout, BLOCK)
    unions = stages.union.survey(problem.indices, layout, lookup, BLOCK, 3, 128)
    first = layout.first_blocks(BLOCK)[layout.spans[layout.entry_of_query(), 2]]
    totals = torch.zeros(2, 2, dtype=torch.int64)
    for tile, head in itertools.product(range(unions.counts.shape[0]), range(2)):
        members, masked = {}, set()
        for local in range(unions.queries):
            query = tile * unions.queries + local
            if query >= layout.num_queries:
                break
            for block in problem.indices[head, query].tolist():
                if block >= 0:
                    row = block + int(first[query])
                    members[row] = members.get(row, 0) | 1 << local
                    if docs.positions[query] < (block + 1) * BLOCK - 1:
                        masked.add(row)
        whole, count = unions.counts[tile, head].tolist()
        rows = unions.rows[tile, head, :count].tolist()
        bits = (unions.members[tile, head, :count].long() & 0xFFFFFFFF).tolist()
        assert dict(zip(rows, bits, strict=True)) == members
        assert set(rows[whole:]) == masked
        totals[head] += torch.tensor([len(members), sum(b.bit_count() for b in members.values())])
    assert torch.equal(unions.tally[0].long(), totals)


@pytest.mark.parametrize("cost", [1, 10**6], ids=["unions", "key-major"])
def test_forward_and_backward(stages, problem, cost, monkeypatch):
    monkeypatch.setattr(stages.union, "EDGES_PER_UNION_BLOCK", cost)
    inputs, docs, layout = problem.inputs, problem.docs, problem.docs.layout
    truth = attention_truth(inputs, problem.indices, docs, BLOCK)
    schedule = reference_schedule.key_schedule(problem.indices, layout, BLOCK)
    config = AttentionConfig(BLOCK, 24**-0.5, False)
    out, lse = stages.forward.forward(
        inputs.q, inputs.k, inputs.v, problem.indices, schedule, layout, config
    )
    delta = stages.backward.backward_preprocess(out, inputs.d_out, lse, inputs.d_lse)
    saved = Saved(inputs.q, inputs.k, inputs.v, out, lse, problem.indices, schedule)
    grads = stages.backward.backward(inputs.d_out, delta, saved, None, layout, config, (True, True))
    grads = stages.backward.backward_postprocess(*grads, torch.float32)
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    for name, value in found.items():
        assert_ok(truth.quantities[name].compare(value))
    for name, zero in truth.must_be_zero().items():
        assert not bool(found[name][zero].any()), name
