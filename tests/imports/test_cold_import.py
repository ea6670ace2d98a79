"""Fresh processes: what importing openmsa brings in, and that every module loads on any host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import openmsa

PACKAGE = Path(openmsa.__file__).parent
OPTIONAL = ("triton", "cutlass", "cuda", "transformers", "matplotlib")
TOOLCHAINS = ("cutlass", "cuda", "triton")

# ``Watch`` refuses some top-level names and notes who asked for them, so that a request is seen
# even where the package is not installed, and one that torch makes is told from one of ours.
WATCH = """
import importlib.abc, json, sys

class Watch(importlib.abc.MetaPathFinder):
    def __init__(self, names):
        self.names, self.asked = names, []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.names:
            return None
        frame = sys._getframe(1)
        while "importlib" in frame.f_globals.get("__name__", ""):
            frame = frame.f_back
        self.asked.append([frame.f_globals["__name__"], name])
        raise ModuleNotFoundError(f"{name} is blocked", name=name)

arguments = json.loads(sys.argv[1])
watch = Watch(arguments["blocked"])
sys.meta_path.insert(0, watch)

def loaded(*names):
    return sorted({name.partition(".")[0] for name in sys.modules} & set(names))
"""

COLD = """
import openmsa
print(json.dumps({"loaded": loaded(*arguments["watched"]), "asked": watch.asked}))
"""

NAMES = """
import torch
before = loaded(*arguments["watched"])
import openmsa
for name in openmsa.__all__:
    getattr(openmsa, name)
print(json.dumps({
    "before": before,
    "after": loaded(*arguments["watched"]),
    "asked": watch.asked,
    "names": openmsa.__all__,
}))
"""

WALK = """
import importlib, os
from pathlib import Path

folder, prefix = Path(arguments["folder"]), arguments["prefix"]
sys.path.insert(0, str(folder.parent))

def module_name(path):
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join((prefix, *(parts[:-1] if parts[-1] == "__init__" else parts)))

from openmsa.errors import UnavailableError

answers = {}
for name in sorted(map(module_name, folder.rglob("*.py"))):
    try:
        importlib.import_module(name)
    except UnavailableError as error:
        answers[name] = f"unavailable: {error}"
    except BaseException as error:
        answers[name] = f"{type(error).__name__}: {error}"
    else:
        answers[name] = "imported"
print(json.dumps({"answers": answers, "asked": watch.asked}))
"""


def fresh(body: str, **arguments: object) -> dict[str, Any]:
    """What ``body`` prints in a process that has imported nothing yet."""
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", WATCH + body, json.dumps({"blocked": [], **arguments})],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def ours(asked: list[list[str]]) -> list[list[str]]:
    """The requests that a module of openmsa made itself."""
    return [request for request in asked if request[0].partition(".")[0] == "openmsa"]


def failures(answers: dict[str, str]) -> dict[str, str]:
    """The modules that neither load nor say that a toolchain is unavailable."""
    return {
        name: answer
        for name, answer in answers.items()
        if answer != "imported" and not answer.startswith("unavailable: ")
    }


@pytest.mark.parametrize("blocked", [(), OPTIONAL], ids=["open", "blocked"])
def test_importing_the_package_brings_in_nothing(blocked: tuple[str, ...]) -> None:
    seen = fresh(COLD, blocked=blocked, watched=["torch", "numpy", *OPTIONAL])
    assert seen == {"loaded": [], "asked": []}


def test_every_public_name_works_without_optional_packages() -> None:
    seen = fresh(NAMES, blocked=OPTIONAL, watched=OPTIONAL)
    assert seen["names"] == openmsa.__all__
    assert ours(seen["asked"]) == [], "openmsa asked for an optional package"


def test_public_names_bring_in_no_optional_package_that_torch_does_not() -> None:
    """Nothing is blocked: on a host that has them all, they must still stay out."""
    seen = fresh(NAMES, watched=OPTIONAL)
    assert seen["after"] == seen["before"]


def test_every_module_imports_or_says_what_is_unavailable() -> None:
    seen = fresh(WALK, blocked=TOOLCHAINS, folder=str(PACKAGE), prefix="openmsa")
    assert failures(seen["answers"]) == {}
    files = list(PACKAGE.rglob("*.py"))
    assert len(seen["answers"]) == len(files)
    for name in ("openmsa", "openmsa.api", "openmsa.kernels.schedule", "openmsa.reference.dense"):
        assert seen["answers"][name] == "imported"


@pytest.fixture(scope="module")
def flawed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The walk of a package with one module of each kind."""
    folder = tmp_path_factory.mktemp("walk") / "flawed"
    (folder / "deep").mkdir(parents=True)
    sources = {
        "__init__": "",
        "good": "import json",
        "bare": "import cutlass",
        "wrong": "raise ValueError('no')",
        "leaves": "raise SystemExit(3)",
        "gated": "from openmsa.kernels import require_cute_dsl\nrequire_cute_dsl()",
        "polite": "try:\n    import triton\nexcept ImportError:\n    triton = None",
        "deep/__init__": "from openmsa.kernels import require_cute_dsl\nrequire_cute_dsl()",
        "deep/inner": "",
    }
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return fresh(WALK, blocked=TOOLCHAINS, folder=str(folder), prefix="flawed")


def test_the_walk_finds_what_does_not_load(flawed: dict[str, Any]) -> None:
    assert failures(flawed["answers"]) == {
        "flawed.bare": "ModuleNotFoundError: cutlass is blocked",
        "flawed.wrong": "ValueError: no",
        "flawed.leaves": "SystemExit: 3",
    }


def test_the_walk_accepts_what_is_unavailable(flawed: dict[str, Any]) -> None:
    answers = flawed["answers"]
    for name in ("flawed.gated", "flawed.deep", "flawed.deep.inner"):
        assert answers[name].startswith("unavailable: ")
        assert 'pip install "openmsa[cute]"' in answers[name]
    assert answers["flawed.good"] == answers["flawed.polite"] == "imported"


def test_the_watch_tells_who_asked(flawed: dict[str, Any]) -> None:
    assert ["flawed.polite", "triton"] in flawed["asked"]
    assert ["openmsa.kernels", "cutlass"] in ours(flawed["asked"])


def test_integrations_are_reached_from_the_package() -> None:
    """The one line of the README, after a plain import."""
    body = "import openmsa\nprint(json.dumps(openmsa.integrations.automodel.enable.__module__))"
    assert fresh(body) == "openmsa.integrations.automodel"
