"""Documents from a 4-D mask: read right, or refused for a single wrong entry."""

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
