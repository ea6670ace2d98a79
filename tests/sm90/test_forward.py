"""The whole forward, simulated from the PTX that ships, against float64."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from openmsa.kernels.common import device
from openmsa.reference.schedule import key_schedule
from openmsa.testing import assert_ok, attention_truth, poisoned_memory
from sm100.problems import BLOCK, problem, with_inputs

from .conftest import ARCH


@pytest.fixture
def verdicts(monkeypatch):
    """For each call, whether each [window, KV head] went the union way."""
    from openmsa.kernels.sm90.forward import launch

    found = []
    inner = launch._Run.key_major

    def key_major(self, out, lse):
        inner(self, out, lse)
        union, edges, unfit = self.tally.unbind(2)
        found.append(((union * self.facts.union_cost < edges) & (unfit == 0)).tolist())

    monkeypatch.setattr(launch._Run, "key_major", key_major)
    return found


def forward(found, *, window=None, indices=None, slots=None, inputs=None):
    """out and lse, on memory full of NaN."""
    from openmsa.kernels.sm90.forward import launch

    inputs, layout = inputs or found.inputs, found.docs.layout
    indices = found.indices if indices is None else indices
    schedule = dataclasses.replace(key_schedule(indices, layout, BLOCK), slots=slots)
    with poisoned_memory():
        out, lse = launch.forward(
            inputs.q, inputs.k, inputs.v, indices, schedule, layout, found.config(), window
        )
    return SimpleNamespace(out=out, lse=lse)


def check(found, result):
    for name in ("out", "lse"):
        assert_ok(found.truth.quantities[name].compare(getattr(result, name)))


def with_indices(found, indices):
    truth = attention_truth(found.inputs, indices, found.docs, BLOCK)
    return dataclasses.replace(found, indices=indices, truth=truth)


def scattered(queries, **options):
    """The last queries of a long document, each of which picks its own blocks."""
    return problem([queries], keys=[BLOCK * 16 + 5], **{"topk": 2, **options})


def test_packed_ragged_and_one_token_documents(simulated, verdicts):
    found = problem([3, 131, 1, 2, 128])
    check(found, forward(found))
    assert verdicts == [[[True]]]
    assert all(f".target {ARCH}" in launch.ptx for launch in simulated.launches)
    assert any("wgmma" in launch.ptx for launch in simulated.launches)


def test_sixteen_of_seventeen_blocks_and_rows_that_read_nothing(simulated, verdicts):
    """A union with blocks that all see whole, then one that they do not; a tile without any."""
    found = problem([9, 18], keys=[BLOCK * 17 + 1, 18])
    assert (found.indices[0, 8] >= 0).sum() == 16
    found.indices[:, 13:] = -1
    found = with_indices(found, found.indices)
    simulated.options = {"seed": 1}
    result = forward(found)
    check(found, result)
    assert not bool(result.out[13:].any())
    assert bool((result.lse[13:] == float("-inf")).all())
    assert verdicts == [[[True]]]


def test_scattered_queries_in_windows(simulated, verdicts):
    """Key-major, with two windows of partial outputs and fewer queries in the second."""
    found = scattered(21)
    simulated.options = {"seed": 2}
    check(found, forward(found, window=16))
    assert verdicts == [[[False], [False]]]


def test_more_blocks_than_the_merge_holds_or_unions_are_made_for(simulated, verdicts):
    found = problem([1], keys=[BLOCK * 17 + 9], topk=40)
    check(found, forward(found))
    assert verdicts == [[[False]]]


def test_windows_that_go_different_ways_at_64_heads_a_group(simulated, verdicts):
    found = scattered(20, group=64)
    pairs = 2 * (torch.arange(20) % 8)
    pairs[16:] = 2
    found = with_indices(found, torch.stack([pairs, pairs + 1], 1).int()[None])
    simulated.options = {"seed": 3}
    check(found, forward(found, window=16))
    assert verdicts == [[[False], [True]]]


@pytest.mark.parametrize("coherent", [False, True])
def test_eight_heads_a_group_in_half_precision(simulated, verdicts, coherent):
    found = scattered(9, group=8, kv_heads=2, dtype=torch.float16)
    if coherent:
        found = with_indices(found, found.indices[:, :1].expand(-1, 9, -1).contiguous())
    simulated.options = {"seed": 4}
    check(found, forward(found))
    assert verdicts == [[[coherent, coherent]]]


def test_32_heads_a_group_and_a_schedule_that_brings_its_slots(simulated, verdicts, monkeypatch):
    """Slots, as Triton's key schedule brings them; nobody else looks for them."""
    from openmsa.kernels.sm90.forward import launch

    found = scattered(9, group=32, kv_heads=2)
    schedule = key_schedule(found.indices, found.docs.layout, BLOCK)
    slots = torch.full_like(schedule.queries, 255, dtype=torch.uint8)
    for head, ends in enumerate(schedule.row_ptr.tolist()):
        for row, (first, end) in enumerate(pairwise(ends)):
            chosen = found.indices[head, schedule.queries[head, first:end]]
            slots[head, first:end] = (chosen == row).byte().argmax(1)
    monkeypatch.delattr(launch, "_slots")
    simulated.options = {"seed": 6}
    check(found, forward(found, slots=slots))
    found = with_indices(found, found.indices[:, :1].expand(-1, 9, -1).contiguous())
    monkeypatch.undo()
    check(found, forward(found))


