"""`python -m ptxsim run|lint|ops`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

from ptxsim.cli import main

SAXPY = harness.kernel(
    """
    mov.u32 %i, %ctaid.x; mov.u32 %t, %ntid.x; mul.lo.u32 %i, %i, %t;
    mov.u32 %t, %tid.x; add.u32 %i, %i, %t;
    ld.param.u32 %t, [n];
    setp.ge.u32 %p, %i, %t;
    @%p ret;
    ld.param.u64 %x, [x]; mad.wide.u32 %x, %i, 4, %x;
    ld.param.u64 %y, [y]; mad.wide.u32 %y, %i, 4, %y;
    ld.param.f32 %a, [a];
    ld.global.f32 %u, [%x]; ld.global.f32 %v, [%y];
    fma.rn.f32 %v, %a, %u, %v;
    st.global.f32 [%y], %v;
    """,
    [".u64 x", ".u64 y", ".f32 a", ".u32 n"],
    ".reg .b32 %i, %t; .reg .f32 %a, %u, %v; .reg .b64 %x, %y; .reg .pred %p;",
    name="saxpy",
)


def launch_file(folder: Path, **changes: Any) -> Path:
    plan: dict[str, Any] = {
        "grid": 2,
        "block": 64,
        "args": [
            {"dtype": "float32", "shape": [100], "fill": "arange"},
            {"dtype": "float32", "shape": [100], "fill": 1, "save": str(folder / "y.npy")},
            2.0,
            100,
        ],
    }
    path = folder / "launch.json"
    path.write_text(json.dumps({**plan, **changes}))
    return path


def ptx_file(folder: Path, text: str = SAXPY) -> str:
    path = folder / "kernel.ptx"
    path.write_text(text)
    return str(path)


def test_run_executes_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["run", ptx_file(tmp_path), "--args", str(launch_file(tmp_path))])
    out = capsys.readouterr().out
    assert status == 0
    assert "warp instructions, simulated" in out
    assert "args[1]: float32[100], min 1, mean 100, max 199, 0 NaN" in out
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), 2 * np.arange(100) + 1)


def test_run_shows_the_failing_warp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the bound check, the second block's last warp leaves the arrays."""
    text = SAXPY.replace("@%p ret;", "")
    path = launch_file(tmp_path)
    status = main(["run", ptx_file(tmp_path, text), "--args", str(path), "--trace", "4"])
    out = capsys.readouterr().out
    assert status == 1
    assert out.startswith("OutOfBounds: global bytes")
    assert "the last instructions of warp 1 of CTA (1, 0, 0):" in out
    rows = out[out.index("the last instructions") :].splitlines()[1:]
    instructions = [r for r in rows if not r.startswith("        ")]
    assert len(instructions) == 4
    assert instructions[-1].split(None, 1)[1] == "ld.global.f32 %u, [%x]"
    assert "ld.param.f32 %a, [a]" in instructions[-2]
    assert "%a = 0x40000000" in rows[rows.index(instructions[-2]) + 1]


