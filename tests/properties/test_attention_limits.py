"""Attention where its right value is known from elsewhere: dense, block-local, merged, permuted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from openmsa import Documents, Selection, select_blocks, sparse_attention

from .oracle import (
    BACKENDS,
    TIGHT,
    Result,
    assert_close,
    assert_same_bits,
    attention,
    differentiate,
    entries,
    offsets,
    ours,
    rand,
    readable,
    truth,
)
from .problems import problems, raw_selection, stable

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def dense_causal(lengths, scale=None):
    """PyTorch's own attention, document by document: the third opinion beside oracle and ours."""

    def call(q, k, v):
        outs = []
        for begin, end in zip(offsets(lengths), offsets(lengths)[1:], strict=False):
            part = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
            group = q.shape[1] // k.shape[1]
            part[1:] = [x.repeat_interleave(group, 1) for x in part[1:]]
            out = scaled_dot_product_attention(*part, is_causal=True, scale=scale)
            outs.append(out[0].transpose(0, 1))
        out = torch.cat(outs)
        return out, torch.zeros(out.shape[:2], dtype=out.dtype)

    return call


@stable(40)
@given(problem=problems())
def test_against_the_dense_definition(problem, backend):
    """Any blocks, the own one not always among them; gradients of out and lse together."""
    sel = raw_selection(problem)
    q, k, v, d_out, d_lse = problem.operands()
    mask = readable(sel.indices, problem.entries, problem.tokens, problem.block_size)
    result = ours(q, k, v, sel, problem.docs, d_out, d_lse, backend=backend)
    assert_close(result, truth(q, k, v, mask, d_out, d_lse))


@stable(20)
@given(problem=problems())
def test_the_indexers_blocks_against_the_dense_definition(problem, backend):
    sel = problem.selection(backend)
    q, k, v, d_out, _ = problem.operands()
    mask = readable(sel.indices, problem.entries, problem.tokens, problem.block_size)
    # Every query sees at least itself: its own block is forced.
    assert mask[:, range(problem.tokens), range(problem.tokens)].all()
    assert_close(
        ours(q, k, v, sel, problem.docs, d_out, backend=backend), truth(q, k, v, mask, d_out)
    )


@stable(20)
@given(problem=problems(min_length=1))
def test_enough_blocks_are_dense_causal_attention(problem, backend):
    index_q, index_k = problem.index_operands()
    blocks = -(-max(problem.lengths) // problem.block_size)
    sel = select_blocks(
        index_q,
        index_k,
        problem.docs,
        topk=min(max(blocks, 1), 64),
        block_size=problem.block_size,
        backend=backend,
    )
    q, k, v, d_out, _ = problem.operands()
    result = ours(q, k, v, sel, problem.docs, d_out, backend=backend)
    expected = differentiate(dense_causal(problem.lengths), q, k, v, d_out)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), **TIGHT)


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "scale"),
    [
        ((8, 2), 64, 64, None),
        ((8, 2), 64, 64, 0.3),
        ((2, 2), 128, 128, None),
        ((16, 1), 96, 128, None),
        ((3, 1), 129, 64, None),
        ((3, 1), 129, 64, 0.3),
    ],
    ids=["gqa_64", "gqa_64_scaled", "mha_128", "group_16_dim_96", "dim_129", "dim_129_scaled"],
)
def test_real_shapes_are_dense_causal_attention(heads, head_dim, block_size, scale, backend):
    """kernels-community#1085 (GQA gradients), flash-attention#2623 (head dim 64 gradients),
    tilelang-ascend#1669 (scale from a padded head dim), TransformerEngine#3333 ([64, 192])."""
    (q_heads, kv_heads), lengths = heads, [64, 192, 1]
    docs = Documents.from_lengths(lengths)
    blocks = -(-192 // block_size)
    ids = torch.arange(blocks).expand(kv_heads, 257, blocks)
    sel = Selection.from_indices(ids, docs, block_size=block_size)
    q, d_out = (rand(257, q_heads, head_dim, seed=i) for i in range(2))
    k, v = (rand(257, kv_heads, head_dim, seed=i) for i in (2, 3))
    result = ours(q, k, v, sel, docs, d_out, backend=backend, scale=scale)
    expected = differentiate(dense_causal(lengths, scale), q, k, v, d_out)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), **TIGHT)


