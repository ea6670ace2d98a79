"""From a build to a function: memory, disk, compilation. Needs the DSL, but no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import openmsa
from openmsa.errors import InvalidInput
from openmsa.kernels.common import env

SCRIPT = Path(__file__).with_name("small_kernel.py")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("tvm_ffi") is None,
    reason="needs the CuTe DSL: pip install 'openmsa[cute]'",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "kernels"


def start(what: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    source = str(Path(openmsa.__file__).parents[1])
    # A simulator in this process sets variables of the DSL.
    outside = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), what],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=folder.parent,
        env={**outside, "PYTHONPATH": source, "OPENMSA_CACHE": str(folder), **environment},
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(printed.splitlines()[-1])


def test_two_processes_that_compile_at_once_keep_one_entry(folder: Path) -> None:
    rivals = [start("twice", folder) for _ in range(2)]
    for rival in rivals:
        assert rival.stdout.readline() == "ready\n", rival.stderr.read()
    for rival in rivals:
        rival.stdin.write("go\n")
        rival.stdin.flush()
    found = [finish(rival) for rival in rivals]
    assert all(answer["same"] and answer["kept"] for answer in found)
    assert found[0]["about"] == found[1]["about"], "the second one uses what the first one kept"
    entries = [path for path in folder.iterdir() if len(path.name) == 64]
    assert len(entries) == len(list(folder.iterdir())) == 1
    about = found[0]["about"]
    assert (about["name"], about["arch"], about["facts"]) == ("scale", "sm_100a", {"block": "128"})
    assert about["versions"]["openmsa"] == openmsa.__version__
    (used,) = about["entries"]
    assert used["stack"] == used["shared"] == 0
    assert 0 < used["registers"] <= 32
    assert list(folder.parent.iterdir()) == [folder], "nothing is left where a process works"


def test_what_lies_on_the_disk_runs_without_being_made(folder: Path) -> None:
    assert finish(start("loaded", folder)) == {"kept": True, "right": True}


def test_with_the_disk_off_it_is_made_anew(folder: Path) -> None:
    assert finish(start("off", folder)) == {"apart": True, "right": True}


def test_another_option_of_the_dsl_is_another_entry(folder: Path) -> None:
    before = len(list(folder.iterdir()))
    process = start("twice", folder, CUTE_DSL_LINEINFO="1")
    process.stdin.write("go\n")
    process.stdin.flush()
    finish(process)
    assert len(list(folder.iterdir())) == before + 1


def test_workers_compile_ahead_and_one_that_fails_costs_nothing(folder: Path) -> None:
    beside = os.pathsep.join([str(Path(openmsa.__file__).parents[1]), str(SCRIPT.parent)])
    process = start("prefetched", folder, OPENMSA_WORKERS="2", PYTHONPATH=beside)
    assert finish(process) == {"whole": True, "broken": False}
    process = start("prefetched", folder, OPENMSA_WORKERS="0", PYTHONPATH=beside)
    assert finish(process) == {"whole": True, "broken": True}


def test_a_helper_may_start_early(tmp_path: Path) -> None:
    beside = os.pathsep.join([str(Path(openmsa.__file__).parents[1]), str(SCRIPT.parent)])
    process = start("early", tmp_path / "kernels", OPENMSA_WORKERS="2", PYTHONPATH=beside)
    assert finish(process) == {"used": True, "kept": True, "again": False, "waited": True}


def test_the_number_of_workers_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.WORKERS, "3")
    assert env.workers() == 3
    monkeypatch.setenv(env.WORKERS, "many")
    with pytest.raises(InvalidInput, match="OPENMSA_WORKERS"):
        env.workers()


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"),
    [(1, "", 0), (3, "", 0), (4, "", 2), (9, "", 4), (192, "", 5), (192, "8", 5), (16, "8", 0)],
)
def test_workers_are_half_of_the_cores_of_a_process(monkeypatch, cores, ranks, workers) -> None:
    monkeypatch.delenv(env.WORKERS, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert env.workers() == workers
