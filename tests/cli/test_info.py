"""``openmsa info``: every stage of every backend, and reason and way out where one fails."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import openmsa
from openmsa.cli import info
from openmsa.cli.main import main
from openmsa.contract import Problem
from openmsa.dispatch.choose import Plan, choose_with
from openmsa.dispatch.probe import DeviceFacts, Toolchain
from openmsa.dispatch.support import Offer
from openmsa.dispatch.table import COMPILED, ORDER, STAGES, TABLE, Cell

STAGE_NAMES = sum(STAGES.values(), ())


def test_json_lists_every_stage_of_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    listed = {(row["backend"], row["stage"]) for row in found["stages"]}
    assert listed == {(backend, stage) for backend in ORDER for stage in STAGE_NAMES}
    assert found["openmsa"] == openmsa.__version__
    assert found["torch"] == torch.__version__
    assert found["cpu"]["threads"] == torch.get_num_threads()
    for row in found["stages"]:
        cells = TABLE[row["backend"]][row["stage"]].families
        assert len(row["cells"]) == len(cells)
        for told, cell in zip(row["cells"], cells, strict=True):
            expected = "fused" if cell.fused else cell.evidence if cell.launcher else "none"
            assert told == {"status": expected, "where": cell.where, "inside": cell.fused}
        assert ("cpu" in row["runs_on"]) == (not row["reasons"]["cpu"])
        if row["backend"] == "reference":
            assert "cpu" in row["runs_on"]


def test_json_file_comes_with_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "info.json"
    assert main(["info", "--json", str(path)]) == 0
    assert "stage" in capsys.readouterr().out
    assert json.loads(path.read_text())["order"] == list(ORDER)
    assert main(["info", "--json", str(tmp_path / "no" / "where.json")]) == 2


def test_tables_show_versions_stages_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert f"openmsa   {openmsa.__version__}" in shown
    assert f"torch     {torch.__version__}" in shown
    for stage in STAGE_NAMES:
        assert f"\n{stage} " in shown
    for backend in ORDER:
        assert f"\n  {backend} " in shown
    assert "auto takes" in shown
    if not torch.cuda.is_available():
        assert "CUDA      none: " in shown


FACTS = {
    "cpu": DeviceFacts("cpu", "a CPU"),
    "cuda": DeviceFacts("cuda", "Fast GPU", (9, 0), 132, 227 * 1024),
}
TOOLS = Toolchain("3.11", str(torch.__version__), None, "4.6.2")


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Triton, and a Triton column whose kernels compiled only."""
    cell = Cell(
        "nowhere:nothing",
        Offer(devices=("cuda",), package="triton", shared_memory=lambda problem: 2**20),
        COMPILED,
        "sm_90",
    )
    monkeypatch.setitem(TABLE, "triton", dict.fromkeys(STAGE_NAMES, cell))
    monkeypatch.setitem(TABLE, "cute", dict.fromkeys(STAGE_NAMES, Cell(reason="not shipped")))

    def facts(device: torch.device) -> DeviceFacts:
        return FACTS[device.type]

    # Not through ``choose``, which remembers its answers for the devices that are really there.
    def choose(problem: Problem) -> Plan:
        return choose_with(problem, "auto", facts(problem.device), TOOLS)

    monkeypatch.setattr(info, "toolchain", lambda: TOOLS)
    monkeypatch.setattr(info, "device_facts", facts)
    monkeypatch.setattr(info, "choose", choose)


@pytest.mark.usefixtures("other_machine")
def test_a_missing_toolchain_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert 'triton    not installed: pip install "openmsa[triton]"' in shown
    assert "CuTe DSL  4.6.2" in shown
    assert "compiled only (sm_90)" in shown
    line = next(line for line in shown.splitlines() if line.startswith("  triton"))
    assert "does not run: device: needs cpu, offers cuda; toolchain: needs triton" in line
    assert line.endswith('pip install "openmsa[triton]"')


@pytest.mark.usefixtures("other_machine")
def test_each_cuda_device_is_described_and_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    memory = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "cuda:0    Fast GPU, compute capability 9.0, 132 SMs, 227 KiB shared memory" in shown
    assert "80.0 GiB" in shown
    assert "cuda:0: auto takes 'reference' for attention" in shown
    assert "shared memory: needs 1048576 bytes per thread block, the device has 232448" in shown
    assert "cute       does not run: not shipped" in shown
    assert "CUDA      none" not in shown


HOPPER = DeviceFacts("cuda", "NVIDIA H200", (9, 0), 132, 232_448)
B200 = DeviceFacts("cuda", "NVIDIA B200", (10, 0), 148, 232_448)
NEITHER = "this version ships no CuTe DSL kernel for it"


@pytest.mark.parametrize(
    ("gpu", "triton", "cute_dsl", "auto", "verdict"),
    [
        (HOPPER, "3.6.0", "4.6.2", "cute", f"runs attention, not select: {NEITHER}"),
        (B200, "3.6.0", "4.6.2", "triton", f"runs attention, not select: {NEITHER}"),
        (
            HOPPER,
            "3.6.0",
            None,
            "triton",
            f"does not run: {NEITHER} [block_scores, select_blocks]; toolchain: needs cute_dsl, "
            "which is not installed [forward, backward_preprocess, task_build, backward, "
            'backward_postprocess]; pip install "openmsa[cute]"',
        ),
        (
            B200,
            None,
            "4.6.2",
            "reference",
            f"does not run: {NEITHER} [block_scores, select_blocks]; toolchain: needs triton, "
            'which is not installed [key_schedule, forward]; pip install "openmsa[triton]"',
        ),
    ],
    ids=["hopper", "blackwell", "hopper-no-dsl", "blackwell-no-triton"],
)
@pytest.mark.filterwarnings("ignore:openmsa. backend")
def test_each_device_hears_of_its_own_family(
    gpu: DeviceFacts,
    triton: str | None,
    cute_dsl: str | None,
    auto: str,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The table that ships, on a machine with one GPU; both families stand in the matrix."""
    tools = Toolchain("3.11", str(torch.__version__), triton, cute_dsl)
    facts = {"cpu": FACTS["cpu"], "cuda": gpu}

    def choose(problem: Problem) -> Plan:
        return choose_with(problem, "auto", facts[problem.device.type], tools)

    monkeypatch.setattr(info, "toolchain", lambda: tools)
    monkeypatch.setattr(info, "device_facts", lambda device: facts[device.type])
    monkeypatch.setattr(info, "choose", choose)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    memory = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert f"cuda:0: auto takes {auto!r} for attention" in shown
    _, _, of_gpu = shown.partition("cuda:0: auto takes")
    (line,) = [line for line in of_gpu.splitlines() if line.startswith("  cute ")]
    assert line == f"  cute       {verdict}"
    assert "ran (H200), simulated (10.0, 10.3)" in shown
