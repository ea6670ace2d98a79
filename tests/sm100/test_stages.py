"""The stages around the main kernel: each against its reference, to the bit where it is integer."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from openmsa import Documents, UnsupportedProblem
from openmsa.contract.key_schedule import KeySchedule
from openmsa.reference import schedule as reference
from openmsa.testing import poisoned_memory

from .problems import BLOCK


def stages():
    from openmsa.kernels.sm100 import backward_postprocess, backward_preprocess, task_build
    from openmsa.kernels.stages import lookup

    return backward_preprocess, task_build, lookup, backward_postprocess


def schedule_of(lengths, heads, topk, seed=0):
    docs = Documents.from_lengths(lengths)
    generator = torch.Generator().manual_seed(seed)
    positions = docs.positions
    own = torch.div(positions, BLOCK, rounding_mode="floor")
    drawn = torch.rand((heads, docs.num_queries, topk), generator=generator)
    ids = (drawn * (own + 1)[None, :, None]).int().sort(-1).values
    first = torch.ones_like(ids, dtype=torch.bool)
    first[..., 1:] = ids[..., 1:] != ids[..., :-1]
    ids = torch.where(first, ids, 2**30).sort(-1).values
    ids = torch.where(ids == 2**30, -1, ids)
    return docs.layout, reference.key_schedule(ids, docs.layout, BLOCK)


@pytest.mark.parametrize(
    ("lengths", "heads", "group", "topk"),
    [
        ([127, 129, 1, 2, 3, 5, 128], 4, 16, 3),
        ([1100, 0, 3, 600], 2, 64, 4),
        ([1], 1, 8, 1),
        ([513], 3, 32, 2),
    ],
)
def test_tasks_are_the_reference_s_to_the_bit(simulated, lengths, heads, group, topk):
    layout, schedule = schedule_of(lengths, heads, topk)
    simulated.options = {"races": True, "seed": len(lengths)}
    with poisoned_memory():
        found = stages()[1].task_build(schedule, group, layout.num_queries)
    expected = reference.task_build(schedule, group, layout.num_queries)
    assert torch.equal(found.tasks, expected.tasks)
    assert torch.equal(found.count, expected.count)
    assert torch.equal(found.owners, expected.owners)
    heads_of = expected.tasks[: int(expected.count), 0]
    edges = schedule.queries[heads_of.long(), expected.tasks[: int(expected.count), 2].long()]
    windows = -(-layout.num_queries // expected.window)
    segment = heads_of * windows + edges // expected.window
    bounds = torch.searchsorted(segment.int(), torch.arange(heads * windows + 1).int())
    assert found.bounds.tolist() == bounds.tolist()


def test_a_schedule_without_edges_or_rows_has_no_tasks(simulated):
    layout, schedule = schedule_of([5], 2, 1)
    schedule.row_ptr.zero_()
    schedule.queries.fill_(-1)
    found = stages()[1].task_build(schedule, 16, layout.num_queries)
    assert found.count.item() == 0
    assert bool((found.tasks == -1).all())
    layout, schedule = schedule_of([0], 2, 1)
    assert stages()[1].task_build(schedule, 16, layout.num_queries).count.item() == 0


def test_sums_of_thread_blocks_carry_past_one_thousand_of_them(simulated):
    """The middle launch of a schedule with more than 2^22 bins, alone: its thread blocks' sums."""
    from openmsa.kernels.stages import tasks as module

    blocks = torch.arange(5000, dtype=torch.int32) % 7
    expected = blocks.cumsum(0).int() - blocks
    total = int(blocks.sum())
    table = torch.zeros((1, 1), dtype=torch.int32)
    line, count, bounds = (torch.zeros(n, dtype=torch.int32) for n in (1, 1, 3))
    tensors = module.Schedule(
        table, table, line, blocks, torch.zeros((1, 4), dtype=torch.int32), count, table, bounds
    )

    class ScanAlone(module.TaskBuild):
        @module.cute.jit
        def __call__(self, first, schedule, stream):
            self.scan(module.Schedule(*schedule)).launch(
                grid=(1, 1, 1), block=(module.THREADS, 1, 1), stream=stream
            )

    whole = module.build("sm_100a", 8, 512)

    def make():
        arguments = whole.make()[1]
        return ScanAlone(8, 512), arguments[:2]

    build = module.Build("scan", "sm_100a", (), make)
    module.function(build)(table, tensors)
    assert torch.equal(blocks, expected)
    assert count.item() == total == bounds[-1].item()


