"""Documents: every constructor against plain loops, and every input it refuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openmsa import Documents, InvalidInput

from . import slow
from .messages import refuses

STABLE = settings(max_examples=60, deadline=None, derandomize=True)


def tensor(rows, dtype=torch.int64):
    return torch.tensor(rows, dtype=dtype)


def summary(docs: Documents) -> tuple:
    """All that is promised about documents, for equality."""
    tensors = (docs.cu_seqlens_q, docs.cu_seqlens_k, docs.positions, docs.token_rows)
    sizes = (docs.num_documents, docs.num_queries, docs.num_keys)
    return (*(x.tolist() for x in tensors), *sizes, docs.max_seqlen_q, docs.max_seqlen_k)


# --- from_ids ---------------------------------------------------------------------------------


def test_ids_are_names_not_numbers():
    """Ids 42, 7 and 9, reused across rows, unordered and with padding before, between, after."""
    ids = tensor([[42, 42, 7, 0, 0, 9], [0, 7, 7, 42, 42, 42], [9, 0, 42, 42, 42, 42]])
    docs = Documents.from_ids(ids)
    runs = [(0, 2), (2, 1), (5, 1), (7, 2), (9, 3), (12, 1), (14, 4)]
    slow.from_runs(runs).check(docs)
    assert docs.cu_seqlens_q.tolist() == [0, 2, 3, 4, 6, 9, 10, 14]
    assert docs.positions.tolist() == [0, 1, 0, 0, 0, 1, 0, 1, 2, 0, 0, 1, 2, 3]
    assert docs.token_rows.tolist() == [0, 1, 2, 5, 7, 8, 9, 10, 11, 12, 14, 15, 16, 17]


def test_equal_ids_in_neighbouring_rows_are_two_documents():
    """Row 0 ends and row 1 begins with id 7; in the flat order they touch."""
    docs = Documents.from_ids(tensor([[0, 7, 7], [7, 7, 7]]))
    slow.from_runs([(1, 2), (3, 3)]).check(docs)


def test_only_names_change_when_ids_are_renamed():
    ids = tensor([[3, 3, 1, 0], [2, 2, 2, 5]])
    renamed = tensor([[10**12, 10**12, 2, 0], [1, 1, 1, 7]])
    assert summary(Documents.from_ids(ids)) == summary(Documents.from_ids(renamed))


def test_every_small_map_of_ids():
    """All 243 maps of five columns and ids 0..2: the loops agree, or both refuse."""
    refused = 0
    for line in itertools.product(range(3), repeat=5):
        runs = slow.runs_of_ids([line])
        if runs is None:
            refused += 1
            with pytest.raises(InvalidInput, match=r"ids.*interrupted"):
                Documents.from_ids(tensor([line]))
        else:
            slow.from_runs(runs).check(Documents.from_ids(tensor([line])))
    assert 0 < refused < 243


@STABLE
@given(
    st.integers(1, 9).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, 3), min_size=width, max_size=width).map(sorted),
            min_size=1,
            max_size=4,
        )
    ),
    st.permutations(range(1, 4)),
)
def test_maps_of_many_rows(rows, names):
    """Sorted rows never interrupt a document; renaming makes their ids unordered."""
    ids = [[names[i - 1] if i else 0 for i in line] for line in rows]
    slow.from_runs(slow.runs_of_ids(ids)).check(Documents.from_ids(tensor(ids)))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str
)
def test_ids_of_any_integer_dtype(dtype):
    ids = [[5, 5, 0, 2], [1, 3, 3, 3]]
    expected = slow.from_runs(slow.runs_of_ids(ids))
    expected.check(Documents.from_ids(tensor(ids, dtype)))


def test_ids_may_be_strided():
    ids = tensor([[1, 2], [1, 2], [0, 3]])
    slow.from_runs(slow.runs_of_ids(ids.t().tolist())).check(Documents.from_ids(ids.t()))
    wide = tensor([[1, 9, 1, 9, 2, 9]])
    slow.from_runs([(0, 2), (2, 1)]).check(Documents.from_ids(wide[:, ::2]))


@pytest.mark.parametrize(
    ("ids", "row", "document"),
    [
        ([[7, 9, 7]], 0, 7),
        ([[7, 0, 7]], 0, 7),
        ([[1, 1, 2], [42, 3, 42]], 1, 42),
        ([[1, 2, 2, 1, 2]], 0, None),
    ],
    ids=["by_another_document", "by_padding", "in_a_later_row", "both_at_once"],
)
def test_interrupted_ids_are_refused(ids, row, document):
    words = [f"row {row}", "interrupted"] + ([] if document is None else [f"document {document}"])
    with refuses("ids", *words):
        Documents.from_ids(tensor(ids))


def test_negative_ids_are_refused_with_their_place():
    with refuses("ids", "-3", "row 1", "column 2"):
        Documents.from_ids(tensor([[1, 1, 0], [2, 2, -3]]))


@pytest.mark.parametrize(
    ("ids", "got"),
    [
        (torch.ones(2, 3, dtype=torch.bool), "bool"),
        (torch.ones(2, 3), "float32"),
        (torch.ones(2, 3, dtype=torch.bfloat16), "bfloat16"),
        (torch.ones(3, dtype=torch.int64), "(3,)"),
        (torch.ones(2, 3, 1, dtype=torch.int64), "(2, 3, 1)"),
        (torch.tensor(1), "()"),
        ([[1, 1, 2]], "list"),
        (None, "NoneType"),
    ],
    ids=["bool", "float", "bfloat16", "one_axis", "three_axes", "scalar", "list", "none"],
)
def test_ids_are_an_integer_map(ids, got):
    with refuses("ids", got):
        Documents.from_ids(ids)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (2, 0), (1, 1), (3, 5)], ids=str)
def test_padding_only_is_no_document(shape):
    docs = Documents.from_ids(torch.zeros(shape, dtype=torch.int64))
    slow.from_runs([]).check(docs)
    assert docs.cu_seqlens_q.tolist() == [0]
    x = torch.randn(*shape, 2)
    assert docs.pack(x).shape == (0, 2)
    assert torch.equal(docs.unpack(docs.pack(x)), torch.zeros_like(x))


# --- from_lengths -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [0],
        [0, 0, 0],
        [1],
        [127, 128, 129],
        [0, 128, 0, 0, 70, 0],
        (5, 3),
        range(4),
        tensor([4, 0, 2]),
        tensor([4, 0, 2], torch.int32),
        tensor([9, 4, 9, 0, 9, 2])[1::2],
        torch.empty(0, dtype=torch.int64),
    ],
    ids=[
        "empty_list",
        "one_empty_document",
        "only_empty_documents",
        "one_token",
        "around_a_block",
        "empty_documents_between",
        "tuple",
        "range",
        "int64_tensor",
        "int32_tensor",
        "strided_tensor",
        "empty_tensor",
    ],
)
def test_lengths(lengths):
    counts = [int(length) for length in lengths]
    firsts = itertools.accumulate(counts, initial=0)
    docs = Documents.from_lengths(lengths)
    slow.from_runs(list(zip(firsts, counts, strict=False))).check(docs)
    assert docs.num_documents == len(counts), "an empty document is a document"
    assert docs.token_rows.tolist() == list(range(sum(counts)))


@pytest.mark.parametrize(
    ("lengths", "got"),
    [
        ([3, -1, 2], "-1"),
        (tensor([-5]), "-5"),
        (tensor([[3, 4]]), "(1, 2)"),
        (torch.tensor(3), "()"),
        (torch.tensor([3.0]), "float32"),
        (torch.tensor([True]), "bool"),
        (["three"], "three"),
        (None, "None"),
        (7, "7"),
    ],
    ids=["negative", "negative_tensor", "2d", "0d", "float", "bool", "words", "none", "number"],
)
def test_lengths_are_counts(lengths, got):
    with refuses("lengths", got):
        Documents.from_lengths(lengths)


def test_fractional_lengths_are_not_truncated():
    """A length of 1.5 is a mistake upstream; cutting it to 1 would shift every later document."""
    with refuses("lengths", "1.5"):
        Documents.from_lengths([1.5, 3])


@pytest.mark.parametrize(
    "lengths",
    [[2**31], [2**30, 2**30], [2**31 - 1, 1], [2**62, 2**62], [2**62] * 4],
    ids=["one", "two", "by_one", "int64_wraps_negative", "int64_wraps_to_zero"],
)
def test_more_tokens_than_int32_offsets_hold(lengths):
    """Refused before anything of that size is allocated."""
    with refuses("tokens"):
        Documents.from_lengths(lengths)


# --- from_cu_seqlens --------------------------------------------------------------------------


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


# --- fragments --------------------------------------------------------------------------------


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
    assert docs.num_queries == rank["total_q"]
    assert docs.num_keys == rank["total_kv"]
    assert docs.max_seqlen_q == rank["max_seqlen_q"]
    assert docs.max_seqlen_k == rank["max_seqlen_kv"]


# --- from_attention_mask ----------------------------------------------------------------------

MASK = [
    [1, 1, 1, 1, 1],
    [1, 1, 0, 0, 0],
    [0, 0, 0, 1, 1],
    [0, 1, 1, 1, 0],
    [0, 0, 0, 0, 0],
    [0, 0, 1, 0, 0],
]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int32, torch.int64, torch.uint8, torch.float32, torch.bfloat16],
    ids=str,
)
def test_padding_masks(dtype):
    """Full, right, left, both, fully padded (no document), and a single token."""
    docs = Documents.from_attention_mask(torch.tensor(MASK).to(dtype))
    slow.from_runs([(0, 5), (5, 2), (13, 2), (16, 3), (27, 1)]).check(docs)


def test_mask_values_other_than_one_are_real_tokens():
    """Nonzero means real; 2 and -1 do not start documents of their own."""
    mask = tensor([[0, 2, 1, -1], [0.5, 0.0, 0.0, 0.0]], torch.float64)
    slow.from_runs([(1, 3), (4, 1)]).check(Documents.from_attention_mask(mask))


def test_an_interrupted_row_is_refused():
    with refuses("attention_mask", "row 1", "interrupted"):
        Documents.from_attention_mask(tensor([[1, 1, 1], [1, 0, 1]]))


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (torch.ones(3), "(3,)"),
        (torch.ones(1, 1, 3, 3), "(1, 1, 3, 3)"),
        ([[1, 1]], "list"),
    ],
    ids=["one_axis", "four_axes", "list"],
)
def test_padding_mask_has_two_axes(mask, got):
    with refuses("attention_mask", got):
        Documents.from_attention_mask(mask)


# --- from_position_ids ------------------------------------------------------------------------


def runs_of_positions(rows):
    runs = []
    for row, line in enumerate(rows):
        for column, position in enumerate(line):
            if column == 0 or position != line[column - 1] + 1:
                runs.append((row * len(line) + column, 0))
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
    return runs


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 1, 2, 3, 4]],
        [[0, 1, 2, 0, 1, 0]],
        [[0, 0, 0]],
        [[0, 1, 2], [3, 4, 5]],
        [[7, 8, 9, 0, 1]],
        [[0, 1, 5, 6, 7]],
        [[3, 2, 1]],
        [[0], [0]],
    ],
    ids=[
        "one",
        "restarts",
        "single_tokens",
        "rows_never_join",
        "starts_at_7",
        "jumps_ahead",
        "falls",
        "one_column",
    ],
)
def test_position_ids(rows):
    docs = Documents.from_position_ids(tensor(rows))
    slow.from_runs(runs_of_positions(rows)).check(docs)


@STABLE
@given(
    st.integers(1, 12).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, 3), min_size=width, max_size=width), min_size=1, max_size=3
        )
    )
)
def test_any_position_ids(rows):
    docs = Documents.from_position_ids(tensor(rows))
    slow.from_runs(runs_of_positions(rows)).check(docs)


def test_positions_need_not_start_at_zero():
    """transformers#39814, #40002: ids 5..260 are one document of 256 tokens, not several."""
    docs = Documents.from_position_ids(torch.arange(5, 261)[None])
    slow.from_runs([(0, 256)]).check(docs)


