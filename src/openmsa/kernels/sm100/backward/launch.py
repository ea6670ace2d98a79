"""The backward on the host: check, choose, compile once, launch."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

import math  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402
from torch import Tensor  # noqa: E402

from openmsa.contract.layout import Layout  # noqa: E402
from openmsa.contract.problem import AttentionConfig, Saved  # noqa: E402
from openmsa.contract.tasks import BackwardTasks  # noqa: E402
from openmsa.kernels.common.compile import ANY, Build, fake, function  # noqa: E402
from openmsa.kernels.common.device import arch_of, sm_count_of  # noqa: E402
from openmsa.kernels.common.tensors import aligned  # noqa: E402
from openmsa.kernels.schedule import grid_launch_bound  # noqa: E402
from openmsa.kernels.sm100.backward import ordered  # noqa: E402
from openmsa.kernels.sm100.backward.config import BLOCK, HEAD_DIM, Config  # noqa: E402
from openmsa.kernels.sm100.backward.context import Numbers, Tensors  # noqa: E402
from openmsa.kernels.sm100.backward.kernel import Backward  # noqa: E402
from openmsa.kernels.stages.lookup import lookup  # noqa: E402

__all__ = ["backward", "builds"]


def backward(
    d_out: Tensor,
    delta: Tensor,
    saved: Saved,
    tasks: BackwardTasks,
    layout: Layout,
    config: AttentionConfig,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 dq, dk and dv of the shapes of q, k and v; rows that nobody reads are zero.

    ``needs`` is ignored: all three cost what two of them would. ``config.deterministic`` makes
    repeated calls equal to the bit.
    """
    q, k, v, d_out = (aligned(x) for x in (saved.q, saved.k, saved.v, d_out))
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    if not layout.num_queries or not saved.schedule.num_rows:
        return dq, dk, dv
    facts = Config(
        str(q.dtype).removeprefix("torch."), q.shape[1] // k.shape[1], config.deterministic
    )
    run = _Run(q, k, v, d_out, facts, config.scale)
    positions, blocks = lookup(layout, saved.schedule.num_rows, config.block_size)
    tensors = Tensors(
        saved.lse.contiguous(), delta, tasks.tasks, tasks.count, saved.schedule.queries, positions,
        blocks, saved.indices.contiguous(), dq, dk, dv, dq.view(-1, 1, 1, HEAD_DIM)[:0],
        tasks.tasks,
    )  # fmt: skip
    if config.deterministic:
        _in_order(run, tensors, tasks, layout)
    else:
        run(tensors, grid_launch_bound(tasks.tasks.shape[0], run.num_sms))
    return dq, dk, dv


class _Run:
    """The main kernel with what all launches of a call share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, facts: Config, scale: float
    ) -> None:
        self.operands = (q, k, v, d_out)
        self.arch = arch_of(q.device)
        self.main = function(_build(self.arch, facts))
        self.scale = scale
        self.num_sms = sm_count_of(q.device)

    def __call__(
        self, tensors: Tensors, grid: int, window: int = 0, windows: int = 1, first: int = 0
    ) -> None:
        numbers = (self.scale, self.scale * math.log2(math.e), window, windows, first)
        self.main(*self.operands, tensors, Numbers(*numbers, self.num_sms, grid))


def _in_order(run: _Run, tensors: Tensors, tasks: BackwardTasks, layout: Layout) -> None:
    """Window by window of queries: the main kernel, then the sums it leaves."""
    indices, dq = tensors.indices, tensors.dq
    heads, topk = indices.shape[0], indices.shape[2]
    size = tasks.window
    windows = -(-layout.num_queries // size)
    device = dq.device
    held = min(size, layout.num_queries)
    slots = torch.empty((held, topk, *dq.shape[1:]), dtype=torch.float32, device=device)
    grid = grid_launch_bound(
        heads * size * topk // tasks.queries_per_task + heads * tensors.blocks.shape[0],
        run.num_sms,
    )
    parts = torch.empty((grid, 2, BLOCK, HEAD_DIM), dtype=torch.float32, device=device)
    part_rows = torch.empty((grid, 4), dtype=torch.int32, device=device)
    sum_slots = function(ordered.sum_slots(run.arch))
    add_parts = function(ordered.add_parts(run.arch))
    rows = (slots.view(held, topk, -1, 4), indices, dq.view(dq.shape[0], -1, 4))
    main = tensors._replace(bounds=tasks.bounds, dq=slots, parts=parts, part_rows=part_rows)
    for window in range(windows):
        first = window * size
        part_rows.fill_(-1)
        run(main, grid, window, windows, first)
        sum_slots(*rows, first, min(size, layout.num_queries - first))
        add_parts(parts, part_rows, tensors.dv, tensors.dk)


def builds(arch: str) -> tuple[Build, ...]:
    """What :func:`backward` compiles for MiniMax-M3 in bf16."""
    main = [_build(arch, Config("bfloat16", 16, ordering)) for ordering in (False, True)]
    return (*main, ordered.sum_slots(arch), ordered.add_parts(arch))


def _build(arch: str, config: Config) -> Build:
    def make() -> tuple[Any, tuple[Any, ...]]:
        dtype = getattr(torch, config.dtype)
        operands = [
            fake(dtype, (ANY, ANY, HEAD_DIM), strides=(ANY, ANY, 1), align=16) for _ in range(4)
        ]
        rows, wide = (ANY, ANY), (ANY, ANY, HEAD_DIM)
        dq = (ANY, *wide) if config.deterministic else wide
        tensors = Tensors(
            lse=fake(torch.float32, rows),
            delta=fake(torch.float32, rows),
            tasks=fake(torch.int32, (ANY, 4), align=16),
            bounds=fake(torch.int32, (ANY,)),
            queries=fake(torch.int32, rows),
            positions=fake(torch.int32, (ANY,)),
            blocks=fake(torch.int32, (ANY, 3)),
            indices=fake(torch.int32, (ANY, ANY, ANY)),
            dq=fake(torch.float32, dq, align=16),
            dk=fake(torch.float32, wide, align=16),
            dv=fake(torch.float32, wide, align=16),
            parts=fake(torch.float32, (ANY, ANY, ANY, HEAD_DIM), align=16),
            part_rows=fake(torch.int32, (ANY, 4)),
        )
        numbers = Numbers(Float32(0), Float32(0), *(Int32(0) for _ in range(5)))
        return Backward(config), (*operands, tensors, numbers)

    facts = (
        ("dtype", config.dtype), ("group", config.group), ("deterministic", config.deterministic),
        ("shared_bytes", config.shared_bytes),
    )  # fmt: skip
    return Build("backward_in_order" if config.deterministic else "backward", arch, facts, make)