@pytest.mark.parametrize("lengths", [[127, 129, 1, 2], [0, 300, 0, 0, 5], [1]])
def test_lookup_says_where_queries_and_blocks_lie(simulated, lengths):
    layout = Documents.from_lengths(lengths).layout
    rows = layout.block_capacity(BLOCK)
    positions, blocks = stages()[2].lookup(layout, rows, BLOCK)
    assert torch.equal(positions.long(), layout.positions())
    expected = [
        [start + at, min(BLOCK, keys - at), at]
        for start, keys in layout.ranges.tolist()
        for at in range(0, keys, BLOCK)
    ]
    assert blocks[: len(expected)].tolist() == expected


def test_lookup_places_fragments_at_the_end_of_their_keys(simulated):
    docs = Documents.from_cu_seqlens(
        torch.tensor([0, 100, 260]), torch.tensor([0, 200, 360]), fragment_indices=[0, 0]
    )
    positions, _ = stages()[2].lookup(docs.layout, docs.layout.block_capacity(BLOCK), BLOCK)
    assert torch.equal(positions.long(), docs.positions)


@pytest.mark.parametrize("has_lse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_delta(simulated, has_lse, dtype):
    generator = torch.Generator().manual_seed(0)
    out, d_out = (torch.randn(37, 6, 128, generator=generator).to(dtype) for _ in "ab")
    lse, d_lse = (torch.randn(37, 6, generator=generator) for _ in "ab")
    # Rows with a stride of their own are read in place.
    wide = torch.zeros(37, 8, 128, dtype=dtype)
    wide[:, :6] = d_out
    with poisoned_memory():
        found = stages()[0].backward_preprocess(out, wide[:, :6], lse, d_lse if has_lse else None)
    terms = out.double() * d_out.double()
    subtracted = d_lse.double() * has_lse
    exact = terms.sum(-1) - subtracted
    bound = (128**0.5 * terms.abs().sum(-1) + subtracted.abs() + exact.abs()) * 2.0**-24
    assert bool(((found.double() - exact).abs() <= bound).all())


def test_delta_of_one_value_for_all(simulated):
    out = torch.randn(9, 2, 128).bfloat16()
    d_out = torch.ones((), dtype=torch.bfloat16).expand(9, 2, 128)
    found = stages()[0].backward_preprocess(out, d_out, torch.zeros(9, 2), None)
    torch.testing.assert_close(found, out.float().sum(-1), rtol=1e-5, atol=1e-4)
    assert stages()[0].backward_preprocess(out[:0], d_out[:0], torch.zeros(0, 2), None).numel() == 0


def test_rows_at_any_address(simulated):
    """A view of a flat buffer, contiguous but where no vector of 16 bytes begins."""
    flat = torch.randn(9 * 2 * 128 + 1).bfloat16()[1:].view(9, 2, 128)
    out = torch.randn(9, 2, 128).bfloat16()
    assert flat.is_contiguous()
    found = stages()[0].backward_preprocess(flat, out, torch.zeros(9, 2), None)
    again = stages()[0].backward_preprocess(flat.clone(), out, torch.zeros(9, 2), None)
    assert torch.equal(found, again)


def test_more_than_two_to_the_31_elements_are_rounded(simulated):
    """The thread block of the last elements alone, on memory of which nothing else is touched."""
    elements = 2**31 + 4
    sums = torch.empty(elements).view(-1, 1, 4)
    sums[-1] = torch.tensor([1.0, -2.0, 3.0, 1 / 3])
    block = elements // 4 // 256
    simulated.change = lambda launch: dataclasses.replace(
        launch, grid=(1, 1, 1), ptx=launch.ptx.replace("%ctaid.x", str(block))
    )
    rounded = stages()[3].backward_postprocess(sums, sums[:0], sums[:0], torch.bfloat16)[0]
    assert torch.equal(rounded[-1], sums[-1].bfloat16())


def test_more_bins_than_offsets_count_are_refused(simulated):
    rows = 2**21
    schedule = KeySchedule(
        torch.zeros(1, 1, dtype=torch.int32).expand(4, rows + 1),
        torch.zeros(4, 0, dtype=torch.int32),
        BLOCK,
    )
    with pytest.raises(UnsupportedProblem, match="bins, at most 2147482624"):
        stages()[1].task_build(schedule, 16, 2**18)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(simulated, dtype):
    sums = [torch.randn(shape) * 3 for shape in ((7, 4, 128), (5, 1, 128), (0, 1, 128))]
    with poisoned_memory():
        found = stages()[3].backward_postprocess(*sums, dtype)
    for rounded, value in zip(found, sums, strict=True):
        assert torch.equal(rounded, value.to(dtype))
