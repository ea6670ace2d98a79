"""``openmsa verify``: table, JSON, exit status; and that it notices a broken backend."""

from __future__ import annotations

import argparse
import importlib
import json

import pytest
import torch

import openmsa
from openmsa.cli import verify as command
from openmsa.testing import problem
from openmsa.testing import verify as verify_function

# As an attribute of the package this name is the function.
verify_module = importlib.import_module("openmsa.testing.verify")

QUANTITIES = (
    "indices",
    "index_lse",
    "selection_slack",
    "selection_repeat",
    "key_schedule",
    "out",
    "lse",
    "dq",
    "dk",
    "dv",
    "unread_zeros",
    "slack",
    "repeat",
    "dq_out_only",
    "dk_out_only",
    "dv_out_only",
)


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="openmsa")
    command.add_parser(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args(["verify", *arguments])
    return args.run(args)


@pytest.fixture(autouse=True)
def two_problems(monkeypatch):
    """Two small problems instead of the suite; which suite was asked for stays visible."""
    asked: list[str] = []

    def few(suite: str):
        asked.append(suite)
        return (problem("one_token"), problem("rows_without_block"))

    monkeypatch.setattr(verify_module, "problems", few)
    return asked


def test_all_green(capsys, two_problems):
    assert call("--backend", "cpu", "--suite", "full", "--dtype", "bf16", "--dtype", "fp32") == 0
    header, *rows, blank, summary = capsys.readouterr().out.splitlines()
    assert header.split() == ["problem", "dtype", "quantity", "error", "eager", "bound", "ok"]
    assert blank == ""
    found = [row.split() for row in rows]
    assert [row[:3] for row in found] == [
        [name, dtype, quantity]
        for name in ("one_token", "rows_without_block")
        for dtype in ("bfloat16", "float32")
        for quantity in QUANTITIES
    ]
    assert {row[-1] for row in found} == {"yes"}
    assert summary.startswith(f"{len(rows)} ok, 0 failed, 0 skipped in ")
    assert "backend cpu, suite full" in summary
    assert two_problems == ["full"]


def test_the_reference_also_checks_its_tasks():
    case = problem("rows_without_block")
    names = [r.name for r in verify_module.verify_case(case, torch.float64, "reference")]
    assert names == [*QUANTITIES[:5], "tasks", *QUANTITIES[5:]]


def test_json_file_and_stdout(capsys, tmp_path):
    path = tmp_path / "verify.json"
    assert call("--backend", "cpu", "--dtype", "fp64", "--json", str(path)) == 0
    assert "problem" in capsys.readouterr().out
    assert call("--backend", "cpu", "--dtype", "fp64", "--json", "-") == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads(path.read_text())
    for result in (written, printed):
        assert (result["backend"], result["suite"], result["failed"]) == ("cpu", "smoke", 0)
        assert result["ok"] == len(result["reports"]) == 2 * len(QUANTITIES)
        report = result["reports"][5]
        assert (report["problem"], report["name"], report["dtype"]) == (
            "one_token",
            "out",
            "float64",
        )
        assert 0 <= report["error"] <= report["bound"]
    assert torch.__version__ in written["toolchain"]


def broken(quantity: str):
    """The public function with one thing wrong."""
    right = openmsa.sparse_attention

    def wrong(q, k, v, *args, **kwargs):
        if quantity == "dv":
            v = v.detach() + (v - v.detach()) * 1.01
        out, lse = right(q, k, v, *args, **kwargs)
        if quantity == "out":
            out = out + out.detach() * 0.02
        if quantity == "lse":
            lse = lse + 1e-3
        if quantity == "crash":
            raise RuntimeError("misaligned address")
        if quantity == "unread":
            out = out + 1e-30
        return out, lse

    return wrong


@pytest.mark.parametrize(
    ("quantity", "row"),
    [
        ("out", "out"),
        ("lse", "lse"),
        ("dv", "dv"),
        ("unread", "unread_zeros"),
        ("crash", "attention"),
    ],
)
def test_a_broken_backend_fails(capsys, monkeypatch, quantity, row):
    monkeypatch.setattr(verify_module, "sparse_attention", broken(quantity))
    assert call("--backend", "cpu", "--dtype", "fp32") == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line.split()[2] for line in lines if line.endswith(" NO")]
    assert row in failed
    assert set(failed) <= {row, f"{row}_out_only"}
    if quantity == "crash":
        assert "RuntimeError: misaligned address" in "\n".join(lines)
    assert f"{len(failed)} failed" in lines[-1]


def test_a_broken_selection_fails(capsys, monkeypatch):
    right = openmsa.select_blocks

    def wrong(*args, **kwargs):
        selection = right(*args, **kwargs)
        selection.indices[:, 129:130, 0] += 1
        return selection

    monkeypatch.setattr(verify_module, "select_blocks", wrong)
    assert call("--backend", "cpu", "--dtype", "fp32", "--json", "-") == 1
    result = json.loads(capsys.readouterr().out)
    failed = [r for r in result["reports"] if r["status"] == "failed"]
    assert {r["problem"] for r in failed} == {"rows_without_block"}
    # The lse is then that of other blocks than the indices say.
    assert [r["name"] for r in failed] == ["indices", "index_lse"]
    assert "query 129" in failed[0]["detail"]


def test_uninitialised_memory_fails(capsys, monkeypatch):
    right = openmsa.sparse_attention

    def wrong(*args, **kwargs):
        out, lse = right(*args, **kwargs)
        return out, torch.where(lse == float("-inf"), torch.empty_like(lse), lse)

    monkeypatch.setattr(verify_module, "sparse_attention", wrong)
    assert call("--backend", "cpu", "--dtype", "fp32") == 1
    assert "got nan, expected -inf" in capsys.readouterr().out


def test_what_is_refused_is_skipped_with_the_reason(capsys):
    refuses = next(
        name for name in ("cute", "triton") if all(r.status == "skipped" for r in _few(name))
    )
    assert call("--backend", refuses, "--dtype", "fp64") == 1
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if "skipped:" in line]
    assert len(rows) == 2 * 3
    assert all(f"skipped: {refuses}: " in row for row in rows)
    assert "0 ok, 0 failed, 6 skipped" in out
    assert "nothing could be checked" in out


def _few(backend: str) -> list:
    return list(verify_function("smoke", backend, [torch.float64], "cpu"))


def test_usage_errors(capsys, tmp_path):
    for arguments in (["--backend", "tpu"], ["--suite", "all"], ["--dtype", "int8"], ["--nope"]):
        with pytest.raises(SystemExit) as stop:
            call(*arguments)
        assert stop.value.code == 2
    assert call("--device", "nowhere") == 2
    assert "--device nowhere" in capsys.readouterr().err
    assert call("--json", str(tmp_path / "missing" / "x.json")) == 2
    assert "--json" in capsys.readouterr().err


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        call("--help")
    assert stop.value.code == 0
    assert "openmsa verify --backend cpu" in capsys.readouterr().out


def test_unknown_backend_or_suite_raises_at_once():
    with pytest.raises(openmsa.InvalidInput, match="backend"):
        verify_function("smoke", "tpu")
