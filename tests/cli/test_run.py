"""``openmsa run``: what it measures and checks, what it refuses, and that its check can fail."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from openmsa import MINIMAX_M3, Documents, Topology
from openmsa.cli import accuracy, dense, measure, options, run
from openmsa.cli.main import main
from openmsa.cli.step import Operands, Step, draw, sparse_step
from openmsa.reference.dense import dense_attention, dense_mask
from openmsa.workloads import load

SMALL = ["--case", "0", "--tokens", "32", "--device", "cpu"]
TINY = Topology(q_heads=4, kv_heads=2, head_dim=16, index_dim=8, block_size=8, topk=3)


def _documents() -> Documents:
    """A document of two fragments that share keys, a square one, and one with blind queries."""
    return Documents.from_cu_seqlens(
        torch.tensor([0, 20, 45, 75, 85]),
        torch.tensor([0, 33, 70, 100, 106]),
        fragment_indices=torch.tensor([0, 0, 2, 3]),
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of two documents, deep enough that not every block is read."""
    folder = tmp_path_factory.mktemp("run")
    argv = ["run", "--tokens", "96", "--device", "cpu", "--json", str(folder / "a.json")]
    assert main([*argv, "--plot", str(folder / "a.png")]) == 0
    return json.loads((folder / "a.json").read_text()), folder


def test_json_has_every_stage(result: tuple[dict[str, Any], Path]) -> None:
    found, _ = result
    stages = {row["stage"]: row for row in found["stages"]}
    assert list(stages) == [
        *("documents", "select", "forward", "backward", "step"),
        *("dense forward", "dense backward", "dense step"),
    ]
    case = load("cp16_192k")[options.DEFAULT_CASE].truncate(96)
    assert found["case"] == options.DEFAULT_CASE
    assert found["case_id"] == case.case_id
    assert (found["queries"], found["documents"]) == (96, 2)
    assert found["sparse_pairs"] == case.sparse_elements < case.causal_elements
    assert stages["select"]["flops"] == 2 * 128 * 4 * case.causal_elements
    assert stages["forward"]["flops"] == 4 * 128 * 64 * case.sparse_elements
    assert stages["backward"]["flops"] == 10 * 128 * 64 * case.sparse_elements
    assert stages["dense backward"]["flops"] == 10 * 128 * 64 * case.causal_elements
    for row in stages.values():
        assert row["seconds"] > 0
        assert row["peak_bytes"] > 2**20
    names = ("select", "forward", "backward")
    ours = sum(stages[name]["seconds"] for name in ("documents", *names))
    assert stages["step"]["seconds"] == pytest.approx(ours)
    assert found["speedup"]["step"] == pytest.approx(stages["dense step"]["seconds"] / ours)


def test_results_are_checked(result: tuple[dict[str, Any], Path]) -> None:
    found, _ = result
    assert [report["name"] for report in found["accuracy"]] == ["out", "dq", "dk", "dv"]
    for report in found["accuracy"]:
        assert report["status"] == "ok"
        assert 0 < report["error"] <= report["bound"]
        assert report["eager_error"] > 0
    assert found["ok"]


