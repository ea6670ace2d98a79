"""The inverse schedule and the backward work tiles, built on the selection's device.

Both are integer stages: every backend must give these tensors to the bit. Nothing here reads a
value on the host; the shapes come from sizes alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.layout import Layout
from openmsa.contract.tasks import WINDOW, BackwardTasks, queries_per_task, task_capacity

__all__ = ["invert", "key_schedule", "task_build"]


def key_schedule(indices: Tensor, layout: Layout, block_size: int) -> KeySchedule:
    """Turn canonical ``[Hkv, Tq, topk]`` block ids into key block -> queries, CSR per head.

    A stable sort of the edges (query, block) by block row keeps each row's queries ascending. An id
    past a query's own block, as a selection made for other documents may have, is no edge.
    """
    heads, total, topk = indices.shape
    rows = layout.block_capacity(block_size)
    entry = layout.entry_of_query()
    first = layout.first_blocks(block_size)[layout.spans[:, 2].long()[entry]]
    real = indices[:, : layout.num_queries].long()
    own = torch.div(layout.positions(), block_size, rounding_mode="floor")
    none = (real < 0) | (real > own[None, :, None])
    row = torch.where(none, rows, real + first[None, :, None]).to(torch.int32)
    row = torch.nn.functional.pad(row, (0, 0, 0, total - layout.num_queries), value=rows)
    row = row.flatten(1)
    row, edge = row.sort(dim=1, stable=True)
    queries = torch.div(edge, topk, rounding_mode="floor").to(torch.int32)
    queries = torch.where(row == rows, -1, queries)
    bounds = torch.arange(rows + 1, device=row.device, dtype=torch.int32).expand(heads, -1)
    row_ptr = torch.searchsorted(row, bounds.contiguous(), out_int32=True)
    return KeySchedule(row_ptr, queries, block_size)


def invert(schedule: KeySchedule, layout: Layout, total: int, topk: int) -> Tensor:
    """The canonical ``[Hkv, total, topk]`` selection a schedule came from."""
    heads, capacity = schedule.queries.shape
    device = schedule.queries.device
    edge = torch.arange(capacity, device=device).expand(heads, -1).contiguous()
    row = torch.searchsorted(schedule.row_ptr.long(), edge, right=True) - 1
    live = schedule.queries >= 0
    query = torch.where(live, schedule.queries.long(), total)
    entry = torch.nn.functional.pad(layout.entry_of_query(), (0, 1 + total - layout.num_queries))
    first = layout.first_blocks(schedule.block_size)
    first = first[layout.spans[:, 2].long()[entry[query]]] if layout.num_entries else query
    # Edges ascend by row, so a stable sort by query gives each query its blocks in ascending order.
    query, order = query.sort(dim=1, stable=True)
    block = (row - first).gather(1, order)
    begin = torch.searchsorted(query, query, right=False)
    slot = torch.arange(capacity, device=device) - begin
    slot = torch.where(query < total, slot, topk)
    out = torch.full((heads, total + 1, topk + 1), -1, device=device, dtype=torch.int32)
    head = torch.arange(heads, device=device)[:, None].expand_as(query)
    out[head, query, slot.clamp(max=topk)] = block.int()
    return out[:, :total, :topk].contiguous()


def task_build(schedule: KeySchedule, group: int, num_queries: int) -> BackwardTasks:
    """Cut every row's queries into tiles that stay within one window of queries.

    Edges keep the key schedule's numbering; only the order of the tiles is by window.
    """
    heads, edges = schedule.queries.shape
    rows, per_task = schedule.num_rows, queries_per_task(group)
    capacity = task_capacity(heads, edges, rows, num_queries, per_task)
    device = schedule.queries.device
    edge = torch.arange(edges, device=device).expand(heads, -1).contiguous()
    live = schedule.queries >= 0
    row = torch.searchsorted(schedule.row_ptr.long(), edge, right=True) - 1
    window = torch.div(schedule.queries.clamp(min=0), WINDOW, rounding_mode="floor").long()
    windows = -(-num_queries // WINDOW)
    # A segment is one row within one window; its edges are neighbours because queries ascend.
    segment = torch.where(live, row * max(windows, 1) + window, rows * max(windows, 1))
    begin = torch.searchsorted(segment, segment, right=False)
    within = edge - begin
    starts = live & (within % per_task == 0)
    size = (torch.searchsorted(segment, segment, right=True) - edge).clamp(max=per_task)
    head = torch.arange(heads, device=device)[:, None].expand_as(edge)
    # Order by head, window, row, edge; tiles that are no tile sort to the end.
    key = ((head * max(windows, 1) + window) * (rows + 1) + row) * max(edges, 1) + edge
    key = torch.where(starts, key, torch.iinfo(torch.int64).max).flatten()
    order = key.argsort()[:capacity]
    table = torch.stack([head, row, edge, size], -1).flatten(0, 1)[order]
    count = starts.sum().to(torch.int32).reshape(1)
    dead = torch.arange(table.shape[0], device=device) >= count
    table = torch.where(dead[:, None], -1, table).to(torch.int32)
    table = torch.nn.functional.pad(table, (0, 0, 0, capacity - table.shape[0]), value=-1)
    opens = (live & (within == 0)).int()
    owners = torch.zeros((heads, rows + 1), dtype=torch.int32, device=device)
    owners.scatter_add_(1, torch.where(live, row, rows), opens)
    return BackwardTasks(table, count, owners[:, :rows].contiguous(), per_task, WINDOW)
