"""The whole backward, simulated from the PTX that ships, against float64."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from openmsa.testing import assert_ok, poisoned_memory
from sm100.problems import problem


def gradients(found, *, deterministic=False, window=512):
    """The four stages, as the pipeline calls them, on memory full of NaN."""
    return backward(
        found, found.saved(), found.inputs.d_out, found.inputs.d_lse, deterministic, window
    )


def backward(found, saved, d_out, d_lse, deterministic, window):
    from openmsa.kernels.sm90 import task_build
    from openmsa.kernels.sm90.backward import launch
    from openmsa.kernels.sm100 import backward_postprocess, backward_preprocess

    layout = found.docs.layout
    with poisoned_memory():
        delta = backward_preprocess.backward_preprocess(saved.out, d_out, saved.lse, d_lse)
        tasks = task_build.task_build(saved.schedule, found.group, layout.num_queries, window)
        sums = launch.backward(
            d_out, delta, saved, tasks, layout, found.config(deterministic), (True, True)
        )
        rounded = backward_postprocess.backward_postprocess(*sums, saved.q.dtype)
    return SimpleNamespace(dq=rounded[0], dk=rounded[1], dv=rounded[2], sums=sums)


def check(found, result):
    for name in ("dq", "dk", "dv"):
        assert_ok(found.truth.quantities[name].compare(getattr(result, name)))
    for name, zero in found.truth.must_be_zero().items():
        if hasattr(result, name):
            assert not bool(getattr(result, name)[zero].any()), name


def relative(found, result):
    """L2 error of dq, dk and dv, relative to the truth's norm, of the fp32 sums."""
    errors = {}
    for name, value in zip(("dq", "dk", "dv"), result.sums, strict=True):
        exact = found.truth.quantities[name].exact
        errors[name] = float((value.double() - exact).norm() / exact.norm())
    return errors


def test_packed_ragged_and_one_token_documents(simulated):
    found = problem([127, 129, 1, 2, 3, 5, 128])
    result = gradients(found)
    print(relative(found, result))
    check(found, result)
    assert max(relative(found, result).values()) < 0.007 / 2
    assert any("wgmma.mma_async" in launch.ptx for launch in simulated.launches)


def test_sums_in_order_are_equal_to_the_bit_under_five_schedules(simulated):
    """Three windows, key blocks that several thread blocks add to, a document within a block."""
    found = problem([76, 20], topk=2)
    results = []
    for seed in range(5):
        simulated.options = {"seed": seed}
        results.append(gradients(found, deterministic=True, window=32))
    check(found, results[0])
    for other in results[1:]:
        for first, again in zip(results[0].sums, other.sums, strict=True):
            assert torch.equal(first, again)


def test_tasks_of_a_row_and_window_are_alike(simulated):
    from openmsa.kernels.stages.tasks import tasks_of

    found = problem([300], topk=2)
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
