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
from openmsa.kernels.sm90.backward import fixed  # noqa: E402
from openmsa.kernels.sm90.backward.config import CONSUMERS, HEAD_DIM, Config  # noqa: E402
from openmsa.kernels.sm90.backward.context import Numbers, Sums, Tensors  # noqa: E402
from openmsa.kernels.sm90.backward.kernel import Backward  # noqa: E402
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
) -> tuple[Tensor | fixed.FixedPoint, Tensor, Tensor]:
    """fp32 dq, dk and dv of the shapes of q, k and v; rows that nobody reads are zero.

    ``tasks`` are those of :func:`openmsa.kernels.sm90.task_build.task_build`. ``needs`` is ignored:
    all three cost what two of them would. ``config.deterministic`` makes repeated calls equal to
    the bit, and dq a fixed-point one: :mod:`openmsa.kernels.sm90.backward_postprocess` reads both.
    """
    q, k, v, d_out = (aligned(x) for x in (saved.q, saved.k, saved.v, d_out))
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    heads, rows = k.shape[1], saved.schedule.num_rows
    if not layout.num_queries or not rows:
        return dq, dk, dv
    facts = Config(
        str(q.dtype).removeprefix("torch."), q.shape[1] // k.shape[1], config.deterministic
    )
    arch = arch_of(q.device)
    positions, blocks = lookup(layout, rows, config.block_size)
    factors, parts, turns = delta, tasks.count, tasks.tasks.view(1, 1, -1)[..., :0]
    if config.deterministic:
        indices = saved.indices.contiguous()
        factors, parts = fixed.units(
            arch, k, v, d_out, delta, indices, blocks, layout, config.scale
        )
        turns = torch.zeros((heads, rows, CONSUMERS * 4), dtype=torch.int32, device=q.device)
    tensors = Tensors(
        saved.lse.contiguous(), delta, tasks.tasks, tasks.count,
        torch.zeros(1, dtype=torch.int32, device=q.device), saved.schedule.queries, positions,
        blocks, saved.schedule.row_ptr, factors, turns,
    )  # fmt: skip
    numbers = Numbers(config.scale, config.scale * math.log2(math.e))
    grid = min(sm_count_of(q.device), tasks.tasks.shape[0])
    sums = dq.view(torch.int32) if config.deterministic else dq
    main = function(_build(arch, facts))
    main(q, k, v, d_out, Sums(sums, dk, dv), tensors, numbers, grid)
    return fixed.FixedPoint(sums, factors, parts) if config.deterministic else dq, dk, dv


def builds(arch: str, dtype: str = "bfloat16", group: int = 16) -> tuple[Build, ...]:
    """What :func:`backward` compiles."""
    main = (_build(arch, Config(dtype, group, ordered)) for ordered in (False, True))
    return *main, *fixed.builds(arch, dtype, group)


def _build(arch: str, config: Config) -> Build:
    def make() -> tuple[Any, tuple[Any, ...]]:
        dtype = getattr(torch, config.dtype)
        operands = [
            fake(dtype, (ANY, ANY, HEAD_DIM), strides=(ANY, ANY, 1), align=16) for _ in range(4)
        ]
        rows, wide = (ANY, ANY), (ANY, ANY, HEAD_DIM)
        kind = torch.int32 if config.deterministic else torch.float32
        sums = [fake(x, wide, align=16) for x in (kind, torch.float32, torch.float32)]
        tensors = Tensors(
            lse=fake(torch.float32, rows),
            delta=fake(torch.float32, rows),
            tasks=fake(torch.int32, (ANY, 4), align=16),
            count=fake(torch.int32, (1,)),
            ticket=fake(torch.int32, (1,)),
            queries=fake(torch.int32, rows),
            positions=fake(torch.int32, (ANY,)),
            blocks=fake(torch.int32, (ANY, 3)),
            row_ptr=fake(torch.int32, rows),
            factors=fake(torch.float32, rows),
            turns=fake(torch.int32, (ANY, ANY, ANY)),
        )
        numbers = Numbers(Float32(0), Float32(0))
        return Backward(config), (*operands, Sums(*sums), tensors, numbers, Int32(0))

    facts = (
        ("dtype", config.dtype), ("group", config.group), ("deterministic", config.deterministic),
        ("shared_bytes", config.shared_bytes),
    )  # fmt: skip
    return Build("backward_in_order" if config.deterministic else "backward", arch, facts, make)