def test_three_axes_of_positions_are_refused():
    """transformers#44911, flash-attention#2381: (3, 1, 256) was read as packing of 3x tokens."""
    with refuses("position_ids", "(3, 1, 256)"):
        Documents.from_position_ids(torch.arange(256).expand(3, 1, 256))


@pytest.mark.parametrize(
    ("positions", "got"),
    [
        (torch.arange(4), "(4,)"),
        (torch.arange(4.0)[None], "float32"),
        (torch.ones(1, 4, dtype=torch.bool), "bool"),
        ([[0, 1]], "list"),
    ],
    ids=["one_axis", "float", "bool", "list"],
)
def test_position_ids_are_an_integer_map(positions, got):
    with refuses("position_ids", got):
        Documents.from_position_ids(positions)


def test_one_packed_row_matches_lengths():
    lengths = [3, 1, 5]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    docs = Documents.from_position_ids(positions)
    assert summary(docs) == summary(Documents.from_lengths(lengths))
    # A collator's restart positions are what the documents say about each token.
    assert torch.equal(docs.positions, positions[0])


def test_no_tokens_at_all():
    slow.from_runs([]).check(Documents.from_position_ids(torch.empty((1, 0), dtype=torch.int64)))


# --- from_block_causal_mask -------------------------------------------------------------------


