"""Jobs on worker threads: order of results, modes, failures; and memory on huge pages."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from openmsa import sparse_attention
from openmsa.backends.cpu import workers
from openmsa.backends.cpu.memory import advise_huge_pages, carve
from openmsa.backends.cpu.workers import PerThread, job_threads, run_jobs
from openmsa.testing import assert_ok, attention_truth, problem


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_job_runs_once(threads):
    counts = [0] * 50

    def job(i: int) -> None:
        counts[i] += 1

    run_jobs([lambda i=i: job(i) for i in range(50)])
    assert counts == [1] * 50
    run_jobs([])


def test_workers_share_the_operator_threads(threads):
    seen = set()
    barrier = threading.Barrier(threads)

    def job() -> None:
        barrier.wait(timeout=60)
        seen.add((threading.get_ident(), torch.get_num_threads()))

    run_jobs([job] * threads)
    assert job_threads() == len(seen) == threads
    assert {count for _, count in seen} == {1}
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("jobs", "each"), [(1, 5), (2, 2), (3, 1), (9, 1)])
def test_few_jobs_get_the_threads_that_are_left(jobs, each):
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        seen = []
        run_jobs([lambda: seen.append(torch.get_num_threads())] * jobs)
        assert seen == [each] * jobs
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


def test_a_failure_is_raised_after_all_running_jobs_ended(threads):
    running, ended = [], []

    def good(i: int) -> None:
        running.append(i)
        torch.ones(1000).sum()
        ended.append(i)

    def bad() -> None:
        raise ValueError("the third job")

    jobs = [lambda: good(0), lambda: good(1), bad, *[lambda i=i: good(i) for i in range(3, 40)]]
    with pytest.raises(ValueError, match="the third job"):
        run_jobs(jobs)
    assert sorted(running) == sorted(ended)
    assert torch.get_num_threads() == threads
    run_jobs([lambda: good(99)] * 2)
    assert ended[-1] == 99


def test_jobs_record_no_gradients_and_keep_their_dtype(threads):
    x = torch.ones(8, 8, requires_grad=True)
    found = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run_jobs([lambda: found.append(x @ x)] * 4)
    assert all(not y.requires_grad and y.dtype == torch.float32 for y in found)


def test_jobs_may_write_to_the_caller_s_inference_tensors(threads):
    with torch.inference_mode():
        out = torch.zeros(4)
        run_jobs([lambda i=i: out[i].add_(1) for i in range(4)])
    assert out.tolist() == [1] * 4


def test_callers_on_several_threads(threads):
    sums = {}

    def caller(name: int) -> None:
        parts = [0] * 20

        def job(i: int) -> None:
            parts[i] = name

        run_jobs([lambda i=i: job(i) for i in range(20)])
        sums[name] = sum(parts)

    callers = [threading.Thread(target=caller, args=(i,)) for i in range(4)]
    for c in callers:
        c.start()
    for c in callers:
        c.join(timeout=60)
    assert sums == {i: 20 * i for i in range(4)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_starts_its_own_workers():
    torch.set_num_threads(2)
    try:
        run_jobs([lambda: None] * 2)
        assert workers._pools
        child = os.fork()
        if child == 0:
            done = []
            # No torch operators: OpenMP itself does not survive a fork.
            pool_is_new = not workers._pools
            workers._pool(2).submit(done.append, 1).result(timeout=30)
            os._exit(0 if pool_is_new and done == [1] else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(1)


def test_per_thread_values():
    made = []
    value = PerThread(lambda: made.append(threading.get_ident()) or len(made))
    assert value.get() == value.get() == 1
    other = threading.Thread(target=lambda: value.get() and value.get())
    other.start()
    other.join()
    assert len(set(made)) == len(made) == 2


@pytest.mark.parametrize("name", ["minimax_m3", "logits_x900", "segments_without_keys"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_on_any_number_of_threads(name, dtype, threads, attend):
    case = problem(name)
    docs, inputs = case.documents(), case.inputs(dtype)
    selection = case.selection(inputs, docs)
    truth = attention_truth(inputs, selection.indices, docs, selection.block_size)
    found = attend(inputs, selection, docs, "cpu")
    for quantity, value in found.items():
        assert_ok(truth.quantities[quantity].compare(value))


def test_attention_inside_inference_mode_and_autocast(threads, attend):
    case = problem("hot_block")
    docs, x = case.documents(), case.inputs(torch.float32)
    selection = case.selection(x, docs)
    want = sparse_attention(x.q, x.k, x.v, selection, docs, backend="cpu")
    with torch.inference_mode():
        assert torch.equal(want, sparse_attention(x.q, x.k, x.v, selection, docs, backend="cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(want, sparse_attention(x.q, x.k, x.v, selection, docs, backend="cpu"))


def test_carved_tensors_are_apart():
    like = torch.empty(0)
    parts = carve(like, torch.float64, (3, 5), (0, 7), (11,))
    assert [tuple(p.shape) for p in parts] == [(3, 5), (0, 7), (11,)]
    for value, part in enumerate(parts):
        part.fill_(value)
    assert parts[0].eq(0).all()
    assert parts[2].eq(2).all()


def test_huge_pages_keep_the_contents():
    x = torch.arange(3 * 2**20, dtype=torch.float32)
    assert advise_huge_pages(x) is x
    assert torch.equal(x, torch.arange(3 * 2**20, dtype=torch.float32))
    # Views that do not start on a page, and small tensors, are as welcome.
    assert advise_huge_pages(x[1:]).shape == (3 * 2**20 - 1,)
    assert advise_huge_pages(x[:3]).tolist() == [0, 1, 2]
