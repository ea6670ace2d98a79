"""The SM100 kernels' compiled PTX, executed on a CPU by the simulator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: no kernel to simulate")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed: no kernel to simulate")

from openmsa.kernels.common import cache, device
from openmsa.kernels.common import compile as compiling
from ptxsim.launchers import cute

ARCH = os.environ.get("PTXSIM_ARCH", "sm_100a")
"""The target of this process: the DSL has one."""

FULL = os.environ.get("PTXSIM_FULL") == "1"
full = pytest.mark.skipif(not FULL, reason="slow: PTXSIM_FULL=1 runs it (make sim)")


@pytest.fixture(scope="module")
def session() -> Iterator[SimpleNamespace]:
    """One session a file, so that a kernel is compiled once there; `options` are those of the next
    launches. It does not outlive the file: within it PyTorch believes in a GPU."""
    state = SimpleNamespace(options={}, launches=[], change=None)

    def run(launch: cute.Launch, known: Any) -> None:
        launch = state.change(launch) if state.change else launch
        state.launches.append(launch)
        cute.run_launch(launch, known, **state.options)

    compiling.cache_clear()
    with cute.simulate(ARCH, run=run):
        yield state
    compiling.cache_clear()


@pytest.fixture
def simulated(session: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Launches go to the simulator, for a small device; races are looked for where asked."""
    session.options, session.launches, session.change = {}, [], None
    # What lies on the disk has no PTX that the session knows.
    with device.assume(ARCH, num_sms=4), cache.disabled():
        yield session
