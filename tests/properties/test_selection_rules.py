"""The choice of blocks against brute force: every rule, every tie, NaN and infinities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmsa import Documents, select_blocks

from .oracle import (
    BACKENDS,
    TIGHT,
    assert_same_bits,
    brute_selected_lse,
    brute_selection,
    entries,
    offsets,
    rand,
)
from .problems import problems, stable

by_backend = pytest.mark.parametrize("backend", BACKENDS)

# Products and sums of these are exact in fp32, fp16 and bf16 scores alike, so ties are real ties.
WHOLE = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0])
ODD = st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0])


@st.composite
def scoring(draw, values=WHOLE, dims=(1, 2, 3)):
    """Documents or suffixes, index operands of few distinct values, and any rules."""
    lengths_k = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
    lengths_q = [draw(st.integers(0, min(n + 2, 8))) for n in lengths_k]
    heads, dim = draw(st.integers(1, 2)), draw(st.sampled_from(dims))
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)

    def tensor(*shape):
        count = math.prod(shape)
        return torch.tensor(draw(st.lists(values, min_size=count, max_size=count))).view(shape)

    topk = draw(st.integers(1, 4))
    init_blocks = draw(st.integers(0, topk - 1))
    rules = {
        "topk": topk,
        "block_size": draw(st.sampled_from([1, 2, 3, 4])),
        "init_blocks": init_blocks,
        "local_blocks": draw(st.integers(1, topk - init_blocks)),
    }
    return cu_q, cu_k, tensor(cu_q[-1], heads, dim), tensor(cu_k[-1], dim), rules


def select(cu_q, cu_k, index_q, index_k, rules, backend, **options):
    docs = Documents.from_cu_seqlens(torch.tensor(cu_q), torch.tensor(cu_k))
    return select_blocks(index_q, index_k, docs, **rules, backend=backend, **options)


@by_backend
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@stable(40)
@given(case=scoring())
def test_ties_are_broken_by_the_lower_id(case, dtype, backend):
    """Whole numbers tie all the time; the choice is the brute-force one in every dtype."""
    cu_q, cu_k, index_q, index_k, rules = case
    sel = select(cu_q, cu_k, index_q.to(dtype), index_k.to(dtype), rules, backend)
    expected = brute_selection(index_q, index_k, entries(cu_q, cu_k), **rules)
    assert sel.indices.tolist() == expected
    assert sel.indices.dtype == torch.int32
    assert sel.indices.is_contiguous()


@by_backend
@stable(80)
@given(case=scoring(values=ODD, dims=(1, 2)))
def test_nan_infinities_and_zeros(case, backend):
    """NaN ranks as -inf, in a key and its block as in a query; +inf ties too; -0 equals +0."""
    cu_q, cu_k, index_q, index_k, rules = case
    sel = select(cu_q, cu_k, index_q, index_k, rules, backend)
    assert sel.indices.tolist() == brute_selection(index_q, index_k, entries(cu_q, cu_k), **rules)


@by_backend
@stable(30)
@given(problem=problems())
def test_random_scores(problem, backend):
    """float64 scores of random operands: no ties, so the order of sums cannot matter."""
    index_q, index_k = problem.index_operands()
    rules = {"topk": problem.topk, "block_size": problem.block_size}
    sel = problem.select(index_q, index_k, problem.docs, backend)
    assert sel.indices.tolist() == brute_selection(index_q, index_k, problem.entries, **rules)


@stable(50)
@given(case=scoring())
def test_backends_agree_to_the_bit(case):
    cu_q, cu_k, index_q, index_k, rules = case
    one, other = (select(cu_q, cu_k, index_q, index_k, rules, backend) for backend in BACKENDS)
    assert_same_bits("indices", one.indices, other.indices)


@pytest.mark.parametrize("values", ["few", "equal"])
def test_backends_agree_on_a_large_tie_heavy_problem(values):
    """5 documents, more than 16 blocks of 128, integer values: equal to the bit, twice over."""
    docs = Documents.from_lengths([2500, 1, 130, 0, 700])
    generator = torch.Generator().manual_seed(0)
    index_q = torch.randint(-2, 3, (3331, 2, 16), generator=generator).float()
    index_k = torch.randint(-2, 3, (3331, 16), generator=generator).float()
    if values == "equal":
        index_k = index_k[:1].expand_as(index_k)
    found = [
        select_blocks(index_q, index_k, docs, backend=backend).indices
        for backend in (*BACKENDS, *BACKENDS)
    ]
    for other in found[1:]:
        assert_same_bits("indices", other, found[0])
    if values == "equal":
        # Every block ties, so the first 15 and the own one win: query 2499 is in block 19.
        assert found[0][0, 2499].tolist() == [*range(15), 19]


def one_query(scores, block_size=1, backend="cpu", **rules):
    """Blocks of the last query of one document whose keys score ``scores``."""
    scores = torch.tensor(scores, dtype=torch.float32)
    docs = Documents.from_cu_seqlens(torch.tensor([0, 1]), torch.tensor([0, len(scores)]))
    one = torch.ones(1, 1, 1)
    sel = select_blocks(one, scores[:, None], docs, block_size=block_size, backend=backend, **rules)
    return sel.indices[0, 0].tolist()


NAN, INF = math.nan, math.inf


@by_backend
@pytest.mark.parametrize(
    ("scores", "rules", "expected"),
    [
        ([5, 5, 5, 5, 5], {"topk": 3}, [0, 1, 4]),
        ([0.0, -0.0, 0.0, -0.0], {"topk": 2}, [0, 3]),
        ([-0.0, 0.0, 0.0, -9.0], {"topk": 2}, [0, 3]),
        ([1, NAN, 0, 0], {"topk": 2}, [0, 3]),
        ([NAN, -INF, -5, 0], {"topk": 2}, [2, 3]),
        ([NAN, -INF, NAN, 0], {"topk": 3}, [0, 1, 3]),
        ([-INF, NAN, -INF, 0], {"topk": 3}, [0, 1, 3]),
        ([NAN, NAN, NAN, NAN], {"topk": 2}, [0, 3]),
        ([3, INF, INF, 0], {"topk": 2}, [1, 3]),
        ([INF, INF, INF, -INF], {"topk": 2}, [0, 3]),
        ([INF, INF, INF, NAN], {"topk": 1}, [3]),
        ([INF, 1, 2, 0], {"topk": 2, "init_blocks": 1}, [0, 3]),
        ([NAN, 9, 9, 9, 0], {"topk": 3, "init_blocks": 1}, [0, 1, 4]),
        ([0, 9, 9, 9, 0], {"topk": 3, "init_blocks": 2}, [0, 1, 4]),
        ([9, 8, 7, 0, 0], {"topk": 3, "local_blocks": 2}, [0, 3, 4]),
        ([9, 8, INF, -INF, NAN], {"topk": 3, "local_blocks": 3}, [2, 3, 4]),
        ([1, 2], {"topk": 4}, [0, 1, -1, -1]),
        ([NAN, NAN], {"topk": 3}, [0, 1, -1]),
        ([1], {"topk": 4, "init_blocks": 2, "local_blocks": 2}, [0, -1, -1, -1]),
        ([0, 1, 2], {"topk": 4, "init_blocks": 2, "local_blocks": 2}, [0, 1, 2, -1]),
        ([1e-45, 0, -1e-45, 9], {"topk": 3}, [0, 1, 3]),
        ([-3e38, 3e38, -1, 0], {"topk": 2}, [1, 3]),
        ([-1, -2, -3, -4], {"topk": 2}, [0, 3]),
    ],
    ids=[
        "all_equal",
        "zeros_of_both_signs",
        "minus_zero_first",
        "nan_loses",
        "nan_and_minus_inf_tie_at_the_bottom",
        "nan_is_taken_before_a_slot_stays_empty",
        "minus_inf_is_taken_before_a_slot_stays_empty",
        "only_nan",
        "inf_ties_by_id",
        "own_block_of_minus_inf_is_forced",
        "own_block_of_nan_beats_inf",
        "forced_first_block_is_not_counted_twice",
        "forced_first_block_of_nan",
        "two_forced_first_blocks",
        "two_local_blocks",
        "local_blocks_beat_inf",
        "fewer_blocks_than_topk",
        "fewer_blocks_than_topk_of_nan",
        "forced_blocks_that_do_not_exist",
        "forced_blocks_that_overlap",
        "subnormal_scores",
        "huge_scores",
        "negative_scores",
    ],
)
def test_rules(scores, rules, expected, backend):
    assert one_query(scores, backend=backend, **rules) == expected


@by_backend
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_nan_key_sinks_its_block_only(place, backend):
    """Blocks of three keys; the NaN key's block holds the best other key."""
    scores = [1, 1, 1, 9, 9, 9, 2, 2, 2, 0, 0, 0]
    scores[3 + place] = NAN
    assert one_query(scores, block_size=3, backend=backend, topk=2) == [2, 3]


