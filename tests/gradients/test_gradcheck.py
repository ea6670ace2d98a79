"""Gradients against finite differences in float64, through the public function, lse included."""

from __future__ import annotations

import pytest
import torch

import openmsa
from openmsa import Documents, Selection
from openmsa.contract import AttentionConfig, Saved
from openmsa.reference import attention as stages
from openmsa.reference.schedule import key_schedule

DOCUMENTS = {
    "ragged": Documents.from_lengths([4, 1, 0, 3]),
    "fragments": Documents.from_cu_seqlens([0, 1, 3, 5], [0, 3, 5, 8], fragment_indices=[0, 0, 2]),
    "more_queries_than_keys": Documents.from_cu_seqlens([0, 4, 6], [0, 2, 4]),
}


def problem(name: str, q_heads: int, kv_heads: int, gaps: bool):
    generator = torch.Generator().manual_seed(0)
    docs = DOCUMENTS[name]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    q = draw(docs.num_queries, q_heads, 3).requires_grad_()
    k = draw(docs.num_keys, kv_heads, 3).requires_grad_()
    v = draw(docs.num_keys, kv_heads, 3).requires_grad_()
    ids = torch.randint(0, 3, (kv_heads, docs.num_queries, 2), generator=generator)
    if gaps:
        ids[:, ::3] = -1
    return q, k, v, Selection.from_indices(ids, docs, block_size=2), docs


CASES = (
    ("ragged", 2, 1, True),
    ("ragged", 1, 1, False),
    ("fragments", 2, 2, False),
    ("fragments", 4, 2, True),
    ("more_queries_than_keys", 2, 1, False),
)


@pytest.mark.parametrize(("name", "q_heads", "kv_heads", "gaps"), CASES)
def test_out_and_lse(name, q_heads, kv_heads, gaps, backend):
    q, k, v, selection, docs = problem(name, q_heads, kv_heads, gaps)

    def run(q, k, v):
        out, lse = openmsa.sparse_attention(
            q, k, v, selection, docs, scale=0.7, return_lse=True, backend=backend
        )
        # A finite difference of -inf is NaN; rows without a key have their own tests.
        return out, lse[lse != float("-inf")]

    assert torch.autograd.gradcheck(run, (q, k, v))


def test_lse_alone(backend):
    q, k, v, selection, docs = problem("ragged", 2, 1, False)

    def run(q, k):
        _, lse = openmsa.sparse_attention(
            q, k, v, selection, docs, return_lse=True, backend=backend
        )
        return lse[lse != float("-inf")]

    assert torch.autograd.gradcheck(run, (q, k))


def test_written_out_backward_is_autograd_of_the_reference_forward():
    q, k, v, selection, docs = problem("fragments", 4, 2, True)
    layout, indices = docs.layout, selection.indices
    config = AttentionConfig(2, 0.7, False)
    out, lse = stages.forward(q, k, v, indices, None, layout, config)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse))
    with torch.no_grad():
        delta = stages.backward_preprocess(out, d_out, lse, d_lse)
        schedule = key_schedule(indices, layout, 2)
        saved = Saved(q, k, v, out, lse, indices, schedule)
        got = stages.backward(d_out, delta, saved, None, layout, config, (True, True))
    for name, x, y in zip(("dq", "dk", "dv"), got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13, msg=name)
