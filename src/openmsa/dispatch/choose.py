"""The choice: the first backend of the written order that can do every stage of the work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from openmsa.contract.problem import STAGES, Problem
from openmsa.dispatch.probe import DeviceFacts, Toolchain, device_facts, toolchain
from openmsa.dispatch.support import Support, misfits, support
from openmsa.dispatch.table import BACKENDS, ORDER, RAN, TABLE, Cell, launcher
from openmsa.errors import UnsupportedProblem, invalid_input

__all__ = ["Plan", "answers", "check_backend", "choose", "explain", "supports"]


@dataclass(frozen=True)
class Plan:
    """The chosen backend and its cell for every stage of the work."""

    backend: str
    cells: tuple[tuple[str, Cell], ...]

    def stage(self, name: str) -> Callable[..., Any] | None:
        """The stage's launcher, or None where another stage already does it."""
        path = dict(self.cells)[name].launcher
        return None if path is None else launcher(path)

    def run(self, name: str, *args: Any) -> Any:
        """Run a stage that this backend has a launcher for."""
        function = self.stage(name)
        if function is None:
            raise KeyError(f"{self.backend} has no separate {name} stage")
        return function(*args)


def check_backend(backend: str) -> None:
    """Raise :class:`InvalidInput` unless ``backend`` is one of the known names."""
    if backend not in BACKENDS:
        invalid_input("backend", f"one of {', '.join(BACKENDS)}", repr(backend))


def supports(
    backend: str, problem: Problem, facts: DeviceFacts, tools: Toolchain
) -> dict[str, Support]:
    """Each stage's answer for one backend."""
    return {stage: answer for stage, (_, answer) in answers(backend, problem, facts, tools).items()}


def answers(
    backend: str, problem: Problem, facts: DeviceFacts, tools: Toolchain
) -> dict[str, tuple[Cell, Support]]:
    """Each stage's cell for such a device, and its answer."""
    return {
        stage: _of_families(TABLE[backend][stage], problem, facts, tools)
        for stage in STAGES[problem.work]
    }


def _of_families(
    cell: Cell, problem: Problem, facts: DeviceFacts, tools: Toolchain
) -> tuple[Cell, Support]:
    """The first cell that accepts, or else the first that is for such a device. For a device that
    none is for, the first of all, with the reasons of each."""
    answered = [(one, _of_cell(one, problem, facts, tools)) for one in cell.families]
    fitting = [(one, answer) for one, answer in answered if not misfits(one.offer, facts)]
    for one, answer in fitting:
        if answer.ok:
            return one, answer
    if fitting:
        return fitting[0]
    reasons = [reason for one in cell.families for reason in misfits(one.offer, facts)]
    reasons += [reason for _, answer in answered for reason in answer.reasons]
    return cell.families[0], Support(False, tuple(dict.fromkeys(reasons)))


def _of_cell(cell: Cell, problem: Problem, facts: DeviceFacts, tools: Toolchain) -> Support:
    if cell.launcher is not None:
        return support(problem, cell.offer, facts, tools)
    if cell.reason:
        return Support(False, (cell.reason,))
    return Support(True)


@lru_cache(maxsize=1024)
def choose(problem: Problem, backend: str = "auto") -> Plan:
    """The plan for ``problem``; memoised, since a problem holds only static facts.

    Raises:
        UnsupportedProblem: the named backend cannot do it (it never falls back), or none can.
    """
    return choose_with(problem, backend, device_facts(problem.device), toolchain())


def choose_with(problem: Problem, backend: str, facts: DeviceFacts, tools: Toolchain) -> Plan:
    """:func:`choose` with the facts given, so that any machine can be asked about any other."""
    check_backend(backend)
    names = ORDER if backend == "auto" else (backend,)
    able = {}
    for name in names:
        found = answers(name, problem, facts, tools)
        if all(answer.ok for _, answer in found.values()):
            able[name] = tuple((stage, cell) for stage, (cell, _) in found.items())
    if not able:
        raise UnsupportedProblem(_refusal(names, problem, facts, tools))
    ran = [name for name, cells in able.items() if _have_run(cells)]
    name = ran[0] if ran else next(iter(able))
    if not ran and backend == "auto":
        warnings.warn(
            f"openmsa: backend {name!r} was chosen, whose kernels have not run on {facts} yet",
            stacklevel=2,
        )
    return Plan(name, able[name])


def explain(problem: Problem) -> str:
    """The order, the chosen backend of ``problem`` and each backend's reason per stage, as text."""
    facts, tools = device_facts(problem.device), toolchain()
    try:
        chosen = choose(problem).backend
    except UnsupportedProblem:
        chosen = "none"
    lines = [f"{problem.work}: {chosen}  (order: {', '.join(ORDER)})"]
    for name in ORDER:
        for stage, (cell, answer) in answers(name, problem, facts, tools).items():
            mark = "->" if name == chosen else "  "
            lines.append(f"  {mark} {name:<10}{stage:<22}{describe(cell, answer)}")
    return "\n".join(lines)


def describe(cell: Cell, answer: Support) -> str:
    """One cell and a gate's answer in words."""
    if cell.fused and answer.ok:
        return f"done inside {cell.fused}"
    if not answer.ok:
        return "no: " + "; ".join(answer.reasons)
    return f"yes ({cell.evidence}: {cell.where})"


def _have_run(cells: tuple[tuple[str, Cell], ...]) -> bool:
    return all(cell.evidence == RAN for _, cell in cells if cell.launcher is not None)


def _refusal(names: tuple[str, ...], problem: Problem, facts: DeviceFacts, tools: Toolchain) -> str:
    lines = [
        f"no backend of {', '.join(names)} can do this {problem.work} problem: "
        f"dtype {str(problem.dtype).removeprefix('torch.')}, {problem.q_heads}/{problem.kv_heads} "
        f"heads, head dim {problem.head_dim}, block {problem.block_size}, top-{problem.topk}"
        f"{', deterministic' if problem.deterministic else ''}, on {facts}; {tools}"
    ]
    for name in names:
        reasons: dict[str, list[str]] = {}
        for stage, answer in supports(name, problem, facts, tools).items():
            for reason in answer.reasons:
                reasons.setdefault(reason, []).append(stage)
        lines += [f"  {name}: {reason} [{', '.join(at)}]" for reason, at in reasons.items()]
    others = [
        name
        for name in ORDER
        if name not in names
        and all(answer.ok for answer in supports(name, problem, facts, tools).values())
    ]
    if others:
        lines.append(f"  instead: backend={others[0]!r}, or backend='auto'")
    return "\n".join(lines)
