"""Every stage and every gradient of a backend against the oracle, problem by problem.

Stages run through the public functions, in poisoned memory, with NaN in the slack rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from openmsa.api import select_blocks, sparse_attention
from openmsa.contract import Documents, KeySchedule, Problem, Selection
from openmsa.dispatch.choose import check_backend, choose, supports
from openmsa.dispatch.probe import device_facts, toolchain
from openmsa.dispatch.support import FLOATS
from openmsa.dispatch.table import ORDER
from openmsa.reference.schedule import invert, key_schedule
from openmsa.testing.case import Case, Inputs
from openmsa.testing.compare import Report, compare_exact
from openmsa.testing.oracle import attention_truth
from openmsa.testing.poison import poisoned_memory
from openmsa.testing.problems import problems
from openmsa.testing.selection_oracle import selection_truth
from openmsa.testing.task_table import task_pairs

__all__ = ["default_device", "refusal", "verify", "verify_case"]

_GRADIENTS = ("dq", "dk", "dv")


def verify(
    suite: str = "smoke",
    backend: str = "auto",
    dtypes: Sequence[torch.dtype] = FLOATS,
    device: torch.device | str | None = None,
) -> Iterator[Report]:
    """Check ``backend`` on every problem of ``suite`` in every dtype of ``dtypes``.

    Per problem: indices and index_lse; the key schedule, its inverse, and the work tiles where the
    backend builds them in a stage of its own; out, lse, dq, dk and dv, the gradients both with and
    without a gradient of lse; exact zeros where nothing is read and in slack rows; bitwise equality
    of two deterministic runs. What the backend's gate refuses is reported as skipped with the
    gate's reason; an exception is a failed report.

    Args:
        suite: ``"smoke"`` or ``"full"``.
        backend: as in :func:`openmsa.sparse_attention`.
        dtypes: input dtypes.
        device: by default :func:`default_device`.

    Raises:
        InvalidInput: an unknown suite or backend.
    """
    check_backend(backend)
    cases = problems(suite)
    return (
        report
        for case in cases
        for dtype in dtypes
        for report in verify_case(case, dtype, backend, device)
    )


def verify_case(
    case: Case,
    dtype: torch.dtype,
    backend: str = "auto",
    device: torch.device | str | None = None,
) -> Iterator[Report]:
    """:func:`verify` for one problem in one dtype."""
    run = _Run(case, dtype, backend, torch.device(device or default_device(backend)))
    parts = (("selection", _selection), ("schedule", _schedule), ("attention", _attention))
    for name, part in parts:
        try:
            for report in part(run):
                yield replace(report, problem=case.name, dtype=str(dtype).removeprefix("torch."))
        except Exception as error:
            yield Report(
                name,
                float("inf"),
                status="failed",
                detail=f"{type(error).__name__}: {error}",
                problem=case.name,
                dtype=str(dtype).removeprefix("torch."),
            )


def default_device(backend: str) -> str:
    """``"cuda"`` where there is one, except for the two backends that are compared on the CPU."""
    host = backend in ("cpu", "reference") or not torch.cuda.is_available()
    return "cpu" if host else "cuda"


def refusal(problem: Problem, backend: str) -> str | None:
    """The gates' reasons against ``problem``, or None where ``backend`` can do it."""
    reasons = []
    for name in ORDER if backend == "auto" else (backend,):
        answers = supports(name, problem, device_facts(problem.device), toolchain())
        against = dict.fromkeys(reason for a in answers.values() for reason in a.reasons)
        if not against:
            return None
        reasons.append(f"{name}: {'; '.join(against)}")
    return " | ".join(reasons)


@dataclass(frozen=True, eq=False)
class _Run:
    """One problem on one backend; everything that several parts need is made once."""

    case: Case
    dtype: torch.dtype
    backend: str
    device: torch.device

    @cached_property
    def docs(self) -> Documents:
        return self.case.documents(self.device)

    @cached_property
    def inputs(self) -> Inputs:
        return self.case.inputs(self.dtype, self.device)

    @cached_property
    def selection(self) -> Selection:
        return self.case.selection(self.inputs, self.docs)

    def problem(self, work: str, deterministic: bool = False) -> Problem:
        t = self.case.topology
        heads, dim = (t.q_heads, t.head_dim) if work == "attention" else (t.kv_heads, t.index_dim)
        return Problem(
            work,
            self.device,
            self.dtype,
            heads,
            t.kv_heads,
            dim,
            t.block_size,
            t.topk,
            deterministic,
        )

    def select(self) -> tuple[Tensor, Tensor]:
        """Indices ``[Hkv, Tq, topk]`` and the selected lse ``[Tq, Hkv]``."""
        config = self.case.selection_config
        with poisoned_memory():
            selection = select_blocks(
                self.inputs.index_q,
                self.inputs.index_k,
                self.docs,
                topk=config.topk,
                block_size=config.block_size,
                init_blocks=config.init_blocks,
                local_blocks=config.local_blocks,
                return_lse=True,
                backend=self.backend,
            )
        if selection.lse is None:
            raise ValueError("return_lse=True gave no lse")
        return selection.indices, selection.lse.t()

    def attend(self, deterministic: bool, with_d_lse: bool) -> dict[str, Tensor]:
        """out, lse, dq, dk and dv."""
        x = self.inputs
        q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.v))
        with poisoned_memory():
            out, lse = sparse_attention(
                q,
                k,
                v,
                self.selection,
                self.docs,
                return_lse=True,
                deterministic=deterministic,
                backend=self.backend,
            )
            outputs, grads = ((out, lse), (x.d_out, x.d_lse)) if with_d_lse else (out, x.d_out)
            found = torch.autograd.grad(outputs, (q, k, v), grads)
        return {
            "out": out.detach(),
            "lse": lse.detach(),
            **dict(zip(_GRADIENTS, found, strict=True)),
        }


