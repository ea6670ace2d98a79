"""Compiled CuTe DSL kernels of openmsa, executed on a CPU by the simulator: for fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: no kernel to simulate")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed: no kernel to simulate")

from openmsa.kernels.common import cache, device
from openmsa.kernels.common import compile as compiling
from ptxsim.launchers import cute

FULL = os.environ.get("PTXSIM_FULL") == "1"
full = pytest.mark.skipif(not FULL, reason="slow: PTXSIM_FULL=1 runs it (make sim)")


@contextmanager
def session_of(arch: str) -> Iterator[SimpleNamespace]:
    """One session, within which PyTorch believes in a GPU and a kernel is compiled once; `options`
    are those of the next launches, and `change` may replace one."""
    state = SimpleNamespace(options={}, launches=[], change=None)

    def run(launch: cute.Launch, known: Any) -> None:
        launch = state.change(launch) if state.change else launch
        state.launches.append(launch)
        # Ours keep the rules that other shipping code breaks, too.
        cute.run_launch(launch, known, **{"strict": True, **state.options})

    compiling.cache_clear()
    with cute.simulate(arch, run=run):
        yield state
    compiling.cache_clear()


@contextmanager
def launches_on(session: SimpleNamespace, arch: str, num_sms: int) -> Iterator[SimpleNamespace]:
    """Launches go to the simulator, for a small device; races are looked for where asked."""
    session.options, session.launches, session.change = {}, [], None
    # What lies on the disk has no PTX that the session knows.
    with device.assume(arch, num_sms=num_sms), cache.disabled():
        yield session