def test_one_block_is_block_local_attention(backend):
    """MoonshotAI/MoBA#26: top-k 1 attended to the whole sequence; S = 512."""
    docs = Documents.from_lengths([512])
    sel = select_blocks(rand(512, 2, 4), rand(512, 4, seed=1), docs, topk=1, backend=backend)
    assert sel.indices[..., 0].tolist() == [[query // 128 for query in range(512)]] * 2
    q, d_out = rand(512, 4, 16, seed=2), rand(512, 4, 16, seed=3)
    k, v = rand(512, 2, 16, seed=4), rand(512, 2, 16, seed=5)
    result = ours(q, k, v, sel, docs, d_out, backend=backend)
    expected = differentiate(dense_causal([128] * 4), q, k, v, d_out)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), **TIGHT)


def test_many_queries_choose_one_block(backend):
    """cudnn-frontend#384, #385: 512 queries read block 0; dk and dv are sums over all of them."""
    docs = Documents.from_lengths([512])
    sel = Selection.from_indices(torch.zeros(2, 512, 1, dtype=torch.int64), docs)
    q, d_out = rand(512, 4, 16, seed=2), rand(512, 4, 16, seed=3)
    k, v = rand(512, 2, 16, seed=4), rand(512, 2, 16, seed=5)
    mask = torch.ones(512, 512, dtype=torch.bool).tril()
    mask[:, 128:] = False
    result = ours(q, k, v, sel, docs, d_out, backend=backend)
    assert_close(result, truth(q, k, v, mask.expand(2, -1, -1), d_out))
    assert (result.dk[128:] == 0).all()
    assert (result.dv[128:] == 0).all()


@stable(20)
@given(problem=problems(min_length=1))
def test_keys_nobody_selected_get_exact_zeros(problem, backend):
    sel = raw_selection(problem)
    q, k, v, d_out, d_lse = (x.float() for x in problem.operands())
    result = ours(q, k, v, sel, problem.docs, d_out, d_lse, backend=backend)
    mask = readable(sel.indices, problem.entries, problem.tokens, problem.block_size)
    unread = ~mask.any(1).t()
    assert (result.dk[unread] == 0).all()
    assert (result.dv[unread] == 0).all()
    # And a key that was read gets something: random gradients do not cancel to zero.
    assert (result.dv[~unread] != 0).any(-1).all()


@pytest.mark.parametrize("how", ["large", "nan"])
@stable(15)
@given(problem=problems(min_length=1))
def test_blocks_nobody_selected_are_not_read(problem, how, backend):
    """vllm#54597, vllm-ascend#13391: what -1 slots and block tails point at must not leak in."""
    sel = raw_selection(problem)
    q, k, v, d_out, d_lse = problem.operands()
    read = torch.zeros(problem.tokens, problem.kv_heads, dtype=torch.bool)
    for entry in problem.entries:
        for head in range(problem.kv_heads):
            chosen = set(sel.indices[head, list(entry.queries)].flatten().tolist())
            for key in entry.keys:
                read[key, head] = (key - entry.keys.start) // problem.block_size in chosen
    before = ours(q, k, v, sel, problem.docs, d_out, d_lse, backend=backend)
    value = {"large": 1e30, "nan": float("nan")}[how]
    k, v = (torch.where(read[..., None], x, value) for x in (k, v))
    after = ours(q, k, v, sel, problem.docs, d_out, d_lse, backend=backend)
    # The values may move work between code paths of different rounding, so not to the bit.
    assert_close(after, before)
    assert (after.dk[~read] == 0).all()
    assert (after.dv[~read] == 0).all()


@stable(20)
@given(problem=problems(), data=st.data())
def test_heads_of_a_group_are_interchangeable(problem, data, backend):
    """Permuting query heads inside their groups permutes out, lse and dq, and keeps dk and dv."""
    order = []
    for head in range(problem.kv_heads):
        inside = data.draw(st.permutations(range(problem.group)))
        order += [head * problem.group + i for i in inside]
    sel = raw_selection(problem)
    q, k, v, d_out, d_lse = problem.operands()
    result = ours(q, k, v, sel, problem.docs, d_out, d_lse, backend=backend)
    moved = ours(
        q[:, order], k, v, sel, problem.docs, d_out[:, order], d_lse[:, order], backend=backend
    )
    parts = (result.out, result.lse, result.dq)
    assert_close(moved, Result(*(x[:, order] for x in parts), result.dk, result.dv))


