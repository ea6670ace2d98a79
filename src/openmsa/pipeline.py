"""MSA from top to bottom: this file is the data flow, with no kernel and no policy in it.

    documents --> block scores --> top-k selection --> inverse schedule --> sparse forward
                                                            |
    d_out, d_lse --> preprocess (delta) --> task build --> backward --> postprocess

A stage that a backend does inside another one has no launcher, so its step is skipped here. The
operators of :mod:`openmsa.ops` call these functions with real tensors; workspaces live and die
inside.
"""

from __future__ import annotations

from torch import Tensor

from openmsa.contract.key_schedule import KeySchedule
from openmsa.contract.layout import Layout
from openmsa.contract.problem import AttentionConfig, Problem, Saved, SelectionConfig
from openmsa.dispatch.choose import choose
from openmsa.dispatch.ready import expect_attention

__all__ = ["backward", "forward", "select"]


def select(
    index_q: Tensor, index_k: Tensor, layout: Layout, config: SelectionConfig, backend: str
) -> tuple[Tensor, Tensor | None]:
    """Block scores and top-k: canonical int32 ``[Hkv, Tq, topk]``, and the selected lse or None."""
    problem = Problem(
        "select",
        index_q.device,
        index_q.dtype,
        index_q.shape[1],
        index_q.shape[1],
        index_q.shape[2],
        config.block_size,
        config.topk,
    )
    plan = choose(problem, backend)
    expect_attention(index_q.device, backend)
    indices, lse = plan.run("select_blocks", index_q, index_k, layout, config)
    return indices, lse


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    layout: Layout,
    config: AttentionConfig,
    backend: str,
) -> tuple[Tensor, Tensor, KeySchedule]:
    """``out [Tq, Hq, D]``, ``lse [Tq, Hq]`` and the key schedule that the backward reuses."""
    plan = choose(attention_problem(q, k, indices, config), backend)
    schedule = plan.run("key_schedule", indices, layout, config.block_size)
    out, lse = plan.run("forward", q, k, v, indices, schedule, layout, config)
    return out, lse, schedule


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    saved: Saved,
    layout: Layout,
    config: AttentionConfig,
    needs: tuple[bool, bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the input dtype; ``needs`` is (dq, dk and dv), the rest may stay zero."""
    q = saved.q
    plan = choose(attention_problem(q, saved.k, saved.indices, config), backend)
    delta = plan.run("backward_preprocess", saved.out, d_out, saved.lse, d_lse)
    task_build = plan.stage("task_build")
    tasks = None
    if task_build is not None:
        tasks = task_build(saved.schedule, q.shape[1] // saved.k.shape[1], layout.num_queries)
    dq, dk, dv = plan.run("backward", d_out, delta, saved, tasks, layout, config, needs)
    postprocess = plan.stage("backward_postprocess")
    if postprocess is not None:
        dq, dk, dv = postprocess(dq, dk, dv, q.dtype)
    return dq, dk, dv


def attention_problem(q: Tensor, k: Tensor, indices: Tensor, config: AttentionConfig) -> Problem:
    """The static facts of an attention call, for the gates."""
    return Problem(
        "attention",
        q.device,
        q.dtype,
        q.shape[1],
        k.shape[1],
        q.shape[2],
        config.block_size,
        indices.shape[2],
        config.deterministic,
    )
