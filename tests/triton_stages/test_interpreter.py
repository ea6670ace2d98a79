"""Runs interpreted.py where Triton's interpreter is on from the start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so its interpreter cannot run")

HERE = Path(__file__).parent


def test_the_kernels_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "2"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [*command, str(HERE / "interpreted.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-1000:]
    assert " passed" in found.stdout
