"""How the operators behave under autograd: subsets, strides, checkpoints, operator checks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import openmsa
from openmsa import Documents, Selection, ops
from openmsa.testing import Case, Inputs, assert_exact, assert_ok, attention_truth, problem

NAMES = ("q", "k", "v")


@pytest.fixture
def case() -> Case:
    return problem("slack_rows")


@pytest.fixture
def docs(case: Case) -> Documents:
    return case.documents()


@pytest.fixture
def inputs(case: Case) -> Inputs:
    return case.inputs(torch.float32)


@pytest.fixture
def selection(case: Case, inputs: Inputs, docs: Documents) -> Selection:
    return case.selection(inputs, docs)


def leaves(inputs: Inputs, needed: tuple[bool, ...] = (True, True, True)) -> list[torch.Tensor]:
    tensors = (inputs.q, inputs.k, inputs.v)
    return [x.clone().requires_grad_(need) for x, need in zip(tensors, needed, strict=True)]


@pytest.mark.parametrize("needed", list(product([True, False], repeat=3)), ids=str)
def test_every_subset_of_gradients(needed, inputs, selection, docs, backend):
    full = leaves(inputs)
    out = openmsa.sparse_attention(*full, selection, docs, backend=backend)
    expected = torch.autograd.grad(out, full, inputs.d_out)
    some = leaves(inputs, needed)
    got = openmsa.sparse_attention(*some, selection, docs, backend=backend)
    assert got.requires_grad == any(needed)
    assert_exact("out", got.detach(), out.detach())
    if any(needed):
        got.backward(inputs.d_out)
    for name, x, need, gradient in zip(NAMES, some, needed, expected, strict=True):
        assert (x.grad is not None) == need
        if need:
            assert_exact(f"d{name}", x.grad, gradient)


def test_one_selection_serves_two_layers(inputs, selection, docs, backend):
    q, k, v = leaves(inputs)
    indices = selection.indices.clone()
    first = openmsa.sparse_attention(q, k, v, selection, docs, backend=backend)
    second = openmsa.sparse_attention(first, k, v, selection, docs, backend=backend)
    together = torch.autograd.grad(second, (q, k, v), inputs.d_out)
    assert_exact("indices", selection.indices, indices)
    # The same by hand: the second layer's dq is the first one's d_out.
    middle = first.detach().requires_grad_()
    out = openmsa.sparse_attention(middle, k, v, selection, docs, backend=backend)
    d_middle, dk2, dv2 = torch.autograd.grad(out, (middle, k, v), inputs.d_out)
    first = openmsa.sparse_attention(q, k, v, selection, docs, backend=backend)
    dq, dk1, dv1 = torch.autograd.grad(first, (q, k, v), d_middle)
    expected = (dq, dk1 + dk2, dv1 + dv2)
    for name, x, y in zip(NAMES, together, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6, msg=f"d{name}")


def test_backward_twice_through_a_kept_graph(inputs, selection, docs, backend):
    q, k, v = leaves(inputs)
    out = openmsa.sparse_attention(q, k, v, selection, docs, backend=backend)
    first = torch.autograd.grad(out, (q, k, v), inputs.d_out, retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v), inputs.d_out)
    for name, x, y in zip(NAMES, second, first, strict=True):
        assert_exact(f"d{name}", x, y)


def test_stride_zero_gradient(inputs, selection, docs, backend):
    q, k, v = leaves(inputs)
    out = openmsa.sparse_attention(q, k, v, selection, docs, backend=backend)
    expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    out.sum().backward()
    for name, x, y in zip(NAMES, (q, k, v), expected, strict=True):
        assert x.grad.abs().max() > 0
        assert_exact(f"d{name}", x.grad, y)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _heads_last(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _every_other(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, -1)[..., ::2]


def _sliced(x: torch.Tensor) -> torch.Tensor:
    """A slice of a fused projection: rows further apart than they are wide, and an offset."""
    return torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]]


VIEWS = (_transposed, _heads_last, _every_other, _sliced)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__.strip("_"))
def test_strided_operands(view, dtype, case, docs, backend):
    inputs = case.inputs(dtype)
    selection = case.selection(inputs, docs)
    truth = attention_truth(inputs, selection.indices, docs, selection.block_size, with_d_lse=False)
    strided = leaves(inputs)
    operands = [view(x) for x in strided]
    d_out = view(inputs.d_out)
    assert not any(x.is_contiguous() for x in (*operands, d_out))
    out = openmsa.sparse_attention(*operands, selection, docs, backend=backend)
    assert_ok(truth.quantities["out"].compare(out))
    for name, gradient in zip(NAMES, torch.autograd.grad(out, strided, d_out), strict=True):
        assert_ok(truth.quantities[f"d{name}"].compare(gradient))


def test_loss_on_the_lse_alone(inputs, selection, docs, backend):
    q, k, v = leaves(inputs)
    _, lse = openmsa.sparse_attention(q, k, v, selection, docs, return_lse=True, backend=backend)
    dq, dk, dv = torch.autograd.grad(lse, (q, k, v), inputs.d_lse)
    silent = Inputs(**{**vars(inputs), "d_out": torch.zeros_like(inputs.d_out)})
    truth = attention_truth(silent, selection.indices, docs, selection.block_size)
    assert_ok(truth.quantities["dq"].compare(dq))
    assert_ok(truth.quantities["dk"].compare(dk))
    assert dq.abs().max() > 0
    assert not dv.any()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_replays_the_same_selection(use_reentrant, backend):
    docs = Documents.from_lengths([70, 33])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(docs.num_queries, 2, 16, generator=generator)
    weight = torch.randn(16, 16, generator=generator)
    seen: list[Selection] = []

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = x @ weight
        index = torch.nn.functional.normalize(hidden, dim=-1)
        selection = openmsa.select_blocks(
            index[:, :1], index[:, 1:], docs, topk=2, block_size=16, backend=backend
        )
        seen.append(selection)
        kv = hidden[:, :1]
        return openmsa.sparse_attention(hidden, kv, kv * 2, selection, docs, backend=backend).tanh()

    def run(call) -> tuple[torch.Tensor, ...]:
        seen.clear()
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = call(a, b)
        out.square().sum().backward()
        return out.detach(), a.grad, b.grad

    plain = run(layer)
    (chosen,) = seen
    replayed = run(lambda a, b: checkpoint(layer, a, b, use_reentrant=use_reentrant))
    assert len(seen) == 2, "the layer was not replayed"
    assert (chosen.indices >= 0).sum() > chosen.indices[..., 0].numel()
    for again in seen:
        assert_exact("indices", again.indices, chosen.indices)
    for name, x_, y in zip(("out", "dx", "dweight"), replayed, plain, strict=True):
        assert_exact(name, x_, y)


@pytest.mark.parametrize("penalty", ["of_dq", "of_dk_dv"])
def test_second_order_gradients_are_refused_in_words(penalty, inputs, selection, docs, backend):
    q, k, v = leaves(inputs)

    def second_order() -> None:
        out = openmsa.sparse_attention(q, k, v, selection, docs, backend=backend)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs.d_out, create_graph=True)
        loss = dq[:10].square().sum() if penalty == "of_dq" else (dk[:10] * dv[:10]).sum()
        torch.autograd.grad(loss, (q, k, v))

    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)second.order|twice"):
        second_order()


def test_first_order_gradients_under_create_graph(inputs, selection, docs, backend):
    q, k, v = leaves(inputs)
    out = openmsa.sparse_attention(q, k, v, selection, docs, backend=backend)
    expected = torch.autograd.grad(out, (q, k, v), inputs.d_out, retain_graph=True)
    got = torch.autograd.grad(out, (q, k, v), inputs.d_out, create_graph=True)
    for name, x, y in zip(NAMES, got, expected, strict=True):
        assert_exact(f"d{name}", x.detach(), y)


OPERATOR_CASES = ("slack_rows", "fragment_end_cuts_own_block", "no_tokens")


@pytest.fixture(params=OPERATOR_CASES)
def operands(request) -> tuple[Case, Documents, Inputs, Selection, list, list]:
    case = problem(request.param)
    docs, inputs = case.documents(), case.inputs(torch.float32)
    if case.slack:
        # The checks compare outputs by value, and NaN padding is not equal to itself.
        inputs = Inputs(**{name: x.nan_to_num(0.5) for name, x in vars(inputs).items()})
    return case, docs, inputs, case.selection(inputs, docs), *ops.flatten(docs.layout)


DIFFERENTIATES = "test_aot_dispatch_dynamic"
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", DIFFERENTIATES)


@pytest.mark.parametrize(("return_lse", "requires_grad"), [(False, False), (True, True)])
def test_select_blocks_operator(operands, return_lse, requires_grad, backend):
    case, _, inputs, _, layout, sizes = operands
    index_q = inputs.index_q.clone().requires_grad_(requires_grad)
    index_k = inputs.index_k.squeeze(1).clone().requires_grad_(requires_grad)
    arguments = (index_q, index_k, layout, sizes, case.topology.topk, case.topology.block_size)
    arguments = (*arguments, [0, 1], 0.3, return_lse, backend)
    # That check adds a float sum to an integer one, the first output's, and cannot run here.
    checks = [check for check in CHECKS if not (requires_grad and check == DIFFERENTIATES)]
    operator = torch.ops.openmsa.select_blocks.default
    torch.library.opcheck(operator, arguments, test_utils=checks)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_attention_forward_operator(operands, requires_grad, backend):
    _, _, inputs, selection, layout, sizes = operands
    qkv = leaves(inputs, (requires_grad,) * 3)
    options = (selection.block_size, 0.3, False, backend)
    operator = torch.ops.openmsa.attention_forward.default
    arguments = (*qkv, selection.indices, layout, sizes, *options)
    torch.library.opcheck(operator, arguments, test_utils=CHECKS)


@pytest.mark.parametrize(
    ("needs", "requires_grad"),
    [((True, True), False), ((True, True), True), ((False, True), False), ((True, False), False)],
)
def test_attention_backward_operator(operands, requires_grad, needs, backend):
    _, _, inputs, selection, layout, sizes = operands
    options = (selection.block_size, 0.3, False)
    with torch.no_grad():
        out, lse, *schedule = torch.ops.openmsa.attention_forward.default(
            *leaves(inputs), selection.indices, layout, sizes, *options, backend
        )
    saved = [*leaves(inputs, (requires_grad,) * 3), out, lse, selection.indices, *schedule]
    arguments = (inputs.d_out, inputs.d_lse, saved, layout, sizes, *options, list(needs), backend)
    # Second-order gradients are refused, so the check that differentiates has nothing to check.
    checks = [check for check in CHECKS if not (requires_grad and check == DIFFERENTIATES)]
    operator = torch.ops.openmsa.attention_backward.default
    torch.library.opcheck(operator, arguments, test_utils=checks)