def block_causal(ids: list[list[int]]) -> Tensor:
    """bool ``[B, 1, S, S]``, True where ids agree, are not padding, and the key is not ahead."""
    ids = tensor(ids)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] > 0)
    return (same & torch.ones_like(same).tril())[:, None]


LAYOUTS = {
    "one_document": [[1, 1, 1, 1, 1]],
    "two_documents": [[1, 1, 2, 2, 2]],
    "right_padded": [[1, 1, 1, 0, 0]],
    "left_padded": [[0, 0, 1, 1, 1]],
    "padding_between": [[1, 1, 0, 2, 2]],
    "single_tokens": [[1, 2, 3, 4, 5]],
    "two_rows": [[1, 1, 2, 0, 0], [0, 1, 2, 2, 2]],
    "a_row_of_padding": [[0, 0, 0, 0, 0], [1, 1, 1, 2, 2]],
}


@pytest.mark.parametrize("ids", LAYOUTS.values(), ids=LAYOUTS)
def test_block_causal_masks(ids):
    docs = Documents.from_block_causal_mask(block_causal(ids))
    assert summary(docs) == summary(Documents.from_ids(tensor(ids)))
    slow.from_runs(slow.runs_of_ids(ids)).check(docs)


@pytest.mark.parametrize("ids", LAYOUTS.values(), ids=LAYOUTS)
def test_every_single_flip_is_judged_right(ids):
    """Each entry flipped in turn: refused, or it is another valid mask and read as that one."""
    mask = block_causal(ids)
    refused = 0
    for at in itertools.product(*map(range, mask.shape)):
        flipped = mask.clone()
        flipped[at] ^= True
        runs = slow.runs_of_mask(flipped[:, 0].tolist())
        if runs is None:
            refused += 1
            # A diagonal entry may leave a document with a hole, which is said in other words.
            with pytest.raises(InvalidInput, match=r"^mask: expected .*, got .*row"):
                Documents.from_block_causal_mask(flipped)
        else:
            slow.from_runs(runs).check(Documents.from_block_causal_mask(flipped))
    # Keys ahead of their query are never valid, so at least those flips must be refused.
    size = mask.shape[-1]
    assert refused >= mask.shape[0] * size * (size - 1) // 2


