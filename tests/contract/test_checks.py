"""What the public functions refuse, in which words, and that valid input never gives NaN."""

from __future__ import annotations

import math
import re

import pytest
import torch

import openmsa
from openmsa import (
    Documents,
    InvalidInput,
    Selection,
    UnavailableError,
    UnsupportedProblem,
    select_blocks,
    sparse_attention,
)

from .messages import refuses

BACKENDS = ("reference", "cpu")
LENGTHS = [5, 0, 9]
TOKENS = 14


@pytest.fixture
def docs():
    return Documents.from_lengths(LENGTHS)


@pytest.fixture
def attention(docs):
    """Right arguments of sparse_attention: 6 query heads, 2 KV heads, head dim 8, one block."""
    q = torch.randn(TOKENS, 6, 8)
    k, v = torch.randn(2, TOKENS, 2, 8).unbind(0)
    sel = Selection.from_indices(torch.zeros(2, TOKENS, 3, dtype=torch.int32), docs)
    return {"q": q, "k": k, "v": v, "sel": sel, "docs": docs}


@pytest.fixture
def scoring(docs):
    """Right arguments of select_blocks: 2 index heads, index dim 8."""
    return {
        "index_q": torch.randn(TOKENS, 2, 8),
        "index_k": torch.randn(TOKENS, 1, 8),
        "docs": docs,
    }


def attend(arguments, **changes):
    return sparse_attention(**{**arguments, **changes})


def select(arguments, **changes):
    return select_blocks(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (InvalidInput, ValueError),
        (UnsupportedProblem, NotImplementedError),
        (UnavailableError, ImportError),
    ],
    ids=["InvalidInput", "UnsupportedProblem", "UnavailableError"],
)
def test_errors_are_also_the_builtin_ones(error, base):
    """Code that catches the usual class keeps working; one base catches all of ours."""
    assert issubclass(error, base)
    assert issubclass(error, openmsa.OpenMSAError)
    with pytest.raises(base, match="because"):
        raise error("because")


def test_refusals_come_before_any_work(attention):
    """A wrong argument raises ValueError, whatever the backend."""
    for backend in (*BACKENDS, "auto", "triton", "cute"):
        with pytest.raises(ValueError, match=r"^q"):
            attend(attention, q=attention["q"][:3], backend=backend)


def test_the_right_arguments_are_right(attention, scoring):
    """Otherwise every refusal below could be for another reason."""
    out, lse = attend(attention, return_lse=True)
    assert out.shape == (TOKENS, 6, 8)
    assert lse.shape == (TOKENS, 6)
    assert lse.dtype == torch.float32
    assert isinstance(attend(attention), torch.Tensor)
    assert select(scoring).indices.shape == (2, TOKENS, 16)


SHAPES = [
    ("q", (TOKENS, 48), "(14, 48)"),
    ("q", (1, TOKENS, 6, 8), "(1, 14, 6, 8)"),
    ("q", (TOKENS - 1, 6, 8), "13"),
    ("q", (0, 6, 8), "0"),
    ("q", (TOKENS, 5, 8), "5"),
    ("q", (TOKENS, 0, 8), "0"),
    ("q", (TOKENS, 1, 8), "1"),
    ("q", (TOKENS, 130, 8), "65"),
    ("k", (TOKENS, 16), "(14, 16)"),
    ("k", (1, TOKENS, 2, 8), "(1, 14, 2, 8)"),
    ("v", (TOKENS, 16), "(14, 16)"),
    ("v", (TOKENS - 1, 2, 8), "(13, 2, 8)"),
    ("v", (TOKENS, 1, 8), "(14, 1, 8)"),
    ("v", (TOKENS, 2, 4), "(14, 2, 4)"),
]


