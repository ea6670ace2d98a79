"""Selection: the canonical form, reading by value, and the converters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openmsa import Documents, InvalidInput, Selection

from .messages import refuses

STABLE = settings(max_examples=60, deadline=None, derandomize=True)

INT32 = torch.iinfo(torch.int32)
INT64 = torch.iinfo(torch.int64)


def canonical(rows, own):
    """One query's slots the slow way: what it can see, ascending, once, then -1."""
    kept = sorted({block for block in rows if 0 <= block <= own})
    return kept + [-1] * (len(rows) - len(kept))


def own_blocks(docs, block_size):
    return [position // block_size if position >= 0 else -1 for position in docs.positions.tolist()]


def check(selection: Selection, indices, docs: Documents, block_size: int) -> None:
    """Hold a selection to the slow canonical form of raw ``indices`` (nested lists)."""
    own = own_blocks(docs, block_size)
    own += [-1] * (selection.num_queries - len(own))
    expected = [[canonical(row, own[query]) for query, row in enumerate(head)] for head in indices]
    assert selection.indices.dtype == torch.int32
    assert selection.indices.is_contiguous()
    assert selection.indices.tolist() == expected
    assert selection.block_size == block_size
    assert selection.lse is None


def one_query(position: int) -> Documents:
    """One document whose only query is its last token, at ``position``."""
    return Documents.from_cu_seqlens(torch.tensor([0, 1]), torch.tensor([0, position + 1]))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([3, 1, 2, 0], [0, 1, 2, 3]),
        ([3, 3, 1, 3], [1, 3, -1, -1]),
        ([-1, 2, -1, 0], [0, 2, -1, -1]),
        ([-1, -1, -1, 1], [1, -1, -1, -1]),
        ([-1, -1, -1, -1], [-1, -1, -1, -1]),
        ([4, 5, 999, 2], [2, -1, -1, -1]),
        ([-2, -128, 0, 3], [0, 3, -1, -1]),
        ([INT32.min, INT32.max, 1, 1], [1, -1, -1, -1]),
        ([INT32.max, INT32.max, INT32.max, INT32.max], [-1, -1, -1, -1]),
    ],
    ids=[
        "canonical",
        "any_order",
        "duplicates",
        "gaps",
        "leading_gaps",
        "nothing",
        "future_and_out_of_range",
        "negative",
        "int32_extremes",
        "int32_max_everywhere",
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_are_read_by_value(raw, expected, dtype):
    """A query in block 3 of its document."""
    docs = one_query(3 * 128 + 5)
    selection = Selection.from_indices(torch.tensor([[raw]], dtype=dtype), docs)
    assert selection.indices.tolist() == [[expected]]
    assert selection.topk == 4


@pytest.mark.parametrize(
    "extreme",
    [INT64.max, INT64.min, INT64.max - 1, 2**32, 2**32 + 1, 2**31, -(2**31) - 1, 2**40],
    ids=str,
)
def test_int64_extremes_select_nothing(extreme):
    """2^32 and 2^32 + 1 would read as blocks 0 and 1 if they were cut to int32 first."""
    docs = one_query(3 * 128)
    selection = Selection.from_indices(torch.tensor([[[extreme, 2, extreme]]]), docs)
    assert selection.indices.tolist() == [[[2, -1, -1]]]


@pytest.mark.parametrize("position", [0, 1, 127, 128, 255, 256, 2047])
def test_the_own_block_is_the_last_visible_one(position):
    """microsoft/MInference#201: no extra block at exact multiples of the block size."""
    own = position // 128
    raw = torch.tensor([[[own + 1, own, own + 2]]])
    selection = Selection.from_indices(raw, one_query(position))
    assert selection.indices.tolist() == [[[own, -1, -1]]]


def test_a_query_without_keys_selects_nothing():
    """Four queries over one key: only the last one has a block."""
    docs = Documents.from_cu_seqlens(torch.tensor([0, 4]), torch.tensor([0, 1]))
    selection = Selection.from_indices(torch.zeros(1, 4, 2, dtype=torch.int64), docs)
    assert selection.indices.tolist() == [[[-1, -1]] * 3 + [[0, -1]]]


raw_ids = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([INT32.min, INT32.max, INT64.min, INT64.max, 2**32, -(2**32)]),
)