LONG = torch.tensor([[1] * 250 + [2] * 20 + [0] * 10 + [3] * 20])
"""Documents that cross row 256, where a verification in slabs could lose sight of them."""


def test_a_long_mask():
    docs = Documents.from_block_causal_mask(block_causal(LONG.tolist()))
    slow.from_runs([(0, 250), (250, 20), (280, 20)]).check(docs)


@pytest.fixture(scope="module")
def long_mask():
    return block_causal(LONG.tolist())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 299), st.integers(0, 299))
def test_a_flip_anywhere_in_a_long_mask_is_refused(long_mask, query, key):
    flipped = long_mask.clone()
    flipped[0, 0, query, key] ^= True
    # Flipping a padding row's own diagonal makes it a document of one token, which is valid.
    if query == key and 270 <= query < 280:
        assert Documents.from_block_causal_mask(flipped).num_documents == 4
    else:
        with refuses("mask", "row 0"):
            Documents.from_block_causal_mask(flipped)


@pytest.mark.parametrize("query", [255, 256, 257, 269, 299])
@pytest.mark.parametrize("key", [0, 249, 255, 298])
def test_flips_around_a_slab_border(long_mask, query, key):
    flipped = long_mask.clone()
    flipped[0, 0, query, key] ^= True
    with refuses("mask", "row 0"):
        Documents.from_block_causal_mask(flipped)


