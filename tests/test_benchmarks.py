"""The benchmark scripts start anywhere; what they measure needs the device."""

from __future__ import annotations

import json
import runpy
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


@pytest.fixture
def here(monkeypatch, capsys):
    """gpu.py with arguments in this process, which has paid for its imports."""

    def run_here(*argv: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [str(GPU), *argv])
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(str(GPU), run_name="__main__")
        return exit.value.code, *capsys.readouterr()

    return run_here


def test_help():
    done = run("--help")
    assert done.returncode == 0
    assert "--no-cases" in done.stdout


@pytest.mark.parametrize(
    "name", ["compiled.py", "cold_start.py", "transformers_m3.py", "automodel_m3.py"]
)
def test_the_other_scripts_start(name):
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_wrong_input_is_a_usage_error(here):
    for argv in (["--tokens", "many"], ["--repeats", "0"]):
        code, _, error = here(*argv)
        assert code == 2
        assert argv[0] in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so(here):
    code, out, _ = here("--tokens", "256")
    assert code == 1
    assert "no CUDA device" in out


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


STEPS = """
import sys
sys.path.insert(0, {folder!r})
import torch
from steps import main

def build(setup):
    if setup.path == "absent":
        raise ImportError("no such framework")
    rows = setup.tokens if setup.path == "linear" else 2**40
    return lambda: torch.zeros(rows, 2**10).sum()

sys.exit(main("A script.", ("linear", "quadratic", "absent"), build))
"""


def test_a_path_that_runs_out_of_memory_is_a_line_of_the_table(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STEPS.format(folder=str(ROOT / "benchmarks")))
    command = [sys.executable, str(script), "--tokens", "1000", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    linear, quadratic, absent = (line.split() for line in done.stdout.splitlines()[-3:])
    assert linear[:2] == ["1000", "linear"]
    assert all(float(x) >= 0 for x in linear[2:])
    assert "out of memory" in " ".join(quadratic)
    assert "ImportError: no such framework" in " ".join(absent)
