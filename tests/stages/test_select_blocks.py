"""Block selection and its log-sum-exp against the definition."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import openmsa
from openmsa import Documents, Selection
from openmsa.testing import (
    Case,
    Inputs,
    SelectionTruth,
    assert_exact,
    assert_ok,
    poisoned_memory,
    problem,
    selection_truth,
)
from openmsa.testing.case import raw_ids


def select(case: Case, inputs: Inputs, docs: Documents, backend: str) -> Selection:
    config = case.selection_config
    with poisoned_memory():
        return openmsa.select_blocks(
            inputs.index_q,
            inputs.index_k,
            docs,
            topk=config.topk,
            block_size=config.block_size,
            init_blocks=config.init_blocks,
            local_blocks=config.local_blocks,
            return_lse=True,
            backend=backend,
        )


@cache
def truth_of(case: Case, dtype: torch.dtype) -> SelectionTruth:
    inputs, config = case.inputs(dtype), case.selection_config
    docs = case.documents()
    return selection_truth(inputs.index_q, inputs.index_k, docs, config, case.exact_scores)


def test_matches_the_definition(trial):
    case, docs = trial.case, trial.case.documents()
    inputs, truth = case.inputs(trial.dtype), truth_of(case, trial.dtype)
    got = select(case, inputs, docs, trial.backend)
    assert got.indices.dtype == torch.int32
    assert got.indices.is_contiguous()
    assert_ok(truth.compare(got.indices))
    assert_ok(truth.selected_lse(got.indices).compare(got.lse.t()))
    assert (got.indices[:, docs.num_queries :] == -1).all()
    assert (got.lse[:, docs.num_queries :] == float("-inf")).all()
    again = select(case, inputs, docs, trial.backend)
    assert_exact("indices", again.indices, got.indices)
    assert_exact("lse", again.lse, got.lse)


def scored(keys: list[float], queries: int, backend: str, **options: int) -> list[list[int]]:
    """Selections of the last ``queries`` queries over one index head of scores ``keys``."""
    docs = Documents.from_cu_seqlens([0, queries], [0, len(keys)])
    got = openmsa.select_blocks(
        torch.ones(queries, 1, 1), torch.tensor(keys)[:, None], docs, backend=backend, **options
    )
    return got.indices[0].tolist()


def test_worked_example(backend):
    # Blocks of two: maxima 5, 1, 3 and, while only its first key is visible, 0 for the own one.
    keys = [5.0, 4.0, 1.0, 1.0, 2.0, 3.0, 0.0, 9.0]
    assert scored(keys, 2, backend, topk=2, block_size=2) == [[0, 3], [0, 3]]
    assert scored(keys, 2, backend, topk=3, block_size=2) == [[0, 2, 3], [0, 2, 3]]
    assert scored(keys, 1, backend, topk=3, block_size=2, local_blocks=2) == [[0, 2, 3]]
    assert scored(keys, 1, backend, topk=3, block_size=2, init_blocks=2) == [[0, 1, 3]]
    assert scored(keys, 3, backend, topk=5, block_size=2) == [
        [0, 1, 2, -1, -1],
        [0, 1, 2, 3, -1],
        [0, 1, 2, 3, -1],
    ]


def test_a_future_key_does_not_score(backend):
    # The best key, 9 at position 6, opens block 3; before it is visible block 0 wins with 3.
    got = scored([3.0, 0.0, 2.0, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0], 4, backend, topk=2, block_size=2)
    assert got == [[0, 2], [0, 3], [0, 3], [3, 4]]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_ties_go_to_the_lower_block(backend, zero):
    keys = [zero, -0.0, -0.0, zero, 0.0, 0.0, -0.0, -0.0]
    assert scored(keys, 1, backend, topk=3, block_size=2) == [[0, 1, 3]]


def test_nan_ranks_below_every_number_but_above_nothing(backend):
    nan, inf = float("nan"), float("inf")
    keys = [nan, -1e30, 2.0, inf, -inf, 0.0]
    assert scored(keys, 1, backend, topk=2, block_size=1) == [[3, 5]]
    assert scored(keys, 1, backend, topk=4, block_size=1) == [[1, 2, 3, 5]]
    # NaN and -inf tie: the lower id first.
    assert scored(keys, 1, backend, topk=5, block_size=1) == [[0, 1, 2, 3, 5]]


def test_heads_select_independently(backend):
    case = problem("more_blocks_than_topk")
    case = replace(case, topology=replace(case.topology, q_heads=4, kv_heads=4))
    inputs, docs = case.inputs(torch.float32), case.documents()
    together = select(case, inputs, docs, backend).indices
    assert len({tuple(head[-1].tolist()) for head in together}) > 1
    for head in range(4):
        alone = replace(inputs, index_q=inputs.index_q[:, head : head + 1])
        assert_exact(f"head {head}", select(case, alone, docs, backend).indices[0], together[head])


def test_strides_and_a_missing_head_axis_do_not_matter(backend):
    case = problem("init_and_local_blocks")
    inputs, docs = case.inputs(torch.bfloat16), case.documents()
    plain = select(case, inputs, docs, backend)
    wide_q = inputs.index_q.transpose(0, 1).repeat_interleave(2, -1).transpose(0, 1)[..., ::2]
    wide_k = inputs.index_k.repeat_interleave(3, 0)[::3]
    assert not wide_q.is_contiguous()
    assert not wide_k.is_contiguous()
    strided = select(case, replace(inputs, index_q=wide_q, index_k=wide_k), docs, backend)
    flat = select(case, replace(inputs, index_k=inputs.index_k.squeeze(1)), docs, backend)
    for got in (strided, flat):
        assert_exact("indices", got.indices, plain.indices)
        assert_exact("lse", got.lse, plain.lse)


def test_scale_enters_the_lse_alone(backend):
    case = problem("packed_64_192")
    inputs, docs = case.inputs(torch.float32), case.documents()
    sizes = {"topk": case.topology.topk, "block_size": case.topology.block_size}
    sels = [
        openmsa.select_blocks(
            inputs.index_q,
            inputs.index_k,
            docs,
            **sizes,
            index_scale=scale,
            return_lse=True,
            backend=backend,
        )
        for scale in (0.01, 3.0)
    ]
    assert_exact("indices", sels[1].indices, sels[0].indices)
    for got, scale in zip(sels, (0.01, 3.0), strict=True):
        config = replace(case.selection_config, scale=scale)
        truth = selection_truth(inputs.index_q, inputs.index_k, docs, config)
        assert_ok(truth.selected_lse(got.indices).compare(got.lse.t()))
    without = openmsa.select_blocks(inputs.index_q, inputs.index_k, docs, **sizes, backend=backend)
    assert without.lse is None


def test_another_document_never_changes_a_selection(backend):
    case = problem("ragged_lengths")
    inputs, docs = case.inputs(torch.float32), case.documents()
    changed = case.inputs(torch.float32, seed=1)
    first = slice(0, int(docs.cu_seqlens_q[1]))
    mixed = {}
    for name in ("index_q", "index_k"):
        mixed[name] = getattr(inputs, name).clone()
        mixed[name][first] = getattr(changed, name)[first]
    before = select(case, inputs, docs, backend)
    after = select(case, replace(inputs, **mixed), docs, backend)
    rest = slice(first.stop, None)
    assert_exact("indices", after.indices[:, rest], before.indices[:, rest])
    assert_exact("lse", after.lse[:, rest], before.lse[:, rest])
    assert not torch.equal(after.lse[:, first], before.lse[:, first])


def test_no_gradient_flows(backend):
    case = problem("topk_1")
    inputs, docs = case.inputs(torch.float32), case.documents()
    live = replace(
        inputs,
        index_q=inputs.index_q.clone().requires_grad_(),
        index_k=inputs.index_k.clone().requires_grad_(),
    )
    got = select(case, live, docs, backend)
    assert not got.indices.requires_grad
    assert not got.lse.requires_grad


def test_raw_ids_are_read_by_value():
    case = problem("raw_ids")
    docs = case.documents()
    raw = raw_ids(case, docs, torch.Generator().manual_seed(0))
    assert raw.dtype == torch.int64
    assert not raw.is_contiguous()
    size = case.topology.block_size
    got = Selection.from_indices(raw, docs, block_size=size).indices
    positions = [*docs.positions.tolist(), *[-1] * case.slack]
    for head in range(raw.shape[0]):
        for query, position in enumerate(positions):
            wanted = sorted({b for b in raw[head, query].tolist() if 0 <= b * size <= position})
            wanted += [-1] * (raw.shape[2] - len(wanted))
            assert got[head, query].tolist() == wanted, (head, query)