def test_the_plot_is_a_png(result: tuple[dict[str, Any], Path]) -> None:
    data = (result[1] / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 20_000


def test_tables_on_stdout_and_progress_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL]) == 0
    captured = capsys.readouterr()
    for words in ("case 0 (recorded as 516): 32 queries", "64/4 heads", "float32 on", "'cpu'"):
        assert words in captured.out
    lines = captured.out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("select", "dq", "dense st"))]
    assert "useful work: forward 4*D*Hq*pairs, backward 10*D*Hq*pairs" in captured.out
    assert "speed over dense attention in the same run: forward" in captured.out
    assert "forward" in captured.err
    assert "dense attention" in captured.err


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64"])
def test_json_alone_on_stdout(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", *SMALL, "--dtype", dtype, "--no-dense", "--json", "-"]
    assert main([*argv, "--backend", "reference"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == str(options.DTYPES[dtype]).removeprefix("torch.")
    assert found["backends"] == {"select": "reference", "attention": "reference"}
    assert found["dense_skipped"] == "--no-dense"
    assert found["speedup"] == {}


def test_a_file_is_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"cases": [{"cu_seqlens_q": [0, 30, 31]}]}')
    assert main(["run", "--workload", str(path), "--no-dense", "--device", "cpu"]) == 0
    assert "case 0 (recorded as 0): 31 queries in 2 fragments of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            ["--workload", "nowhere"],
            "workload: expected a built-in name (cp16_192k) or a JSON file",
        ),
        (["--case", "99"], "--case: expected 0..31 in cp16_192k, got 99"),
        (["--backend", "triton"], "triton: "),
    ],
)
def test_work_that_cannot_be_done_is_1(
    extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *SMALL, *extra]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_file_has_its_own_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"block_size": 8, "topk": 2, "cases": [{"cu_seqlens_q": [0, 40]}]}')
    argv = ["run", "--workload", str(path), "--no-dense", "--device", "cpu", "--json", "-"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    pairs = sum(position + 1 if position < 16 else 9 + position % 8 for position in range(40))
    assert (found["block_size"], found["topk"], found["sparse_pairs"]) == (8, 2, pairs)
    bench = ["bench", *argv[1:3], "--selection", "real", "--stage", "forward", "--tokens", "30"]
    assert main([*bench, "--repeats", "1", "--device", "cpu"]) == 0
    assert "blocks of 8, top-2" in capsys.readouterr().out


@pytest.mark.parametrize("offsets", [[0], [0, 0]])
def test_a_case_without_pairs_is_1(
    offsets: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.json"
    path.write_text(json.dumps({"cases": [{"cu_seqlens_q": offsets}]}))
    assert main(["run", "--workload", str(path), "--device", "cpu"]) == 1
    assert "expected a query that sees a key, got none" in capsys.readouterr().err


def test_a_malformed_file_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"cases": [{"cu_seqlens_q": [0, 9, 8]}]}')
    assert main(["run", "--workload", str(path)]) == 1
    assert "cases[0].cu_seqlens_q: expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--tokens", "0"], "0 is not 1 or more"),
        (["--case", "-1"], "-1 is not 0 or more"),
        (["--dense", "--no-dense"], "not allowed with"),
        (["--device", "abacus"], "--device abacus"),
        (["--dtype", "int8"], "invalid choice"),
        (["--json", "/no/such/place.json"], "there is no directory"),
        (["--json", "/"], "is a directory"),
        (["--plot", "step.bmp"], "ends in .png, .pdf or .svg"),
    ],
)
def test_usage_errors_come_before_the_work(
    extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *SMALL, *extra]) == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_the_work(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None;"
        "from openmsa.cli.main import main;"
        f"raise SystemExit(main(['run', '--plot', {str(tmp_path / 'a.png')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("openmsa run: --plot needs matplotlib")
    assert 'pip install "openmsa[plot]"' in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_slow_dense_attention_is_skipped_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "expected_seconds", lambda x, causal: 1234.5)
    assert main(["run", *SMALL]) == 0
    assert "dense attention was not run: it would take about 123" in capsys.readouterr().out
    assert main(["run", *SMALL, "--dense"]) == 0
    assert "speed over dense attention" in capsys.readouterr().out


def test_a_wrong_result_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Step:
        step = sparse_step(*args, **kwargs)
        assert step.out is not None
        step.out += 1e-3
        return step

    monkeypatch.setattr(run, "sparse_step", wrong)
    assert main(["run", *SMALL, "--no-dense"]) == 1
    assert "NO: element" in capsys.readouterr().out


@pytest.fixture(scope="module")
def step() -> tuple[Operands, Step]:
    x = draw(_documents(), TINY, torch.float32, 0)
    return x, sparse_step(x, "reference")


@pytest.mark.parametrize("seed", range(5))
def test_the_check_accepts_the_truth(step: tuple[Operands, Step], seed: int) -> None:
    assert all(report.ok for report in accuracy.check(*step, seed))


def _break_out(step: Step) -> None:
    assert step.out is not None
    step.out[:] *= 1.0001


