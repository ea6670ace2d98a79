"""The yardstick itself: it passes what is right and notices what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from openmsa import Documents
from openmsa.contract.problem import accumulate_dtype
from openmsa.reference.dense import dense_attention, dense_mask
from openmsa.testing import (
    Inputs,
    assert_exact,
    assert_within,
    attention_truth,
    compare,
    compare_exact,
    compare_selection,
    problem,
    rounding,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
QUANTITIES = ("out", "lse", "dq", "dk", "dv")


def dense(inputs: Inputs, mask: Tensor, scale: float, d_lse: float = 1.0) -> dict[str, Tensor]:
    """The dense definition over any mask, in fp32 (fp64 for fp64) and rounded once at the end."""
    dtype = inputs.q.dtype
    wide = accumulate_dtype(dtype)
    q, k, v = (x.to(wide).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = dense_attention(q, k, v, mask, scale)
    grads = torch.autograd.grad(
        (out, lse), (q, k, v), (inputs.d_out.to(wide), d_lse * inputs.d_lse.to(lse.dtype))
    )
    values = (out.detach().to(dtype), lse.detach(), *(g.to(dtype) for g in grads))
    return dict(zip(QUANTITIES, values, strict=True))


class Setting:
    """A problem of 333 tokens over 6 blocks with its truth and a right answer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.case = replace(problem("random_blocks"), cu_seqlens_q=(0, 333))
        self.docs = self.case.documents()
        self.inputs = self.case.inputs(dtype)
        self.indices = self.case.selection(self.inputs, self.docs).indices
        self.scale = self.case.topology.head_dim**-0.5
        self.mask = dense_mask(self.indices, self.docs.layout, 333, 64)
        self.truth = attention_truth(self.inputs, self.indices, self.docs, 64)

    def wrong(self, values: dict[str, Tensor]) -> set[str]:
        """The quantities that the yardstick rejects."""
        truth = self.truth.quantities
        return {name for name in QUANTITIES if not truth[name].compare(values[name]).ok}


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def setting(request) -> Setting:
    return Setting(request.param)


def test_right_answers_pass(setting):
    assert setting.wrong(dense(setting.inputs, setting.mask, setting.scale)) == set()


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_a_wrong_row_in_a_hundred(setting, quantity):
    right = dense(setting.inputs, setting.mask, setting.scale)
    broken = right[quantity].clone()
    rows = torch.arange(50, 333, 100)
    broken[rows] = right[quantity][rows + 1]
    assert setting.wrong({**right, quantity: broken}) == {quantity}


def test_two_swapped_keys(setting):
    order = torch.arange(333)
    order[[130, 131]] = order[[131, 130]]
    swapped = replace(setting.inputs, k=setting.inputs.k[order])
    wrong = setting.wrong(dense(swapped, setting.mask, setting.scale))
    assert {"out", "lse", "dq", "dk", "dv"} == wrong


@pytest.mark.parametrize("factor", [4.0, 1.1], ids=["missing", "of_a_padded_dim"])
def test_a_wrong_scale(setting, factor):
    values = dense(setting.inputs, setting.mask, setting.scale * factor)
    assert setting.wrong(values) == set(QUANTITIES)


def test_a_forgotten_scale_of_the_gradient(setting):
    right = dense(setting.inputs, setting.mask, setting.scale)
    for name in ("dq", "dk"):
        assert setting.wrong({**right, name: right[name] / setting.scale}) == {name}


@pytest.mark.parametrize("shift", [-1, 1], ids=["own_key_hidden", "one_future_key"])
def test_a_mask_off_by_one(setting, shift):
    chosen = dense_mask(setting.indices, setting.docs.layout, 333, 64)
    position = torch.arange(333)
    if shift < 0:
        mask = chosen & (position < position[:, None])
    else:
        mask = chosen | (position == position[:, None] + 1)
    assert setting.wrong(dense(setting.inputs, mask, setting.scale)) >= {"out", "lse", "dq", "dk"}


