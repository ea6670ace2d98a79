"""Inputs that broke other attention libraries, each with its right value.

The report is named in each docstring; what is asserted is what our contract says about its input.
"""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

from openmsa import Documents, Selection, select_blocks, sparse_attention
from openmsa.testing import Inputs, assert_ok, attention_truth

from .oracle import (
    BACKENDS,
    Result,
    assert_close,
    assert_same_bits,
    differentiate,
    entries,
    offsets,
    ours,
    rand,
    truth_by_entry,
)

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

INT64 = torch.iinfo(torch.int64)


def operands(tokens, keys=None, q_heads=4, kv_heads=2, dim=8, dtype=torch.float64, size=1.0):
    """q, k, v and d_out."""
    keys = tokens if keys is None else keys
    shapes = [(tokens, q_heads), (keys, kv_heads), (keys, kv_heads), (tokens, q_heads)]
    return tuple((rand(*s, dim, seed=i) * size).to(dtype) for i, s in enumerate(shapes))


def own_blocks(docs, block_size=128):
    return docs.positions.clamp(min=-1).div(block_size, rounding_mode="floor")


def check(q, k, v, sel, docs, d_out, cu_q, cu_k=None, *, backend) -> Result:
    """Ours against the definition in float64 of the very operands given."""
    result = ours(q, k, v, sel, docs, d_out, backend=backend)
    expected = truth_by_entry(q, k, v, sel, entries(cu_q, cu_k), d_out)
    assert_close(result, expected)
    return result


def hold_to_the_yardstick(result: Result, q, k, v, sel, docs, d_out) -> None:
    """Low precision: at most twice the error of plain PyTorch in that dtype, plus rounding."""
    no_d_lse = torch.zeros(q.shape[:2], dtype=result.lse.dtype)
    inputs = Inputs(q, k, v, q, k, d_out, no_d_lse)
    right = attention_truth(inputs, sel.indices, docs, sel.block_size, with_d_lse=False)
    for name, x in result.items():
        assert x.isfinite().all(), name
        assert_ok(right.quantities[name].compare(x))


@contextmanager
def uninitialised_memory_is_nan():
    """PyTorch's own switch: every torch.empty comes filled with NaN or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def test_stale_lanes_in_index_rows(backend):
    """NVIDIA/cudnn-frontend#676(a): -1 before the block, an id of 999, garbage behind."""
    docs = Documents.from_lengths([256])
    ids = torch.zeros(2, 256, 16, dtype=torch.int64)
    ids[:, :, 1:] = -1
    ids[:, 7] = torch.tensor([-1] * 15 + [0])
    ids[:, 130] = torch.tensor([0, 999] + [-1] * 14)
    ids[0, 131] = torch.tensor([1, 0, -1, INT64.max, INT64.min, 2**32, -7, 2, *[77] * 8])
    sel = Selection.from_indices(ids, docs)
    assert sel.indices[0, 131, :3].tolist() == [0, 1, -1]
    result = check(*operands(256)[:3], sel, docs, operands(256)[3], [0, 256], backend=backend)
    assert all(x.isfinite().all() for _, x in result.items())


@pytest.mark.parametrize(
    "rows", [[5], list(range(0, 256, 3)), list(range(256))], ids=["one", "third", "all"]
)
def test_rows_without_any_block(rows, backend):
    """cudnn-frontend#676(b) hung on one; vllm#49054 subtracted -inf from -inf over all of them."""
    docs = Documents.from_lengths([256])
    ids = own_blocks(docs)[None, :, None].repeat(2, 1, 16)
    ids[:, rows] = -1
    sel = Selection.from_indices(ids, docs)
    q, k, v, d_out = operands(256)
    result = check(q, k, v, sel, docs, d_out, [0, 256], backend=backend)
    assert (result.out[rows] == 0).all()
    assert (result.lse[rows] == -math.inf).all()
    assert (result.dq[rows] == 0).all()
    if len(rows) == 256:
        assert (result.dk == 0).all()
        assert (result.dv == 0).all()


@pytest.mark.parametrize("tokens", [1, 2, 63, 126, 127])
def test_a_tail_of_sentinels_is_never_followed(tokens, backend):
    """vllm#54597: a list of one block and fifteen -1, which pointed at page -1; NaN lies there."""
    docs = Documents.from_lengths([tokens])
    ids = torch.full((2, tokens, 16), -1)
    ids[..., 0] = 0
    sel = Selection.from_indices(ids, docs)
    q, k, v, d_out = operands(tokens)
    k, v = (torch.cat([x, torch.full((128, *x.shape[1:]), math.nan)]) for x in (k, v))
    result = ours(q, k, v, sel, docs, d_out, backend=backend)
    expected = truth_by_entry(q, k[:tokens], v[:tokens], sel, entries([0, tokens]), d_out)
    assert (result.dk[tokens:] == 0).all()
    assert (result.dv[tokens:] == 0).all()
    trimmed = Result(result.out, result.lse, result.dq, result.dk[:tokens], result.dv[:tokens])
    assert_close(trimmed, expected)


