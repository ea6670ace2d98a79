"""The example trains, and its two runs agree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="Transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")

ROOT = Path(__file__).parents[2]


def test_a_few_steps(tmp_path):
    plot = tmp_path / "loss.png"
    command = [sys.executable, str(ROOT / "examples" / "finetune_m3_tiny.py"), "--steps", "4"]
    done = subprocess.run(
        [*command, "--plot", str(plot)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    curves = re.findall(r"loss ([0-9.]+) -> ([0-9.]+)", done.stdout)
    assert len(curves) == 2
    assert all(float(last) < float(first) for first, last in curves)
    assert plot.stat().st_size > 1000
