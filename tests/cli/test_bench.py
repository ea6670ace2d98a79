"""``openmsa bench``: its table and numbers, and the selections it draws."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from openmsa import MINIMAX_M3, Documents, Selection, Topology, select_blocks
from openmsa.cli import dense
from openmsa.cli.dense import choose_blocks, why_not
from openmsa.cli.main import main
from openmsa.cli.selections import coherent_selection, random_selection
from openmsa.cli.step import draw
from openmsa.contract.selection import canonical_indices, own_blocks

TINY = Topology(q_heads=4, kv_heads=2, head_dim=16, index_dim=8, block_size=8, topk=4)


def _bench(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["bench", "--device", "cpu", "--json", "-", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--stage", "forward", "--tokens", "40,64", "--repeats", "2", "--device", "cpu"]
    assert main(["bench", *argv, "--backend", "cpu,reference"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith("forward, random selection, 64/4 heads")
    assert lines[1] == "median of 2 alternating runs, no warm-up"
    header = lines[3].split()
    assert header[:3] == ["queries", "median", "fastest"]
    names = [line.split()[:2] for line in lines[4:10]]
    assert names == [
        [name, size] for size in ("40", "64") for name in ("cpu", "reference", "dense")
    ]
    assert "forward 4*D*Hq*pairs, backward 10*D*Hq*pairs" in captured.out
    assert "pair ratio: causal pairs / selected pairs" in captured.out
    # A B A B: the two backends and dense attention take turns.
    turns = [line.split("queries, ")[1] for line in captured.err.splitlines()][:6]
    assert turns == [
        f"run {number} of 2: {name}" for number in (1, 2) for name in ("cpu", "reference", "dense")
    ]


@pytest.mark.parametrize("stage", ["forward", "backward", "step"])
def test_json(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = _bench(capsys, "--stage", stage, "--tokens", "64", "--repeats", "3")
    sparse, dense = found["rows"]
    assert (sparse["name"], sparse["ran"], dense["name"]) == ("auto", "cpu", "dense")
    for row in found["rows"]:
        assert 0 < row["fastest_seconds"] <= row["median_seconds"] <= row["slowest_seconds"]
        assert row["flops_per_second"] == pytest.approx(row["flops"] / row["median_seconds"])
    assert sparse["speedup"] == pytest.approx(dense["median_seconds"] / sparse["median_seconds"])
    pairs = 64 * 65 // 2
    products = {"forward": 4, "backward": 10, "step": 14}[stage]
    assert dense["flops"] == products * 128 * 64 * pairs
    scoring = 2 * 128 * 4 * pairs if stage == "step" else 0
    assert sparse["flops"] == dense["flops"] + scoring
    assert sparse["pair_ratio"] == 1.0
    assert sparse["share_of_pair_ratio"] == pytest.approx(sparse["speedup"])
    assert found["stage"] == stage


def test_selection_meets_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    found = _bench(capsys, "--stage", "select", "--tokens", "300", "--repeats", "1")
    sparse, torch_row = found["rows"]
    assert torch_row["name"] == "torch"
    assert sparse["speedup"] == pytest.approx(
        torch_row["median_seconds"] / sparse["median_seconds"]
    )
    # Both score every causal pair.
    assert sparse["flops"] == torch_row["flops"] == 2 * 128 * 4 * (300 * 301 // 2)
    assert sparse["pair_ratio"] == 1.0


def test_baseline_selects_the_same_blocks() -> None:
    t = Topology(8, 2, 16, 16, block_size=8, topk=3, init_blocks=1)
    x = draw(Documents.from_lengths([100]), t, torch.float64, seed=3)
    want = select_blocks(
        x.index_q, x.index_k, x.docs, topk=3, block_size=8, init_blocks=1, backend="reference"
    )
    chosen = choose_blocks(x.index_q, x.index_k[:, 0], t)
    block = torch.arange(13)
    for ids, canonical in zip(chosen.flatten(0, 1), want.indices.flatten(0, 1), strict=True):
        query_blocks = set(canonical[canonical >= 0].tolist())
        # Where fewer blocks are visible than top-k, the rest of the list is padding.
        assert query_blocks <= set(ids.tolist()) <= set(block.tolist())


def test_selection_that_would_not_fit_is_skipped() -> None:
    x = draw(Documents.from_lengths([40]), MINIMAX_M3, torch.float32, seed=0)
    long = replace(x, docs=Documents.from_lengths([200_000]))
    assert "would hold about" in why_not(long, "select", 0)
    assert why_not(x, "select", 0) == ""


@pytest.mark.parametrize("selection", ["coherent", "real"])
def test_other_selections(selection: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--stage", "forward", "--selection", selection, "--case", "0", "--repeats", "1")
    found = _bench(capsys, *argv, "--tokens", "32", "--against", "none")
    (row,) = found["rows"]
    assert row["tokens"] == 32
    assert row["speedup"] is None
    assert found["dense_skipped"] == {"32": "--against none"}


def test_slow_dense_attention_is_skipped_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dense, "expected_seconds", lambda x, causal, backward: 1e3)
    argv = ("--stage", "forward", "--tokens", "32", "--repeats", "1")
    found = _bench(capsys, *argv)
    assert "would take about 1000 s" in found["dense_skipped"]["32"]
    assert len(_bench(capsys, *argv, "--against", "dense")["rows"]) == 2


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.png"
    argv = ("--stage", "forward", "--tokens", "24,48", "--repeats", "1", "--plot", str(path))
    _bench(capsys, *argv)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--tokens", "0"], "0 is not 1 or more"),
        (["--tokens", "8,x"], "--tokens"),
        (["--backend", "cpu,abacus"], "'abacus' is none of auto"),
        (["--selection", "odd"], "invalid choice"),
        (["--repeats", "0"], "0 is not 1 or more"),
    ],
)
def test_usage_errors(extra: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *extra]) == 2
    assert message in capsys.readouterr().err


def test_a_backend_that_cannot_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--backend", "cpu,triton", "--tokens", "8"]) == 1
    error = capsys.readouterr().err
    assert "triton: " in error
    assert error.count("\n") == 1


DOCUMENTS = Documents.from_cu_seqlens(
    torch.tensor([0, 100, 130, 131, 160, 170]),
    torch.tensor([0, 100, 330, 331, 360, 364]),
    fragment_indices=torch.tensor([0, 0, 2, 3, 4]),
)


@pytest.mark.parametrize("pick", [random_selection, coherent_selection])
def test_selections_are_full_and_causal(pick: Any) -> None:
    selection: Selection = pick(DOCUMENTS, TINY, 0)
    own = own_blocks(DOCUMENTS, 8)
    indices = selection.indices
    assert indices.shape == (2, 170, 4)
    assert torch.equal(indices, canonical_indices(indices, DOCUMENTS, 8))
    taken = (indices >= 0).sum(-1)
    assert torch.equal(taken, (own + 1).clamp(max=4).expand(2, -1))
    assert torch.equal(indices.amax(-1), own.int().expand(2, -1))
    assert torch.equal(indices, pick(DOCUMENTS, TINY, 0).indices)
    assert not torch.equal(indices, pick(DOCUMENTS, TINY, 1).indices)


def _union(selection: Selection, first: int) -> int:
    """Distinct blocks of 8 neighbouring queries, KV head 0."""
    return int(selection.indices[0, first : first + 8].unique().numel())


def test_neighbours_agree_only_where_they_should() -> None:
    wide = Topology(q_heads=16, kv_heads=4, head_dim=16, index_dim=16)
    docs = Documents.from_cu_seqlens(torch.tensor([0, 512]), torch.tensor([0, 16384]))
    places = range(0, 512, 8)
    unions = {
        pick: sum(_union(pick(docs, wide, 0), first) for first in places) / len(places)
        for pick in (random_selection, coherent_selection)
    }
    assert 16 <= unions[coherent_selection] < 18
    assert unions[random_selection] > 60


def test_random_blocks_are_equally_likely() -> None:
    docs = Documents.from_cu_seqlens(torch.tensor([0, 4000]), torch.tensor([0, 8000]))
    wide = Topology(q_heads=4, kv_heads=4, head_dim=16, index_dim=16)
    early = random_selection(docs, wide, 0).indices[:, :, :-1]
    counts = torch.bincount(early[early >= 0].long(), minlength=63)[:32].double()
    assert float(counts.std() / counts.mean()) < 0.05
