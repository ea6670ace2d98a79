"""What a table of backward tasks must say, whatever a backend's tiles and windows."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.tasks import BackwardTasks

__all__ = ["task_pairs"]


def task_pairs(
    tasks: BackwardTasks, schedule: KeySchedule, num_queries: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of tensors that are equal if ``tasks`` has every edge of ``schedule`` once, ordered by
    (KV head, window, row, edge), in tiles that are not too large and lie within one window.

    Returns:
        ``edges``: (head, row, edge) of every edge in the order of the tasks, and as wanted;
        ``sizes`` and ``windows``: tasks that are empty or too large, that leave their window, and
        none; ``dead``: rows past the last task, and -1; ``owners``: as the record has them, and
        counted.
    """
    heads, edges = schedule.queries.shape
    device = schedule.queries.device
    count = int(tasks.count)
    live, dead = tasks.tasks[:count].long(), tasks.tasks[count:]
    head, row, first, size = live.unbind(1)
    of = torch.repeat_interleave(torch.arange(count, device=device), size.clamp(min=0))
    start = size.clamp(min=0).cumsum(0) - size.clamp(min=0)
    edge = first[of] + torch.arange(of.numel(), device=device) - start[of]
    found = torch.stack([head[of], row[of], edge], 1)

    every = torch.arange(edges, device=device).expand(heads, -1).contiguous()
    rows = torch.searchsorted(schedule.row_ptr.long(), every, right=True) - 1
    heads_of = torch.arange(heads, device=device)[:, None].expand_as(every)
    window = torch.div(schedule.queries.clamp(min=0), tasks.window, rounding_mode="floor").long()
    windows = max(1, -(-num_queries // tasks.window))
    segment = (heads_of * windows + window) * (schedule.num_rows + 1) + rows
    read = schedule.queries >= 0
    order = (segment * max(edges, 1) + every)[read].argsort()
    wanted = torch.stack([heads_of, rows, every], -1)[read][order]

    last = (first + size - 1).clamp(0, max(edges - 1, 0))
    leaves = window[head, first.clamp(0, max(edges - 1, 0))] != window[head, last]
    wrong = (size < 1) | (size > tasks.queries_per_task)
    opened = torch.zeros((heads, schedule.num_rows), dtype=torch.int32, device=device)
    # A row and window is one run of edges: count where one begins.
    begins = torch.ones_like(read)
    begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
    at = begins & read
    opened.index_put_(
        (heads_of[at], rows[at]), torch.ones_like(rows[at], dtype=torch.int32), accumulate=True
    )
    none = torch.zeros(count, dtype=torch.bool, device=device)
    return {
        "edges": (found, wanted),
        "sizes": (wrong, none),
        "windows": (leaves, none),
        "dead": (dead, torch.full_like(dead, -1)),
        "owners": (tasks.owners, opened),
    }