def test_no_race_whatever_the_schedule(simulated, verdicts):
    """Both ways, one after the other."""
    found = scattered(5)
    simulated.options = {"seed": 5, "races": True}
    check(found, forward(found))
    found = problem([9], keys=[140], topk=2)
    check(found, forward(found))
    assert verdicts == [[[False]], [[True]]]


def test_one_thread_block_does_it_all(simulated, verdicts):
    """Tasks of every length, buffers and stages that come round, either way."""
    found = problem([70, 6], keys=[BLOCK * 2 + 6, 6], topk=2)
    apart = scattered(21)
    with device.assume(ARCH, num_sms=1):
        check(found, forward(found))
        check(apart, forward(apart))
    assert verdicts == [[[True]], [[False]]]


def test_what_lies_behind_a_key_that_a_row_does_not_see_may_be_anything(simulated, verdicts):
    """The next document's keys follow a short block in memory, and its values, too."""
    found = problem([5, 3])
    k, v = found.inputs.k.clone(), found.inputs.v.clone()
    k[5:], v[5:] = float("nan"), float("inf")
    plain, result = forward(found), forward(found, inputs=with_inputs(found, k=k, v=v).inputs)
    for name in ("out", "lse"):
        assert torch.equal(getattr(result, name)[:5], getattr(plain, name)[:5]), name
    assert verdicts == [[[False]], [[False]]]


def test_values_that_are_not_finite_reach_only_those_that_see_them(simulated, verdicts):
    found = problem([7])
    v = found.inputs.v.clone()
    v[3, 0, 5], v[4, 0, 6], v[5, 0, 6], v[5, 0, 127] = (
        float(x) for x in ("inf", "-inf", "inf", "nan")
    )
    plain, result = forward(found), forward(found, inputs=with_inputs(found, v=v).inputs)
    expected = plain.out.clone()
    expected[3:, :, 5] = float("inf")
    expected[4:, :, 6] = float("-inf")
    expected[5:, :, 6] = float("nan")
    expected[5:, :, 127] = float("nan")
    finite = expected.isfinite()
    assert torch.equal(result.out.isnan(), expected.isnan())
    assert torch.equal(
        result.out[~finite & ~expected.isnan()], expected[~finite & ~expected.isnan()]
    )
    torch.testing.assert_close(result.out[finite], expected[finite], rtol=0, atol=0)
    assert torch.equal(result.lse, plain.lse)
    assert verdicts == [[[True]], [[False]]]


def test_strided_inputs_and_rows_past_the_last_query(simulated, verdicts):
    found = problem([4, 2])
    q, k = found.inputs.q, found.inputs.k
    wide = torch.full((8, 20, 128), float("nan"), dtype=q.dtype)
    wide[:6, 2:18] = q
    turned = k.transpose(0, 1).contiguous().transpose(0, 1)
    indices = torch.cat([found.indices, torch.full_like(found.indices[:, :2], -1)], 1)
    inputs = with_inputs(found, q=wide[:, 2:18], k=turned).inputs
    result = forward(found, indices=indices, inputs=inputs)
    assert not bool(result.out[6:].any())
    assert bool((result.lse[6:] == float("-inf")).all())
    check(found, SimpleNamespace(out=result.out[:6], lse=result.lse[:6]))


def test_a_document_of_nothing_and_a_selection_of_nothing(simulated, verdicts):
    found = problem([3, 0], topk=2)
    result = forward(found, indices=torch.full_like(found.indices, -1))
    assert not bool(result.out.any())
    assert bool((result.lse == float("-inf")).all())
    empty = problem([0], topk=2)
    assert [tuple(x.shape) for x in vars(forward(empty)).values()] == [(0, 16, 128), (0, 16)]


def test_slots_are_found_where_a_schedule_has_none():
    from openmsa.kernels.sm90.forward.launch import _slots

    found = scattered(9, kv_heads=2, topk=5)
    indices = found.indices
    indices[1, 3] = -1
    queries = key_schedule(indices, found.docs.layout, BLOCK).queries
    slots = _slots(queries, found.docs.num_queries)
    row_ptr = key_schedule(indices, found.docs.layout, BLOCK).row_ptr
    for head in range(2):
        for row in range(row_ptr.shape[1] - 1):
            for edge in range(int(row_ptr[head, row]), int(row_ptr[head, row + 1])):
                assert indices[head, queries[head, edge], slots[head, edge].long()] == row
