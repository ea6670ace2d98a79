"""Fresh choices, and a table with more rows than this machine could run."""

from __future__ import annotations

import pytest

from openmsa.dispatch.choose import choose
from openmsa.dispatch.table import TABLE

from .fakes import HOPPER, PORTABLE, row


@pytest.fixture(autouse=True)
def fresh_choices():
    """Choices are remembered for the process; these tests change what they depend on."""
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.fixture
def two_rows(monkeypatch):
    """CuTe for Hopper and Triton for any GPU, both of which ran."""
    monkeypatch.setitem(TABLE, "cute", row(HOPPER))
    monkeypatch.setitem(TABLE, "triton", row(PORTABLE))
