"""Workload files: what they say, what is refused, and what cutting them keeps."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

import openmsa.workloads
from openmsa import Documents, InvalidInput
from openmsa.workloads import WORKLOADS, Case, count_pairs, load

CASES = load("cp16_192k")


def _raw() -> list[dict[str, Any]]:
    text = resources.files(openmsa.workloads).joinpath(WORKLOADS["cp16_192k"]).read_text()
    cases: list[dict[str, Any]] = json.loads(text)["cases"]
    return cases


def _seen(docs: Documents, queries: int) -> torch.Tensor:
    """First and last packed key row that each of the first queries sees, ``[queries, 2]``."""
    start = docs.layout.spans[:, 0].long()[docs.layout.entry_of_query()[:queries]]
    return torch.stack([start, start + docs.positions[:queries]], 1)


def test_the_built_in_cases_are_the_recorded_ones() -> None:
    raw = _raw()
    assert len(CASES) == len(raw) == 32
    for case, fields in zip(CASES, raw, strict=True):
        assert case.case_id == fields["case_id"]
        assert case.weight == fields["representative_weight"]
        assert list(case.cu_seqlens_q) == fields["cu_seqlens_q"]
        assert list(case.cu_seqlens_k) == fields["cu_seqlens_kv"]
        assert list(case.fragment_indices) == fields["fragment_indices"]


@pytest.mark.parametrize("number", range(32))
def test_recomputed_pairs_are_the_recorded_ones(number: int) -> None:
    fields, case = _raw()[number], CASES[number]
    docs = case.documents()
    expected = (fields["causal_elements"], fields["sparse_elements"])
    assert count_pairs(docs, 128, 16) == expected
    assert (case.causal_elements, case.sparse_elements) == expected
    assert docs.num_queries == fields["total_q"]
    assert docs.num_keys == fields["total_kv"]
    assert docs.max_seqlen_k == fields["max_seqlen_kv"]


def test_source_and_licence_are_named() -> None:
    readme = resources.files(openmsa.workloads).joinpath("README.md").read_text()
    for words in ("MiniMax-AI/MSA", "MIT License", "Copyright (c) 2026 MiniMax", "Shapes only"):
        assert words in readme


def test_count_pairs_by_enumeration() -> None:
    docs = Documents.from_cu_seqlens(
        torch.tensor([0, 5, 9, 9, 20]), torch.tensor([0, 30, 32, 40, 51])
    )
    causal = sparse = 0
    for position in docs.positions.tolist():
        if position < 0:
            continue
        causal += position + 1
        blocks = list(range(position // 4 + 1))
        kept = [*blocks[:-1][:2], blocks[-1]]
        sparse += sum(min(4, position + 1 - 4 * block) for block in kept)
    assert count_pairs(docs, block_size=4, topk=3) == (causal, sparse)


@pytest.mark.parametrize("number", [0, 10, 12, 14, 31])
@pytest.mark.parametrize("tokens", [1, 60, 61, 62, 1024, 1500, 2560, 12287, 12288, 99999])
def test_truncate_keeps_what_each_query_sees(number: int, tokens: int) -> None:
    case = CASES[number]
    cut = case.truncate(tokens)
    docs, whole = cut.documents(), case.documents()
    kept = min(tokens, case.num_queries)
    assert docs.num_queries == cut.num_queries == kept
    assert torch.equal(docs.positions, whole.positions[:kept])
    assert torch.equal(_seen(docs, kept), _seen(whole, kept))
    # No key is stored behind the last one in sight.
    assert docs.num_keys == int(_seen(docs, kept).max()) + 1
    assert (cut.causal_elements, cut.sparse_elements) == count_pairs(docs, 128, 16)


def test_truncate_to_all_is_the_same_case() -> None:
    assert CASES[3].truncate(12288) is CASES[3]


def test_truncate_refuses() -> None:
    with pytest.raises(InvalidInput, match="num_queries: expected 1 or more, got 0"):
        CASES[0].truncate(0)
    # Entry 1 repeats the last keys of entry 0, so shortening its keys would cut entry 0's.
    case = Case(0, 1, (0, 8, 16), (0, 16, 17), (0, 0), 0, 0)
    with pytest.raises(InvalidInput, match="does not cut entry 1"):
        case.truncate(10)


def test_a_file_needs_only_query_offsets(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"cases": [{"cu_seqlens_q": [0, 300, 310]}, {"cu_seqlens_q": [0, 7]}]}')
    first, second = load(path)
    assert first == Case(0, 1, (0, 300, 310), (0, 300, 310), (0, 1), 45205, 45205)
    assert second.case_id == 1
    assert load(str(path)) == [first, second]


GOOD = {"cu_seqlens_q": [0, 4, 8], "cu_seqlens_kv": [0, 4, 8], "fragment_indices": [0, 1]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "workload: expected a JSON file"),
        ("[]", "cases: expected a list of cases"),
        ("{}", "cases: expected a list of cases"),
        ({"cases": {}}, "cases: expected a list of cases"),
        ({"cases": [GOOD], "topk": 0}, "topk: expected an integer, 1 or more, got 0"),
        ({"cases": [GOOD], "block_size": "a"}, "block_size: expected an integer"),
        ({"cases": [GOOD, 3]}, r"cases\[1\]\.cu_seqlens_q: expected an object"),
        ({"cases": [{}]}, r"cases\[0\]\.cu_seqlens_q: expected a list of integers, got nothing"),
        ({"cases": [GOOD | {"cu_seqlens_q": []}]}, r"cu_seqlens_q: .*, got nothing"),
        ({"cases": [GOOD | {"cu_seqlens_q": "abc"}]}, r"cu_seqlens_q: .*, got str"),
        ({"cases": [GOOD | {"cu_seqlens_q": [0, 1.5, 8]}]}, r"cu_seqlens_q: .*, got 1.5"),
        ({"cases": [GOOD | {"cu_seqlens_q": [0, 2**70, 8]}]}, r"cu_seqlens_q: .* of 32 bits"),
        ({"cases": [GOOD | {"cu_seqlens_q": [0, 9, 8]}]}, r"cases\[0\]\.cu_seqlens_q"),
        ({"cases": [GOOD | {"cu_seqlens_kv": [0, 9, 8]}]}, r"cases\[0\]\.cu_seqlens_kv"),
        ({"cases": [GOOD | {"cu_seqlens_kv": [0, 8]}]}, r"cases\[0\]\.cu_seqlens_kv"),
        ({"cases": [GOOD | {"fragment_indices": [1, 0]}]}, r"cases\[0\]\.fragment_indices"),
        ({"cases": [GOOD | {"fragment_indices": [0]}]}, r"cases\[0\]\.fragment_indices"),
        ({"cases": [GOOD | {"case_id": -1}]}, r"case_id: expected an integer, 0 or more"),
        ({"cases": [GOOD | {"representative_weight": True}]}, "representative_weight: .*True"),
        ({"cases": [GOOD | {"causal_elements": 21}]}, "causal_elements: expected 20, .*got 21"),
        ({"cases": [GOOD | {"sparse_elements": 19}]}, "sparse_elements: expected 20, .*got 19"),
    ],
)
def test_a_malformed_file_names_the_field(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InvalidInput, match=message):
        load(path)


def test_an_unknown_workload_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cp16_192k\) or a JSON file, got 'nowhere'.*No such"):
        load("nowhere")
    with pytest.raises(InvalidInput, match="directory"):
        load(tmp_path)
