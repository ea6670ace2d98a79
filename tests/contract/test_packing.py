"""Packing and unpacking of padded tensors: the real tokens, zeros, and their gradients."""

from __future__ import annotations

import pytest
import torch

from openmsa import Documents

from .messages import refuses
from .slow import tensor

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