def _skipped(name: str, reason: str) -> Report:
    return Report(name, status="skipped", detail=reason)


def _all_exact(name: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> Report:
    """One report of bitwise equality for several (actual, expected) pairs."""
    reports = [compare_exact(name, *pair) for pair in pairs.values()]
    wrong = [
        f"{part}: {report.detail}"
        for part, report in zip(pairs, reports, strict=True)
        if not report.ok
    ]
    if not wrong:
        return Report(name, norm="exact")
    count = sum(report.error for report in reports)
    return Report(name, count, status="failed", norm="exact", detail="; ".join(wrong))


def _selection(run: _Run) -> Iterator[Report]:
    reason = refusal(run.problem("select"), run.backend)
    if reason is not None:
        yield _skipped("selection", reason)
        return
    x, case, n = run.inputs, run.case, run.docs.num_queries
    first, lse = run.select()
    again, lse_again = run.select()
    truth = selection_truth(
        x.index_q, x.index_k, run.docs, case.selection_config, case.exact_scores
    )
    yield truth.compare(first)
    yield truth.selected_lse(first).compare(lse.cpu())
    rest, lse_rest = first[:, n:], lse[n:]
    yield _all_exact(
        "selection_slack",
        {
            "indices": (rest, torch.full_like(rest, -1)),
            "lse": (lse_rest, torch.full_like(lse_rest, float("-inf"))),
        },
    )
    yield _all_exact("selection_repeat", {"indices": (again, first), "lse": (lse_again, lse)})


def _schedule(run: _Run) -> Iterator[Report]:
    problem = run.problem("attention")
    reason = refusal(problem, run.backend)
    if reason is not None:
        yield _skipped("schedule", reason)
        return
    plan, indices, layout = choose(problem, run.backend), run.selection.indices, run.docs.layout
    size = run.case.topology.block_size
    with poisoned_memory():
        built: KeySchedule = plan.run("key_schedule", indices, layout, size)
    wanted = key_schedule(indices, layout, size)
    inverse = invert(built, layout, indices.shape[1], indices.shape[2])
    yield _all_exact(
        "key_schedule",
        {
            "row_ptr": (built.row_ptr, wanted.row_ptr),
            "queries": (built.queries, wanted.queries),
            "inverse": (inverse, indices),
        },
    )
    build = plan.stage("task_build")
    if build is None:
        return
    with poisoned_memory():
        tasks = build(built, run.case.topology.group, layout.num_queries)
    yield _all_exact("tasks", task_pairs(tasks, wanted, layout.num_queries))


def _attention(run: _Run) -> Iterator[Report]:
    reason = refusal(run.problem("attention"), run.backend)
    if reason is not None:
        yield _skipped("attention", reason)
        return
    unrepeatable = refusal(run.problem("attention", deterministic=True), run.backend)
    first = run.attend(deterministic=unrepeatable is None, with_d_lse=True)
    size, n, m = run.case.topology.block_size, run.docs.num_queries, run.docs.num_keys
    truth = attention_truth(run.inputs, run.selection.indices, run.docs, size)
    for name, quantity in truth.quantities.items():
        yield quantity.compare(first[name])
    unread, slack = {}, {}
    for name, zero in truth.must_be_zero().items():
        rows = first[name][: zero.shape[0]][zero].abs()
        unread[name] = (rows, torch.zeros_like(rows))
    for name, value in first.items():
        rest = value[m if name in ("dk", "dv") else n :]
        empty = torch.full_like(rest, float("-inf") if name == "lse" else 0.0)
        slack[name] = (rest if name == "lse" else rest.abs(), empty)
    yield _all_exact("unread_zeros", unread)
    yield _all_exact("slack", slack)
    if unrepeatable is None:
        second = run.attend(deterministic=True, with_d_lse=True)
        yield _all_exact("repeat", {name: (second[name], first[name]) for name in first})
    else:
        yield _skipped("repeat", unrepeatable)
    plain = run.attend(deterministic=False, with_d_lse=False)
    truth = attention_truth(run.inputs, run.selection.indices, run.docs, size, with_d_lse=False)
    for name in _GRADIENTS:
        yield replace(truth.quantities[name].compare(plain[name]), name=f"{name}_out_only")
