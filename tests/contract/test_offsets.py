"""Documents and query fragments from packed offsets: right ones, and every wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from openmsa import Documents

from . import slow
from .messages import refuses
from .slow import summary, tensor


@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        ([0], None),
        ([0, 5], None),
        ([0, 3, 3, 3, 10], None),
        ([0, 0, 0], None),
        ([0, 2, 4], [0, 5, 9]),
        ([0, 0, 128], [0, 128, 256]),
        ([0, 0, 1208, 2048, 2048], [0, 2538, 4280, 5120, 8192]),
        ([0, 0, 0, 1023], [0, 0, 1, 2046]),
        ([0, 4, 9], [0, 1, 3]),
        ([0, 4, 4], [0, 0, 7]),
    ],
    ids=[
        "no_documents",
        "one",
        "repeated_offsets",
        "only_empty",
        "suffixes",
        "no_queries_in_one",
        "no_queries_at_both_ends",
        "no_keys_in_one",
        "more_queries_than_keys",
        "queries_without_keys",
    ],
)
def test_offsets(cu_q, cu_k):
    """flash-attention#2562, #2421 and #1254: the offsets that hung or crashed backward passes."""
    docs = Documents.from_cu_seqlens(tensor(cu_q), None if cu_k is None else tensor(cu_k))
    slow.from_offsets(cu_q, cu_k).check(docs)


def test_positions_of_more_queries_than_keys():
    """flash-attention#443: three documents of one key; only the last query of each sees it."""
    docs = Documents.from_cu_seqlens(tensor([0, 76, 110, 256]), tensor([0, 1, 2, 3]))
    seen = (docs.positions >= 0).nonzero().flatten().tolist()
    assert seen == [75, 109, 255]
    assert docs.positions[seen].tolist() == [0, 0, 0]
    assert docs.positions[0] == -75


def test_repeated_offsets_are_an_empty_document():
    """fla#103: cu_seqlens [0, 128, 128, 256] crashed."""
    docs = Documents.from_cu_seqlens(tensor([0, 128, 128, 256]))
    assert docs.num_documents == 3
    assert docs.positions.tolist() == [*range(128), *range(128)]


def strided(values, dtype):
    wide = torch.full((len(values), 3), 77, dtype=dtype)
    wide[:, 1] = tensor(values, dtype)
    assert not wide[:, 1].is_contiguous()
    return wide[:, 1]


@pytest.mark.parametrize("form", ["contiguous", "strided", "sliced"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_any_form(dtype, form):
    """MiniMax-AI/MSA takes int32, contiguous, same device only; here all of them are converted."""
    cu_q, cu_k = [0, 2, 2, 6], [0, 4, 5, 11]
    make = {
        "contiguous": tensor,
        "strided": strided,
        "sliced": lambda values, dtype: tensor([9, *values, 1], dtype)[1:-1],
    }[form]
    docs = Documents.from_cu_seqlens(make(cu_q, dtype), make(cu_k, dtype))
    slow.from_offsets(cu_q, cu_k).check(docs)
    mixed = Documents.from_cu_seqlens(make(cu_q, dtype), tensor(cu_k, torch.int32))
    assert summary(mixed) == summary(docs)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "argument", "got"),
    [
        (tensor([1, 3]), None, "cu_seqlens_q", "1"),
        (tensor([-1, 3]), None, "cu_seqlens_q", "-1"),
        (tensor([0, 5, 3]), None, "cu_seqlens_q", "5 then 3"),
        (tensor([0, 5, 3]), tensor([0, 5, 9]), "cu_seqlens_q", "5 then 3"),
        (tensor([0, 5]), tensor([2, 5]), "cu_seqlens_k", "2"),
        (tensor([0, 5, 8]), tensor([0, 5, 4]), "cu_seqlens_k", "5 then 4"),
        (tensor([0, 5]), tensor([0, 5, 9]), "cu_seqlens_k", "3"),
        (tensor([0, 5, 9]), tensor([0]), "cu_seqlens_k", "1"),
        (torch.empty(0, dtype=torch.int32), None, "cu_seqlens_q", "empty"),
        (tensor([0, 5]), torch.empty(0, dtype=torch.int32), "cu_seqlens_k", "empty"),
        (torch.tensor([0.0, 5.0]), None, "cu_seqlens_q", "float32"),
        (torch.tensor([False, True]), None, "cu_seqlens_q", "bool"),
        (tensor([0, 5]), torch.tensor([0.0, 5.0]), "cu_seqlens_k", "float32"),
        (tensor([[0, 5]]), None, "cu_seqlens_q", "(1, 2)"),
        (torch.tensor(0), None, "cu_seqlens_q", "()"),
        (tensor([0, 5]), tensor([[0, 5]]), "cu_seqlens_k", "(1, 2)"),
        (tensor([0, 2**31]), None, "tokens", str(2**31)),
        (tensor([0, 1]), tensor([0, 2**31]), "tokens", str(2**31)),
    ],
    ids=[
        "q_starts_at_1",
        "q_starts_negative",
        "q_falls",
        "q_falls_beside_k",
        "k_starts_at_2",
        "k_falls",
        "k_longer",
        "k_shorter",
        "q_empty",
        "k_empty",
        "q_float",
        "q_bool",
        "k_float",
        "q_2d",
        "q_0d",
        "k_2d",
        "q_past_int32",
        "k_past_int32",
    ],
)
def test_malformed_offsets_are_refused(cu_q, cu_k, argument, got):
    with refuses(argument, got):
        Documents.from_cu_seqlens(cu_q, cu_k)


