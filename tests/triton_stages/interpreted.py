"""The Triton stages under Triton's interpreter: the kernels' own code, on a CPU, against float64.

Small on purpose: the interpreter runs a kernel program by program in Python. It must be chosen
before Triton is imported, so test_interpreter.py runs this file in a process of its own.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from openmsa import Documents
from openmsa.contract.problem import AttentionConfig, Saved, SelectionConfig
from openmsa.reference import attention as reference_attention
from openmsa.reference import schedule as reference_schedule
from openmsa.reference import selection as reference_selection
from openmsa.testing import Inputs, assert_ok, attention_truth

TOPK, BLOCK = 3, 16


@pytest.fixture(scope="module")
def stages():
    """The backend's modules."""
    package = "openmsa.backends.triton"
    names = ("common", "selection", "schedule", "union", "forward", "backward", "sizes")
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
    return SimpleNamespace(
        docs=docs, inputs=inputs, config=config, indices=indices, lse=lse, forwards={}
    )


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
    """Every tile's union: its blocks with their members, in front those that need no mask."""
    monkeypatch.setattr(stages.union, "_SAMPLE", 1)
    # So cheap that every window with two queries that agree is won.
    monkeypatch.setattr(stages.union, "EDGES_PER_UNION_BLOCK", 1)
    docs, layout = problem.docs, problem.docs.layout
    lookup = stages.common.tables(layout, BLOCK)
    unions = stages.union.survey(problem.indices, problem.inputs.v, layout, lookup, BLOCK, 3, 128)
    first = layout.first_blocks(BLOCK)[layout.spans[layout.entry_of_query(), 2]]
    totals = torch.zeros(2, 2, dtype=torch.int64)
    for tile, head in itertools.product(range(unions.counts.shape[0]), range(2)):
        begin = tile * unions.queries
        queries = range(begin, min(begin + unions.queries, layout.num_queries))
        members, seen_whole = {}, {}
        for local, query in enumerate(queries):
            for block in problem.indices[head, query].tolist():
                if block >= 0:
                    row = block + int(first[query])
                    members[row] = members.get(row, 0) | 1 << local
                    whole = int(docs.positions[query]) >= (block + 1) * BLOCK - 1
                    seen_whole[row] = seen_whole.get(row, 0) + whole
        unmasked, count = unions.counts[tile, head].tolist()
        rows = unions.rows[tile, head, :count].tolist()
        bits = (unions.members[tile, head, :count].long() & 0xFFFFFFFF).tolist()
        assert dict(zip(rows, bits, strict=True)) == members
        assert set(rows[:unmasked]) == {r for r, n in seen_whole.items() if n == len(queries)}
        assert torch.equal(unions.starts[tile, head, :count], lookup.blocks[rows, 0])
        totals[head] += torch.tensor([len(members), sum(b.bit_count() for b in members.values())])
    assert torch.equal(unions.tally[0].long(), totals)


def test_a_window_with_an_infinite_value_is_no_union(stages, problem, monkeypatch):
    monkeypatch.setattr(stages.union, "EDGES_PER_UNION_BLOCK", 1)
    layout, v = problem.docs.layout, problem.inputs.v.clone()
    lookup = stages.common.tables(layout, BLOCK)
    v[1, 0, 3] = float("inf")
    tally = stages.union.survey(problem.indices, v, layout, lookup, BLOCK, 3, 128).tally[0]
    assert tally[0, 0] >= tally[0, 1], "the KV head that reads it"
    assert tally[1, 0] < tally[1, 1], "the other"


@pytest.mark.parametrize("cost", [1, 10**6], ids=["unions", "key-major"])
def test_forward_and_backward(stages, problem, cost, monkeypatch):
    monkeypatch.setattr(stages.union, "EDGES_PER_UNION_BLOCK", cost)
    inputs, docs = problem.inputs, problem.docs
    truth = attention_truth(inputs, problem.indices, docs, BLOCK)
    saved = attended(stages, problem)
    found = {"out": saved.out, "lse": saved.lse, **differentiate(stages, problem, saved, False)}
    for name, value in found.items():
        assert_ok(truth.quantities[name].compare(value))
    for name, zero in truth.must_be_zero().items():
        assert not bool(found[name][zero].any()), name


