"""What only a real CUDA device can show: synchronisation, graphs, recompilation, large offsets.

The numbers themselves are checked by ``openmsa verify`` and, everywhere, under the interpreter.
"""

from __future__ import annotations

import importlib

import pytest
import torch

import openmsa
from openmsa import Documents
from openmsa.cli.selections import coherent_selection, random_selection
from openmsa.testing import Inputs, assert_ok, attention_truth

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs a CUDA device and Triton",
)

T, HQ, HK, D = 3000, 16, 2, 128
LENGTHS = ([1503, 1497, 0], [2, 2048, 950])


def documents(lengths) -> Documents:
    return Documents.from_lengths(lengths, device="cuda")


def tensors(tokens=T, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    return {
        "q": normal(tokens, HQ, D),
        "k": normal(tokens, HK, D),
        "v": normal(tokens, HK, D),
        "d_out": normal(tokens, HQ, D),
        "index_q": normal(tokens, HK, D),
        "index_k": normal(tokens, 1, D),
    }


def step(x, docs, backend="triton", deterministic=False):
    """Select, forward and backward; out, lse and the gradients."""
    q, k, v = (x[name].detach().requires_grad_() for name in "qkv")
    selection = openmsa.select_blocks(x["index_q"], x["index_k"], docs, topk=8, backend=backend)
    out, lse = openmsa.sparse_attention(
        q, k, v, selection, docs, return_lse=True, backend=backend, deterministic=deterministic
    )
    return out, lse, *torch.autograd.grad(out, (q, k, v), x["d_out"])


def close(found, wanted):
    """Results of the same kernels: only the order of the dq, dk and dv sums may differ."""
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        if name in ("out", "lse"):
            assert torch.equal(a, b), name
        else:
            bound = 2**-7 * b.float().abs() + 2**-7 * b.float().abs().mean()
            assert bool(((a.float() - b.float()).abs() <= bound).all()), name


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_host_synchronisation(deterministic):
    x, docs = tensors(), documents(LENGTHS[0])
    step(x, docs, deterministic=deterministic)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x, docs, deterministic=deterministic)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cuda_graph_follows_its_inputs(deterministic):
    x, docs = tensors(), documents(LENGTHS[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(x, docs, deterministic=deterministic)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(x, docs, deterministic=deterministic)
    for lengths in (*LENGTHS, LENGTHS[0]):
        other = documents(lengths)
        for name in ("cu_seqlens_q", "spans", "ranges"):
            getattr(docs.layout, name).copy_(getattr(other.layout, name))
        for name in ("q", "index_q"):
            x[name].copy_(x[name].roll(7, 0))
        graph.replay()
        torch.cuda.synchronize()
        close(found, step(x, other))


def test_counts_of_tokens_and_documents_compile_nothing():
    modules = [
        importlib.import_module(f"openmsa.backends.triton.{name}")
        for name in ("common", "selection", "schedule", "union", "forward", "backward")
    ]

    def compiled() -> int:
        kernels = {
            id(value): value
            for module in modules
            for value in vars(module).values()
            if hasattr(value, "device_caches")
        }
        return sum(len(c[0]) for value in kernels.values() for c in value.device_caches.values())

    for lengths in ([700, 1, 0, 300], [9000], [33], [5000, 64]):
        for deterministic in (False, True):
            step(tensors(sum(lengths)), documents(lengths), deterministic=deterministic)
    before = compiled()
    for lengths in ([5, 7], [1000, 3, 64], [4097], [128] * 9, [1], [12001, 17]):
        for deterministic in (False, True):
            step(tensors(sum(lengths)), documents(lengths), deterministic=deterministic)
    assert compiled() == before


@pytest.mark.parametrize("pick", [random_selection, coherent_selection])
def test_both_dataflows_meet_the_yardstick(pick):
    """Random selections go key-major but for the first blocks, coherent ones over unions."""
    topology = openmsa.Topology(HQ, HK, D, D, topk=8)
    docs = documents([1700, 1, 0, 3100, 64])
    x = tensors(docs.num_queries)
    d_lse = x["d_out"][..., 0].float()
    inputs = Inputs(x["q"], x["k"], x["v"], x["index_q"], x["index_k"], x["d_out"], d_lse)
    selection = pick(docs, topology, seed=0)
    truth = attention_truth(inputs, selection.indices, docs, topology.block_size)
    leaves = [x[name].detach().requires_grad_() for name in "qkv"]
    out, lse = openmsa.sparse_attention(*leaves, selection, docs, return_lse=True, backend="triton")
    grads = torch.autograd.grad((out, lse), leaves, (x["d_out"], d_lse))
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    for name, value in found.items():
        assert_ok(truth.quantities[name].compare(value.detach()))


def test_strided_inputs_and_another_stream():
    x, docs = tensors(), documents(LENGTHS[1])
    wanted = step(x, docs)
    wide = {name: torch.cat([value, value], 2)[..., : value.shape[2]] for name, value in x.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step(wide, docs)
    torch.cuda.current_stream().wait_stream(stream)
    close(found, wanted)


def test_offsets_beyond_two_to_the_31():
    """The last document of a pack whose q has more than 2^31 elements, against that one alone."""
    heads = 64
    tail = 1000
    tokens = 2**31 // (heads * D) + tail + 5
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v = normal(tokens, heads, D), normal(tokens, 4, D), normal(tokens, 4, D)
    d_out = torch.zeros_like(q)
    d_out[-tail:] = normal(tail, heads, D)
    topology = openmsa.MINIMAX_M3
    alone = documents([tail])
    short = random_selection(alone, topology, seed=0)
    lengths = [tokens - tail, tail]
    docs = documents(lengths)
    indices = torch.full((4, tokens, topology.topk), -1, dtype=torch.int32, device="cuda")
    indices[:, -tail:] = short.indices
    selection = openmsa.Selection.from_indices(indices, docs)

    def attend(selection, docs, rows):
        leaves = [t[rows].detach().requires_grad_() for t in (q, k, v)]
        out, lse = openmsa.sparse_attention(
            *leaves, selection, docs, return_lse=True, backend="triton"
        )
        grads = torch.autograd.grad(out, leaves, d_out[rows])
        return [t[-tail:].clone() for t in (out, lse, *grads)]

    close(attend(selection, docs, slice(None)), attend(short, alone, slice(-tail, None)))


def test_two_thousand_backward_passes():
    """No launch is wrong, which a race would make some of them."""
    x, docs = tensors(), documents(LENGTHS[1])
    wanted = step(x, docs)
    for _ in range(2000):
        close(step(x, docs), wanted)


@pytest.mark.parametrize("lengths", [[20_000, 1, 0, 12_767], [3000] * 3])
def test_the_repeatable_backward_is_equal_to_the_bit(lengths):
    """Twenty runs on one input, at a size where the slots of its ring are used several times."""
    docs = documents(lengths)
    tokens = docs.num_queries
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(heads):
        shape = (tokens, heads, D)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    leaves = [normal(heads).requires_grad_() for heads in (64, 4, 4)]
    d_out = normal(64)
    selection = random_selection(docs, openmsa.MINIMAX_M3, seed=0)

    def differentiate(deterministic):
        out = openmsa.sparse_attention(
            *leaves, selection, docs, backend="triton", deterministic=deterministic
        )
        return torch.autograd.grad(out, leaves, d_out)

    wanted = differentiate(True)
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(differentiate(True), wanted, strict=True))
    for a, b in zip(differentiate(False), wanted, strict=True):
        bound = 2**-7 * b.float().abs() + 2**-7 * b.float().abs().mean()
        assert bool(((a.float() - b.float()).abs() <= bound).all())


@pytest.mark.parametrize("pick", [random_selection, coherent_selection])
def test_a_broken_value_reaches_only_those_that_see_it(pick):
    topology = openmsa.Topology(HQ, HK, D, D, topk=8)
    docs = documents([1700, 1300])
    x = tensors(docs.num_queries)
    selection = pick(docs, topology, seed=0)

    def attend(v):
        return openmsa.sparse_attention(x["q"], x["k"], v, selection, docs, backend="triton")

    clean = attend(x["v"])
    v = x["v"].clone()
    v[1000, 0, 3] = float("nan")
    found = attend(v)
    query = torch.arange(docs.num_queries, device="cuda")
    sees = (query >= 1000) & (query < 1700) & (selection.indices[0] == 1000 // 128).any(1)
    wrong = found.isnan()[:, : HQ // HK, 3]
    assert torch.equal(wrong, sees[:, None].expand_as(wrong))
    assert int(found.isnan().sum()) == int(wrong.sum())
    sound = ~found.isnan()
    torch.testing.assert_close(found[sound], clean[sound], rtol=2**-7, atol=2**-7)
