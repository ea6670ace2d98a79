"""The whole backward, simulated from the PTX that ships, against float64."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from openmsa import pipeline
from openmsa.dispatch.choose import choose_with
from openmsa.dispatch.probe import DeviceFacts, Toolchain
from openmsa.kernels.common import device
from openmsa.testing import assert_ok, attention_truth, poisoned_memory

from .conftest import ARCH, full
from .problems import BLOCK, check, problem, relative, with_inputs, with_slack


def gradients(found, *, deterministic=False, window=512, d_out=None):
    """The four stages, as the pipeline calls them, on memory full of NaN."""
    d_out = found.inputs.d_out if d_out is None else d_out
    return backward(found, found.saved(), d_out, found.inputs.d_lse, deterministic, window)


def backward(found, saved, d_out, d_lse, deterministic, window):
    from openmsa.kernels.sm100 import backward_postprocess, backward_preprocess, task_build
    from openmsa.kernels.sm100.backward import launch

    layout = found.docs.layout
    with poisoned_memory():
        delta = backward_preprocess.backward_preprocess(saved.out, d_out, saved.lse, d_lse)
        tasks = task_build.task_build(saved.schedule, found.group, layout.num_queries, window)
        sums = launch.backward(
            d_out, delta, saved, tasks, layout, found.config(deterministic), (True, True)
        )
        rounded = backward_postprocess.backward_postprocess(*sums, saved.q.dtype)
    return SimpleNamespace(dq=rounded[0], dk=rounded[1], dv=rounded[2], sums=sums)


def test_packed_ragged_and_one_token_documents(simulated):
    found = problem([127, 129, 1, 2, 3, 5, 128])
    result = gradients(found)
    check(found, result)
    assert max(relative(found, result).values()) < 0.007 / 2
    assert any("tcgen05.mma" in launch.ptx for launch in simulated.launches)


def test_sixteen_of_seventeen_blocks_and_rows_that_read_nothing(simulated):
    """The last queries of a long document; some of another's read nothing, nor is a key read."""
    found = problem([9, 5], keys=[BLOCK * 17 + 1, 5])
    assert (found.indices[0, 8] >= 0).sum() == 16
    found.indices[:, 10:12] = -1
    found = dataclasses.replace(
        found, truth=attention_truth(found.inputs, found.indices, found.docs, BLOCK)
    )
    simulated.options = {"seed": 1}
    result = gradients(found)
    check(found, result)
    assert not bool(result.dq[10:12].any())
    # Sixteen parts of dq, which round sixteen times where a sum is kept in 16 bits.
    assert relative(found, result)["dq"] < 0.007 / 2


@pytest.mark.parametrize(
    ("group", "dtype", "seed"), [(8, torch.float16, 2), (64, torch.bfloat16, 3)], ids=str
)
def test_other_groups_and_half_precision(simulated, group, dtype, seed):
    found = problem([30, 3], group=group, dtype=dtype, kv_heads=2)
    simulated.options = {"seed": seed}
    check(found, gradients(found))


def test_no_race_whatever_the_schedule(simulated):
    found = problem([20, 131], topk=2)
    simulated.options = {"seed": 4, "races": True}
    check(found, gradients(found))
    assert all(f".target {ARCH}" in launch.ptx for launch in simulated.launches)


@pytest.mark.skipif(ARCH != "sm_100a", reason="this is what the other process runs")
def test_the_other_target():
    """The same for sm_103a, in a process of its own."""
    chosen = f"{__file__}::test_no_race_whatever_the_schedule"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", chosen],
        env={**os.environ, "PTXSIM_ARCH": "sm_103a"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_sums_in_order_are_equal_to_the_bit_under_five_schedules(simulated):
    """Three windows, runs that go on in another thread block, and a document within a block."""
    found = problem([76, 20], topk=2)
    results = []
    for seed in range(5):
        simulated.options = {"seed": seed}
        results.append(gradients(found, deterministic=True, window=32))
    check(found, results[0])
    for other in results[1:]:
        for first, again in zip(results[0].sums, other.sums, strict=True):
            assert torch.equal(first, again)


def test_more_queries_than_keys_slack_rows_and_many_runs_in_one_thread_block(simulated):
    """Queries that see no key, a document of no key, rows past the last document; short and full
    blocks one after the other, all by one thread block."""
    found = problem([9, 3, 2, 1, 3], keys=[5, 0, 130, 1, 128], group=32)
    total, truth = found.docs.num_queries, found.truth
    wide, d_out, d_lse = with_slack(found)
    with device.assume(ARCH, num_sms=1):
        for deterministic in (False, True):
            grads = backward(found, wide, d_out, d_lse, deterministic, 8)
            assert not bool(grads.dq[total:].any())
            grads.dq = grads.dq[:total]
            for name in ("dq", "dk", "dv"):
                assert_ok(truth.quantities[name].compare(getattr(grads, name)))
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
    found = problem([5, 9], group=64)
    inputs = found.inputs
    k, v = inputs.k.clone(), inputs.v.clone()
    k[5:], v[5:] = float("nan"), float("inf")
    plain = gradients(found, deterministic=True)
    result = gradients(with_inputs(found, k=k, v=v), deterministic=True)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(result, name)[:5], getattr(plain, name)[:5]), name


def test_a_document_of_nothing_and_a_selection_of_nothing(simulated):
    found = problem([3, 0], topk=1)
    nothing = dataclasses.replace(found, indices=torch.full_like(found.indices, -1))
    for value in gradients(nothing).sums:
        assert not bool(value.any())
    empty = problem([0], topk=1)
    assert [tuple(x.shape) for x in gradients(empty).sums] == [
        (0, 16, 128),
        (0, 1, 128),
        (0, 1, 128),
    ]


@full
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_document_of_256_tokens_and_four_heads(simulated, seed):
    """The problem that the other implementation's kernel is simulated on (tests/ptxsim)."""
    found = problem([256], kv_heads=4)
    simulated.options = {"seed": seed}
    result = gradients(found)
    check(found, result)
    assert max(relative(found, result).values()) < 0.007 / 2


@full
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_with_four_heads(simulated, deterministic):
    found = problem([127, 129, 1, 2, 3, 5, 128], kv_heads=4)
    simulated.options = {"seed": 5, "processes": 2}
    check(found, gradients(found, deterministic=deterministic))


@full
def test_all_queries_of_a_document_longer_than_top_k(simulated):
    found = problem([BLOCK * 3 + 7], topk=2, kv_heads=2)
    simulated.options = {"seed": 6, "races": True, "processes": 2}
    check(found, gradients(found))


def test_the_pipeline_runs_the_row_s_stages(simulated, monkeypatch):
    """What ``backend="cute"`` does on such a device, but for the forward, which is Triton's."""
    chip = DeviceFacts("cuda", "NVIDIA B200", (10, 0), 148, 232_448)
    tools = Toolchain("3.11", "2.13", triton="3.6.0", cute_dsl="4.6.2")
    monkeypatch.setattr(pipeline, "choose", partial(choose_with, facts=chip, tools=tools))
    found = problem([20, 5])
    inputs = found.inputs
    grads = pipeline.backward(
        inputs.d_out, inputs.d_lse, found.saved(), found.docs.layout, found.config(),
        (True, True), "cute",
    )  # fmt: skip
    assert all(grad.dtype == inputs.q.dtype for grad in grads)
    check(found, SimpleNamespace(**dict(zip(("dq", "dk", "dv"), grads, strict=True))))