@stable(20)
@given(problem=problems())
def test_kv_heads_are_independent(problem, backend):
    """One KV head with its group, alone, gives what it gives among others."""
    sel = raw_selection(problem)
    q, k, v, d_out, d_lse = problem.operands()
    result = ours(q, k, v, sel, problem.docs, d_out, d_lse, backend=backend)
    for head in range(problem.kv_heads):
        group = slice(head * problem.group, (head + 1) * problem.group)
        one = slice(head, head + 1)
        alone = Selection(sel.indices[one].contiguous(), sel.block_size)
        single = ours(
            q[:, group],
            k[:, one],
            v[:, one],
            alone,
            problem.docs,
            d_out[:, group],
            d_lse[:, group],
            backend=backend,
        )
        parts = (result.out, result.lse, result.dq)
        expected = Result(*(x[:, group] for x in parts), result.dk[:, one], result.dv[:, one])
        assert_close(single, expected)


@stable(20)
@given(problem=problems(min_length=1))
def test_partial_results_merge_by_their_lse(problem, backend):
    """Two halves of a selection, merged through the differentiable lse, are the whole."""
    sel = raw_selection(problem)
    q, k, v, d_out, _ = problem.operands()
    odd = sel.indices % 2 == 1
    halves = [
        Selection.from_indices(
            torch.where(keep & (sel.indices >= 0), sel.indices, -1),
            problem.docs,
            block_size=sel.block_size,
        )
        for keep in (odd, ~odd)
    ]

    def merged(q, k, v):
        parts = [
            sparse_attention(q, k, v, half, problem.docs, return_lse=True, backend=backend)
            for half in halves
        ]
        lses = torch.stack([lse for _, lse in parts])
        # A row that sees nothing in both halves has no lse to divide by.
        seen = lses.isfinite().any(0)
        lse = torch.where(seen, lses, 0.0).logsumexp(0)
        weights = torch.where(seen, lses - lse, -torch.inf).exp()
        out = sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True))
        return out, torch.where(seen, lse, -torch.inf)

    whole = ours(q, k, v, sel, problem.docs, d_out, backend=backend)
    assert_close(differentiate(merged, q, k, v, d_out), whole)


@stable(20)
@given(problem=problems(), data=st.data())
def test_the_form_of_the_ids_does_not_matter(problem, data, backend):
    """Shuffled slots, duplicates in place of -1, int64 and strides: the same result to the bit."""
    sel = raw_selection(problem)
    order = data.draw(st.permutations(range(problem.topk)))
    ids = sel.indices.long()
    ids = torch.where(ids < 0, ids[..., :1], ids)[..., order]
    messy = torch.stack([ids, torch.full_like(ids, 7)], -1)[..., 0]
    other = Selection.from_indices(messy, problem.docs, block_size=sel.block_size)
    q, k, v, d_out, d_lse = problem.operands()
    one = ours(q, k, v, sel, problem.docs, d_out, d_lse, backend=backend)
    two = ours(q, k, v, other, problem.docs, d_out, d_lse, backend=backend)
    for name, x in one.items():
        assert_same_bits(name, getattr(two, name), x)


@stable(15)
@given(problem=problems())
def test_the_same_call_twice_is_the_same_to_the_bit(problem, backend):
    """Repeatable gradients on a CPU, with and without asking for them."""
    sel = raw_selection(problem)
    operands = [x.float() for x in problem.operands()]
    runs = []
    for deterministic in (None, True, False, True):

        def call(q, k, v, deterministic=deterministic):
            return sparse_attention(
                q,
                k,
                v,
                sel,
                problem.docs,
                return_lse=True,
                deterministic=deterministic,
                backend=backend,
            )

        runs.append(differentiate(call, *operands))
    for other in runs[1:]:
        for name, x in runs[0].items():
            assert_same_bits(name, getattr(other, name), x)


@stable(20)
@given(problem=problems(min_length=1), which=st.sampled_from(["out", "lse", "both"]))
def test_gradients_of_either_output(problem, which, backend):
    """A loss on lse alone, on out alone, or on both: against autograd of the definition."""
    sel = raw_selection(problem)
    q, k, v, d_out, d_lse = problem.operands()
    d_out = d_out if which != "lse" else torch.zeros_like(d_out)
    d_lse = d_lse if which != "out" else None
    mask = readable(sel.indices, problem.entries, problem.tokens, problem.block_size)
    result = ours(q, k, v, sel, problem.docs, d_out, d_lse, backend=backend)
    assert_close(result, truth(q, k, v, mask, d_out, d_lse))
    if which == "lse":
        assert (result.dv == 0).all(), "the lse does not depend on v"