def test_the_trace_of_a_divergent_warp_shows_its_lanes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
    mov.u32 %i, %laneid; setp.lt.u32 %p, %i, 4;
    @!%p bra DONE;
    ld.global.b32 %i, [%x];
    DONE:
    """
    text = harness.kernel(body, [], ".reg .b32 %i; .reg .pred %p; .reg .b64 %x;")
    path = launch_file(tmp_path, args=[], grid=1, block=32)
    assert main(["run", ptx_file(tmp_path, text), "--args", str(path)]) == 1
    out = capsys.readouterr().out
    assert "ld.global.b32 %i, [%x]  lanes 0x0000000f" in out


def test_strict_and_seed_reach_the_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "mov.u32 %i, %laneid; div.u32 %i, %i, 0;"
    text = harness.kernel(body, [], ".reg .b32 %i;")
    path = launch_file(tmp_path, args=[], grid=1, block=32)
    assert main(["run", ptx_file(tmp_path, text), "--args", str(path), "--seed", "3"]) == 0
    assert "warning: div by zero" in capsys.readouterr().out
    assert main(["run", ptx_file(tmp_path, text), "--args", str(path), "--strict"]) == 1
    assert "InvalidOperand: div by zero" in capsys.readouterr().out


def test_ops_counts_forms_and_names_what_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ops", ptx_file(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "      2  ld.global.f32\n" in out
    assert out.endswith("all supported\n")
    text = SAXPY.replace("fma.rn.f32", "fma.rs.f32").replace("ret;\n}", "tex.2d;\nret;\n}")
    assert main(["ops", ptx_file(tmp_path, text)]) == 1
    out = capsys.readouterr().out
    assert "fma.rs.f32    UNSUPPORTED" in out
    line = next(n for n, row in enumerate(text.split("\n"), 1) if "fma.rs" in row)
    assert f"fma.rs.f32: needs one of .rn, .rz, .rm, .rp (lines {line})" in out
    assert "tex.2d: no such instruction here" in out


def test_lint_lists_errors_and_suspicions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", ptx_file(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    unread = SAXPY.replace("ld.param.f32 %a, [a];", "")
    name = ptx_file(tmp_path, unread)
    assert main(["lint", name]) == 0
    line = next(n for n, row in enumerate(unread.split("\n"), 1) if "fma.rn" in row)
    out = capsys.readouterr().out
    assert out == f"{name}:{line}: note: %a may be read before it is written\n"
    assert main(["lint", ptx_file(tmp_path, SAXPY.replace("fma.rn", "fma.rs"))]) == 1
    assert "error: fma.rs.f32: needs one of .rn" in capsys.readouterr().out


def test_lint_notes_what_is_opened_and_never_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
    .shared .align 4 .b32 slot;
    mov.u32 %i, slot;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%i], 32;
    """
    main(["lint", ptx_file(tmp_path, harness.kernel(body, [], ".reg .b32 %i;"))])
    assert "tensor memory is allocated and never freed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grdi": 1}, "unknown keys ['grdi']"),
        ({"args": []}, "saxpy takes 4 arguments, 0 given"),
        ({"args": [{"shape": [4], "fill": "ones"}, 1, 1, 1]}, "fill 'ones'"),
        ({"args": ["x", 1, 1, 1]}, "a number or an object is needed"),
        ({"kernel": "other"}, "no kernel 'other'"),
        ({"grid": 0}, "grid (0, 1, 1)"),
    ],
)
def test_a_wrong_description_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    path = launch_file(tmp_path, **changes)
    assert main(["run", ptx_file(tmp_path), "--args", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_ptx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", ptx_file(tmp_path, "int main() {}\n")]) == 1
    err = capsys.readouterr().err
    assert "kernel.ptx" in err
    assert "line 1" in err
    assert main(["ops", str(tmp_path / "absent.ptx")]) == 2


def test_bfloat16_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [{"dtype": "bfloat16", "shape": [2, 3], "fill": 1.5}, {"bytes": "0000803f"}, 1]
    text = harness.kernel("", [".u64 x", ".f32 y", ".u32 z"])
    path = launch_file(tmp_path, args=args, grid=1, block=32)
    assert main(["run", ptx_file(tmp_path, text), "--args", str(path)]) == 0
    assert "args[0]: bfloat16[2, 3], min 1.5, mean 1.5, max 1.5, 0 NaN" in capsys.readouterr().out


def test_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ptxsim", "ops", ptx_file(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "all supported" in done.stdout


def test_races_are_looked_for_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
    .shared .align 4 .b32 slot;
    mov.u32 %t, %tid.x; mov.u32 %s, slot;
    st.shared.b32 [%s], %t;
    """
    text = harness.kernel(body, [], ".reg .b32 %t, %s;")
    path = launch_file(tmp_path, args=[], grid=1, block=64)
    assert main(["run", ptx_file(tmp_path, text), "--args", str(path)]) == 0
    capsys.readouterr()
    assert main(["run", ptx_file(tmp_path, text), "--args", str(path), "--races"]) == 1
    assert capsys.readouterr().out.startswith("DataRace")