@by_backend
def test_nan_in_a_query_leaves_the_lowest_ids(backend):
    docs = Documents.from_lengths([12])
    index_q = torch.ones(12, 2, 3)
    index_q[:, 1, 1] = NAN
    index_k = rand(12, 3).float()
    sel = select_blocks(index_q, index_k, docs, topk=3, block_size=2, backend=backend)
    assert sel.indices[1, 11].tolist() == [0, 1, 5]
    clean = select_blocks(
        torch.ones(12, 2, 3), index_k, docs, topk=3, block_size=2, backend=backend
    )
    assert_same_bits("the other head", sel.indices[0], clean.indices[0])


@by_backend
def test_a_future_key_does_not_count(backend):
    """The own block's score is the maximum over the keys seen so far; later keys are huge."""
    docs = Documents.from_lengths([8])
    index_k = torch.tensor([[1.0], [2.0], [9e9], [9e9], [3.0], [NAN], [9e9], [INF]])
    sel = select_blocks(
        torch.ones(8, 1, 1), index_k, docs, topk=1, block_size=4, backend=backend, return_lse=True
    )
    assert sel.indices.flatten().tolist() == [0] * 4 + [1] * 4
    assert sel.lse[0, 0] == 1.0
    assert sel.lse[0, 4] == 3.0
    torch.testing.assert_close(
        sel.lse[0, 1].item(), math.log(math.e + math.e**2), rtol=1e-6, atol=0
    )


