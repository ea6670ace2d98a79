"""What a selection has started for the attention that follows it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from openmsa.dispatch import ready
from openmsa.kernels.common import workers

from .fakes import B200, BOTH, CPU, H200, TRITON


@pytest.mark.parametrize(
    ("facts", "tools", "backend", "wanted"),
    [
        (H200, BOTH, "auto", True),
        (H200, BOTH, "cute", True),
        (H200, BOTH, "triton", False),
        (H200, TRITON, "auto", False),
        (B200, BOTH, "auto", False),
        (CPU, BOTH, "auto", False),
    ],
)
def test_a_selection_on_hopper_has_a_helper_started(monkeypatch, facts, tools, backend, wanted):
    started = []
    monkeypatch.setattr(ready, "device_facts", lambda device: facts)
    monkeypatch.setattr(ready, "toolchain", lambda: tools)
    monkeypatch.setattr(workers, "get_ready", lambda *modules: started.append(modules))
    ready.expect_attention.cache_clear()
    try:
        for _ in range(2):
            ready.expect_attention(torch.device("cuda", 0), backend)
    finally:
        ready.expect_attention.cache_clear()
    assert len(started) == wanted
    assert all(importlib.util.find_spec(module) for modules in started for module in modules)
