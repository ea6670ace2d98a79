"""Documents do not know of each other: order, neighbours, empty ones and fragments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmsa import Documents, Selection, select_blocks

from .oracle import (
    BACKENDS,
    TIGHT,
    Result,
    assert_close,
    assert_same_bits,
    offsets,
    ours,
    rand,
)
from .problems import Problem, problems, stable

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def run(problem: Problem, index: tuple, operands: tuple, docs: Documents, backend: str):
    """Selection and attention of given operands."""
    sel = problem.select(*index, docs, backend)
    return sel, ours(operands[0], *operands[1:3], sel, docs, *operands[3:], backend=backend)


@stable(20)
@given(problem=problems(min_documents=2), data=st.data())
def test_permuting_documents_permutes_everything(problem, data, backend):
    order = data.draw(st.permutations(range(len(problem.lengths))))
    index, operands = problem.index_operands(), problem.operands()
    sel, result = run(problem, index, operands, problem.docs, backend)
    rows = torch.cat([torch.arange(problem.tokens)[problem.rows(i)] for i in order])
    docs = Documents.from_lengths([problem.lengths[i] for i in order])
    moved_index, moved = ([x[rows] for x in xs] for xs in (index, operands))
    moved_sel, moved_result = run(problem, tuple(moved_index), tuple(moved), docs, backend)
    assert torch.equal(moved_sel.indices, sel.indices[:, rows])
    torch.testing.assert_close(moved_sel.lse, sel.lse[:, rows], **TIGHT)
    assert_close(moved_result, Result(*(x[rows] for _, x in result.items())))


def loud(x, rows, how):
    """``x`` with one document's rows changed."""
    x = x.clone()
    part = x[rows]
    x[rows] = {
        "noise": lambda: part.flip(0) + 0.5,
        "x1000": lambda: part * 1e3,
        "infinite": lambda: torch.full_like(part, float("inf")),
        "nan": lambda: torch.full_like(part, float("nan")),
    }[how]()
    return x


@pytest.mark.parametrize("how", ["noise", "x1000", "infinite", "nan"])
@stable(12)
@given(problem=problems(min_documents=2, min_length=1), data=st.data())
def test_a_document_cannot_be_heard_in_another(problem, data, how, backend):
    """pacman100/LLM-Workshop#1: every other document is the same to the bit, in every tensor.

    A thousandfold, infinite or NaN document must not even change a neighbour's rounding.
    """
    victim = data.draw(st.integers(0, len(problem.lengths) - 1))
    rows = problem.rows(victim)
    index = tuple(x.float() for x in problem.index_operands())
    operands = tuple(x.float() for x in problem.operands())
    sel, result = run(problem, index, operands, problem.docs, backend)
    index = tuple(loud(x, rows, how) for x in index)
    operands = tuple(loud(x, rows, how) for x in operands)
    loud_sel, loud_result = run(problem, index, operands, problem.docs, backend)
    others = torch.ones(problem.tokens, dtype=torch.bool)
    others[rows] = False
    assert_same_bits("indices", loud_sel.indices[:, others], sel.indices[:, others])
    assert_same_bits("selected lse", loud_sel.lse[:, others], sel.lse[:, others])
    for name, x in loud_result.items():
        assert_same_bits(name, x[others], getattr(result, name)[others])
    # The change itself has to show, or this test would pass without looking.
    assert not torch.equal(loud_result.out[rows], result.out[rows])


@pytest.mark.parametrize("how", ["noise", "x1000"])
@stable(12)
@given(problem=problems(min_length=2), data=st.data())
def test_the_future_cannot_be_heard(problem, data, how, backend):
    """Changing the later tokens of a document keeps its earlier rows, also inside a block.

    dk and dv of earlier keys do change, since later queries read them.
    """
    document = data.draw(st.integers(0, len(problem.lengths) - 1))
    rows = problem.rows(document)
    cut = data.draw(st.integers(rows.start + 1, rows.stop - 1))
    later = slice(cut, rows.stop)
    index, operands = problem.index_operands(), problem.operands()
    sel, result = run(problem, index, operands, problem.docs, backend)
    index = tuple(loud(x, later, how) for x in index)
    operands = tuple(loud(x, later, how) for x in operands)
    loud_sel, loud_result = run(problem, index, operands, problem.docs, backend)
    earlier = slice(rows.start, cut)
    assert torch.equal(loud_sel.indices[:, earlier], sel.indices[:, earlier])
    torch.testing.assert_close(loud_sel.lse[:, earlier], sel.lse[:, earlier], **TIGHT)
    for name in ("out", "lse", "dq"):
        before, after = getattr(result, name), getattr(loud_result, name)
        torch.testing.assert_close(after[earlier], before[earlier], **TIGHT)
    assert not torch.equal(loud_result.out[later], result.out[later])


