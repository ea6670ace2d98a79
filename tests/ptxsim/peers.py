"""Other people's kernels for tests: fetched when a test asks, never part of this repository.

The packages go, without their dependencies, into a folder of pytest's cache.  The CuTe DSL itself
must be installed (`pip install openmsa[cute]`).  CUTLASS's examples come with no package: the
variable PTXSIM_CUTLASS names a checkout of github.com/NVIDIA/cutlass.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "src"
PACKAGES = (
    "nemo-automodel==0.7.0",
    "flash-attn-4==4.0.0b36",
    "quack-kernels==0.6.4",
    "apache-tvm-ffi==0.1.15.post2",
    "torch-c-dlpack-ext",
    "einops",
)
# The slow corpus (`make sim`): larger problems and more schedules.
FULL = os.environ.get("PTXSIM_FULL") == "1"


def require_dsl() -> None:
    """Skip the test if the CuTe DSL is not there."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("nvidia-cutlass-dsl is not installed")


def packages(config: pytest.Config) -> Path:
    """The folder with the peers' packages, filled at the first call; skips if PyPI is away."""
    require_dsl()
    folder = cached(config, "ptxsim-peers")
    stamp = folder / "installed.txt"
    wanted = "\n".join(PACKAGES)
    if not stamp.exists() or stamp.read_text() != wanted:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        done = subprocess.run(
            [*command, "--target", str(folder), *PACKAGES], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"the peers' packages cannot be fetched: {done.stderr.strip()[-300:]}")
        stamp.write_text(wanted)
    return folder


def cached(config: pytest.Config, name: str) -> Path:
    """A folder that lasts from run to run; skips where pytest keeps none."""
    if getattr(config, "cache", None) is None:
        pytest.skip("pytest runs without its cache, where the peers' packages go")
    return Path(config.cache.mkdir(name))  # type: ignore[union-attr]


def cutlass_sources(config: pytest.Config) -> Path:
    """The folder of the package nvidia-cutlass; skips without nvcc or if PyPI is away."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the path")
    folder = cached(config, "ptxsim-cutlass")
    if not (folder / "cutlass_library").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        done = subprocess.run(
            [*command, str(folder), "nvidia-cutlass==4.2.0.0"], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"nvidia-cutlass cannot be fetched: {done.stderr.strip()[-300:]}")
    return folder


def cutlass_examples() -> Path:
    """The folder of CUTLASS's DSL examples; skips without a checkout."""
    require_dsl()
    root = os.environ.get("PTXSIM_CUTLASS")
    if not root:
        pytest.skip("PTXSIM_CUTLASS does not name a checkout of NVIDIA/cutlass")
    return Path(root) / "examples" / "python" / "CuTeDSL" / "cute"


def run(script: str, *arguments: str, path: Path | None = None, limit: int = 900) -> Any:
    """Run one script of the corpus in a fresh interpreter; what it prints last, read as JSON.

    A fresh one because the DSL and the kernels' packages read the architecture once per process.
    """
    search = [str(SOURCES), str(HERE)] + ([str(path)] if path else [])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "corpus" / script), *arguments],
        capture_output=True, text=True, env=environment, timeout=limit,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.strip().split("\n")[-1])
