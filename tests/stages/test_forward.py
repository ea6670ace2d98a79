"""Sparse attention forward: out and lse against the dense float64 definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import openmsa
from openmsa import Documents, Selection
from openmsa.testing import (
    Case,
    assert_exact,
    assert_ok,
    attention_truth,
    poisoned_memory,
    problem,
    unit_roundoff,
)
from openmsa.testing.case import Inputs


def forward(inputs: Inputs, selection: Selection, docs: Documents, backend: str, **options):
    with poisoned_memory():
        return openmsa.sparse_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            selection,
            docs,
            return_lse=True,
            backend=backend,
            **options,
        )


def test_matches_the_oracle(trial, prepared):
    made = prepared(trial.case, trial.dtype)
    n, truth = made.docs.num_queries, made.truth
    out, lse = forward(made.inputs, made.selection, made.docs, trial.backend)
    assert out.dtype == trial.dtype
    assert lse.dtype == (torch.float64 if trial.dtype == torch.float64 else torch.float32)
    assert_ok(truth.quantities["out"].compare(out))
    assert_ok(truth.quantities["lse"].compare(lse))
    blind = truth.must_be_zero()["out"]
    assert not out[:n][blind].any()
    assert (lse[:n][blind] == float("-inf")).all()
    assert not out[n:].any()
    assert (lse[n:] == float("-inf")).all()


def whole(case: Case, docs: Documents) -> Selection:
    """Every block of every query."""
    blocks = -(-docs.max_seqlen_k // case.topology.block_size)
    ids = torch.arange(blocks).expand(case.topology.kv_heads, docs.num_queries, -1)
    return Selection.from_indices(ids, docs, block_size=case.topology.block_size)


def test_all_blocks_are_causal_attention(backend):
    case = problem("packed_64_192")
    inputs, docs = case.inputs(torch.float64), case.documents()
    out, _ = forward(inputs, whole(case, docs), docs, backend)
    for begin, end in ((0, 64), (64, 256)):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v))
        dense = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out[begin:end], dense.transpose(0, 1), rtol=0, atol=1e-13)


def test_own_block_alone_is_block_local_attention(backend):
    case = problem("topk_1")
    inputs, docs = case.inputs(torch.float64), case.documents()
    selection = openmsa.select_blocks(
        inputs.index_q, inputs.index_k, docs, topk=1, block_size=64, backend=backend
    )
    out, _ = forward(inputs, selection, docs, backend)
    local = Documents.from_lengths([64, 64, 64, 8, 64, 6])
    alone, _ = forward(inputs, whole(case, local), local, backend)
    torch.testing.assert_close(out, alone, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_one_token_returns_its_value(backend, dtype):
    case = problem("one_token")
    inputs, docs = case.inputs(dtype), case.documents()
    out, lse = forward(inputs, whole(case, docs), docs, backend, scale=0.25)
    # Weight 1 up to the rounding of exp and of the division, which vanishes in bf16.
    slack = 4 * unit_roundoff(dtype) * (dtype == torch.float64)
    assert ((out - inputs.v).abs() <= slack * inputs.v.abs()).all()
    logit = 0.25 * (inputs.q.double() * inputs.k.double()).sum(-1)
    torch.testing.assert_close(lse.double(), logit, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [0.01, 1.7])
def test_scale_is_honoured(backend, scale):
    case = problem("group_4_dim_96")
    inputs, docs = case.inputs(torch.float32), case.documents()
    selection = case.selection(inputs, docs)
    truth = attention_truth(inputs, selection.indices, docs, selection.block_size, scale=scale)
    out, lse = forward(inputs, selection, docs, backend, scale=scale)
    assert_ok(truth.quantities["out"].compare(out))
    assert_ok(truth.quantities["lse"].compare(lse))


@pytest.mark.parametrize("factor", [5.0, float("nan")])
@pytest.mark.parametrize("name", ["ragged_lengths", "loud_and_quiet_documents"])
def test_another_document_never_changes_a_result(backend, name, factor):
    case = problem(name)
    inputs, docs = case.inputs(torch.float32), case.documents()
    selection = case.selection(inputs, docs)
    changed, first = case.inputs(torch.float32, seed=1), slice(0, int(docs.cu_seqlens_q[1]))
    mixed = {x: getattr(inputs, x).clone() for x in ("q", "k", "v")}
    for x, value in mixed.items():
        value[first] = factor * getattr(changed, x)[first]
    before = forward(inputs, selection, docs, backend)
    after = forward(replace(inputs, **mixed), selection, docs, backend)
    for quantity, x, y in zip(("out", "lse"), after, before, strict=True):
        assert_exact(quantity, x[first.stop :], y[first.stop :])
        assert not torch.equal(x[first], y[first])


def test_permuted_documents_give_permuted_results(backend):
    case = problem("off_grid_documents")
    inputs, docs = case.inputs(torch.float32), case.documents()
    selection = case.selection(inputs, docs)
    order = torch.cat([torch.arange(100, 256), torch.arange(100)])
    swapped = replace(inputs, **{x: getattr(inputs, x)[order] for x in ("q", "k", "v")})
    ids = Selection(selection.indices[:, order].contiguous(), selection.block_size)
    before = forward(inputs, selection, docs, backend)
    after = forward(swapped, ids, Documents.from_lengths([156, 100]), backend)
    for quantity, x, y in zip(("out", "lse"), after, before, strict=True):
        assert_exact(quantity, x, y[order])


def test_partial_results_merge_by_their_lse(backend):
    case = problem("random_blocks")
    inputs, docs = case.inputs(torch.float64), case.documents()
    selection = case.selection(inputs, docs)
    even = torch.where(selection.indices % 2 == 0, selection.indices, -1)
    odd = torch.where(selection.indices % 2 == 1, selection.indices, -1)
    parts = [
        forward(inputs, Selection.from_indices(ids, docs, block_size=64), docs, backend)
        for ids in (even, odd)
    ]
    out, lse = forward(inputs, selection, docs, backend)
    merged = torch.logaddexp(parts[0][1], parts[1][1])
    torch.testing.assert_close(merged, lse, rtol=0, atol=1e-13)
    weighted = sum(part * (part_lse - merged).exp()[..., None] for part, part_lse in parts)
    torch.testing.assert_close(weighted, out, rtol=0, atol=1e-13)
    assert (parts[1][1] == float("-inf")).any(), "no row without a block: the test lost its edge"
