"""torch.compile: whole graphs, forward and backward, with results equal to eager ones."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import openmsa
from openmsa import Documents
from openmsa.testing import assert_exact


def layer(q, k, v, index_q, index_k, docs, backend):
    selection = openmsa.select_blocks(
        index_q, index_k, docs, topk=2, block_size=4, return_lse=True, backend=backend
    )
    out, lse = openmsa.sparse_attention(q, k, v, selection, docs, return_lse=True, backend=backend)
    return out * 2, lse, selection.indices, selection.lse


def run(function, lengths: list[int], backend: str) -> dict[str, torch.Tensor]:
    docs = Documents.from_lengths(lengths)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(docs.num_queries, heads, 8, generator=generator)

    q, k, v = (draw(heads).requires_grad_() for heads in (4, 2, 2))
    out, lse, indices, index_lse = function(q, k, v, draw(2), draw(1), docs, backend)
    grads = torch.autograd.grad(out.square().sum() + lse.sin().sum(), (q, k, v))
    found = {"out": out.detach(), "lse": lse.detach(), "indices": indices, "index_lse": index_lse}
    return {**found, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def check(function, lengths: list[int], backend: str) -> None:
    expected = run(layer, lengths, backend)
    for name, value in run(function, lengths, backend).items():
        assert_exact(name, value, expected[name])


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_token_counts(dynamic, backend):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ([5, 1, 9], [33, 7, 2, 1], [40]):
        check(compiled, lengths, backend)


def test_token_counts_do_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    # Sizes that happen to be equal at first are taken to be equal always, and then recompile:
    # token counts here equal no head count and no offset inside the layout's table.
    for lengths in ([5, 1, 9, 2, 13], [6, 9, 12, 1, 3], [33, 7, 2, 1, 5], [20, 4, 0, 3, 8, 7]):
        check(compiled, lengths, "cpu")
    assert counter.frame_count == 1


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler: no g++ here")
def test_inductor():
    compiled = torch.compile(layer, fullgraph=True, backend="inductor")
    expected = run(layer, [5, 1, 9], "cpu")
    for name, value in run(compiled, [5, 1, 9], "cpu").items():
        # Only the pointwise code around the operators is inductor's own.
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)
