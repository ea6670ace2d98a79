"""The SM100 kernels' compiled PTX, executed on a CPU by the simulator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from simulation import full, launches_on, session_of

__all__ = ["ARCH", "full"]

ARCH = os.environ.get("PTXSIM_ARCH", "sm_100a")
"""The target of this process: the DSL has one."""


@pytest.fixture(scope="module")
def session() -> Iterator[SimpleNamespace]:
    """One session a file; it does not outlive the file."""
    with session_of(ARCH) as state:
        yield state


@pytest.fixture
def simulated(session: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Launches of this test go to the simulator."""
    with launches_on(session, ARCH, num_sms=4) as state:
        yield state