def test_causal_across_documents_is_refused():
    """A plain causal mask with one padding column between the documents."""
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    mask[..., 2] = False
    mask[:, :, 2] = False
    with refuses("mask", "row 0"):
        Documents.from_block_causal_mask(mask)


def test_a_document_that_goes_on_after_another_is_refused():
    """Tokens 0, 1 and 3 attend to each other around token 2: causal, but not contiguous."""
    with refuses("mask", "row 0"):
        Documents.from_block_causal_mask(block_causal([[1, 1, 2, 1]]))


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (torch.ones(1, 1, 3, 3).tril(), "float32"),
        (torch.ones(1, 1, 3, 3, dtype=torch.int64).tril(), "int64"),
        (torch.ones(3, 3, dtype=torch.bool).tril(), "(3, 3)"),
        (torch.ones(1, 3, 3, dtype=torch.bool).tril(), "(1, 3, 3)"),
        (torch.ones(1, 2, 3, 3, dtype=torch.bool).tril(), "(1, 2, 3, 3)"),
        (torch.ones(1, 1, 3, 4, dtype=torch.bool), "(1, 1, 3, 4)"),
        (torch.ones(1, 1, 3, 3, dtype=torch.bool), "row 0, query 0"),
        (torch.ones(1, 1, 3, 3, dtype=torch.bool).triu(), "row 0"),
        (~torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(), "row 0"),
        ([[True]], "list"),
    ],
    ids=[
        "float",
        "int",
        "two_axes",
        "three_axes",
        "per_head",
        "not_square",
        "bidirectional",
        "anticausal",
        "inverted",
        "list",
    ],
)
def test_what_is_no_block_causal_mask(mask, got):
    with refuses("mask", got):
        Documents.from_block_causal_mask(mask)


@pytest.mark.parametrize("size", [0, 1])
def test_the_smallest_masks(size):
    mask = torch.ones(2, 1, size, size, dtype=torch.bool)
    docs = Documents.from_block_causal_mask(mask)
    slow.from_runs([(0, 1), (1, 1)] if size else []).check(docs)


def test_an_expanded_mask():
    """A batch of stride 0, as broadcast masks have."""
    mask = block_causal([[1, 1, 2]]).expand(3, -1, -1, -1)
    docs = Documents.from_block_causal_mask(mask)
    slow.from_runs([(0, 2), (2, 1), (3, 2), (5, 1), (6, 2), (8, 1)]).check(docs)


# --- all constructors tell the same story -----------------------------------------------------