@stable(20)
@given(problem=problems(), data=st.data())
def test_an_empty_document_changes_nothing(problem, data, backend):
    """fla#103, flash-attention#2562: an empty document anywhere, to the bit."""
    at = data.draw(st.integers(0, len(problem.lengths)))
    lengths = [*problem.lengths[:at], 0, *problem.lengths[at:]]
    index = tuple(x.float() for x in problem.index_operands())
    operands = tuple(x.float() for x in problem.operands())
    sel, result = run(problem, index, operands, problem.docs, backend)
    docs = Documents.from_lengths(lengths)
    assert docs.num_documents == len(problem.lengths) + 1
    more_sel, more_result = run(problem, index, operands, docs, backend)
    assert_same_bits("indices", more_sel.indices, sel.indices)
    assert_same_bits("selected lse", more_sel.lse, sel.lse)
    for name, x in more_result.items():
        assert_same_bits(name, x, getattr(result, name))


@stable(10)
@given(
    problem=problems(min_length=1), prefix=st.integers(1, 20), at_end=st.booleans(), data=st.data()
)
def test_keys_without_queries_change_nothing(problem, prefix, at_end, data, backend):
    """flash-attention#2421: a document with keys but no queries; its gradients are exact zeros."""
    cu = offsets(problem.lengths)
    if at_end:
        cu_q, cu_k = [*cu, cu[-1]], [*cu, cu[-1] + prefix]
        own = slice(0, cu[-1])
    else:
        cu_q, cu_k = [0, *cu], [0, *(x + prefix for x in cu)]
        own = slice(prefix, None)
    index_q, index_k = problem.index_operands()
    q, k, v, *rest = problem.operands()
    alone_sel, alone = run(problem, (index_q, index_k), (q, k, v, *rest), problem.docs, backend)
    docs = Documents.from_cu_seqlens(torch.tensor(cu_q), torch.tensor(cu_k))

    def widened(x, seed):
        wide = rand(cu_k[-1], *x.shape[1:], seed=seed)
        wide[own] = x
        return wide

    index, operands = (index_q, widened(index_k, 91)), (q, widened(k, 92), widened(v, 93), *rest)
    sel, result = run(problem, index, operands, docs, backend)
    assert torch.equal(sel.indices, alone_sel.indices)
    unread = torch.ones(cu_k[-1], dtype=torch.bool)
    unread[own] = False
    assert int(unread.sum()) == prefix
    for name in ("dk", "dv"):
        assert (getattr(result, name)[unread] == 0).all(), name
    assert_close(Result(result.out, result.lse, result.dq, result.dk[own], result.dv[own]), alone)


def cuts(draw, length):
    """Cut points of one document, empty fragments included."""
    inner = draw(st.lists(st.integers(0, length), max_size=3))
    return [*sorted(inner), length]


@stable(20)
@given(problem=problems(), data=st.data())
def test_fragments_add_up_to_the_document(problem, data, backend):
    """MiniMax-AI/MSA context parallelism: queries in fragments over shared keys change nothing."""
    cu, heads = [0], []
    for document, length in enumerate(problem.lengths):
        first = len(heads)
        for cut in cuts(data.draw, length):
            cu.append(problem.rows(document).start + cut)
            heads.append(first)
    docs = Documents.from_cu_seqlens(
        torch.tensor(cu), torch.tensor(cu), fragment_indices=torch.tensor(heads, dtype=torch.long)
    )
    assert docs.num_documents == len(heads) >= len(problem.lengths)
    index, operands = problem.index_operands(), problem.operands()
    whole_sel, whole = run(problem, index, operands, problem.docs, backend)
    sel, result = run(problem, index, operands, docs, backend)
    assert torch.equal(docs.positions, problem.docs.positions)
    assert torch.equal(sel.indices, whole_sel.indices)
    torch.testing.assert_close(sel.lse, whole_sel.lse, **TIGHT)
    assert_close(result, whole)


@stable(15)
@given(problem=problems(min_length=1), data=st.data())
def test_chunks_with_their_own_copy_of_the_keys_add_up(problem, data, backend):
    """Chunked prefill of the first document: each chunk carries its prefix of the keys.

    dk and dv of the copies, summed, are those of the document.
    """
    length = problem.lengths[0]
    part = Problem((length,), *list(vars(problem).values())[1:])
    ends = cuts(data.draw, length)
    index, operands = part.index_operands(), part.operands()
    whole_sel, whole = run(part, index, operands, part.docs, backend)
    copies = torch.cat([torch.arange(end) for end in ends])
    docs = Documents.from_cu_seqlens(torch.tensor([0, *ends]), torch.tensor(offsets(ends)))
    index = (index[0], index[1][copies])
    q, k, v, d_out, d_lse = operands
    sel, result = run(part, index, (q, k[copies], v[copies], d_out, d_lse), docs, backend)
    assert torch.equal(sel.indices, whole_sel.indices)
    summed = [torch.zeros_like(k).index_add(0, copies, grad) for grad in (result.dk, result.dv)]
    assert_close(Result(result.out, result.lse, result.dq, *summed), whole)