@by_backend
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 255, 256, 257])
def test_topk_beyond_the_number_of_blocks(tokens, backend):
    """lucidrains/native-sparse-attention-pytorch#18, MInference#201: clamp, pad with -1, and no
    extra block at exact multiples of the block size."""
    docs = Documents.from_lengths([tokens])
    sel = select_blocks(rand(tokens, 1, 4), rand(tokens, 4, seed=1), docs, backend=backend)
    for query in range(0, tokens, 37):
        own = query // 128
        assert sel.indices[0, query].tolist() == [*range(own + 1)] + [-1] * (15 - own)


@by_backend
@pytest.mark.parametrize("topk", [16, 32, 64])
def test_many_blocks(topk, backend):
    """ROCm/ATOM#1368, vllm-ascend#12734: more blocks than top-k, and top-k beyond 16."""
    tokens, block = 17 * 128 if topk == 16 else 70 * 16, 128 if topk == 16 else 16
    docs = Documents.from_lengths([tokens])
    index_q, index_k = rand(tokens, 2, 4, seed=topk), rand(tokens, 4, seed=topk + 1)
    sel = select_blocks(index_q, index_k, docs, topk=topk, block_size=block, backend=backend)
    last = entries([0, 3], [0, tokens])
    expected = brute_selection(index_q[-3:], index_k, last, topk=topk, block_size=block)
    assert sel.indices[:, -3:].tolist() == expected
    assert all(-1 not in row for head in expected for row in head)


@by_backend
def test_every_kv_group_chooses_for_itself(backend):
    """transformers#46762: heads collapsed by a max shared one list; here head h wants block h."""
    docs = Documents.from_lengths([6 * 16])
    index_q = torch.eye(4).expand(96, 4, 4)
    index_k = torch.zeros(96, 4)
    for head in range(4):
        index_k[head * 16 + 5, head] = 1.0
    sel = select_blocks(index_q, index_k, docs, topk=2, block_size=16, backend=backend)
    assert sel.indices.shape == (4, 96, 2)
    assert sel.indices[:, 95].tolist() == [[0, 5], [1, 5], [2, 5], [3, 5]]


@by_backend
@stable(25)
@given(problem=problems(), data=st.data())
def test_a_head_alone_chooses_the_same(problem, data, backend):
    index_q, index_k = problem.index_operands()
    sel = problem.select(index_q, index_k, problem.docs, backend)
    head = data.draw(st.integers(0, problem.kv_heads - 1))
    alone = problem.select(index_q[:, head : head + 1], index_k, problem.docs, backend)
    assert torch.equal(alone.indices[0], sel.indices[head])
    torch.testing.assert_close(alone.lse[0], sel.lse[head], **TIGHT)


