"""Facts of this process, learnt without importing a toolchain or waking a device."""

from __future__ import annotations

import subprocess
import sys

import torch

from openmsa.dispatch import probe
from openmsa.dispatch.probe import DeviceFacts, device_facts, toolchain


def test_facts_of_a_cpu():
    facts = device_facts(torch.device("cpu"))
    assert facts.kind == "cpu"
    assert facts.capability is None
    assert (facts.sm_count, facts.shared_memory) == (0, 0)
    assert str(facts)


def test_facts_of_this_process():
    tools = toolchain()
    assert tools.torch == torch.__version__
    assert tools.python == ".".join(map(str, sys.version_info[:3]))


def test_probing_imports_no_toolchain():
    """Versions come from package metadata; nothing is imported to learn them."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from openmsa.dispatch.choose import explain\n"
        "from openmsa.contract.problem import Problem\n"
        "print(explain(Problem('select', torch.device('cpu'), torch.float32, 1, 1, 8, 8, 1)))\n"
        "new = set(sys.modules) - before\n"
        "assert not [m for m in new if m.split('.')[0] in ('triton', 'cutlass', 'cuda')], new\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("select: cpu")


def test_a_device_without_an_index_is_the_current_one(monkeypatch):
    """flash-attention#54, triton#2441: facts of the tensor's device, not of device 0."""
    seen = []

    class Properties:
        name = "NVIDIA Fake"
        multi_processor_count = 7
        shared_memory_per_block_optin = 4096

    def properties(device):
        seen.append(device)
        return Properties

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(probe, "sm_capability", lambda device: (9, device.index))
    monkeypatch.setattr(probe, "sm_count", lambda device: 7)
    # Indices that no other test asks about, since facts are looked up once per device.
    assert device_facts(torch.device("cuda")) == DeviceFacts("cuda", "NVIDIA Fake", (9, 5), 7, 4096)
    assert device_facts(torch.device("cuda", 6)).capability == (9, 6)
    assert [torch.device(device).index for device in seen] == [5, 6]
    probe._device_facts.cache_clear()