@STABLE
@given(st.data(), st.lists(st.integers(0, 20), max_size=4), st.integers(0, 3))
def test_any_ids_become_canonical(data, lengths, slack):
    """Any ids of any documents, slack rows included, against the slow form; and once is enough."""
    docs = Documents.from_lengths(lengths)
    heads, topk = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5))
    row = st.lists(raw_ids, min_size=topk, max_size=topk)
    rows = docs.num_queries + slack
    raw = data.draw(
        st.lists(st.lists(row, min_size=rows, max_size=rows), min_size=heads, max_size=heads)
    )
    indices = torch.tensor(raw, dtype=torch.int64).view(heads, rows, topk)
    selection = Selection.from_indices(indices, docs, block_size=4)
    check(selection, raw, docs, 4)
    again = Selection.from_indices(selection.indices, docs, block_size=4)
    assert torch.equal(again.indices, selection.indices)
    shuffled = indices[..., torch.randperm(topk, generator=torch.Generator().manual_seed(0))]
    assert torch.equal(Selection.from_indices(shuffled, docs, block_size=4).indices, again.indices)


def test_slack_rows_select_nothing():
    docs = Documents.from_lengths([3])
    selection = Selection.from_indices(torch.zeros(2, 5, 2, dtype=torch.int32), docs)
    assert selection.indices.shape == (2, 5, 2)
    assert (selection.indices[:, :3, 0] == 0).all()
    assert (selection.indices[:, 3:] == -1).all()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
def test_no_queries(lengths):
    docs = Documents.from_lengths(lengths)
    selection = Selection.from_indices(torch.empty(4, 0, 16, dtype=torch.int64), docs)
    assert selection.indices.shape == (4, 0, 16)
    assert selection.indices.dtype == torch.int32


@pytest.fixture
def three_documents():
    return Documents.from_lengths([300, 1, 83])


