"""The SM90 kernels on a Hopper chip: against float64, the simulator, and themselves.

The simulator takes minutes; ``PTXSIM_RESULTS`` may name a file of ``python -m sm90.results``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openmsa import MINIMAX_M3, Documents
from openmsa.cli.selections import coherent_selection, random_selection
from openmsa.contract.problem import AttentionConfig, Saved
from openmsa.testing import assert_ok

from .results import NAMES, named, on, results

FOUND = torch.cuda.get_device_capability() if torch.cuda.is_available() else None

pytestmark = pytest.mark.skipif(FOUND != (9, 0), reason="needs a Hopper GPU")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """The simulator's results of the same PTX."""
    if "PTXSIM_RESULTS" in os.environ:
        return torch.load(os.environ["PTXSIM_RESULTS"])
    file = tmp_path_factory.mktemp("simulated") / "results.pt"
    command = [sys.executable, "-m", "sm90.results", str(file)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(file)


@pytest.mark.parametrize("name", NAMES)
def test_the_chip_agrees_with_float64_and_with_the_simulator(name, simulated):
    """Tensor cores add in an order of their own, so that sums differ in their last bits, and a
    value in 16 bits that lies between two others may go either way."""
    found = named(name)
    chip = results(on("cuda", found))
    for quantity in ("out", "lse"):
        assert_ok(found.truth.quantities[quantity].compare(chip[quantity]))
    for quantity, here in simulated[name].items():
        there = chip[quantity]
        norm = here.double().norm()
        apart = float((there.double() - here.double()).norm() / norm) if norm else 0.0
        # P, dS and outputs have 16 bits: a last bit that differs in one of eight is 2^-9 / sqrt(8).
        assert apart < 2**-10, (quantity, apart)


@pytest.mark.parametrize("pick", [random_selection, coherent_selection])
def test_fifty_repetitions_are_equal_to_the_bit(pick):
    from openmsa.kernels.sm90 import backward_postprocess, task_build
    from openmsa.kernels.sm90.backward import launch as backward
    from openmsa.kernels.sm90.forward import launch as forward
    from openmsa.kernels.sm100 import backward_preprocess
    from openmsa.reference.schedule import key_schedule

    torch.manual_seed(0)
    docs = Documents.from_lengths([5000, 1, 127, 3000], device="cuda")
    total = docs.num_queries

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(total, heads, 128, device="cuda", dtype=torch.bfloat16)

    q, k, v, d_out = normal(64), normal(4), normal(4), normal(64)
    indices = pick(docs, MINIMAX_M3, 0).indices
    schedule = key_schedule(indices, docs.layout, 128)
    config = AttentionConfig(128, 128**-0.5, True)
    out, lse = forward.forward(q, k, v, indices, schedule, docs.layout, config)
    saved = Saved(q, k, v, out, lse, indices, schedule)
    delta = backward_preprocess.backward_preprocess(out, d_out, lse, None)

    def grads() -> tuple[torch.Tensor, ...]:
        tasks = task_build.task_build(schedule, 16, total)
        sums = backward.backward(d_out, delta, saved, tasks, docs.layout, config, (True, True))
        return backward_postprocess.backward_postprocess(*sums, torch.float32)

    first = grads()
    for _ in range(50):
        again = forward.forward(q, k, v, indices, schedule, docs.layout, config)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
        assert all(torch.equal(a, b) for a, b in zip(grads(), first, strict=True))
