"""Work of the SM90 backward: a task is up to 256 queries of a window that read one key block."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from openmsa.contract.key_schedule import KeySchedule  # noqa: E402
from openmsa.contract.tasks import BackwardTasks  # noqa: E402
from openmsa.kernels.build import Build  # noqa: E402
from openmsa.kernels.sm90.backward.config import CHUNK, WINDOWS, window_of  # noqa: E402
from openmsa.kernels.stages import tasks  # noqa: E402

__all__ = ["builds", "task_build"]


def task_build(
    schedule: KeySchedule, group: int, num_queries: int, window: int | None = None
) -> BackwardTasks:
    """Cut every row's queries into tasks that stay within one window of queries.

    Args:
        schedule: of the selection.
        group: query heads of a KV head; a task's queries do not depend on it.
        num_queries: queries of the layout.
        window: queries per window; by default what the backward was tuned for.

    Raises:
        UnsupportedProblem: more bins than 32-bit offsets count.
    """
    if window is None:
        edges = schedule.queries.shape[1]
        window = window_of(1024 * edges / max(1, schedule.num_rows * num_queries))
    return tasks.tasks_of(schedule, CHUNK, num_queries, window, even=True)


def builds(arch: str) -> tuple[Build, ...]:
    """What :func:`task_build` compiles."""
    return tuple(tasks.build(arch, CHUNK, window, even=True) for window in WINDOWS)
