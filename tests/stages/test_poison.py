"""Poisoned memory shows a read of what nobody wrote."""

from __future__ import annotations

import pytest
import torch

from openmsa.testing import poison, poisoned_memory


def forgets_the_last_row(x: torch.Tensor) -> torch.Tensor:
    """A workspace bug: the result has one row that is never written."""
    out = torch.empty_like(x)
    out[:-1] = x[:-1] * 2
    return out


def test_an_uninitialised_read_shows():
    x = torch.ones(4, 3)
    with poisoned_memory():
        out = forgets_the_last_row(x)
    assert out[-1].isnan().all()
    assert (out[:-1] == 2).all()


FACTORIES = {
    "empty": lambda dtype: torch.empty(2, 3, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(2, 3), dtype=dtype),
    "empty_strided": lambda dtype: torch.empty_strided((2, 3), (1, 2), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1).new_empty((2, 3), dtype=dtype),
    "new_empty_strided": lambda dtype: torch.zeros(1).new_empty_strided(
        (2, 3), (1, 2), dtype=dtype
    ),
}


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool], ids=str
)
def test_every_factory_and_dtype(factory, dtype):
    with poisoned_memory():
        x = FACTORIES[factory](dtype)
    assert x.dtype == dtype
    assert x.shape == (2, 3)
    if dtype.is_floating_point:
        assert x.isnan().all()
    else:
        assert (x == (1 if dtype == torch.bool else torch.iinfo(dtype).max)).all()


def test_initialised_memory_is_left_alone():
    with poisoned_memory():
        assert (torch.zeros(3) == 0).all()
        assert (torch.full((3,), 7) == 7).all()
        assert torch.ones(2).new_zeros(3).sum() == 0
        leaf = torch.empty(3, requires_grad=True)
    assert leaf.requires_grad
    assert leaf.is_leaf


def originals() -> list[object]:
    return [
        torch.empty,
        torch.empty_like,
        torch.Tensor.new_empty,
        "new_empty" in vars(torch.Tensor),
    ]


def test_everything_is_restored():
    before = originals()
    with poisoned_memory():
        with poisoned_memory():
            assert torch.empty(1).isnan()
        assert torch.empty(1).isnan()
        assert originals() != before
    assert originals() == before
    with pytest.raises(KeyError), poisoned_memory():
        raise KeyError("leave")
    assert originals() == before


def test_poison_returns_its_argument():
    x = torch.zeros(2, requires_grad=True)
    assert poison(x) is x
    assert x.isnan().all()
