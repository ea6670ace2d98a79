"""Work tiles of the SM100 backward: :mod:`openmsa.kernels.stages.tasks` in the contract's order."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from openmsa.contract.key_schedule import KeySchedule  # noqa: E402
from openmsa.contract.tasks import WINDOW, BackwardTasks, queries_per_task  # noqa: E402
from openmsa.kernels.build import Build  # noqa: E402
from openmsa.kernels.stages import tasks  # noqa: E402

__all__ = ["builds", "task_build"]


def task_build(
    schedule: KeySchedule, group: int, num_queries: int, window: int = WINDOW
) -> BackwardTasks:
    """Cut every row's queries into tiles that stay within one window of queries.

    Args:
        schedule: of the selection, on a device that the kernels are built for.
        group: query heads of a KV head.
        num_queries: queries of the layout.
        window: queries per window; the contract's order has :data:`WINDOW`.

    Returns:
        The tasks, to the bit those of :func:`openmsa.reference.schedule.task_build`, and
        ``bounds``.

    Raises:
        UnsupportedProblem: more bins than 32-bit offsets count: some 6 million queries of one
            document, fewer of many short ones.
    """
    return tasks.tasks_of(schedule, queries_per_task(group), num_queries, window)


def builds(arch: str) -> tuple[Build, ...]:
    """What :func:`task_build` compiles for MiniMax-M3."""
    return (tasks.build(arch, queries_per_task(16), WINDOW),)
