"""The benchmark scripts start anywhere; what they measure needs the device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
GPU = ROOT / "benchmarks" / "gpu.py"


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(GPU), *argv], capture_output=True, text=True, check=False, cwd=ROOT
    )


def test_help():
    done = run("--help")
    assert done.returncode == 0
    assert "--no-cases" in done.stdout


@pytest.mark.parametrize("name", ["compiled.py", "cold_start.py"])
def test_the_other_scripts_start(name):
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_wrong_input_is_a_usage_error():
    for argv in (["--tokens", "many"], ["--repeats", "0"]):
        done = run(*argv)
        assert done.returncode == 2
        assert argv[0] in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so():
    done = run("--tokens", "256")
    assert done.returncode == 1
    assert "no CUDA device" in done.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_small_run(tmp_path):
    path = tmp_path / "gpu.json"
    done = run("--tokens", "1024", "--repeats", "2", "--no-cases", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    names = {(row["name"], row["stage"]) for row in found["rows"]}
    assert ("random", "forward") in names
    assert ("dense", "backward") in names
    assert all(row["milliseconds"] > 0 for row in found["rows"])