def test_constructors_agree():
    ids = [[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    from_ids = Documents.from_ids(tensor(ids))
    from_mask = Documents.from_attention_mask(tensor(ids))
    from_square = Documents.from_block_causal_mask(block_causal(ids))
    assert summary(from_mask) == summary(from_ids)
    assert summary(from_square) == summary(from_ids)
    packed = Documents.from_lengths([3, 4])
    assert summary(Documents.from_cu_seqlens(packed.cu_seqlens_q)) == summary(packed)
    assert torch.equal(from_ids.cu_seqlens_q, packed.cu_seqlens_q)
    assert torch.equal(from_ids.positions, packed.positions)


class OnDevice(torch.Tensor):
    """A CPU tensor that behaves as if it lay on an accelerator: reading it is seen and counted.

    Results of its operations are again of this class; only an explicit copy to the host leaves it.
    """

    copies = 0
    READS = (
        *("item", "tolist", "numpy", "nonzero", "unique", "unique_consecutive", "masked_select"),
        *("is_nonzero", "equal", "__bool__", "__int__", "__float__", "__index__", "__contains__"),
    )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in cls.READS, f"{name} waits for the device"
        kwargs = kwargs or {}
        targets = [str(target) for target in (*args[1:], *kwargs.values())]
        to_host = name == "cpu" or (name == "to" and "cpu" in targets)
        result = super().__torch_function__(func, types, args, kwargs)
        if to_host:
            cls.copies += 1
            return result.as_subclass(torch.Tensor)
        return result


@pytest.mark.parametrize(
    "build",
    [
        lambda wrap: Documents.from_ids(wrap(tensor([[4, 4, 0], [1, 2, 2]]))),
        lambda wrap: Documents.from_lengths(wrap(tensor([3, 0, 4]))),
        lambda wrap: Documents.from_cu_seqlens(wrap(tensor([0, 3, 7], torch.int32))),
        lambda wrap: Documents.from_cu_seqlens(
            wrap(tensor([0, 3, 7])), wrap(tensor([0, 5, 9], torch.int32))
        ),
        lambda wrap: Documents.from_cu_seqlens(
            wrap(tensor([0, 3, 7])),
            wrap(tensor([0, 5, 9])),
            fragment_indices=wrap(tensor([0, 0])),
        ),
        lambda wrap: Documents.from_attention_mask(wrap(tensor([[0, 1, 1], [1, 1, 1]]))),
        lambda wrap: Documents.from_position_ids(wrap(tensor([[0, 1, 0], [0, 1, 2]]))),
        lambda wrap: Documents.from_block_causal_mask(wrap(block_causal([[1, 1, 2]]))),
    ],
    ids=[
        "ids",
        "lengths",
        "cu_seqlens",
        "cu_seqlens_q_and_k",
        "fragments",
        "attention_mask",
        "position_ids",
        "block_causal_mask",
    ],
)
def test_one_copy_to_the_host(build):
    """Building from a device tensor costs exactly one device-to-host copy."""
    OnDevice.copies = 0
    docs = build(lambda x: x.as_subclass(OnDevice))
    assert OnDevice.copies == 1
    assert summary(docs) == summary(build(lambda x: x))


def test_nothing_is_read_back_after_building():
    """On the meta device any read of a value raises, so what succeeds there never waits."""
    docs = Documents.from_lengths([3, 0, 4], device="meta")
    assert {x.device.type for x in (docs.cu_seqlens_q, docs.cu_seqlens_k, docs.positions)} == {
        "meta"
    }
    assert (docs.num_queries, docs.num_keys, docs.max_seqlen_q, docs.max_seqlen_k) == (7, 7, 4, 4)
    assert docs.positions.shape == docs.token_rows.shape == (7,)
    cu = tensor([0, 3, 7])
    fragments = Documents.from_cu_seqlens(cu, cu, fragment_indices=tensor([0, 0]), device="meta")
    assert fragments.max_seqlen_k == 7
    assert fragments.device.type == "meta"
    moved = Documents.from_ids(tensor([[1, 1, 0], [2, 2, 2]])).to("meta")
    assert moved.unpack(torch.empty(5, 2, device="meta")).shape == (2, 3, 2)
    assert moved.pack(torch.empty(2, 3, 2, device="meta")).shape == (5, 2)


def test_to_moves_everything():
    docs = Documents.from_lengths([3, 4]).to("meta")
    for tensor_ in (docs.cu_seqlens_q, docs.cu_seqlens_k, docs.positions, docs.token_rows):
        assert tensor_.device.type == "meta"


# --- pack and unpack --------------------------------------------------------------------------

PADDED = [[0, 5, 5, 0], [0, 0, 0, 0], [8, 8, 3, 0]]


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("ids", [PADDED, [[1, 1], [2, 3]]], ids=["padded", "full"])
def test_pack_takes_the_real_tokens_in_order(ids, trailing):
    docs = Documents.from_ids(tensor(ids))
    x = torch.randn(len(ids), len(ids[0]), *trailing)
    packed = docs.pack(x)
    real = [(r, c) for r, line in enumerate(ids) for c, i in enumerate(line) if i]
    assert packed.shape == (len(real), *trailing)
    for row, (r, c) in enumerate(real):
        assert torch.equal(packed[row], x[r, c])
    # Back: real tokens as they were, zeros at padding.
    expected = x.clone()
    expected[tensor(ids) == 0] = 0
    assert torch.equal(docs.unpack(packed), expected)
    assert torch.equal(docs.pack(docs.unpack(packed)), packed)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int32, torch.bfloat16, torch.complex64], ids=str
)
def test_pack_any_dtype(dtype):
    docs = Documents.from_ids(tensor(PADDED))
    x = torch.ones(3, 4, 2, dtype=dtype)
    assert docs.pack(x).dtype == dtype
    expected = x * (tensor(PADDED) > 0)[..., None]
    assert torch.equal(docs.unpack(docs.pack(x)), expected)