def random_ids(*shape, high=4):
    return torch.randint(-1, high, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_every_second_slot(three_documents, dtype):
    """FastVideo#1243: int64 ids and an idx[..., ::2] view were read as if int32 contiguous."""
    wide = random_ids(2, 384, 8).to(dtype)
    view = wide[..., ::2]
    assert not view.is_contiguous()
    check(Selection.from_indices(view, three_documents), view.tolist(), three_documents, 128)


def test_a_transposed_view_keeps_its_meaning(three_documents):
    """vllm#48603, #48604: a token-major buffer seen head-major is read by its strides."""
    token_major = random_ids(384, 4, 16)
    view = token_major.transpose(0, 1)
    selection = Selection.from_indices(view, three_documents)
    check(selection, view.tolist(), three_documents, 128)
    same = Selection.from_indices(view.contiguous(), three_documents)
    assert torch.equal(selection.indices, same.indices)


def test_an_expanded_view(three_documents):
    """One list for all heads and queries, by stride 0."""
    view = torch.tensor([0, 2, -1]).expand(4, 384, 3)
    check(Selection.from_indices(view, three_documents), view.tolist(), three_documents, 128)


def test_the_input_is_left_alone(three_documents):
    ids = random_ids(4, 384, 16).to(torch.int32)
    before = ids.clone()
    selection = Selection.from_indices(ids, three_documents)
    assert torch.equal(ids, before)
    assert selection.indices.data_ptr() != ids.data_ptr()


@pytest.mark.parametrize("shape", [(384, 4, 16), (384, 2, 16), (384, 1, 3)], ids=str)
def test_token_major_ids_are_refused_with_a_way_out(three_documents, shape):
    """vllm#48603, Lvllm#68: a token-major buffer read head-major masked whole rows."""
    with refuses("indices", "384", str(shape), "from_flashinfer"):
        Selection.from_indices(torch.zeros(shape, dtype=torch.int32), three_documents)


@pytest.mark.parametrize(
    ("indices", "argument", "got"),
    [
        (torch.zeros(384, 16, dtype=torch.int32), "indices", "(384, 16)"),
        (torch.zeros(1, 4, 384, 16, dtype=torch.int32), "indices", "(1, 4, 384, 16)"),
        (torch.zeros(4, 383, 16, dtype=torch.int32), "indices", "383"),
        (torch.zeros(4, 384, 16), "indices", "float32"),
        (torch.zeros(4, 384, 16, dtype=torch.bool), "indices", "bool"),
        (torch.zeros(4, 384, 0, dtype=torch.int32), "topk", "0"),
        (torch.zeros(4, 384, 65, dtype=torch.int32), "topk", "65"),
        (torch.zeros(4, 384, 16, dtype=torch.int32, device="meta"), "indices", "meta"),
    ],
    ids=[
        "two_axes",
        "four_axes",
        "too_few_queries",
        "float",
        "bool",
        "topk_0",
        "topk_65",
        "other_device",
    ],
)
def test_what_is_no_selection(three_documents, indices, argument, got):
    with refuses(argument, got):
        Selection.from_indices(indices, three_documents)


@pytest.mark.parametrize("topk", [1, 17, 32, 64])
def test_topk_up_to_64(topk):
    """vllm-ascend#12734: arrays of 16 overflowed for more than 16 blocks."""
    docs = one_query(63 * 128)
    selection = Selection.from_indices(torch.arange(topk).flip(0)[None, None], docs)
    assert selection.indices.tolist() == [[list(range(topk))]]


@pytest.mark.parametrize("block_size", [0, -128])
def test_block_size_is_positive(three_documents, block_size):
    with refuses("block_size", str(block_size)):
        Selection.from_indices(random_ids(1, 384, 2), three_documents, block_size=block_size)


@pytest.mark.parametrize("block_size", [1, 64, 128, 1000])
def test_block_sizes(three_documents, block_size):
    ids = random_ids(2, 384, 5, high=8)
    selection = Selection.from_indices(ids, three_documents, block_size=block_size)
    check(selection, ids.tolist(), three_documents, block_size)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (4, ["0..2", "4"]),
        (3, ["0..2", "3"]),
        (-2, ["0..2", "-2"]),
        (INT64.max, ["0..2", str(INT64.max)]),
        (INT64.min, ["0..2", str(INT64.min)]),
        (2**32, ["0..2", str(2**32)]),
    ],
    ids=["out_of_range", "future", "negative", "int64_max", "int64_min", "wraps_to_0"],
)
def test_validate_names_head_and_query(bad, words):
    """Query 299 is in block 2 of the first document of 500 keys."""
    docs = Documents.from_lengths([500, 9])
    ids = torch.zeros(4, 509, 3, dtype=torch.int64)
    ids[3, 299, 1] = bad
    with refuses("indices", "kv head 3", "query 299", *words):
        Selection.from_indices(ids, docs, validate=True)
    # Without validation the same id selects nothing and disturbs nobody.
    assert Selection.from_indices(ids, docs).indices[3, 299].tolist() == [0, -1, -1]


def test_validate_names_the_first_wrong_id():
    ids = torch.full((2, 4, 2), 7)
    ids[0] = 0
    ids[1, 0] = -1
    with refuses("indices", "kv head 1", "query 1", "7"):
        Selection.from_indices(ids, Documents.from_lengths([4]), validate=True)


def test_validate_knows_queries_without_keys():
    docs = Documents.from_cu_seqlens(torch.tensor([0, 2]), torch.tensor([0, 1]))
    with refuses("indices", "no key", "query 0"):
        Selection.from_indices(torch.zeros(1, 2, 1, dtype=torch.int64), docs, validate=True)