def test_more_queries_than_keys(backend):
    """flash-attention#443: cu_q [0, 76, 110, 256], cu_k [0, 1, 2, 3], inputs x3; NaN in dq."""
    cu_q, cu_k = [0, 76, 110, 256], [0, 1, 2, 3]
    docs = Documents.from_cu_seqlens(torch.tensor(cu_q), torch.tensor(cu_k))
    sel = select_blocks(rand(256, 2, 4), rand(3, 4, seed=9), docs, backend=backend)
    q, k, v, d_out = operands(256, 3, size=3.0)
    result = check(q, k, v, sel, docs, d_out, cu_q, cu_k, backend=backend)
    blind = torch.ones(256, dtype=torch.bool)
    blind[[75, 109, 255]] = False
    assert (result.out[blind] == 0).all()
    assert (result.dq[blind] == 0).all()
    assert result.dq.abs().amax() < 1e-12, "softmax over one key has no slope"
    torch.testing.assert_close(result.out[75, 0], v[0, 0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_one_token(dtype, backend):
    """flash-attention#334: NaN in dq at 1 x 1 x 1. Whole numbers, so that everything is exact."""
    docs = Documents.from_lengths([1])
    sel = select_blocks(torch.ones(1, 1, 4), torch.ones(1, 4), docs, backend=backend)
    q, k, v, d_out = (torch.tensor([[[a, 1.0]]], dtype=dtype) for a in (2.0, -3.0, 4.0, 5.0))
    result = ours(q, k, v, sel, docs, d_out, backend=backend)
    assert torch.equal(result.out, v)
    assert torch.equal(result.dv, d_out)
    assert (result.dq == 0).all()
    assert (result.dk == 0).all()
    assert result.lse.item() == pytest.approx((2 * -3 + 1) / math.sqrt(2), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_very_negative_scores(dtype, backend):
    """cudnn-frontend#1072: one query, 128 keys, scores near -1000; dk and dv were NaN."""
    docs = Documents.from_cu_seqlens(torch.tensor([0, 1]), torch.tensor([0, 128]))
    sel = Selection.from_indices(torch.zeros(1, 1, 1, dtype=torch.int64), docs)
    q, k, v, d_out = operands(1, 128, 2, 1, 8, dtype)
    k = (k * 0.1 - 12.0).to(dtype)
    q = (q * 0.1 + 30.0).to(dtype)
    result = ours(q, k, v, sel, docs, d_out, backend=backend)
    hold_to_the_yardstick(result, q, k, v, sel, docs, d_out)
    assert -1100 < result.lse.min() < result.lse.max() < -900


@pytest.mark.parametrize("size", [3.0, 30.0], ids=["x3", "x30"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_large_inputs(size, dtype, backend):
    """flash-attention#1052, #1311: NaN gradients when q, k and v are scaled by 3."""
    docs = Documents.from_lengths([256])
    sel = select_blocks(
        rand(256, 1, 4), rand(256, 4, seed=9), docs, topk=2, block_size=64, backend=backend
    )
    q, k, v, d_out = operands(256, None, 1, 1, 64, dtype, size)
    result = ours(q, k, v, sel, docs, d_out, backend=backend)
    hold_to_the_yardstick(result, q, k, v, sel, docs, d_out)


def test_uninitialised_workspaces(backend):
    """tile-ai/tilelang#2461: NaN left in lse and delta of padding rows poisoned dk (0 * NaN)."""
    docs = Documents.from_lengths([129])
    sel = Selection.from_indices(torch.tensor([0, 1]).expand(2, 140, 2), docs)
    q, k, v, d_out = operands(140)
    plain = ours(q, k, v, sel, docs, d_out, backend=backend)
    with uninitialised_memory_is_nan():
        poisoned = ours(q, k, v, sel, docs, d_out, backend=backend)
        index = rand(140, 2, 4), rand(140, 4, seed=9)
        selected = select_blocks(*index, docs, topk=2, return_lse=True, backend=backend)
    expected = select_blocks(*index, docs, topk=2, return_lse=True, backend=backend)
    for name, x in poisoned.items():
        assert_same_bits(name, x, getattr(plain, name))
    assert_same_bits("indices", selected.indices, expected.indices)
    assert_same_bits("selected lse", selected.lse, expected.lse)


def test_a_tail_block_of_two_keys(backend):
    """vllm-ascend#13391: 130 keys, and 1e4 in the rest of the cache; results drifted run to run."""
    docs = Documents.from_lengths([130])
    sel = Selection.from_indices(torch.tensor([0, 1]).expand(2, 130, 2), docs)
    q, k, v, d_out = operands(130)
    k, v = (torch.cat([x, torch.full((126, *x.shape[1:]), 1e4, dtype=x.dtype)]) for x in (k, v))
    runs = [ours(q, k, v, sel, docs, d_out, backend=backend) for _ in range(3)]
    assert_close(runs[0], truth_by_entry(q, k, v, sel, entries([0, 130]), d_out))
    for run in runs[1:]:
        for name, x in run.items():
            assert_same_bits(name, x, getattr(runs[0], name))


@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        ([0, 0, 1208, 2048, 2048], [0, 2538, 4280, 5120, 8192]),
        ([0, 0, 128], [0, 128, 256]),
        ([0, 0, 0, 1023], [0, 0, 1, 2046]),
        ([0, 128, 128, 256], None),
    ],
    ids=["flash-attention_2562", "flash-attention_2421", "flash-attention_1254", "fla_103"],
)
def test_segments_without_queries(cu_q, cu_k, backend):
    """The reported offsets themselves: no crash, no hang, and exact zeros for unread keys."""
    docs = Documents.from_cu_seqlens(
        torch.tensor(cu_q), None if cu_k is None else torch.tensor(cu_k)
    )
    tokens, keys = docs.num_queries, docs.num_keys
    sel = select_blocks(rand(tokens, 1, 4), rand(keys, 4, seed=9), docs, topk=4, backend=backend)
    q, k, v, d_out = operands(tokens, keys, 1, 1)
    result = check(q, k, v, sel, docs, d_out, cu_q, cu_k, backend=backend)
    for entry in entries(cu_q, cu_k):
        if not entry.queries:
            unread = slice(entry.keys.start, entry.keys.stop)
            assert (result.dk[unread] == 0).all()
            assert (result.dv[unread] == 0).all()


@pytest.mark.parametrize("lengths", [[64, 192], [100, 157]], ids=["64_192", "100_157"])
def test_packed_gradients(lengths, backend):
    """TransformerEngine#3333 ([64, 192], 8/2 heads: forward right, backward wrong); flash-msa
    (257 tokens, no multiple of 128)."""
    docs = Documents.from_lengths(lengths)
    sel = select_blocks(
        rand(sum(lengths), 2, 4), rand(sum(lengths), 4, seed=9), docs, backend=backend
    )
    q, k, v, d_out = operands(sum(lengths), None, 8, 2)
    check(q, k, v, sel, docs, d_out, offsets(lengths), backend=backend)


@pytest.mark.parametrize("topk", [17, 32, 64])
def test_more_than_sixteen_blocks(topk, backend):
    """vllm-ascend#12734: arrays of 16 overflowed; here up to 64 blocks a query."""
    docs = Documents.from_lengths([300])
    ids = torch.arange(topk).flip(0).expand(2, 300, topk)
    sel = Selection.from_indices(ids, docs, block_size=4)
    check(*operands(300)[:3], sel, docs, operands(300)[3], [0, 300], backend=backend)


def test_padding_by_the_token_count(backend):
    """fla-org/native-sparse-attention#32: linspace inputs, indices padded with T and not -1."""
    docs = Documents.from_lengths([200])
    ids = torch.full((2, 200, 8), 200)
    ids[..., 0] = own_blocks(docs, 32)
    sel = Selection.from_indices(ids, docs, block_size=32)
    q, k, v, d_out = (
        torch.linspace(-2, 2, 200 * h * 8, dtype=torch.float64).view(200, h, 8)
        for h in (4, 2, 2, 4)
    )
    check(q, k, v, sel, docs, d_out, [0, 200], backend=backend)


def test_a_transposed_selection(backend):
    """vllm#48603, #48604: a token-major buffer viewed head-major, read through its strides."""
    docs = Documents.from_lengths([200])
    token_major = torch.randint(-1, 7, (200, 4, 16), generator=torch.Generator().manual_seed(0))
    sel = Selection.from_indices(token_major.transpose(0, 1), docs, block_size=32)
    q, k, v, d_out = operands(200, None, 4, 4)
    check(q, k, v, sel, docs, d_out, [0, 200], backend=backend)
    assert torch.equal(
        sel.indices, Selection.from_flashinfer(token_major, docs, block_size=32).indices
    )


@pytest.fixture
def layout_problem(backend):
    docs = Documents.from_lengths([50, 14])
    sel = Selection.from_indices(torch.tensor([0, 1, 2]).expand(2, 64, 3), docs, block_size=16)
    arguments = operands(64)
    return docs, sel, arguments, ours(*arguments[:3], sel, docs, arguments[3], backend=backend)


def views(x):
    """The same values in other memory."""
    strided = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)[..., ::2]
    rows = torch.full((2 * x.shape[0], *x.shape[1:]), math.nan, dtype=x.dtype)[::2]
    heads = torch.full((x.shape[0], x.shape[1] + 3, x.shape[2]), math.nan, dtype=x.dtype)[:, 1:-2]
    for view in (strided, rows, heads):
        view.copy_(x)
    return {
        "every_second_channel": strided,
        "every_second_row": rows,
        "slice_of_heads": heads,
        "head_major": x.transpose(0, 1).contiguous().transpose(0, 1),
        "channel_major": x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    }


@pytest.mark.parametrize("argument", ["q", "k", "v", "d_out"])
@pytest.mark.parametrize(
    "form",
    ["every_second_channel", "every_second_row", "slice_of_heads", "head_major", "channel_major"],
)
def test_any_strides(layout_problem, argument, form, backend):
    """flash-attention#355: gradients were wrong for a dO that was not contiguous."""
    docs, sel, arguments, expected = layout_problem
    named = dict(zip(("q", "k", "v", "d_out"), arguments, strict=True))
    view = views(named[argument])[form]
    assert not view.is_contiguous()
    named[argument] = view
    leaves = [named[name].detach().requires_grad_() for name in ("q", "k", "v")]
    out, lse = sparse_attention(*leaves, sel, docs, return_lse=True, backend=backend)
    grads = torch.autograd.grad(out, leaves, named["d_out"])
    assert_close(Result(out.detach(), lse.detach(), *grads), expected)


def test_d_out_of_stride_zero(layout_problem, backend):
    """out.sum().backward() sends an expanded scalar."""
    docs, sel, (q, k, v, _), _ = layout_problem
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sparse_attention(*leaves, sel, docs, backend=backend).sum().backward()
    expected = truth_by_entry(q, k, v, sel, entries([0, 50, 64]), torch.ones_like(q))
    for leaf, name in zip(leaves, ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(leaf.grad, getattr(expected, name), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_only_the_gradients_asked_for(layout_problem, wanted, backend):
    docs, sel, (q, k, v, d_out), expected = layout_problem
    leaves = {name: x.clone() for name, x in zip("qkv", (q, k, v), strict=True)}
    for name in wanted:
        leaves[name].requires_grad_()
    out = sparse_attention(*leaves.values(), sel, docs, backend=backend)
    out.backward(d_out)
    for name, leaf in leaves.items():
        if name in wanted:
            torch.testing.assert_close(
                leaf.grad, getattr(expected, f"d{name}"), rtol=1e-10, atol=1e-11
            )
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_large_d_out(dtype, backend):
    """NVIDIA-NeMo/Automodel#3809: dq summed in fp16 passes 65,504 on the way; fp32 sums do not.

    d_out alternates between +1e4 and -1e4 over queries and heads, so partial sums of dk and dv
    leave fp16's range and the results do not.
    """
    docs = Documents.from_lengths([256])
    sel = Selection.from_indices(torch.arange(16).expand(1, 256, 16), docs, block_size=16)
    q, k, v, _ = operands(256, None, 16, 1, 16, dtype, size=0.25)
    signs = (torch.arange(256)[:, None] + torch.arange(16)) % 2 * 2 - 1
    d_out = (1e4 * signs[..., None].expand(256, 16, 16)).to(dtype)
    result = ours(q, k, v, sel, docs, d_out, backend=backend)
    hold_to_the_yardstick(result, q, k, v, sel, docs, d_out)
    expected = truth_by_entry(q, k, v, sel, entries([0, 256]), d_out)
    for name, right in expected.items():
        assert right.abs().amax() < torch.finfo(dtype).max, f"{name}: the right value fits"


def test_inputs_are_left_alone(layout_problem, backend):
    docs, sel, arguments, _ = layout_problem
    before = [x.clone() for x in (*arguments, sel.indices)]
    differentiate(
        lambda q, k, v: sparse_attention(q, k, v, sel, docs, return_lse=True, backend=backend),
        *arguments,
    )
    for x, copy in zip((*arguments, sel.indices), before, strict=True):
        assert torch.equal(x, copy)
