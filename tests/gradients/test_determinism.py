"""Bitwise repeatable results where torch or the caller asks for them."""

from __future__ import annotations

import pytest
import torch

from openmsa.testing import assert_exact, problem

RUNS = 5


@pytest.fixture
def deterministic_torch():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def two_threads():
    """Work that is split over threads is what could sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def check_runs(case, dtype, backend, attend, **options):
    docs, inputs = case.documents(), case.inputs(dtype)
    selection = case.selection(inputs, docs)
    first = attend(inputs, selection, docs, backend, **options)
    assert all(value.isfinite().all() for value in first.values())
    for _ in range(RUNS - 1):
        again = attend(inputs, selection, docs, backend, **options)
        for quantity, value in again.items():
            assert_exact(quantity, value, first[quantity])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["hot_block", "fragments_with_hot_block"])
def test_five_runs_agree_to_the_bit(name, dtype, backend, attend, deterministic_torch):
    check_runs(problem(name), dtype, backend, attend)


def test_five_runs_on_two_threads(attend, deterministic_torch, two_threads):
    check_runs(problem("fragments_with_hot_block"), torch.float32, "cpu", attend)


def test_the_argument_asks_as_well(backend, attend):
    assert not torch.are_deterministic_algorithms_enabled()
    case = problem("fragments_with_hot_block")
    check_runs(case, torch.float32, backend, attend, deterministic=True)