@pytest.mark.parametrize(
    ("argument", "shape", "got"),
    SHAPES,
    ids=[f"{name}_{'x'.join(map(str, shape))}" for name, shape, _ in SHAPES],
)
def test_attention_shapes(attention, argument, shape, got):
    argument_or_ratio = "query heads per KV head" if "65" in got else argument
    with refuses(argument_or_ratio, got):
        attend(attention, **{argument: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("shape", "argument", "got"),
    [
        ((TOKENS - 1, 2, 8), "k", "13"),
        ((0, 2, 8), "k", "0"),
        ((TOKENS, 4, 8), "q", "6"),
        ((TOKENS, 0, 8), "q", "6"),
        ((TOKENS, 2, 16), "k", "16"),
        ((TOKENS, 3, 8), "sel", "2"),
        ((TOKENS, 1, 8), "sel", "2"),
    ],
    ids=[
        "too_few_keys",
        "no_keys",
        "heads_do_not_divide",
        "no_heads",
        "other_head_dim",
        "more_heads_than_lists",
        "fewer_heads_than_lists",
    ],
)
def test_key_and_value_shapes(attention, shape, argument, got):
    """k and v agree with each other here, and disagree with the rest."""
    with refuses(argument, got):
        attend(attention, k=torch.zeros(shape), v=torch.zeros(shape))


def test_head_dim_zero_is_refused(attention):
    with refuses("q", "0"):
        attend(
            attention,
            q=torch.zeros(TOKENS, 6, 0),
            k=torch.zeros(TOKENS, 2, 0),
            v=torch.zeros(TOKENS, 2, 0),
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_attention_needs_floats(attention, argument, dtype):
    with refuses(argument, str(dtype)):
        attend(attention, **{argument: attention[argument].to(dtype)})


@pytest.mark.parametrize("argument", ["k", "v"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64], ids=lambda x: str(x)[6:]
)
def test_mixed_dtypes(attention, argument, dtype):
    with refuses(argument, "float32", str(dtype)):
        attend(attention, **{argument: attention[argument].to(dtype)})


@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_mixed_devices(attention, argument):
    """flash-attention#54, #1782, pytorch#141010: tensors on a device other than the expected."""
    with refuses(argument, "cpu", "meta"):
        attend(attention, **{argument: attention[argument].to("meta")})


def test_a_selection_on_another_device(attention):
    with refuses("sel", "cpu", "meta"):
        attend(attention, sel=attention["sel"].to("meta"))


def test_documents_on_another_device(attention):
    with refuses("q", "meta", "cpu"):
        attend(attention, docs=attention["docs"].to("meta"))


@pytest.mark.parametrize("lengths", [[5, 0, 8], [15], [200]], ids=["shorter", "longer", "longest"])
def test_a_selection_made_for_other_documents(attention, lengths):
    other = Documents.from_lengths(lengths)
    ids = torch.zeros(2, sum(lengths), 3, dtype=torch.int32)
    with refuses("sel", "14", str(sum(lengths))):
        attend(attention, sel=Selection.from_indices(ids, other))


def test_raw_int64_ids_in_a_selection_are_refused(attention):
    """A hand-made Selection skips from_indices; kernels read int32."""
    ids = torch.zeros(2, TOKENS, 3, dtype=torch.int64)
    with refuses("sel", "int32", "int64"):
        attend(attention, sel=Selection(ids, 128))


BAD_SCALES = [
    (0, "0"),
    (0.0, "0"),
    (-0.125, "-0.125"),
    (math.nan, "nan"),
    (math.inf, "inf"),
    (-math.inf, "-inf"),
    (torch.tensor(0.125), "Tensor"),
    (True, "bool"),
]


@pytest.mark.parametrize(("scale", "got"), BAD_SCALES, ids=[repr(s) for s, _ in BAD_SCALES])
def test_scale_is_a_positive_number(attention, scale, got):
    with refuses("scale", got):
        attend(attention, scale=scale)


@pytest.mark.parametrize("scale", ["0.125", [0.125], 1j], ids=["str", "list", "complex"])
def test_scale_is_a_number_at_all(attention, scale):
    with refuses("scale"):
        attend(attention, scale=scale)


@pytest.mark.parametrize("scale", [1, 0.5, 1e-6, 1e3], ids=str)
def test_any_positive_scale_works(attention, scale):
    assert attend(attention, scale=scale).isfinite().all()


BAD_BACKENDS = ["cuda", "CPU", "", "torch", None, 3]


@pytest.mark.parametrize("backend", BAD_BACKENDS, ids=repr)
def test_backend_names(attention, scoring, backend):
    """The message lists the names there are."""
    names = ("auto", "reference", "cpu", "triton", "cute")
    with refuses("backend", repr(backend), *names):
        attend(attention, backend=backend)
    with refuses("backend", repr(backend), *names):
        select(scoring, backend=backend)


INDEX_SHAPES = [
    ("index_q", (TOKENS, 16), "(14, 16)"),
    ("index_q", (1, TOKENS, 2, 8), "(1, 14, 2, 8)"),
    ("index_q", (TOKENS - 1, 2, 8), "13"),
    ("index_q", (TOKENS, 0, 8), "0"),
    ("index_k", (TOKENS,), "(14,)"),
    ("index_k", (1, TOKENS, 1, 8), "(1, 14, 1, 8)"),
    ("index_k", (TOKENS - 1, 1, 8), "13"),
    ("index_k", (TOKENS - 1, 8), "13"),
    ("index_k", (TOKENS, 2, 8), "2"),
    ("index_k", (TOKENS, 0, 8), "0"),
    ("index_k", (TOKENS, 1, 4), "4"),
    ("index_k", (TOKENS, 4), "4"),
]


@pytest.mark.parametrize(
    ("argument", "shape", "got"),
    INDEX_SHAPES,
    ids=[f"{name}_{'x'.join(map(str, shape))}" for name, shape, _ in INDEX_SHAPES],
)
def test_index_shapes(scoring, argument, shape, got):
    """(14, 2, 8) for index_k is a key per head, where one is shared by all heads."""
    with refuses(argument, got):
        select(scoring, **{argument: torch.zeros(shape)})


def test_index_dim_zero_is_refused(scoring):
    with refuses("index_", "0"):
        select(scoring, index_q=torch.zeros(TOKENS, 2, 0), index_k=torch.zeros(TOKENS, 0))


@pytest.mark.parametrize("argument", ["index_q", "index_k"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
def test_index_operands_are_floats(scoring, argument, dtype):
    with refuses(argument, str(dtype)):
        select(scoring, **{argument: scoring[argument].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_index_operands_share_a_dtype(scoring, dtype):
    with refuses("index_k", "float32", str(dtype)):
        select(scoring, index_k=scoring["index_k"].to(dtype))


@pytest.mark.parametrize("argument", ["index_q", "index_k"])
def test_index_operands_share_a_device(scoring, argument):
    with refuses(argument, "cpu", "meta"):
        select(scoring, **{argument: scoring[argument].to("meta")})


@pytest.mark.parametrize(
    ("sizes", "argument", "got"),
    [
        ({"topk": 0}, "topk", "0"),
        ({"topk": 65}, "topk", "65"),
        ({"topk": -1}, "topk", "-1"),
        ({"block_size": 0}, "block_size", "0"),
        ({"block_size": -128}, "block_size", "-128"),
        ({"init_blocks": -1}, "init_blocks", "-1"),
        ({"local_blocks": 0}, "local_blocks", "0"),
        ({"init_blocks": 16}, "init_blocks + local_blocks", "17"),
        ({"topk": 2, "local_blocks": 3}, "init_blocks + local_blocks", "3"),
    ],
    ids=str,
)
def test_selection_sizes(scoring, sizes, argument, got):
    with refuses(argument, got):
        select(scoring, **sizes)


@pytest.mark.parametrize(("scale", "got"), BAD_SCALES, ids=[repr(s) for s, _ in BAD_SCALES])
def test_index_scale_is_a_positive_number(scoring, scale, got):
    with refuses("index_scale", got):
        select(scoring, index_scale=scale)


def test_one_shared_index_key_in_either_shape(scoring):
    three_axes = select(scoring)
    two_axes = select(scoring, index_k=scoring["index_k"][:, 0])
    assert torch.equal(three_axes.indices, two_axes.indices)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_operands_are_tensors(attention, argument):
    with refuses(argument, "list"):
        attend(attention, **{argument: [[1.0]]})


@pytest.mark.parametrize("argument", ["index_q", "index_k"])
def test_index_operands_are_tensors(scoring, argument):
    with refuses(argument, "list"):
        select(scoring, **{argument: [[1.0]]})


def test_raw_ids_are_no_selection(attention):
    """Others' kernels take the id tensor itself; here it is read by Selection.from_indices."""
    with refuses("sel", "Tensor"):
        attend(attention, sel=attention["sel"].indices)


def test_raw_offsets_are_no_documents(attention, scoring):
    cu_seqlens = attention["docs"].cu_seqlens_q
    with refuses("docs", "Tensor"):
        attend(attention, docs=cu_seqlens)
    with refuses("docs", "Tensor"):
        select(scoring, docs=cu_seqlens)


def test_ids_of_a_selection_are_a_tensor(docs):
    with refuses("indices", "list"):
        Selection.from_indices([[[0]]], docs)


def test_cute_on_a_cpu_is_unsupported_and_says_why(attention, scoring):
    """Never a fallback: what was needed, on which device, with which versions, and a way out."""
    for call, arguments in ((attend, attention), (select, scoring)):
        with pytest.raises(UnsupportedProblem) as error:
            call(arguments, backend="cute")
        message = str(error.value)
        assert re.search(r"\bcute\b", message)
        assert "float32" in message
        assert f"torch {torch.__version__}" in message
        assert "instead: backend='cpu'" in message


def test_explain_checks_its_arguments(attention):
    arguments = {**attention, "v": attention["v"][:, :1]}
    with refuses("v", "(14, 1, 8)"):
        openmsa.explain(**arguments)


EDGES = {
    "no_documents": ([0], None),
    "only_empty_documents": ([0, 0, 0], None),
    "one_token": ([0, 1], None),
    "empty_documents_between": ([0, 0, 3, 3, 8, 8], None),
    "keys_without_queries": ([0, 0, 0], [0, 4, 9]),
    "queries_without_keys": ([0, 3, 5], [0, 0, 2]),
    "more_queries_than_keys": ([0, 6, 9], [0, 2, 3]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float64],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("slack", [0, 3], ids=["", "slack"])
@pytest.mark.parametrize("edge", EDGES)
def test_no_nan_at_the_edges(edge, slack, dtype, backend):
    """Empty documents, no tokens, no keys: finite results, and exact zeros without a key."""
    cu_q, cu_k = EDGES[edge]
    docs = Documents.from_cu_seqlens(
        torch.tensor(cu_q), None if cu_k is None else torch.tensor(cu_k)
    )

    def rand(tokens, *shape):
        x = torch.randn(tokens, *shape).to(dtype)
        return torch.cat([x, x.new_full((slack, *shape), float("nan"))])

    sel = select_blocks(
        rand(docs.num_queries, 2, 8),
        rand(docs.num_keys, 8),
        docs,
        topk=2,
        block_size=4,
        return_lse=True,
        backend=backend,
    )
    assert sel.indices.shape == (2, docs.num_queries + slack, 2)
    q = rand(docs.num_queries, 4, 8).requires_grad_()
    k, v = (rand(docs.num_keys, 2, 8).requires_grad_() for _ in range(2))
    out, lse = sparse_attention(q, k, v, sel, docs, return_lse=True, backend=backend)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for name, x in {"out": out, "dq": dq, "dk": dk, "dv": dv}.items():
        assert x.dtype == dtype, name
        assert x.isfinite().all(), name
    # A row sees a key exactly where its position is not negative; slack rows see none.
    sees = torch.cat([docs.positions >= 0, torch.zeros(slack, dtype=torch.bool)])
    for x in (lse, sel.lse.t()):
        assert x.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert not x.isnan().any()
        assert torch.equal(x.isfinite(), sees[:, None].expand_as(x))
        assert (x[~sees] == -math.inf).all()
    assert ((sel.indices >= 0).any(-1) == sees).all()
    assert (out[~sees] == 0).all()
    assert (dq[~sees] == 0).all()
    assert (dk[docs.num_keys :] == 0).all()
    assert (dv[docs.num_keys :] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "ids",
    [[[1, 1, 2], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 3, 3]]],
    ids=["second_row_padding", "all_padding", "first_row_padding"],
)
def test_rows_of_padding(ids, backend):
    """hyunwoongko/transformer#40, Megatron-LM#1764: a row or a whole rank without real tokens."""
    docs = Documents.from_ids(torch.tensor(ids))
    x = torch.randn(2, 3, 4, 8)
    x[torch.tensor(ids) == 0] = float("nan")
    q = x.clone().requires_grad_()
    k, v = (x[:, :, :2].clone().requires_grad_() for _ in range(2))
    sel = select_blocks(
        docs.pack(x[:, :, :2]), docs.pack(x[:, :, 0]), docs, topk=1, block_size=2, backend=backend
    )
    out = docs.unpack(
        sparse_attention(docs.pack(q), docs.pack(k), docs.pack(v), sel, docs, backend=backend)
    )
    loss = out.square().sum()
    assert loss.isfinite()
    padding = torch.tensor(ids) == 0
    assert (out[padding] == 0).all()
    assert (out[~padding] != 0).all()
    for grad in torch.autograd.grad(loss, (q, k, v)):
        assert grad.isfinite().all()
        assert (grad[padding] == 0).all()
    if padding.all():
        assert loss == 0