def test_a_falling_offset_is_named_by_its_document():
    with refuses("cu_seqlens_q", "document 2"):
        Documents.from_cu_seqlens(tensor([0, 5, 9, 8, 10]))


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "fragments"),
    [
        ([0, 4, 8, 12], [0, 4, 8, 12], [0, 1, 2]),
        ([0, 4, 8, 12], [0, 4, 8, 12], [0, 0, 0]),
        ([0, 4, 6, 9], [0, 6, 10, 15], [0, 0, 2]),
        ([0, 2, 3, 5, 9], [0, 7, 12, 20, 40], [0, 0, 2, 2]),
        ([0, 2, 2, 5], [0, 3, 7, 9], [0, 0, 0]),
        ([0], [0], []),
    ],
    ids=[
        "whole_documents",
        "one_document_in_three",
        "two_and_one",
        "two_and_two",
        "empty_fragment",
        "none",
    ],
)
def test_fragments_see_the_keys_before_them(cu_q, cu_k, fragments):
    docs = Documents.from_cu_seqlens(tensor(cu_q), tensor(cu_k), fragment_indices=tensor(fragments))
    slow.from_offsets(cu_q, cu_k, fragments).check(docs)


def test_fragments_of_one_document_give_the_document_back():
    """Queries 0..9 cut at 4 and 5: the fragments' positions are those of the whole document."""
    whole = Documents.from_lengths([10])
    cut = tensor([0, 4, 5, 10])
    docs = Documents.from_cu_seqlens(cut, cut, fragment_indices=tensor([0, 0, 0]))
    assert torch.equal(docs.positions, whole.positions)
    assert docs.max_seqlen_k == 10


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_fragment_indices_of_any_form(dtype):
    docs = Documents.from_cu_seqlens(
        tensor([0, 1, 3]), tensor([0, 4, 6]), fragment_indices=strided([0, 0], dtype)
    )
    slow.from_offsets([0, 1, 3], [0, 4, 6], [0, 0]).check(docs)


@pytest.mark.parametrize(
    ("fragments", "words"),
    [
        ([0, 0], ["3", "2"]),
        ([0, 0, 0, 0], ["3", "4"]),
        ([-1, 0, 0], ["-1", "entry 0"]),
        ([0, 2, 2], ["2", "entry 1"]),
        ([0, 0, 99], ["99", "entry 2"]),
        ([0, 0, 1], ["1", "entry 2"]),
        ([0, 1, 0], ["0", "entry 2"]),
    ],
    ids=[
        "too_few",
        "too_many",
        "negative",
        "points_ahead",
        "out_of_range",
        "points_at_a_later_fragment",
        "interrupted_by_another_document",
    ],
)
def test_fragments_that_are_none_are_refused(fragments, words):
    """The last one would let entry 2 read entry 1's keys, another document's."""
    cu = tensor([0, 4, 8, 12])
    with refuses("fragment_indices", *words):
        Documents.from_cu_seqlens(cu, cu, fragment_indices=tensor(fragments))


@pytest.mark.parametrize(
    ("fragments", "got"),
    [(torch.tensor([0.0, 0.0]), "float32"), (tensor([[0, 0]]), "(1, 2)")],
    ids=["float", "2d"],
)
def test_fragment_indices_are_an_integer_vector(fragments, got):
    cu = tensor([0, 4, 8])
    with refuses("fragment_indices", got):
        Documents.from_cu_seqlens(cu, cu, fragment_indices=fragments)


# Rank-local shapes of real 192K-token training steps under context parallelism of 16, from
# MiniMax-AI/MSA (MIT), with the counts that were derived from them there.
RANKS = json.loads((Path(__file__).parent / "cp16_ranks.json").read_text())


@pytest.mark.parametrize("rank", RANKS, ids=[str(rank["case_id"]) for rank in RANKS])
def test_real_context_parallel_ranks(rank):
    """Causal elements and key blocks counted from our positions are the published ones."""
    fragments = rank["fragment_indices"]
    docs = Documents.from_cu_seqlens(
        tensor(rank["cu_seqlens_q"]),
        tensor(rank["cu_seqlens_kv"]),
        fragment_indices=tensor(fragments),
    )
    slow.from_offsets(rank["cu_seqlens_q"], rank["cu_seqlens_kv"], fragments).check(docs)
    assert int((docs.positions + 1).sum()) == rank["causal_elements"]
    # An entry's last query sits on its last key, so it counts the key blocks of the entry.
    last = docs.positions[docs.cu_seqlens_q[1:].long() - 1]
    assert int((last // 128 + 1).sum()) == rank["total_rows"]
    assert docs.num_queries == rank["total_q"]
    assert docs.num_keys == rank["total_kv"]
    assert docs.max_seqlen_q == rank["max_seqlen_q"]
    assert docs.max_seqlen_k == rank["max_seqlen_kv"]
