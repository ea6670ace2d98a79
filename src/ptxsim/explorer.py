"""Runs one launch under several schedules and says where the results differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxsim.errors import SimulationError
from ptxsim.memory import GlobalMemory
from ptxsim.module import _extent


@dataclass(frozen=True, slots=True)
class Outcome:
    """One schedule: its error, or how many bytes of each buffer differ from the first one's."""

    seed: int
    error: SimulationError | None
    differing: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        """No error, and the bytes of the first schedule."""
        return self.error is None and not any(self.differing)


def explore(
    run: Callable[[int], Any], buffers: Sequence[Any], seeds: Sequence[int] = (0, 1, 2, 3, 4)
) -> list[Outcome]:
    """Call `run(seed)` for each seed, each time from the present contents of `buffers`.

    `buffers` are arrays, CPU tensors or (address, bytes): all that the launch may write.  They hold
    the last schedule's results afterwards.  A kernel whose outcome depends on the schedule by more
    than the order of floating-point atomics is wrong; those differ in last bits only, so look at
    the values before blaming a count of bytes.
    """
    memory = GlobalMemory([_extent(b) for b in buffers])
    places = [memory.bytes_at(*extent) for extent in memory.regions_as_extents()]
    before = [place.copy() for place in places]
    first: list[np.ndarray] | None = None
    outcomes = []
    for seed in seeds:
        for place, old in zip(places, before, strict=True):
            place[:] = old
        try:
            run(seed)
        except SimulationError as error:
            outcomes.append(Outcome(seed, error, ()))
            continue
        if first is None:
            first = [place.copy() for place in places]
        counts = (int((p != f).sum()) for p, f in zip(places, first, strict=True))
        outcomes.append(Outcome(seed, None, tuple(counts)))
    return outcomes