@pytest.mark.parametrize("output", ["out", "lse"])
def test_a_row_without_keys_has_no_gradient_whatever_arrives(output, backend):
    """Merging two empty partial results sends NaN back (-inf minus -inf); it must end there.

    Queries 0 and 1 see no key; query 3 selects no block. Rows 2 and 4 are ordinary.
    """
    docs = Documents.from_cu_seqlens(torch.tensor([0, 5]), torch.tensor([0, 3]))
    ids = torch.tensor([[-1], [-1], [0], [-1], [0]]).expand(1, 5, 1)
    sel = Selection.from_indices(ids, docs, block_size=4)
    q, k, v, d_out, d_lse = (
        rand(n, *shape, seed=i)
        for i, (n, shape) in enumerate(
            [(5, (2, 4)), (3, (1, 4)), (3, (1, 4)), (5, (2, 4)), (5, (2,))]
        )
    )
    clean = ours(q, k, v, sel, docs, d_out, d_lse, backend=backend)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = sparse_attention(q, k, v, sel, docs, return_lse=True, backend=backend)
    for row in (0, 1, 3):
        (d_out if output == "out" else d_lse)[row] = float("nan")
    d_lse = torch.where(lse.isfinite() | d_lse.isnan(), d_lse, 0.0)
    grads = torch.autograd.grad([out, lse], (q, k, v), [d_out, d_lse])
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(grad, getattr(clean, name), **TIGHT)
    assert (grads[0][[0, 1, 3]] == 0).all()


def test_gradients_by_finite_differences(backend):
    """flash-attention#2101: through the public function only, so that nothing is left out."""
    cu_q, cu_k = [0, 3, 3, 7], [0, 5, 6, 8]
    docs = Documents.from_cu_seqlens(torch.tensor(cu_q), torch.tensor(cu_k))
    ids = torch.tensor([[1, 0], [0, 0], [-1, 2], [0, 1], [0, 1], [-1, -1], [0, -1]])
    sel = Selection.from_indices(ids[None], docs, block_size=2)
    q, k, v = rand(7, 2, 3), rand(8, 1, 3, seed=1), rand(8, 1, 3, seed=2)
    seen = readable(sel.indices, entries(cu_q, cu_k), 8, 2).any(-1)[0]
    assert 0 < int(seen.sum()) < 7, "some rows see nothing here"

    def call(q, k, v):
        out, lse = sparse_attention(q, k, v, sel, docs, return_lse=True, backend=backend)
        return out, lse[seen]

    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(call, inputs)
    torch.testing.assert_close(
        call(*inputs)[0],
        attention(q, k, v, readable(sel.indices, entries(cu_q, cu_k), 8, 2))[0],
        **TIGHT,
    )


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_token_leaves_the_queries_before_it_alone(backend, broken):
    """Causality holds for NaN as well: zero weights must not multiply what they hide."""
    docs = Documents.from_lengths([40, 30])
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn((70, heads, 16), generator=generator) for heads in (4, 2, 2, 4))
    blocks = torch.stack([torch.arange(70) % 40 // 8, torch.zeros(70, dtype=torch.int64)], 1)
    blocks[40:, 0] = torch.arange(30) // 8
    selection = Selection.from_indices(blocks.int().expand(2, -1, -1), docs, block_size=8)

    def attend(k, v):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = sparse_attention(*leaves, selection, docs, backend=backend)
        before = out[:20]
        # dk and dv also sum over the queries behind, which rightly are broken.
        return before.detach(), torch.autograd.grad(before, leaves, d_out[:20])[0][:20]

    wanted = attend(k, v)
    for tensor in ("k", "v"):
        operands = {"k": k.clone(), "v": v.clone()}
        operands[tensor][20, :] = broken
        found = attend(**operands)
        for name, a, b in zip(("out", "dq"), found, wanted, strict=True):
            assert a.isfinite().all(), f"{tensor}: {name}"
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=f"{tensor}: {name}")
