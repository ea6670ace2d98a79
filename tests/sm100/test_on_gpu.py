"""The stages that use no Blackwell instruction, run on whatever GPU is here, at real sizes.

They are compiled for the GPU's own target; what is proved is the code, the launch path and the
cache on disk, not a Blackwell chip.
"""

from __future__ import annotations

import pytest
import torch

from openmsa import Documents
from openmsa.kernels.common import device
from openmsa.kernels.common.compile import function
from openmsa.kernels.sm100 import (
    backward_postprocess,
    backward_preprocess,
    task_build,
)
from openmsa.kernels.sm100.backward import ordered
from openmsa.kernels.stages import lookup
from openmsa.reference import schedule as reference

TARGETS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
FOUND = torch.cuda.get_device_capability() if torch.cuda.is_available() else None

pytestmark = pytest.mark.skipif(FOUND not in TARGETS, reason="needs a GPU of Hopper or Blackwell")


@pytest.fixture(autouse=True)
def own_target():
    with device.assume(TARGETS[FOUND], 132):
        yield


def selection(docs: Documents, heads: int, topk: int = 16) -> torch.Tensor:
    """Blocks before the query's own, a random distance apart."""
    where = docs.positions.device
    generator = torch.Generator(where).manual_seed(0)
    own = torch.div(docs.positions, 128, rounding_mode="floor")
    apart = torch.randint(1, 8, (heads, own.numel(), 1), device=where, generator=generator)
    blocks = own[None, :, None] - torch.arange(topk, device=where) * apart
    blocks = torch.where(blocks < 0, 2**30, blocks).sort(-1).values
    return torch.where(blocks == 2**30, -1, blocks).int()


@pytest.mark.parametrize(
    "lengths",
    [
        [127, 129, 1, 2, 3, 5, 128, 0, 40000, 777],
        [65536],
        pytest.param([300000], id="more than 2^22 bins"),
    ],
    ids=str,
)
def test_tasks_and_lookup(lengths):
    docs = Documents.from_lengths(lengths, device="cuda")
    layout, heads = docs.layout, 4
    schedule = reference.key_schedule(selection(docs, heads), layout, 128)
    found = task_build.task_build(schedule, 16, layout.num_queries)
    expected = reference.task_build(schedule, 16, layout.num_queries)
    assert torch.equal(found.tasks, expected.tasks)
    assert torch.equal(found.count, expected.count)
    assert torch.equal(found.owners, expected.owners)
    positions, blocks = lookup.lookup(layout, schedule.num_rows, 128)
    assert torch.equal(positions.long(), docs.positions)
    rows = [
        [start + at, min(128, keys - at), at]
        for start, keys in layout.ranges.tolist()
        for at in range(0, keys, 128)
    ]
    assert blocks[: len(rows)].tolist() == rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_delta_and_rounding(dtype):
    out, d_out = (torch.randn(16384, 64, 128, device="cuda").to(dtype) for _ in "ab")
    lse, d_lse = (torch.randn(16384, 64, device="cuda") for _ in "ab")
    found = backward_preprocess.backward_preprocess(out, d_out, lse, d_lse)
    terms = out.double() * d_out.double()
    exact = terms.sum(-1) - d_lse.double()
    size = 128**0.5 * terms.abs().sum(-1) + d_lse.abs() + exact.abs()
    assert bool(((found - exact).abs() <= size * 2.0**-24).all())
    sums = [torch.randn(5000, heads, 128, device="cuda") for heads in (64, 4, 4)]
    for rounded, value in zip(
        backward_postprocess.backward_postprocess(*sums, dtype), sums, strict=True
    ):
        assert torch.equal(rounded, value.to(dtype))


def test_sums_in_order():
    window, topk, first = 512, 16, 300
    slots = torch.randn(window, topk, 64, 128, device="cuda")
    indices = (torch.rand(4, 1000, topk, device="cuda") < 0.7).int() - 1
    dq = torch.full((1000, 64, 128), float("nan"), device="cuda")
    build = ordered.sum_slots(TARGETS[FOUND])
    function(build)(slots.view(window, topk, -1, 4), indices, dq.view(1000, -1, 4), first, window)
    live = (indices[:, first : first + window] >= 0).repeat_interleave(16, 0).permute(1, 2, 0)
    expected = torch.zeros_like(dq[:window])
    for slot in range(topk):
        expected += torch.where(live[:, slot, :, None], slots[:, slot], 0)
    assert torch.equal(dq[first : first + window], expected)
    assert bool(dq[:first].isnan().all())


def test_parts_of_runs_in_order():
    ctas = 148
    parts = torch.randn(ctas, 2, 128, 128, device="cuda")
    rows = torch.full((ctas, 4), -1, dtype=torch.int32)
    for cta in range(0, ctas, 3):
        rows[cta, :3] = torch.tensor([cta % 4, 128 * (cta % 5), 128 - cta % 7 * 10])
    dv, dk = (torch.randn(800, 4, 128, device="cuda") for _ in "vk")
    expected = [dv.clone(), dk.clone()]
    function(ordered.add_parts(TARGETS[FOUND]))(parts, rows.cuda(), dv, dk)
    for cta in range(0, ctas, 3):
        head, start, keys = rows[cta, :3].tolist()
        for which in (0, 1):
            expected[which][start : start + keys, head] += parts[cta, which, :keys]
    assert torch.equal(dv, expected[0])
    assert torch.equal(dk, expected[1])
