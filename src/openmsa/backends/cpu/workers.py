"""Independent jobs on worker threads, each of which runs torch operators on its own cores.

A key-major pass is a long chain of operators that take a millisecond each. Spreading every operator
over the cores costs two thread barriers per operator; where idle threads sleep between operators
(``OMP_WAIT_POLICY=PASSIVE``, or a busy machine) the second core then brings next to nothing.
Spreading the jobs instead needs one barrier per pass. Torch releases Python's lock inside an
operator, so the workers run side by side.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch

__all__ = ["PerThread", "job_threads", "run_jobs"]

T = TypeVar("T")

_MAX_WORKERS = 16
"""An operator call holds Python's lock for some 10 microseconds of a millisecond: more workers than
this would wait for it, so further cores go to the operators instead."""

_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def _forget_pools() -> None:
    """A forked child has none of its parent's threads, and perhaps a lock that nobody will open."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)


def job_threads() -> int:
    """How many jobs may run at once: torch's intra-op thread count, within limits."""
    return min(torch.get_num_threads(), _MAX_WORKERS)


class PerThread(Generic[T]):
    """A value that each thread makes once and keeps, such as its buffers."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._local = threading.local()

    def get(self) -> T:
        """This thread's value."""
        if not hasattr(self._local, "value"):
            self._local.value = self._make()
        value: T = self._local.value
        return value


def run_jobs(jobs: Sequence[Callable[[], None]]) -> None:
    """Run all jobs, which must not touch each other's results, and return when all have ended.

    The first exception is raised again here, after the jobs that had begun have ended too.
    """
    threads = torch.get_num_threads()
    workers = min(len(jobs), job_threads())
    inference = torch.is_inference_mode_enabled()

    def guarded(job: Callable[[], None]) -> None:
        # These modes belong to a thread, so a worker must be told. Below autograd nothing is
        # recorded, and our GEMMs have the dtype that they ask for.
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast("cpu", enabled=False):
            job()

    def on_worker(job: Callable[[], None]) -> None:
        # OpenMP's count belongs to this thread, MKL's to the process: hence every time.
        torch.set_num_threads(threads // workers)
        guarded(job)

    if workers < 2:
        for job in jobs:
            guarded(job)
        return
    futures = [_pool(workers).submit(on_worker, job) for job in jobs]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
        torch.set_num_threads(threads)
    for future in done:
        future.result()


def _pool(workers: int) -> ThreadPoolExecutor:
    """The process's pool of ``workers`` threads; they live on, as new ones cost a millisecond."""
    with _lock:
        if workers not in _pools:
            _pools[workers] = ThreadPoolExecutor(workers, thread_name_prefix="openmsa-cpu")
        return _pools[workers]
