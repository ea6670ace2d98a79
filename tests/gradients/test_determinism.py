"""Bitwise repeatable results where torch or the caller asks for them."""

from __future__ import annotations

import pytest
import torch

from openmsa.testing import assert_exact, problem

TRIALS = (
    ("hot_block", torch.bfloat16),
    ("hot_block", torch.float32),
    ("fragments_with_hot_block", torch.float32),
)
RUNS = 5


@pytest.fixture(autouse=True)
def several_threads(backend):
    """Work that is split over threads is what could sum in another order. The reference's many
    small operators would only wait for their threads where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if backend == "cpu" else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deterministic_torch():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(("name", "dtype"), TRIALS)
def test_five_runs_agree_to_the_bit(name, dtype, backend, attend, deterministic_torch):
    case = problem(name)
    docs, inputs = case.documents(), case.inputs(dtype)
    selection = case.selection(inputs, docs)
    first = attend(inputs, selection, docs, backend)
    assert all(value.isfinite().all() for name, value in first.items() if name != "lse")
    for _ in range(RUNS - 1):
        again = attend(inputs, selection, docs, backend)
        for quantity, value in again.items():
            assert_exact(quantity, value, first[quantity])


def test_the_argument_asks_as_well(backend, attend):
    case = problem("hot_block")
    docs, inputs = case.documents(), case.inputs(torch.float32)
    selection = case.selection(inputs, docs)
    assert not torch.are_deterministic_algorithms_enabled()
    runs = [attend(inputs, selection, docs, backend, deterministic=True) for _ in range(RUNS)]
    for again in runs[1:]:
        for quantity, value in again.items():
            assert_exact(quantity, value, runs[0][quantity])