def test_one_key_of_one_query_off_by_one(setting):
    # Query 200's own key alone is missing; it weighs about 1/70 there.
    mask = setting.mask.clone()
    query = int((setting.mask[0].diagonal()).nonzero()[-1])
    mask[0, query, query] = False
    assert setting.wrong(dense(setting.inputs, mask, setting.scale)) >= {"lse"}


def test_a_dropped_d_lse(setting):
    values = dense(setting.inputs, setting.mask, setting.scale, d_lse=0.0)
    assert setting.wrong(values) == {"dq", "dk"}


def test_an_lse_of_less_precision_or_another_base(setting):
    right = dense(setting.inputs, setting.mask, setting.scale)
    coarse = right["lse"].to(torch.bfloat16).to(right["lse"].dtype)
    for lse in (coarse, right["lse"] / math.log(2), right["lse"] + 1e-4):
        assert setting.wrong({**right, "lse": lse}) == {"lse"}


def test_low_precision_sums():
    # Every query reads block 0; its dv is summed in bf16 instead of fp32.
    count = 600
    docs = Documents.from_lengths([count])
    case = replace(problem("hot_block"), cu_seqlens_q=(0, count))
    inputs = case.inputs(torch.bfloat16)
    indices = torch.zeros(2, count, 1, dtype=torch.int32)
    truth = attention_truth(inputs, indices, docs, 64).quantities["dv"]
    mask = dense_mask(indices, docs.layout, count, 64)
    q, k, d_out = (x.float() for x in (inputs.q, inputs.k, inputs.d_out))
    _, lse = dense_attention(q, k, k, mask, 0.25)
    total = torch.zeros_like(inputs.v)
    for row in range(count):
        logits = 0.25 * torch.einsum("hgd,khd->hgk", q[row].unflatten(0, (2, 2)), k[:64])
        p = (logits - lse[row].view(2, 2, 1)).exp()
        p = p.masked_fill(~mask[:, None, row, :64], 0.0)
        part = torch.einsum("hgk,hgd->khd", p, d_out[row].unflatten(0, (2, 2)))
        total[:64] += part.bfloat16()
    assert truth.compare(dense(inputs, mask, 0.25)["dv"]).ok
    assert not truth.compare(total).ok


def test_a_loud_document_hides_nothing():
    case = problem("loud_and_quiet_documents")
    docs, inputs = case.documents(), case.inputs(torch.bfloat16)
    loud = replace(inputs, v=inputs.v.clone())
    loud.v[:150] *= 1000
    selection = case.selection(inputs, docs)
    truth = attention_truth(loud, selection.indices, docs, 64).quantities["out"]
    actual = truth.exact.bfloat16()
    actual[160] += 0.3
    error = (actual.double() - truth.exact).abs()
    assert error[160].max() < error[:150].max(), "not quiet enough to be hidden"
    assert not truth.compare(actual).ok
    assert compare("out", actual, truth.eager, truth.exact, truth.rounding).ok


def test_non_finite_values_must_agree():
    exact = torch.tensor([1.0, -math.inf, math.nan, math.inf], dtype=torch.float64)
    slack = torch.zeros_like(exact)
    assert compare("x", exact.float(), None, exact, slack).ok
    for at, value in (
        (0, math.nan),
        (1, math.inf),
        (1, -1e30),
        (2, 0.0),
        (3, math.nan),
        (0, 1.001),
    ):
        actual = exact.float()
        actual[at] = value
        report = compare("x", actual, None, exact, slack)
        assert report.status == "failed", (at, value)
        assert f"element [{at}]" in report.detail
    # 1e5 is infinity once stored in fp16; then a finite value is wrong.
    big = torch.tensor([1e5], dtype=torch.float64)
    assert compare("x", big.half(), None, big, big * 0).ok
    assert not compare("x", torch.tensor([65504.0]).half(), None, big, big * 0).ok


