"""The one autograd formula: what the forward saves, and what the backward returns.

Saved: q, k, v, out, lse, the selection, its key schedule, and the documents' offsets. No partial
output and no score is kept. The backward needs no second look at the selection's inputs, so
replaying a checkpointed forward gives the same selection as long as its inputs are the same.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from openmsa import ops
from openmsa.errors import UnsupportedProblem

__all__ = ["attention"]

attention = ops.attention_forward
"""``openmsa::attention_forward`` with its gradient registered."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, indices, layout, sizes, block_size, scale, deterministic, backend = inputs
    out, lse, row_ptr, queries = output
    ctx.save_for_backward(q, k, v, out, lse, indices, row_ptr, queries, *layout)
    ctx.arguments = (sizes, block_size, scale, deterministic, backend)
    ctx.mark_non_differentiable(row_ptr, queries)


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor, *_: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    sizes, block_size, scale, deterministic, backend = ctx.arguments
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.needs_input_grad[2]]
    dq, dk, dv = ops.attention_backward(
        d_out,
        d_lse,
        list(saved[:8]),
        list(saved[8:]),
        sizes,
        block_size,
        scale,
        deterministic,
        needs,
        backend,
    )
    return (
        dq if ctx.needs_input_grad[0] else None,
        dk if ctx.needs_input_grad[1] else None,
        dv if ctx.needs_input_grad[2] else None,
        None,
        [None] * len(saved[8:]),
        *(None,) * 5,
    )


def _second_order(ctx: Any, *_: Tensor) -> NoReturn:
    raise UnsupportedProblem(
        "openmsa: second-order gradients of sparse attention are not implemented (one of dq, "
        "dk or dv was asked for); use openmsa.reference.dense on a small problem"
    )


def _selects(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output)


def _no_gradient(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
    return (None, None, [None] * 3, *(None,) * 7)


# No gradient flows through selection; saying so keeps the operator's outputs out of the graph even
# where its inputs are not detached.
torch.library.register_autograd(
    "openmsa::select_blocks", _no_gradient, setup_context=_selects, lib=ops.LIBRARY
)
torch.library.register_autograd("openmsa::attention_backward", _second_order, lib=ops.LIBRARY)
torch.library.register_autograd(
    "openmsa::attention_forward", _backward, setup_context=_setup_context, lib=ops.LIBRARY
)
