"""The inverse schedule in Triton: two small kernels around a radix sort.

The same tensors, to the bit, as :func:`openmsa.reference.schedule.key_schedule`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.backends.triton.common import first_rows, last_not_above
from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.layout import Layout

__all__ = ["key_schedule"]

_LANES = 512


def key_schedule(indices: Tensor, layout: Layout, block_size: int) -> KeySchedule:
    """Turn canonical ``[Hkv, Tq, topk]`` block ids into key block -> queries, CSR per head."""
    heads, total, topk = indices.shape
    rows = layout.block_capacity(block_size)
    device = indices.device
    indices = indices.contiguous()
    edges = total * topk
    # Narrow keys take half the passes of a radix sort.
    narrow = heads * (rows + 1) <= torch.iinfo(torch.int16).max
    row = torch.empty(heads * edges, dtype=torch.int16 if narrow else torch.int32, device=device)
    queries = torch.empty((heads, edges), dtype=torch.int32, device=device)
    slots = torch.empty((heads, edges), dtype=torch.uint8, device=device)
    row_ptr = torch.zeros((heads, rows + 1), dtype=torch.int32, device=device)
    if not edges:
        return KeySchedule(row_ptr, queries, block_size, slots)
    grid = (triton.cdiv(edges, _LANES), heads)
    first = first_rows(layout, block_size)
    _edge_rows[grid](
        indices, layout.cu_seqlens_q, layout.spans, first, row,
        edges, layout.num_queries, layout.num_entries, rows, TOPK=topk, LANES=_LANES,
    )  # fmt: skip
    # A stable sort keeps a row's edges, which come in query order, in that order. A head's rows,
    # with one more for what points nowhere, stay together because the keys count through the heads.
    row, edge = row.sort(stable=True)
    _split[grid](row, edge, queries, slots, row_ptr, edges, rows, TOPK=topk, LANES=_LANES)
    return KeySchedule(row_ptr, queries, block_size, slots)


@triton.jit(do_not_specialize=["edges", "num_queries", "entries", "rows"])
def _edge_rows(
    indices, cu_seqlens_q, spans, first, row, edges, num_queries, entries, rows,
    TOPK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    edge = tl.program_id(0) * LANES + tl.arange(0, LANES)
    place = tl.cast(tl.program_id(1), tl.int64) * edges + edge
    query = edge // TOPK
    entry = last_not_above(cu_seqlens_q, entries, query, LANES)
    live = (edge < edges) & (query < num_queries)
    block = tl.load(indices + place, mask=live, other=-1)
    key_range = tl.load(spans + entry * 3 + 2, mask=live, other=0)
    base = tl.load(first + key_range, mask=live, other=0)
    found = tl.program_id(1) * (rows + 1) + tl.where(block < 0, rows, base + block)
    tl.store(row + place, found.to(row.dtype.element_ty), mask=edge < edges)


@triton.jit(do_not_specialize=["edges", "rows"])
def _split(
    row, edge, queries, slots, row_ptr, edges, rows, TOPK: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    head = tl.cast(tl.program_id(1), tl.int64)
    place = head * edges + at
    live = at < edges
    base = tl.program_id(1) * (rows + 1)
    mine = tl.load(row + place, mask=live, other=0).to(tl.int32) - base
    mate = tl.load(edge + place, mask=live, other=0) - head * edges
    query = (mate // TOPK).to(tl.int32)
    tl.store(queries + place, tl.where(mine == rows, -1, query), mask=live)
    tl.store(slots + place, (mate % TOPK).to(tl.uint8), mask=live)
    # Every row up to mine that no earlier edge has begins here; empty rows in between, too.
    before = tl.load(row + place - 1, mask=live & (at > 0), other=0).to(tl.int32) - base
    target = tl.where(at > 0, before, -1) + 1
    while tl.max(tl.where(live, mine - target, -1), 0) >= 0:
        tl.store(row_ptr + head * (rows + 1) + target, at, mask=live & (target <= mine))
        target += 1
    # The last edge closes the rows that no edge has.
    final = live & (at == edges - 1)
    target = mine + 1
    while tl.max(tl.where(final, rows - target, -1), 0) >= 0:
        tl.store(row_ptr + head * (rows + 1) + target, edges, mask=final & (target <= rows))
        target += 1