def test_an_eager_overflow_grants_nothing():
    exact = torch.ones(4, dtype=torch.float64)
    eager = torch.tensor([math.inf, math.nan, 1.0, 1.0])
    assert compare("x", torch.ones(4), eager, exact, exact * 0).ok
    assert not compare("x", torch.full((4,), 1.01), eager, exact, exact * 1e-3).ok


def test_an_empty_or_misshapen_result():
    empty = torch.zeros(0, 3, dtype=torch.float64)
    assert compare("x", empty.float(), None, empty, empty).ok
    report = compare("x", torch.zeros(2, 3), None, empty, empty)
    assert not report.ok
    assert "shape (2, 3), expected (0, 3)" in str(report)


def test_plain_sums_meet_their_rounding_term():
    x = torch.randn(64, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.bfloat16().double()
    exact, terms = x.sum(1), x.abs().sum(1)
    slack = rounding(exact, terms, 4096, torch.bfloat16)
    single = x.float().cumsum(1)[:, -1]
    assert_within("sum", single.bfloat16(), None, exact, slack)
    coarse = torch.zeros(64, dtype=torch.bfloat16)
    for column in x.bfloat16().unbind(1):
        coarse += column
    assert not compare("sum", coarse, None, exact, slack).ok
    # A correct fp32 sum need not be exact: without the term it would be rejected.
    tight = rounding(exact, terms, 4096, torch.float32)
    assert_within("sum", single, None, exact, tight)
    assert not compare("sum", single, None, exact, tight * 0).ok


def test_the_message_names_the_worst_element():
    exact = torch.zeros(3, 4, dtype=torch.float64)
    actual = torch.zeros(3, 4)
    actual[0, 1], actual[2, 3] = 0.5, -2.0
    with pytest.raises(
        AssertionError, match=r"dq: failed.*element \[2, 3\]: got -2\.0, expected 0"
    ):
        assert_within("dq", actual, None, exact, exact + 1e-3)
    with pytest.raises(AssertionError, match=r"ids: failed.*first at element \[0, 1\]"):
        assert_exact("ids", actual, torch.zeros(3, 4))


def test_exact_comparison_is_bitwise():
    x = torch.tensor([0.0, math.nan])
    assert compare_exact("x", x, x.clone()).ok
    assert not compare_exact("x", torch.tensor([-0.0, math.nan]), x).ok
    assert compare_exact("x", torch.tensor([1.0, 2.0]), x).error == 2
    assert "dtype" in compare_exact("x", x.double(), x).detail
    assert "shape" in compare_exact("x", x[:1], x).detail


SCORES = torch.tensor([3.0, 2.0, 2.0 - 1e-9, 1.0, math.inf, -math.inf], dtype=torch.float64)


@pytest.mark.parametrize(
    ("actual", "right"),
    [
        ([0, 1, 4], True),
        ([0, 2, 4], True),
        ([1, 2, 4], False),
        ([0, 3, 4], False),
        ([0, 1, 2], False),
        ([0, 4, 5], False),
        ([0, 4, 9], False),
        ([0, 4, -1], False),
        ([1, 0, 4], False),
        ([0, 0, 4], False),
        ([-1, 0, 4], False),
        ([0, 4, -7], False),
    ],
    ids=[
        "equal",
        "tie_within_rounding",
        "best_missing",
        "worse_chosen",
        "forced_missing",
        "future_chosen",
        "out_of_range",
        "too_few",
        "unsorted",
        "repeated",
        "gap_inside",
        "another_sentinel",
    ],
)
def test_selections(actual, right):
    def ids(values: list[int]) -> Tensor:
        return torch.tensor([[[0, 1, 4], values]], dtype=torch.int32)

    scores = SCORES.expand(1, 2, -1)
    slack = torch.full_like(scores, 1e-8)
    report = compare_selection("indices", ids(actual), ids([0, 1, 4]), scores, slack)
    assert report.ok == right
    if not right:
        assert "kv head 0, query 1" in report.detail
    strict = compare_selection("indices", ids(actual), ids([0, 1, 4]), scores, slack * 0)
    assert strict.ok == (actual == [0, 1, 4])