def test_validate_takes_what_is_right(three_documents):
    own = torch.tensor(own_blocks(three_documents, 128))
    ids = torch.stack([own, torch.zeros_like(own), torch.full_like(own, -1)], -1).expand(4, -1, -1)
    selection = Selection.from_indices(ids, three_documents, validate=True)
    check(selection, ids.tolist(), three_documents, 128)


def test_validate_does_not_look_at_slack_rows():
    ids = torch.zeros(1, 5, 1, dtype=torch.int64)
    ids[:, 3:] = 999
    selection = Selection.from_indices(ids, Documents.from_lengths([3]), validate=True)
    assert selection.indices.flatten().tolist() == [0, 0, 0, -1, -1]


def some_selection(docs, heads=4, topk=6, block_size=16):
    """Every query's own block and some earlier ones."""
    own = torch.tensor(own_blocks(docs, block_size))
    ids = random_ids(heads, docs.num_queries, topk, high=9)
    ids[..., 0] = own
    return Selection.from_indices(ids, docs, block_size=block_size)


def test_minimax_order_has_the_own_block_last():
    docs = Documents.from_lengths([130, 1, 40])
    selection = some_selection(docs)
    given_back = selection.to_minimax()
    assert given_back.dtype == torch.int32
    assert given_back.shape == selection.indices.shape
    for head in given_back.tolist():
        for row, own in zip(head, own_blocks(docs, 16), strict=True):
            valid = [block for block in row if block >= 0]
            assert row == valid + [-1] * (len(row) - len(valid)), "valid entries are a prefix"
            assert valid[-1] == own
            assert len(set(valid)) == len(valid)


def test_minimax_is_inverted():
    docs = Documents.from_lengths([130, 1, 40])
    selection = some_selection(docs)
    back = Selection.from_minimax(selection.to_minimax(), docs, block_size=16)
    assert torch.equal(back.indices, selection.indices)
    assert back.block_size == 16
    assert torch.equal(back.to_minimax(), selection.to_minimax())


def test_minimax_history_is_unordered():
    """MiniMax-AI/MSA writes the blocks before the own one in no particular order."""
    docs = one_query(5 * 128)
    selection = Selection.from_minimax(torch.tensor([[[4, 0, 3, 5, -1, -1]]]), docs)
    assert selection.indices.tolist() == [[[0, 3, 4, 5, -1, -1]]]
    assert selection.to_minimax().tolist() == [[[0, 3, 4, 5, -1, -1]]]


def test_minimax_copy_is_the_callers_own():
    docs = one_query(128)
    selection = Selection.from_indices(torch.tensor([[[0, 1]]]), docs)
    selection.to_minimax().fill_(-1)
    assert selection.indices.tolist() == [[[0, 1]]]


def test_flashinfer_is_token_major_and_inverted():
    docs = Documents.from_lengths([130, 1, 40])
    selection = some_selection(docs)
    given_back = selection.to_flashinfer()
    assert given_back.shape == (171, 4, 6)
    assert given_back.dtype == torch.int32
    assert given_back.is_contiguous()
    for head in range(4):
        assert torch.equal(given_back[:, head], selection.indices[head])
    back = Selection.from_flashinfer(given_back, docs, block_size=16)
    assert torch.equal(back.indices, selection.indices)
    assert back.indices.is_contiguous()
    assert torch.equal(back.to_flashinfer(), given_back)


def test_flashinfer_where_heads_and_queries_could_be_mixed_up():
    """Four tokens and four heads: only the converter's name tells the axes apart."""
    docs = Documents.from_lengths([4])
    ids = torch.full((4, 4, 1), -1)
    ids[2, 1] = 0
    selection = Selection.from_flashinfer(ids, docs)
    assert selection.indices[1, 2].tolist() == [0]
    assert int((selection.indices == 0).sum()) == 1


