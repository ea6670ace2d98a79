"""``openmsa compile``: errors, output and files; and the main kernel, really compiled."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import openmsa
from machine_code import check_copies
from openmsa.cli.main import main
from openmsa.errors import UnavailableError, UnsupportedProblem
from openmsa.kernels import catalogue
from openmsa.kernels.build import Build, Roofline
from openmsa.kernels.common import cache
from openmsa.kernels.common.device import ARCHITECTURES

PTX = """
.version 8.7
.target sm_100a
.visible .entry f()
{
  mov.b32 %r1, 256;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], %r1;
  ex2.approx.ftz.f32 %f1, %f2;
  ret;
}
"""


def roof(build: Build, products: tuple[Any, ...]) -> Roofline:
    assert build.name == "first"
    cycles = {"tensor": {"products": 100}, "shared memory": {"operands": 50, "dS": 70}}
    return Roofline("tile", 80, cycles, {"read a tile": 4096})


BUILDS = (
    Build("first", "sm_100a", (("shared_bytes", 4096), ("ordered", False)), lambda: (None, ())),
    Build("first", "sm_100a", (("shared_bytes", 4096), ("ordered", True)), lambda: (None, ())),
    Build("second", "sm_100a", (), lambda: (None, ())),
)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[Build]:
    """A compiler that takes no time, where there is no DSL; gives what it was asked for."""
    asked: list[Build] = []

    def ahead(build: Build) -> tuple[cache.Entry, bool]:
        asked.append(build)
        used = {"entry": "f", "registers": 128, "stack": 0, "shared": 64}
        about = {
            "name": build.name, "arch": build.arch, "facts": {}, "versions": {}, "seconds": 1.25,
            "entries": [used, {**used, "registers": 40, "stack": 8}],
        }  # fmt: skip
        files = {"kernel.o": b"o", "kernel.ptx": PTX.encode(), "kernel.cubin": b"cubin"}
        return cache.Entry(files, about), build.name == "second"

    module = ModuleType("openmsa.kernels.common.compile")
    module.ahead = ahead
    launch = ModuleType("a_launch_module")
    launch.roofline = roof
    launch.builds = lambda arch: tuple(build for build in BUILDS if build.arch == arch)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, launch.__name__, launch)
    monkeypatch.setitem(catalogue.MODULES, "sm_100a", (launch.__name__,))
    monkeypatch.setattr(catalogue, "ROOFLINES", {("sm_100a", "first"): launch.__name__})
    monkeypatch.setattr(catalogue, "require_cute_dsl", lambda: None)
    return asked


def test_the_table_has_a_line_for_each_build(
    compiler: list[Build], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "--arch", "sm_100a"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line}
    assert lines["first"] == ["first", "1.2", "10", "128", "8", "64", "4,096", "256"]
    assert lines["first-ordered"][1:] == ["1.2", "10", "128", "8", "64", "4,096", "256"]
    assert lines["second"][:3] == ["second", "1.2", "(kept)"]
    assert "mufu" not in shown
    assert compiler == list(BUILDS)


def test_the_report_has_pipes_and_a_roofline(
    compiler: list[Build], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "--arch", "sm_100a", "--kernel", "first", "--report"]) == 0
    shown = capsys.readouterr().out
    assert "\nfirst on sm_100a\n" in shown
    assert "\nmufu " in shown
    assert "shared memory     120  operands 50, dS 70" in shown
    assert "Takes longest: shared memory. Tensor work: 1.25 of what is needed." in shown
    assert "Bytes of L2: 4,096 read a tile." in shown
    assert shown.count("Takes longest") == 2, "of both builds of that name"
    assert compiler == list(BUILDS[:2])


def test_json_goes_to_stdout_alone_or_to_a_file(
    compiler: list[Build], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compile", "--arch", "sm_100a", "--kernel", "first-ordered", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    (kernel,) = found["kernels"]
    assert (found["arch"], kernel["title"]) == ("sm_100a", "first-ordered")
    assert kernel["instructions"]["mufu"] == 1
    assert kernel["roofline"]["needed"] == 80
    assert kernel["tensor_columns"] == 256
    assert main([*command, str(tmp_path / "all.json")]) == 0
    assert json.loads((tmp_path / "all.json").read_text()) == found
    assert main([*command, str(tmp_path / "no" / "all.json")]) == 2


def test_out_gets_three_files_for_each_build(compiler: list[Build], tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    assert main(["compile", "--arch", "sm_100a", "--out", str(folder)]) == 0
    names = {"first", "first-ordered", "second"}
    endings = ("ptx", "cubin", "json")
    assert {path.name for path in folder.iterdir()} == {f"{n}.{e}" for n in names for e in endings}
    assert (folder / "first.ptx").read_text() == PTX
    assert (folder / "first.cubin").read_bytes() == b"cubin"
    roofline = json.loads((folder / "first.json").read_text())["roofline"]
    assert roofline["total"] == {"tensor": 100, "shared memory": 120}
    assert roofline["bound"] == "shared memory"


def test_a_folder_that_cannot_be_made_is_a_usage_error(
    compiler: list[Build], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "--arch", "sm_100a", "--out", "/proc/nowhere/out"]) == 2
    assert "--out /proc/nowhere/out: " in capsys.readouterr().err
    assert compiler == [], "said before the work starts"


@pytest.mark.parametrize("place", ["/nowhere/result.json", "/"])
def test_a_result_that_cannot_be_written_is_a_usage_error(
    place: str, compiler: list[Build], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "--arch", "sm_100a", "--json", place]) == 2
    assert f"--json {place}: " in capsys.readouterr().err
    assert compiler == [], "said before the work starts"


def test_an_arch_without_kernels_lists_those_that_have_some(
    compiler: list[Build], capsys: pytest.CaptureFixture[str]
) -> None:
    for arch in ("sm_80", "sm_100", "sm_100A", ""):
        assert main(["compile", "--arch", arch]) == 1
        said = capsys.readouterr().err
        assert f"openmsa compile: no kernel is written in the CuTe DSL for {arch}; " in said
        assert said.strip().endswith(", ".join(catalogue.MODULES))
        with pytest.raises(UnsupportedProblem):
            catalogue.builds(arch)
    assert compiler == []


def test_the_help_lists_the_architectures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--help"]) == 0
    assert f"of {', '.join(catalogue.MODULES)}" in " ".join(capsys.readouterr().out.split())


def test_every_architecture_has_kernels_of_its_own_name() -> None:
    for arch, modules in catalogue.MODULES.items():
        assert arch in ARCHITECTURES.values()
        assert len(modules) == len(set(modules)) > 0
    for arch, _ in catalogue.ROOFLINES:
        assert arch in catalogue.MODULES


def test_a_kernel_of_the_same_name_elsewhere_has_its_own_roofline() -> None:
    """Hopper's backward is not costed with Blackwell's pipes."""
    build = Build("backward", "sm_nowhere", (), lambda: (None, ()))
    assert catalogue.roofline(build) is None


def test_several_kernels_are_compiled_in_the_catalogues_order(
    compiler: list[Build], capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--kernel", "second", "--kernel", "first-ordered", "--kernel", "first-ordered"]
    assert main(["compile", "--arch", "sm_100a", *named]) == 0
    assert compiler == list(BUILDS[1:])
    compiler.clear()
    assert main(["compile", "--arch", "sm_100a", "--kernel", "first", "--kernel", "second"]) == 0
    assert compiler == list(BUILDS)


def test_one_unknown_kernel_among_several_is_refused_before_the_work(
    compiler: list[Build], capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--kernel", "first", "--kernel", "third"]
    assert main(["compile", "--arch", "sm_100a", *named]) == 1
    assert "no kernel 'third' for sm_100a; there are first" in capsys.readouterr().err
    assert compiler == []


def test_an_unknown_kernel_lists_those_there_are(
    compiler: list[Build], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "--arch", "sm_100a", "--kernel", "third"]) == 1
    said = capsys.readouterr().err
    assert "no kernel 'third' for sm_100a; there are first, first-ordered, second" in said


def test_an_arch_is_required() -> None:
    assert main(["compile"]) == 2


def test_without_the_dsl_it_says_what_to_install(
    compiler: list[Build], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise UnavailableError('Install them with: pip install "openmsa[cute]"')

    monkeypatch.setattr(catalogue, "require_cute_dsl", refuse)
    assert main(["compile", "--arch", "sm_100a"]) == 1
    assert 'pip install "openmsa[cute]"' in capsys.readouterr().err


def test_builds_that_no_fact_tells_apart_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="two builds of second do not differ"):
        catalogue.titles((BUILDS[2], BUILDS[2]))
    numbers = tuple(Build("k", "sm_100a", (("group", n),), lambda: (None, ())) for n in (4, 16))
    assert list(catalogue.titles(numbers)) == ["k-group-4", "k-group-16"]


@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("tvm_ffi") is None,
    reason="needs the CuTe DSL: pip install 'openmsa[cute]'",
)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_the_main_kernel_fits_and_issues_no_more_than_it_needs(arch: str, tmp_path: Path) -> None:
    """In a process of its own: the simulator needs one in which nothing was compiled before."""
    command = ["compile", "--arch", arch, "--kernel", "backward", "--json", "--out", "out"]
    outside = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    done = subprocess.run(
        [sys.executable, "-m", "openmsa", *command],
        capture_output=True, text=True, cwd=tmp_path,
        env={
            **outside, "PYTHONPATH": str(Path(openmsa.__file__).parents[1]),
            "OPENMSA_CACHE": str(tmp_path / "cache"),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kernels = {kernel["title"]: kernel for kernel in json.loads(done.stdout)["kernels"]}
    main_kernel = kernels["backward"]
    for kernel in kernels.values():
        assert not kernel["kept"]
        assert kernel["arch"] == arch
        for used in kernel["entries"]:
            assert used["stack"] == 0, "spills"
            assert used["shared"] + kernel["dynamic_shared"] <= 227 * 1024
            assert used["registers"] * 512 <= 65536
        assert kernel["tensor_columns"] <= 512
    assert main_kernel["tensor_columns"] == 512
    assert main_kernel["instructions"]["local"] == 0
    roofline = main_kernel["roofline"]
    assert roofline["needed"] == 2560
    assert roofline["total"]["tensor"] == 2560
    assert {path.name for path in tmp_path.iterdir()} == {"out", "cache"}
    assert f".target {arch}" in (tmp_path / "out" / "backward.ptx").read_text()
    assert (tmp_path / "out" / "backward.cubin").read_bytes()[:4] == b"\x7fELF"
    check_copies(tmp_path / "out" / "backward.cubin")