@pytest.mark.parametrize("queries", [16, 1024])
def test_the_repeatable_backward(stages, problem, queries, monkeypatch):
    """Also where its memory for parts of dq has to be used again."""
    monkeypatch.setattr(stages.backward, "_SHORT", queries)
    monkeypatch.setattr(stages.backward, "_SUM_QUERIES", 3)
    monkeypatch.setattr(stages.backward, "_SLOT_BYTES", 4)
    truth = attention_truth(problem.inputs, problem.indices, problem.docs, BLOCK)
    saved = attended(stages, problem)
    found = differentiate(stages, problem, saved, True)
    for name, value in found.items():
        assert_ok(truth.quantities[name].compare(value))
        assert not bool(value[truth.must_be_zero()[name]].any()), name
    assert all(
        torch.equal(value, found[name])
        for name, value in differentiate(stages, problem, saved, True).items()
    )


def test_a_group_that_fills_more_than_one_tile(stages, problem, monkeypatch):
    fit = dataclasses.replace(stages.sizes.sizes(torch.device("cpu")), grads_rows=2)
    monkeypatch.setattr(stages.backward, "sizes", lambda device: fit)
    truth = attention_truth(problem.inputs, problem.indices, problem.docs, BLOCK)
    saved = attended(stages, problem)
    for name, value in differentiate(stages, problem, saved, True).items():
        assert_ok(truth.quantities[name].compare(value))


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_that_nobody_needs_are_zero(stages, problem, deterministic):
    saved = attended(stages, problem)
    every = differentiate(stages, problem, saved, True)
    for needs, names in (((True, False), ["dq"]), ((False, True), ["dk", "dv"])):
        found = differentiate(stages, problem, saved, deterministic, needs)
        for name, value in found.items():
            if name in names:
                torch.testing.assert_close(value, every[name], rtol=1e-5, atol=1e-5)
            else:
                assert not bool(value.any()), name


@pytest.mark.parametrize(
    ("cost", "value"), [(1, float("inf")), (10**6, float("nan"))], ids=["unions", "key-major"]
)
def test_a_broken_value_reaches_only_those_that_see_it(stages, problem, cost, value, monkeypatch):
    """Zero times infinity is NaN: a masked key must not take part in a product with its value."""
    monkeypatch.setattr(stages.union, "EDGES_PER_UNION_BLOCK", cost)
    inputs, layout = problem.inputs, problem.docs.layout
    clean = attended(stages, problem)
    for token in (5, 30):
        v = inputs.v.clone()
        v[token, 0, 3] = value
        broken = dataclasses.replace(inputs, v=v)
        found = attend(stages, problem, broken).out
        config = AttentionConfig(BLOCK, 24**-0.5, False)
        wanted, _ = reference_attention.forward(
            inputs.q, inputs.k, v, problem.indices, clean.schedule, layout, config
        )
        assert torch.equal(found.isfinite(), wanted.isfinite())
        assert 0 < int((~wanted.isfinite()).sum()) < wanted[:, :3, 3].numel()
        sound = wanted.isfinite()
        assert torch.equal(found.isnan(), wanted.isnan())
        torch.testing.assert_close(found[sound], clean.out[sound], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_selected_lse_of_broken_logits(stages, problem, value):
    inputs, layout = problem.inputs, problem.docs.layout
    index_q, index_k = inputs.index_q.abs(), inputs.index_k[:, 0].clone()
    index_k[7] = value
    clean = problem.inputs.index_k[:, 0]
    _, sound = reference_selection.select_blocks(index_q, clean, layout, problem.config)
    indices, wanted = reference_selection.select_blocks(index_q, index_k, layout, problem.config)
    found = stages.selection.selected_lse(index_q, index_k, indices, layout, problem.config)
    assert not torch.equal(wanted, sound), "some query reads it"
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def attended(stages, problem) -> Saved:
    """The problem's own forward, once for each way that a test may ask for."""
    way = stages.union.EDGES_PER_UNION_BLOCK
    if way not in problem.forwards:
        problem.forwards[way] = attend(stages, problem, problem.inputs)
    return problem.forwards[way]


def attend(stages, problem, inputs) -> Saved:
    layout = problem.docs.layout
    schedule = reference_schedule.key_schedule(problem.indices, layout, BLOCK)
    config = AttentionConfig(BLOCK, 24**-0.5, False)
    out, lse = stages.forward.forward(
        inputs.q, inputs.k, inputs.v, problem.indices, schedule, layout, config
    )
    return Saved(inputs.q, inputs.k, inputs.v, out, lse, problem.indices, schedule)


def differentiate(stages, problem, saved, deterministic, needs=(True, True)):
    d_out, d_lse = problem.inputs.d_out, problem.inputs.d_lse
    delta = stages.backward.backward_preprocess(saved.out, d_out, saved.lse, d_lse)
    config = AttentionConfig(BLOCK, 24**-0.5, deterministic)
    grads = stages.backward.backward(d_out, delta, saved, None, problem.docs.layout, config, needs)
    grads = stages.backward.backward_postprocess(*grads, torch.float32)
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))
