"""Sparse attention backward: dq, dk and dv against autograd through the dense definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openmsa import Documents, Selection
from openmsa.testing import (
    assert_exact,
    assert_ok,
    attention_truth,
    problem,
    problems,
    unit_roundoff,
)

GRADIENTS = ("dq", "dk", "dv")


def test_matches_the_oracle(trial, prepared, attend):
    made = prepared(trial.case, trial.dtype)
    got = attend(made.inputs, made.selection, made.docs, trial.backend)
    zeros = made.truth.must_be_zero()
    for name in GRADIENTS:
        assert got[name].dtype == trial.dtype
        assert_ok(made.truth.quantities[name].compare(got[name]))
        rows = zeros[name].shape[0]
        assert not got[name][:rows][zeros[name]].any(), f"{name}: nothing was read there"
        assert not got[name][rows:].any(), f"{name}: slack rows"


@pytest.mark.parametrize("case", problems("smoke"), ids=str)
def test_without_a_gradient_of_lse(case, backend, prepared, attend):
    made = prepared(case, torch.float32, with_d_lse=False)
    got = attend(made.inputs, made.selection, made.docs, backend, with_d_lse=False)
    for name in GRADIENTS:
        assert_ok(made.truth.quantities[name].compare(got[name]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_token_has_no_logit_gradient(backend, dtype, attend):
    case = problem("one_token")
    inputs, docs = case.inputs(dtype), case.documents()
    selection = case.selection(inputs, docs)
    got = attend(inputs, selection, docs, backend, with_d_lse=False)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    # P = exp(logit - lse), and both are the same sum of D terms, which forward and backward may
    # take in another order: P is 1 but for twice its rounding, and exactly 1 in half precision.
    heads, dim = inputs.q.shape[1:]
    share = inputs.k.double().abs().repeat_interleave(heads // inputs.k.shape[1], 1)
    logits = dim**-0.5 * float((inputs.q.double().abs() * share).sum(-1).max())
    if dtype in (torch.float32, torch.float64):
        apart = (2 * dim * logits + 4) * unit_roundoff(accumulate)
        wanted = inputs.d_out.double()
        assert bool(((got["dv"].double() - wanted).abs() <= apart * wanted.abs()).all())
    else:
        assert_exact("dv", got["dv"], inputs.d_out)
    # dS = d_out . v - delta, the same sum of D terms twice: what is left is its rounding.
    terms = float((inputs.d_out.double() * inputs.v.double()).abs().sum())
    left = 2 * 4 * unit_roundoff(accumulate) * terms
    assert got["dq"].abs().max() <= 0.25 * left * inputs.k.abs().max()
    assert got["dk"].abs().max() <= 0.25 * left * inputs.q.abs().max()


@pytest.mark.parametrize("scale", [0.01, 1.7])
def test_scale_is_honoured(backend, scale, attend):
    case = problem("group_4_dim_96")
    inputs, docs = case.inputs(torch.float32), case.documents()
    selection = case.selection(inputs, docs)
    truth = attention_truth(inputs, selection.indices, docs, selection.block_size, scale=scale)
    got = attend(inputs, selection, docs, backend, scale=scale)
    for name in GRADIENTS:
        assert_ok(truth.quantities[name].compare(got[name]))


def test_a_key_that_everybody_reads_sums_over_all(backend, attend):
    # Equal keys and values in one block give every reader the same weights; dv is then a count.
    docs = Documents.from_cu_seqlens([0, 512], [0, 768])
    selection = Selection.from_indices(
        torch.zeros(1, 512, 1, dtype=torch.int32), docs, block_size=64
    )
    case = problem("hot_block")
    inputs = replace(
        case.inputs(torch.float64),
        q=torch.randn(512, 2, 16, dtype=torch.float64),
        k=torch.ones(768, 1, 16, dtype=torch.float64),
        v=torch.ones(768, 1, 16, dtype=torch.float64),
        d_out=torch.ones(512, 2, 16, dtype=torch.float64),
    )
    got = attend(inputs, selection, docs, backend, with_d_lse=False)
    expected = torch.zeros_like(got["dv"])
    expected[:64] = 512 * 2 / 64
    torch.testing.assert_close(got["dv"], expected, rtol=0, atol=1e-11)
    assert not got["dv"][64:].any()


@pytest.mark.parametrize("factor", [5.0, float("nan")])
@pytest.mark.parametrize("name", ["ragged_lengths", "loud_and_quiet_documents"])
def test_another_document_never_changes_a_gradient(backend, name, factor, attend):
    case = problem(name)
    inputs, docs = case.inputs(torch.float32), case.documents()
    selection = case.selection(inputs, docs)
    changed, first = case.inputs(torch.float32, seed=1), slice(0, int(docs.cu_seqlens_q[1]))
    mixed = {x: getattr(inputs, x).clone() for x in ("q", "k", "v", "d_out")}
    for x, value in mixed.items():
        value[first] = factor * getattr(changed, x)[first]
    before = attend(inputs, selection, docs, backend)
    after = attend(replace(inputs, **mixed), selection, docs, backend)
    for quantity in GRADIENTS:
        x, y = after[quantity], before[quantity]
        assert_exact(quantity, x[first.stop :], y[first.stop :])
        assert not torch.equal(x[first], y[first])


def test_large_gradients_stay_finite(backend, prepared, attend):
    # fp16 ends at 65504: d_out . v passes it, the gradients themselves do not.
    made = prepared(problem("large_output_gradient"), torch.float16)
    dots = made.inputs.d_out.double() @ made.inputs.v.double().transpose(1, 2)
    assert dots.abs().max() > 65504
    got = attend(made.inputs, made.selection, made.docs, backend)
    for name in GRADIENTS:
        assert made.truth.quantities[name].exact.abs().max() < 65504
        assert got[name].isfinite().all()
        assert_ok(made.truth.quantities[name].compare(got[name]))