def test_pack_a_strided_tensor():
    docs = Documents.from_ids(tensor(PADDED))
    x = torch.randn(4, 2, 3).transpose(0, 2).transpose(1, 2)
    assert x.shape[:2] == (3, 4)
    assert torch.equal(docs.pack(x), docs.pack(x.contiguous()))


def test_padding_that_is_nan_stays_out():
    docs = Documents.from_ids(tensor(PADDED))
    x = torch.randn(3, 4, 2)
    x[tensor(PADDED) == 0] = float("nan")
    packed = docs.pack(x)
    assert packed.isfinite().all()
    assert docs.unpack(packed).isfinite().all()


@pytest.mark.parametrize("ids", [PADDED, [[1, 1], [2, 3]]], ids=["padded", "full"])
def test_pack_is_differentiable(ids):
    docs = Documents.from_ids(tensor(ids))
    x = torch.randn(len(ids), len(ids[0]), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(docs.pack, (x,))
    weight = torch.randn(docs.num_queries, 2, dtype=torch.float64)
    (grad,) = torch.autograd.grad(docs.pack(x), x, weight)
    assert torch.equal(docs.pack(grad), weight)
    assert (grad[tensor(ids) == 0] == 0).all(), "padding has exactly no gradient"


@pytest.mark.parametrize("ids", [PADDED, [[1, 1], [2, 3]]], ids=["padded", "full"])
def test_unpack_is_differentiable(ids):
    docs = Documents.from_ids(tensor(ids))
    packed = torch.randn(docs.num_queries, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(docs.unpack, (packed,))
    # What arrives at padding, NaN included, must not reach any token.
    weight = torch.randn(len(ids), len(ids[0]), 2, dtype=torch.float64)
    weight[tensor(ids) == 0] = float("nan")
    (grad,) = torch.autograd.grad(docs.unpack(packed), packed, weight)
    assert torch.equal(grad, docs.pack(weight))


def test_unpack_drops_slack_rows():
    docs = Documents.from_ids(tensor(PADDED))
    packed = torch.randn(9, 2, dtype=torch.float64)
    packed[5:] = float("nan")
    packed.requires_grad_()
    x = docs.unpack(packed)
    assert torch.equal(x, docs.unpack(packed[:5]))
    (grad,) = torch.autograd.grad(x.sum(), packed)
    assert torch.equal(grad, torch.cat([torch.ones(5, 2), torch.zeros(4, 2)]).double())


def test_unpack_leaves_its_input_alone():
    """Aliasing is allowed where nothing is padded; writing through is not part of unpacking."""
    docs = Documents.from_lengths([2, 3])
    packed = torch.randn(5, 2)
    before = packed.clone()
    x = docs.unpack(packed)
    assert x.shape == (1, 5, 2)
    assert torch.equal(x[0], before)
    assert torch.equal(packed, before)


@pytest.mark.parametrize("shape", [(3,), (4, 3, 2), (2, 4, 2), (3, 5, 2), (12, 2)], ids=str)
def test_pack_needs_the_batch_shape(shape):
    docs = Documents.from_ids(tensor(PADDED))
    with refuses("x", "(3, 4)", str(shape)):
        docs.pack(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(), (4,), (4, 2), (0, 2)], ids=str)
def test_unpack_needs_every_token(shape):
    docs = Documents.from_ids(tensor(PADDED))
    with refuses("packed", "5", str(shape)):
        docs.unpack(torch.zeros(shape))


def test_documents_say_what_they_are():
    text = repr(Documents.from_lengths([3, 4]))
    assert "num_documents=2" in text
    assert "num_queries=7" in text