@by_backend
@stable(25)
@given(problem=problems(), factor=st.sampled_from([1e-3, 0.5, 1.0, 64.0]))
def test_the_scale_is_for_the_lse_only(problem, factor, backend):
    """A positive scale cannot change the order of scores; it enters the selected lse."""
    index_q, index_k = problem.index_operands()
    rules = {"topk": problem.topk, "block_size": problem.block_size}
    plain = select_blocks(index_q, index_k, problem.docs, **rules, backend=backend)
    assert plain.lse is None
    sel = select_blocks(
        index_q,
        index_k,
        problem.docs,
        **rules,
        index_scale=factor,
        return_lse=True,
        backend=backend,
    )
    assert_same_bits("indices", sel.indices, plain.indices)
    expected = brute_selected_lse(
        index_q, index_k, problem.entries, sel.indices, problem.block_size, factor
    )
    torch.testing.assert_close(sel.lse, expected, rtol=1e-10, atol=1e-9)


@by_backend
@stable(40)
@given(case=scoring())
def test_selected_lse(case, backend):
    """fp32 inputs, default scale Di^-1/2: natural log, over visible keys of chosen blocks only.

    Scaled logits are below 7 here and there are at most 20 of them, so a few fp32 roundings
    (6e-8 each) of numbers of that size stay below 2e-6.
    """
    cu_q, cu_k, index_q, index_k, rules = case
    sel = select(cu_q, cu_k, index_q, index_k, rules, backend, return_lse=True)
    assert sel.lse.dtype == torch.float32
    expected = brute_selected_lse(
        index_q,
        index_k,
        entries(cu_q, cu_k),
        sel.indices,
        rules["block_size"],
        index_q.shape[2] ** -0.5,
    )
    torch.testing.assert_close(sel.lse.double(), expected, rtol=0, atol=2e-6)


@by_backend
def test_the_selector_gets_no_gradient(backend):
    """XunhaoLai/native-sparse-attention-triton#24: no gradient flows through the choice."""
    docs = Documents.from_lengths([9])
    index_q, index_k = rand(9, 2, 4).requires_grad_(), rand(9, 4, seed=1).requires_grad_()
    sel = select_blocks(
        index_q, index_k, docs, topk=2, block_size=2, return_lse=True, backend=backend
    )
    assert not sel.indices.requires_grad
    assert not sel.lse.requires_grad
    assert index_q.grad is None
    assert index_k.grad is None


@by_backend
def test_a_recomputed_forward_chooses_the_same(backend):
    """NeMo-RL#1676, xtuner#1989: checkpointing must see the same blocks twice."""
    docs = Documents.from_lengths([300, 77])
    index_q, index_k = rand(377, 2, 16).bfloat16(), rand(377, 16, seed=1).bfloat16()
    found = [
        select_blocks(
            index_q, index_k, docs, topk=4, block_size=16, return_lse=True, backend=backend
        )
        for _ in range(3)
    ]
    for other in found[1:]:
        assert_same_bits("indices", other.indices, found[0].indices)
        assert_same_bits("lse", other.lse, found[0].lse)


@by_backend
@pytest.mark.parametrize("form", ["strided", "transposed", "expanded"])
def test_layouts_of_the_index_operands(form, backend):
    docs = Documents.from_lengths([40])
    index_q, index_k = rand(40, 2, 4), rand(40, 1, 4, seed=1)
    if form == "strided":
        views = rand(40, 2, 8)[..., ::2], rand(40, 3, 4, seed=1)[:, 1:2]
    elif form == "transposed":
        views = index_q.transpose(0, 1).contiguous().transpose(0, 1), index_k.mT.contiguous().mT
    else:
        views = index_q[:, :1].expand(40, 2, 4), index_k[:1].expand(40, 1, 4)
    plain = [x.contiguous().clone() for x in views]
    rules = {"topk": 2, "block_size": 4, "return_lse": True, "backend": backend}
    seen, expected = select_blocks(*views, docs, **rules), select_blocks(*plain, docs, **rules)
    assert torch.equal(seen.indices, expected.indices)
    torch.testing.assert_close(seen.lse, expected.lse, **TIGHT)
