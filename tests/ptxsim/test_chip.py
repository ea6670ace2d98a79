"""The comparison with a GPU, without one."""

from __future__ import annotations

import chip
import harness
import numpy as np
import pytest


def test_differences_overlook_nan_payloads_and_last_bits_only() -> None:
    nan = np.array([0x7FC00000, 0x7FFFFFFF, 5], np.uint32)
    other = np.array([0xFFC00001, 0x7FFFFFFF, 5], np.uint32)
    assert not chip.differences(nan, other).size
    other[2] = 6
    assert chip.differences(nan, other).tolist() == [2]
    exact = np.array([1.0, np.inf, np.nan, 0.0], np.float32)
    near = np.array([1.0 + 2.0**-11, np.inf, np.nan, 2.0**-22], np.float32)
    assert not chip.differences(exact, near).size
    assert chip.differences(exact, np.array([1.01, -np.inf, 0, 1e-3], np.float32)).size == 4
    assert not chip.differences(np.array([True]), np.array([True])).size


@pytest.mark.parametrize("lie", [False, True])
def test_every_kernel_of_the_harness_is_compared(
    monkeypatch: pytest.MonkeyPatch, lie: bool
) -> None:
    seen = []

    def run(text, grid, block, inputs, outputs):
        seen.append((grid, block, len(inputs), len(outputs)))
        assert ".visible .entry k(" in text
        return [inputs[0] + inputs[1] + np.uint32(lie)]

    monkeypatch.setattr(chip, "WANTED", True)
    monkeypatch.setattr(chip, "run", run)
    monkeypatch.setattr(chip, "COUNTS", chip.Counter())
    a = np.arange(64, dtype=np.uint32)
    if lie:
        with pytest.raises(AssertionError, match="64 of 64 differ from the GPU"):
            harness.run("add.u32 %d0, %a0, %a1;", [a, a], ["u4"])
    else:
        harness.run("add.u32 %d0, %a0, %a1;", [a, a], ["u4"])
    harness.run("add.u32 %d0, %a0, %a1;", [a, a], ["u4"], real=False)
    assert seen == [(1, 64, 2, 1)]
    assert chip.COUNTS["compared"] == 1


def test_a_kernel_that_the_gpu_does_not_have_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chip, "WANTED", True)
    monkeypatch.setattr(chip, "run", lambda *args: None)
    monkeypatch.setattr(chip, "COUNTS", chip.Counter())
    harness.run("mov.u32 %d0, 1;", [np.zeros(32, np.uint32)], ["u4"])
    assert chip.COUNTS == {"not on this GPU": 1}
