"""One training step of one attention layer, stage by stage: operands, the pass, what it took."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openmsa.api import select_blocks, sparse_attention
from openmsa.cli.measure import Cost, measure
from openmsa.contract import Documents, Problem, Selection, Topology
from openmsa.dispatch.choose import choose

__all__ = ["STAGES", "Operands", "Step", "backends_of", "draw", "sparse_step"]

STAGES = ("select", "forward", "backward")


@dataclass(frozen=True, eq=False)
class Operands:
    """Documents and standard normal tensors, shaped as in :func:`openmsa.sparse_attention` and
    :func:`openmsa.select_blocks`."""

    docs: Documents
    topology: Topology
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    index_q: Tensor
    index_k: Tensor


@dataclass
class Step:
    """Results of a pass, as far as it went, and each stage's cost."""

    selection: Selection
    out: Tensor | None = None
    grads: tuple[Tensor, ...] = ()
    costs: dict[str, Cost] = field(default_factory=dict)


def draw(docs: Documents, topology: Topology, dtype: torch.dtype, seed: int) -> Operands:
    """Random operands for ``docs`` on its device; the same for the same seed."""
    t = topology
    generator = torch.Generator(device=docs.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=docs.device, generator=generator)

    return Operands(
        docs,
        topology,
        q=normal(docs.num_queries, t.q_heads, t.head_dim),
        k=normal(docs.num_keys, t.kv_heads, t.head_dim),
        v=normal(docs.num_keys, t.kv_heads, t.head_dim),
        d_out=normal(docs.num_queries, t.q_heads, t.head_dim),
        index_q=normal(docs.num_queries, t.kv_heads, t.index_dim),
        index_k=normal(docs.num_keys, 1, t.index_dim),
    )


def backends_of(
    topology: Topology, device: torch.device, dtype: torch.dtype, backend: str
) -> dict[str, str]:
    """The backend that ``backend`` means for selection and for attention.

    Raises:
        UnsupportedProblem: it cannot do one of them here.
    """
    t = topology
    shapes = {"select": (t.kv_heads, t.index_dim), "attention": (t.q_heads, t.head_dim)}
    return {
        work: choose(
            Problem(work, device, dtype, heads, t.kv_heads, width, t.block_size, t.topk), backend
        ).backend
        for work, (heads, width) in shapes.items()
    }


def sparse_step(
    x: Operands,
    backend: str,
    selection: Selection | None = None,
    stages: Collection[str] = STAGES,
    before: Callable[[str], None] = lambda stage: None,
) -> Step:
    """Run ``stages`` in order.

    Args:
        x: the operands.
        backend: as in :func:`openmsa.sparse_attention`.
        selection: what attention reads; by default what the ``"select"`` stage chooses.
        stages: of :data:`STAGES`; backward needs forward.
        before: called with each stage's name before it starts.
    """
    device, t = x.docs.device, x.topology
    costs = {}
    if "select" in stages:
        before("select")
        chosen, costs["select"] = measure(
            device,
            lambda: select_blocks(
                x.index_q,
                x.index_k,
                x.docs,
                topk=t.topk,
                block_size=t.block_size,
                init_blocks=t.init_blocks,
                local_blocks=t.local_blocks,
                backend=backend,
            ),
        )
        selection = chosen if selection is None else selection
    if selection is None:
        raise ValueError("without the select stage a selection must be given")
    step = Step(selection, costs=costs)
    if "forward" in stages:
        before("forward")
        leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
        q, k, v = leaves
        out, costs["forward"] = measure(
            device, lambda: sparse_attention(q, k, v, step.selection, x.docs, backend=backend)
        )
        step.out = out.detach()
        if "backward" in stages:
            before("backward")
            step.grads, costs["backward"] = measure(
                device, lambda: torch.autograd.grad(out, leaves, x.d_out)
            )
    return step
