"""The named problems, and the oracle that judges everything else, from the definition alone."""

from __future__ import annotations

import math

import pytest
import torch

from openmsa.testing import (
    assert_exact,
    attention_truth,
    problem,
    problems,
)


@pytest.mark.parametrize(
    "name", ["one_token", "more_queries_than_keys", "fragment_end_cuts_own_block"]
)
def test_the_oracle_agrees_with_loops(name):
    """Out and lse of the exact result, from Python floats and the definition alone."""
    case = problem(name)
    docs, inputs = case.documents(), case.inputs(torch.float64)
    indices = case.selection(inputs, docs).indices
    truth = attention_truth(inputs, indices, docs, case.topology.block_size)
    out, lse = truth.quantities["out"].exact, truth.quantities["lse"].exact
    cu_q, group = case.cu_seqlens_q, case.topology.group
    cu_k = case.cu_seqlens_k or cu_q
    heads = case.fragment_indices or tuple(range(len(cu_q) - 1))
    for entry in range(len(cu_q) - 1):
        start = cu_k[heads[entry]]
        length, queries = cu_k[entry + 1] - start, cu_q[entry + 1] - cu_q[entry]
        for i in {0, queries // 2, queries - 1}:
            row, head = cu_q[entry] + i, i % case.topology.q_heads
            blocks = set(indices[head // group, row].tolist()) - {-1}
            seen = [
                start + j
                for j in range(max(0, i + length - queries + 1))
                if j // case.topology.block_size in blocks
            ]
            q = inputs.q[row, head].tolist()
            dots = [
                sum(a * b for a, b in zip(q, inputs.k[j, head // group].tolist(), strict=True))
                for j in seen
            ]
            weights = [math.exp(dot / math.sqrt(len(q))) for dot in dots]
            if not seen:
                assert lse[row, head] == -math.inf
                assert not out[row, head].any()
                continue
            assert math.isclose(lse[row, head], math.log(sum(weights)), abs_tol=1e-12)
            for d, value in enumerate(out[row, head].tolist()):
                v = [float(inputs.v[j, head // group, d]) for j in seen]
                mean = sum(w * x for w, x in zip(weights, v, strict=True)) / sum(weights)
                assert math.isclose(value, mean, abs_tol=1e-12)


def test_problems_are_named_once_and_smoke_is_part_of_full():
    names = [case.name for case in problems("full")]
    assert len(set(names)) == len(names)
    assert set(problems("smoke")) < set(problems("full"))
    assert problem("one_token") in problems("smoke")
    with pytest.raises(ValueError, match="suite"):
        problems("all")
    with pytest.raises(ValueError, match="one_token"):
        problem("no_such_problem")


def test_inputs_are_the_same_numbers_in_every_dtype():
    case = problem("slack_rows")
    wide, narrow = case.inputs(torch.float64), case.inputs(torch.bfloat16)
    for name, value in vars(wide).items():
        other = getattr(narrow, name)
        assert_exact(name, other, value.to(other.dtype))
        assert value[-case.slack :].isnan().all()
        assert not torch.equal(value[:9], getattr(case.inputs(torch.float64, seed=1), name)[:9])