@stable(20)
@given(problem=problems(), slack_q=st.integers(0, 9), slack_k=st.integers(0, 9))
def test_slack_rows_change_nothing_and_get_nothing(problem, slack_q, slack_k, backend):
    """flashinfer#5015: rows past the last document, full of NaN, as a padded graph batch has."""

    def pad(x, rows):
        return torch.cat([x, x.new_full((rows, *x.shape[1:]), float("nan"))])

    tokens = problem.tokens
    index, operands = problem.index_operands(), problem.operands()
    sel, result = run(problem, index, operands, problem.docs, backend)
    slack_index = (pad(index[0], slack_q), pad(index[1], slack_k))
    rows = (slack_q, slack_k, slack_k, slack_q, slack_q)
    slack_operands = tuple(pad(x, n) for x, n in zip(operands, rows, strict=True))
    slack_sel, slack_result = run(problem, slack_index, slack_operands, problem.docs, backend)
    assert torch.equal(slack_sel.indices[:, :tokens], sel.indices)
    assert (slack_sel.indices[:, tokens:] == -1).all()
    torch.testing.assert_close(slack_sel.lse[:, :tokens], sel.lse, **TIGHT)
    assert_close(Result(*(x[:tokens] for _, x in slack_result.items())), result)
    for name, x in slack_result.items():
        nothing = float("-inf") if name == "lse" else 0.0
        assert (x[tokens:] == nothing).all(), name


@stable(10)
@given(problem=problems(), slack=st.integers(1, 9))
def test_a_selection_without_slack_serves_padded_operands(problem, slack, backend):
    """Operands may be padded after the selection was made."""

    def pad(x):
        return torch.cat([x, x.new_full((slack, *x.shape[1:]), float("nan"))])

    sel = problem.selection(backend)
    q, k, v, d_out, d_lse = problem.operands()
    result = ours(q, k, v, sel, problem.docs, d_out, d_lse, backend=backend)
    padded = ours(pad(q), k, v, sel, problem.docs, pad(d_out), pad(d_lse), backend=backend)
    tokens = problem.tokens
    trimmed = Result(
        padded.out[:tokens], padded.lse[:tokens], padded.dq[:tokens], padded.dk, padded.dv
    )
    assert_close(trimmed, result)
    assert (padded.dq[tokens:] == 0).all()
    assert (padded.out[tokens:] == 0).all()


def test_the_grid_starts_anew_in_every_document(backend):
    """flash-msa lays one grid over the whole batch and wants multiples of 128; 100 + 156 + 1 here.

    Each document packed equals the document alone.
    """
    lengths = [100, 156, 1]
    docs = Documents.from_lengths(lengths)
    index_q, index_k = rand(257, 2, 4, seed=1), rand(257, 4, seed=2)
    q, k, v, d_out = (rand(257, h, 8, seed=3 + h + i) for i, h in enumerate((4, 2, 2, 4)))
    sel = select_blocks(index_q, index_k, docs, topk=2, block_size=64, backend=backend)
    assert sel.indices.amax() == 2, "document 1 has blocks 0..2 of its own"
    packed = ours(q, k, v, sel, docs, d_out, backend=backend)
    for document in range(3):
        rows = slice(*offsets(lengths)[document : document + 2])
        alone = Documents.from_lengths(lengths[document : document + 1])
        one = select_blocks(
            index_q[rows], index_k[rows], alone, topk=2, block_size=64, backend=backend
        )
        assert torch.equal(one.indices, sel.indices[:, rows])
        result = ours(q[rows], k[rows], v[rows], one, alone, d_out[rows], backend=backend)
        assert_close(Result(*(x[rows] for _, x in packed.items())), result)


def test_equal_ids_in_two_rows_stay_apart(backend):
    """Through the whole path from ids: rows 0 and 1 both name their document 7."""
    docs = Documents.from_ids(torch.tensor([[0, 7, 7, 7], [7, 7, 0, 0]]))
    x = rand(2, 4, 2, 8, seed=5)
    sel = Selection.from_indices(torch.zeros(2, 5, 1, dtype=torch.int32), docs)
    packed = docs.pack(x)
    before = ours(packed, packed, packed, sel, docs, packed, backend=backend)
    x[0] *= 7
    packed = docs.pack(x)
    after = ours(packed, packed, packed, sel, docs, packed, backend=backend)
    for name, value in after.items():
        assert_same_bits(name, value[3:], getattr(before, name)[3:])
        assert not torch.equal(value[:3], getattr(before, name)[:3]), name
