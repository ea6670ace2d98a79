"""A selection that was made for other documents of as many tokens reads nothing outside its own.

Ids that a query can't have select nothing, as in `Selection.from_indices`.
"""

from __future__ import annotations

import pytest
import torch

from openmsa import Documents, Selection, select_blocks, sparse_attention

PAIRS = {
    "shorter": ([200, 0, 1], [1, 200]),
    "whole": ([40, 90, 70], [200]),
    "many": ([10, 20, 192, 169, 42, 167], [228, 11, 210, 59, 59, 33]),
    "longer": ([200], [40, 90, 70]),
}
BLOCK = 16


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("pair", PAIRS)
def test_reads_as_a_selection_of_the_same_ids_does(pair, backend):
    mine, others = (Documents.from_lengths(lengths) for lengths in PAIRS[pair])
    total = max(mine.num_queries, others.num_queries)
    torch.manual_seed(0)
    index_q, index_k = torch.randn(total, 2, 16), torch.randn(total, 1, 16)
    stale = select_blocks(index_q, index_k, others, topk=4, block_size=BLOCK)
    read = Selection.from_indices(stale.indices, mine, block_size=BLOCK)
    q, k, v = torch.randn(total, 4, 16), torch.randn(total, 2, 16), torch.randn(total, 2, 16)

    def step(sel):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = sparse_attention(*leaves, sel, mine, return_lse=True, backend=backend)
        lse = torch.where(lse.isfinite(), lse, 0.0)
        return [out, lse, *torch.autograd.grad((out.square().sum() + lse.sum()), leaves)]

    for found, wanted in zip(step(stale), step(read), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