BREAKAGES: dict[str, Callable[[Step], object]] = {
    "out": _break_out,
    "dq": lambda step: step.grads[0].mul_(1.0001),
    "dk": lambda step: step.grads[1].mul_(1.0001),
    "dv": lambda step: step.grads[2].mul_(1.0001),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_the_check_notices(step: tuple[Operands, Step], name: str) -> None:
    x, right = step
    assert right.out is not None
    wrong = Step(right.selection, right.out.clone(), tuple(g.clone() for g in right.grads))
    BREAKAGES[name](wrong)
    assert [report.name for report in accuracy.check(x, wrong, 0) if not report.ok] == [name]


def test_the_check_notices_a_forgotten_query() -> None:
    """A reader whose share is missing from dk and dv: what a broken schedule would lose."""
    docs = Documents.from_lengths([40])
    x = draw(docs, TINY, torch.float32, 0)
    step = sparse_step(x, "reference")
    last = torch.full_like(step.selection.indices[:, -1:], -1)
    step.selection.indices[:, -1:] = last
    short = sparse_step(x, "reference", step.selection)
    full = sparse_step(x, "reference")
    reports = accuracy.check(x, Step(full.selection, full.out, short.grads), 3)
    assert not all(report.ok for report in reports)


@pytest.mark.parametrize(("n", "m"), [(9, 9), (1, 9), (5, 300), (64, 65)])
def test_dense_attention_is_the_causal_suffix(n: int, m: int) -> None:
    docs = Documents.from_cu_seqlens(torch.tensor([0, n]), torch.tensor([0, m]))
    x = draw(docs, TINY, torch.float64, 0)
    every = torch.arange(-(-m // 8)).expand(2, n, -1)
    mask = dense_mask(every, docs.layout, m, 8)
    expected, _ = dense_attention(x.q, x.k, x.v, mask, TINY.head_dim**-0.5)
    torch.testing.assert_close(dense.attend(x.q, x.k, x.v), expected)


def test_dense_attention_counts_every_pair_once() -> None:
    x = draw(_documents(), TINY, torch.float32, 0)
    pairs: list[int] = []
    costs = dense.dense_step(x, after=pairs.append)
    assert sum(pairs) == int((x.docs.positions.clamp(min=-1) + 1).sum())
    assert set(costs) == {"forward", "backward"}
    assert set(dense.dense_step(x, backward=False)) == {"forward"}
    assert 0 < dense.expected_seconds(x, sum(pairs)) < 1


@pytest.mark.parametrize("sampled", [False, True])
def test_peak_memory_is_seen(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if sampled:
        monkeypatch.setattr(measure, "_reset_high_water", lambda: False)
    elif not measure._reset_high_water():
        pytest.skip("this system does not let a process reset its high-water mark")
    before = measure._status("VmRSS") or 0
    size = 2**28
    _, cost = measure.measure(torch.device("cpu"), lambda: torch.ones(size // 4).amax())
    assert cost.peak_bytes is not None
    assert 0.8 * size < cost.peak_bytes - before < 2 * size


def test_costs_add_up() -> None:
    total = measure.Cost(1.0, 5).plus(measure.Cost(2.0, None))
    assert total == measure.Cost(3.0, 5)
    assert measure.Cost(1.0, None).plus(measure.Cost(1.0, None)).peak_bytes is None


def test_the_device_follows_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(device=None, error=pytest.fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert options.device_of(args, ("auto", "cpu")) == torch.device("cpu")
    assert options.device_of(args, ("reference",)) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert options.device_of(args, ("auto",)) == torch.device("cpu")


def test_operands_have_the_model_s_shapes() -> None:
    x = draw(Documents.from_lengths([3]), MINIMAX_M3, torch.bfloat16, 1)
    again = draw(Documents.from_lengths([3]), MINIMAX_M3, torch.bfloat16, 1)
    assert x.q.shape == x.d_out.shape == (3, 64, 128)
    assert x.k.shape == x.v.shape == x.index_q.shape == (3, 4, 128)
    assert x.index_k.shape == (3, 1, 128)
    assert torch.equal(x.q, again.q)
    assert not torch.equal(x.q, x.d_out)
