"""The whole backward, simulated from the PTX that ships, against float64."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from openmsa import pipeline
from openmsa.dispatch.choose import choose_with
from openmsa.dispatch.probe import DeviceFacts, Toolchain
from openmsa.kernels.common import device
from openmsa.testing import assert_ok, attention_truth, poisoned_memory
from sm100.problems import BLOCK, Backward, check, problem, relative, with_inputs, with_slack

from .conftest import ARCH, full


def gradients(found, *, deterministic=False, window=512):
    """The four stages, as the pipeline calls them, on memory full of NaN."""
    return backward(
        found, found.saved(), found.inputs.d_out, found.inputs.d_lse, deterministic, window
    )


def backward(found, saved, d_out, d_lse, deterministic, window):
    from openmsa.kernels.sm90 import backward_postprocess, task_build
    from openmsa.kernels.sm90.backward import launch
    from openmsa.kernels.sm100 import backward_preprocess

    layout = found.docs.layout
    with poisoned_memory():
        delta = backward_preprocess.backward_preprocess(saved.out, d_out, saved.lse, d_lse)
        tasks = task_build.task_build(saved.schedule, found.group, layout.num_queries, window)
        sums = launch.backward(
            d_out, delta, saved, tasks, layout, found.config(deterministic), (True, True)
        )
        rounded = backward_postprocess.backward_postprocess(*sums, saved.q.dtype)
        if deterministic:
            sums = backward_postprocess.backward_postprocess(*sums, torch.float32)
    return SimpleNamespace(dq=rounded[0], dk=rounded[1], dv=rounded[2], sums=sums)


def test_packed_ragged_and_one_token_documents(simulated):
    found = problem([127, 129, 1, 2, 3])
    result = gradients(found)
    check(found, result)
    assert max(relative(found, result).values()) < 0.007 / 2
    assert any("wgmma.mma_async" in launch.ptx for launch in simulated.launches)


def test_sums_in_order_are_equal_to_the_bit_under_four_schedules(simulated):
    """Ten windows, hence tasks of a key block: of two numbers any order gives the same sum. Two
    processes, as one runs thread blocks one after the other, and the first takes all tasks."""
    found = problem([40, 9], keys=[170, 9], topk=2)
    results = []
    for seed in range(4):
        simulated.options = {"seed": seed, "processes": 2}
        results.append(gradients(found, deterministic=True, window=4))
    check(found, results[0])
    for other in results[1:]:
        for first, again in zip(results[0].sums, other.sums, strict=True):
            assert torch.equal(first, again)


def test_short_tasks_wait_for_the_long_one_before_them(simulated):
    """The sums of one thread block, which takes tasks in order, and of several at the same time:
    there the second and third task of the key block are done long before the first."""
    found = problem([48], topk=1)
    found.indices[:, 17:32], found.indices[:, 33:] = -1, -1
    found = with_truth(found)
    with device.assume(ARCH, num_sms=1):
        alone = gradients(found, deterministic=True, window=16)
    check(found, alone)
    simulated.options = {"processes": 2}
    together = gradients(found, deterministic=True, window=16)
    for first, again in zip(alone.sums, together.sums, strict=True):
        assert torch.equal(first, again)


def test_tasks_of_a_row_and_window_are_alike(simulated):
    from openmsa.kernels.stages.tasks import tasks_of

    found = problem([300], topk=2, group=8)
    schedule = found.saved().schedule
    tasks = tasks_of(schedule, 64, 300, 200, even=True)
    table = tasks.tasks[: int(tasks.count)]
    seen = []
    for head, row, edge, size in table.tolist():
        seen += range(edge, edge + size)
        window = schedule.queries[head, edge] // 200
        assert (schedule.queries[head, edge : edge + size] // 200 == window).all()
        ends = schedule.row_ptr[head, row], schedule.row_ptr[head, row + 1]
        assert ends[0] <= edge
        assert edge + size <= ends[1]
    assert sorted(seen) == list(range(int(schedule.row_ptr[0, -1])))
    assert table[:, 3].max() <= 64
    by_run = {}
    for head, row, edge, size in table.tolist():
        by_run.setdefault((head, row, int(schedule.queries[head, edge]) // 200), []).append(size)
    assert all(max(sizes) - min(sizes) <= 8 * len(sizes) for sizes in by_run.values())
    assert any(len(sizes) > 1 for sizes in by_run.values())


def test_sixteen_of_seventeen_blocks_and_rows_that_read_nothing(simulated):
    """The last queries of a long document; some of another's read nothing, nor is a key read."""
    found = problem([9, 5], keys=[BLOCK * 17 + 1, 5])
    assert (found.indices[0, 8] >= 0).sum() == 16
    found.indices[:, 10:12] = -1
    found = with_truth(found)
    simulated.options = {"seed": 1}
    result = gradients(found)
    check(found, result)
    assert not bool(result.dq[10:12].any())
    assert relative(found, result)["dq"] < 0.007 / 2