def test_flashinfer_needs_three_axes():
    with refuses("indices", "(4, 16)"):
        Selection.from_flashinfer(
            torch.zeros(4, 16, dtype=torch.int32), Documents.from_lengths([4])
        )


def row_anchored(rows, heads, length, topk, high, dtype=torch.int64):
    return random_ids(rows, heads, length, topk, high=high).to(dtype)


def expected_from_transformers(block_indices, runs, block_size):
    """The slow reading: ``runs`` are (row, first column, length); heads, then packed queries."""
    heads = block_indices.shape[1]
    found = [[] for _ in range(heads)]
    for row, column, length in runs:
        for position in range(length):
            for head in range(heads):
                slots = block_indices[row, head, column + position].tolist()
                local = [b - column // block_size if b >= 0 else -1 for b in slots]
                found[head].append(canonical(local, position // block_size))
    return found


@pytest.mark.parametrize(
    ("ids", "runs"),
    [
        ([[1] * 12] * 2, [(0, 0, 12), (1, 0, 12)]),
        ([[1] * 7 + [0] * 5, [1] * 12], [(0, 0, 7), (1, 0, 12)]),
        ([[0] * 8 + [1] * 4, [0] * 4 + [1] * 8], [(0, 8, 4), (1, 4, 8)]),
        ([[1] * 4 + [2] * 8, [0] * 12], [(0, 0, 4), (0, 4, 8)]),
        ([[1] * 3 + [0] + [2] * 5 + [0] * 3, [0] * 8 + [3] * 2 + [0] * 2], None),
    ],
    ids=["unpadded", "right_padded", "left_padded_by_blocks", "packed_on_grid", "padded_on_grid"],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_transformers_blocks_count_from_the_row(ids, runs, dtype):
    if runs is None:
        runs = [(0, 0, 3), (0, 4, 5), (1, 8, 2)]
    docs = Documents.from_ids(torch.tensor(ids))
    blocks = row_anchored(2, 3, 12, 4, high=5, dtype=dtype)
    selection = Selection.from_transformers(blocks, docs, block_size=4)
    assert selection.indices.dtype == torch.int32
    assert selection.indices.is_contiguous()
    assert selection.indices.tolist() == expected_from_transformers(blocks, runs, 4)


def test_transformers_ids_before_the_document_select_nothing():
    """A row-anchored block of the document before, or of padding, is not ours to read."""
    docs = Documents.from_ids(torch.tensor([[1] * 4 + [2] * 4]))
    blocks = torch.zeros(1, 1, 8, 1, dtype=torch.int64)
    selection = Selection.from_transformers(blocks, docs, block_size=4)
    assert selection.indices.flatten().tolist() == [0] * 4 + [-1] * 4


def test_transformers_extremes_select_nothing():
    docs = Documents.from_ids(torch.tensor([[0] * 4 + [1] * 4]))
    blocks = torch.tensor([INT64.max, INT64.min, -1, 1]).expand(1, 1, 8, 4)
    selection = Selection.from_transformers(blocks, docs, block_size=4)
    assert selection.indices.tolist() == [[[0, -1, -1, -1]] * 4]


def test_transformers_strided_blocks():
    """The model's own layout: slots last, but heads behind the sequence in memory."""
    docs = Documents.from_attention_mask(torch.ones(2, 12))
    blocks = row_anchored(2, 12, 3, 4, high=5).transpose(1, 2)
    selection = Selection.from_transformers(blocks, docs, block_size=4)
    runs = [(0, 0, 12), (1, 0, 12)]
    assert selection.indices.tolist() == expected_from_transformers(blocks, runs, 4)


@pytest.mark.parametrize(
    ("ids", "document", "column"),
    [
        ([[0] * 3 + [1] * 9], 0, 3),
        ([[1] * 5 + [2] * 7], 1, 5),
        ([[1] * 12, [0] * 1 + [1] * 11], 1, 1),
    ],
    ids=["left_padded_off_grid", "packed_off_grid", "second_row"],
)
def test_transformers_documents_off_the_grid_are_refused(ids, document, column):
    """No selection of document-anchored blocks reads the keys of a block that two share."""
    docs = Documents.from_ids(torch.tensor(ids))
    blocks = torch.zeros(len(ids), 1, 12, 2, dtype=torch.int64)
    with refuses("docs", f"document {document}", f"column {column}", "4"):
        Selection.from_transformers(blocks, docs, block_size=4)


@pytest.mark.parametrize(
    "shape", [(2, 1, 12), (1, 1, 12, 2), (2, 12, 1, 2), (2, 1, 11, 2), (2, 1, 12, 2, 1)], ids=str
)
def test_transformers_shape(shape):
    docs = Documents.from_attention_mask(torch.ones(2, 12))
    with refuses("block_indices", str(shape)):
        Selection.from_transformers(torch.zeros(shape, dtype=torch.int64), docs)


def test_transformers_ids_are_integers():
    docs = Documents.from_attention_mask(torch.ones(1, 12))
    with refuses("block_indices", "float32"):
        Selection.from_transformers(torch.zeros(1, 1, 12, 2), docs)


@pytest.mark.parametrize(
    "ids", [[[0] * 4], [[0] * 4] * 3, [[]]], ids=["padding", "rows_of_padding", "no_columns"]
)
def test_transformers_without_tokens(ids):
    docs = Documents.from_ids(torch.tensor(ids, dtype=torch.int64))
    shape = (len(ids), 2, len(ids[0]), 3)
    selection = Selection.from_transformers(torch.zeros(shape, dtype=torch.int64), docs)
    assert selection.indices.shape == (2, 0, 3)


def test_transformers_chunked_prefill_counts_from_the_first_key():
    """A row's last 4 queries of 12 keys: blocks count from key 0, wherever the queries start."""
    docs = Documents.from_cu_seqlens(torch.tensor([0, 4]), torch.tensor([0, 12]))
    blocks = torch.tensor([0, 2, 1]).expand(1, 2, 4, 3)
    selection = Selection.from_transformers(blocks, docs, block_size=4)
    assert selection.indices.tolist() == [[[0, 1, 2]] * 4] * 2


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "fragments"),
    [
        ([0, 4, 12], [0, 4, 12], [0, 0]),
        ([0, 4, 8], [0, 8, 16], None),
    ],
    ids=["fragments_of_one_document", "two_prefills"],
)
def test_transformers_blocks_count_from_keys_not_queries(cu_q, cu_k, fragments):
    """Where an entry's queries and keys start in different columns: right, or refused.

    Counting from the column of the first *query* would read other blocks without a word.
    """
    docs = Documents.from_cu_seqlens(
        torch.tensor(cu_q),
        torch.tensor(cu_k),
        fragment_indices=None if fragments is None else torch.tensor(fragments),
    )
    blocks = torch.full((1, 1, cu_q[-1], 1), 2)
    expected = []
    for entry in range(2):
        first_key = cu_k[entry if fragments is None else fragments[entry]]
        len_q, len_k = cu_q[entry + 1] - cu_q[entry], cu_k[entry + 1] - first_key
        local = [2 - first_key // 4]
        expected += [canonical(local, (row + len_k - len_q) // 4) for row in range(len_q)]
    try:
        selection = Selection.from_transformers(blocks, docs, block_size=4)
    except InvalidInput:
        return
    assert selection.indices.tolist() == [expected]


def test_to_moves_indices_and_lse():
    docs = Documents.from_lengths([4])
    selection = Selection.from_indices(torch.zeros(2, 4, 1, dtype=torch.int32), docs)
    moved = selection.to("meta")
    assert moved.indices.device.type == "meta"
    assert moved.block_size == 128
    assert moved.lse is None
    with_lse = Selection(selection.indices, 128, torch.zeros(2, 4)).to("meta")
    assert with_lse.lse.device.type == "meta"
