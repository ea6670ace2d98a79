"""Documents from ids, lengths, padding masks and positions, against plain loops."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openmsa import Documents, InvalidInput

from . import slow
from .messages import refuses
from .slow import block_causal, summary, tensor

STABLE = settings(max_examples=60, deadline=None, derandomize=True)


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
        ([2**70], str(2**70)),
        (None, "None"),
        (7, "7"),
    ],
    ids=[
        "negative",
        "negative_tensor",
        "2d",
        "0d",
        "float",
        "bool",
        "words",
        "huge",
        "none",
        "number",
    ],
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
    """Nonzero means real; 2 and 3 do not start documents of their own."""
    mask = tensor([[0, 2, 1, 3], [0.5, 0.0, 0.0, 0.0]], torch.float64)
    slow.from_runs([(1, 3), (4, 1)]).check(Documents.from_attention_mask(mask))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.finfo(torch.float32).min, ["-3.4", "mask == 0"]),
        (float("-inf"), ["-inf", "mask == 0"]),
        (-1.0, ["-1.0", "mask == 0"]),
        (float("nan"), ["nan"]),
        (float("inf"), ["inf"]),
    ],
)
def test_a_mask_that_is_added_to_scores_is_refused(value, said):
    """There 0 stands for the tokens, and what is not 0 for the padding."""
    with refuses("attention_mask", *said):
        Documents.from_attention_mask(torch.tensor([[0.0, 0.0, 0.0, value]]))


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