@pytest.mark.parametrize(
    ("group", "dtype", "deterministic"),
    [
        (8, torch.float16, False),
        (8, torch.bfloat16, True),
        (32, torch.bfloat16, True),
        (64, torch.bfloat16, False),
    ],
    ids=str,
)
def test_other_groups_and_half_precision(simulated, group, dtype, deterministic):
    found = problem([1024 // (group * 3), 3], group=group, dtype=dtype, kv_heads=2)
    simulated.options = {"seed": 2}
    check(found, gradients(found, deterministic=deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_race_whatever_the_schedule(simulated, deterministic):
    found = problem([8, 20], keys=[8, 150], topk=2)
    simulated.options = {"seed": 4, "races": True}
    check(found, gradients(found, deterministic=deterministic, window=16))


def test_more_queries_than_keys_slack_rows_and_many_tasks_in_one_thread_block(simulated):
    """Queries that see no key, a document of no key, rows past the last document; short and full
    blocks one after the other, all by one thread block."""
    found = problem([9, 3, 2, 1, 3], keys=[5, 0, 130, 1, 128], group=32)
    total = found.docs.num_queries
    wide, d_out, d_lse = with_slack(found)
    with device.assume(ARCH, num_sms=1):
        for deterministic in (False, True):
            grads = backward(found, wide, d_out, d_lse, deterministic, 8)
            assert not bool(grads.dq[total:].any())
            grads.dq = grads.dq[:total]
            for name in ("dq", "dk", "dv"):
                assert_ok(found.truth.quantities[name].compare(getattr(grads, name)))
            assert not bool(grads.dq[:4].any())


def test_strided_and_expanded_inputs(simulated):
    found = problem([40], kv_heads=2, group=8)
    q, k = found.inputs.q, found.inputs.k
    wide = torch.full((40, 20, 128), float("nan"), dtype=q.dtype)
    wide[:, 2:18] = q
    turned = k.transpose(0, 1).contiguous().transpose(0, 1)
    plain = gradients(found)
    other = gradients(with_inputs(found, q=wide[:, 2:18], k=turned))
    for first, again in zip(plain.sums, other.sums, strict=True):
        torch.testing.assert_close(first, again, rtol=1e-5, atol=1e-5)


def test_what_lies_behind_a_key_that_a_row_does_not_see_may_be_anything(simulated):
    """The next document's keys follow a short block in memory, and its values, too."""
    found = problem([5, 9], group=32)
    k, v = found.inputs.k.clone(), found.inputs.v.clone()
    k[5:], v[5:] = float("nan"), float("inf")
    for deterministic in (False, True):
        plain = gradients(found, deterministic=deterministic)
        result = gradients(with_inputs(found, k=k, v=v), deterministic=deterministic)
        for name in ("dq", "dk", "dv"):
            assert torch.equal(getattr(result, name)[:5], getattr(plain, name)[:5]), name


def test_gradients_of_a_key_that_nobody_sees_are_zero_whatever_it_holds(simulated):
    """The block's other keys are read, by a tile that is not full."""
    found = problem([BLOCK], topk=1)
    found.indices[0, 3:] = -1
    k, v = found.inputs.k.clone(), found.inputs.v.clone()
    k[9], v[9], v[10] = (float(x) for x in ("nan", "inf", "nan"))
    result = gradients(with_inputs(found, k=k, v=v))
    for name in ("dk", "dv"):
        assert bool(getattr(result, name)[:3].any())
        assert not bool(getattr(result, name)[3:].any()), name


def test_a_document_of_nothing_and_a_selection_of_nothing(simulated):
    found = problem([3, 0], topk=1)
    nothing = dataclasses.replace(found, indices=torch.full_like(found.indices, -1))
    for deterministic in (False, True):
        for value in gradients(nothing, deterministic=deterministic).sums:
            assert not bool(value.any())
    empty = problem([0], topk=1)
    assert [tuple(x.shape) for x in gradients(empty).sums] == [
        (0, 16, 128),
        (0, 1, 128),
        (0, 1, 128),
    ]


def test_integer_sums_with_outliers_and_tiny_values(simulated):
    """A key and a value a hundred times the others, a loud and a quiet row of d_out, a large
    gradient of lse: the units of rows follow, and errors stay within the yardstick."""
    found = problem([40, 12])
    inputs = found.inputs
    k, v, d_out, d_lse = (x.clone() for x in (inputs.k, inputs.v, inputs.d_out, inputs.d_lse))
    k[3] *= 100
    v[7] *= 100
    d_out[20] *= 1e4
    d_out[41:] *= 1e-20
    d_lse[30] = 1e4
    d_lse[41:] = 0
    found = with_truth(with_inputs(found, k=k, v=v, d_out=d_out, d_lse=d_lse))
    result = gradients(found, deterministic=True)
    check(found, result)
    assert bool(result.sums[0][42:].any())


def test_a_row_whose_integers_have_no_bound_is_nan_and_no_other(simulated):
    found = problem([20, 6])
    d_out = found.inputs.d_out.clone()
    d_out[4, 2, 5], d_out[9, 1, 0] = float("nan"), float("inf")
    plain = gradients(found, deterministic=True).sums[0]
    hit = gradients(with_inputs(found, d_out=d_out), deterministic=True).sums[0]
    for query, head in ((4, 2), (9, 1)):
        assert bool(hit[query, head].isnan().all())
        hit[query, head] = plain[query, head]
    assert torch.equal(hit, plain)


def test_rows_whose_squares_are_none_of_fp32(simulated):
    """So small or large that the sum of a row's squares vanishes or overflows: in d_out, in V."""
    found = problem([8, 8, 8, 8], group=8, topk=1)
    inputs = found.inputs
    v, d_out = inputs.v.double(), inputs.d_out.double()
    d_out[:8] *= 1e-24
    d_out[8:16] *= 1e20
    v[16:24] *= 1e25
    v[24:] *= 1e-24
    changed = {"v": v.bfloat16(), "d_out": d_out.bfloat16(), "d_lse": inputs.d_lse * 0}
    found = with_truth(with_inputs(found, **changed))
    check(found, gradients(found, deterministic=True))


def test_nan_in_d_out_reaches_dq_where_all_keys_are_zero(simulated):
    found = problem([6], topk=1)
    d_out = found.inputs.d_out.clone()
    d_out[2, 3, 4] = float("nan")
    changed = with_inputs(found, k=torch.zeros_like(found.inputs.k), d_out=d_out)
    result = gradients(changed, deterministic=True).sums[0]
    assert bool(result[2, 3].isnan().all())
    result[2, 3] = 0
    assert not bool(result.any())


def test_the_largest_sum_of_integers_stays_below_its_limit(simulated):
    """One key that has all the weight, V that is dO, and a gradient of lse that turns delta against
    dP: dq of the largest channel of K is the bound itself, just below a power of two."""
    found = problem([1, 1], topk=1)
    inputs = found.inputs
    d_out = inputs.d_out[:, :1].expand(-1, 16, -1).contiguous()
    scale = found.config().scale
    d_lse = 4096 * (1 - 2**-20) / (scale * inputs.k.double().abs().amax(2))
    assert bool((d_lse > d_out.double().square().sum(2)).all())
    d_lse = d_lse.expand(-1, 16).float().contiguous()
    found = with_truth(with_inputs(found, v=d_out[:, :1].clone(), d_out=d_out, d_lse=d_lse))
    result = gradients(found, deterministic=True)
    check(found, result)
    assert abs(float(result.sums[0].abs().max()) / 4096 - 1) < 2**-8


def test_the_pipeline_runs_the_row_s_stages(simulated, monkeypatch):
    """What ``backend="cute"`` does on a Hopper GPU."""
    chip = DeviceFacts("cuda", "NVIDIA H200", (9, 0), 132, 232_448)
    tools = Toolchain("3.12", "2.11", triton="3.6", cute_dsl="4.6.2")
    monkeypatch.setattr(pipeline, "choose", partial(choose_with, facts=chip, tools=tools))
    found = problem([20, 5])
    inputs = found.inputs
    grads = pipeline.backward(
        inputs.d_out, inputs.d_lse, found.saved(), found.docs.layout, found.config(),
        (True, True), "cute",
    )  # fmt: skip
    assert all(grad.dtype == inputs.q.dtype for grad in grads)
    check(found, SimpleNamespace(**dict(zip(("dq", "dk", "dv"), grads, strict=True))))


@full
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_document_of_256_tokens_and_four_heads(simulated, seed):
    found = problem([256], kv_heads=4)
    simulated.options = {"seed": seed}
    result = gradients(found, deterministic=seed == 2)
    check(found, result)
    assert max(relative(found, result).values()) < 0.007 / 2


@full
@pytest.mark.parametrize("deterministic", [False, True])
def test_all_queries_of_a_document_longer_than_top_k(simulated, deterministic):
    found = problem([BLOCK * 3 + 7], topk=2, kv_heads=2)
    simulated.options = {"seed": 6, "races": True, "processes": 2}
    check(found, gradients(found, deterministic=deterministic))


def with_truth(found: Backward) -> Backward:
    """The problem with the truth of its tensors as they are."""
    truth = attention_truth(found.inputs, found.indices, found.docs, BLOCK)
    return dataclasses.replace(found, truth=truth)
