"""Every kernel compiled for every architecture, which needs no GPU: does it fit, does it spill?"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so there is nothing to compile")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Output of compiled_for.py by architecture; processes of their own, two at a time, because
    the interpreter must be off and Triton keeps one device per process."""
    cache = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)

    def compile_for(arch: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(HERE / "compiled_for.py"), arch]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ARCHITECTURES, pool.map(compile_for, ARCHITECTURES), strict=True))


ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_fits(reports, arch):
    found = reports[arch]
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert "kernels fit" in found.stdout
