"""The barrier objects: mbarriers (PTX ISA: mbarrier), named barriers, cluster barrier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxsim import proxy
from ptxsim.errors import BarrierError

MAX_COUNT = (1 << 20) - 1


@dataclass(slots=True)
class Mbarrier:
    """One mbarrier object; `phase` counts completed phases since its init."""

    offset: int
    expected: int
    pending: int
    transactions: int = 0
    phase: int = 0
    announced: int = 0
    history: list[str] = field(default_factory=list)
    home: Any = None  # the SharedMemory it lies in
    arriving: proxy.Writes = field(default_factory=dict)
    arrived_writes: proxy.Writes = field(default_factory=dict)
    arriving_vector: np.ndarray | None = None
    vector: np.ndarray | None = None

    def arrive(self, count: int) -> None:
        """Take `count` arrivals off the current phase."""
        if count > self.pending:
            raise BarrierError(
                f"mbarrier {self.offset:#x}: {count} arrivals, but phase {self.phase} expects only "
                f"{self.pending} more of {self.expected}"
            )
        self.pending -= count
        self._complete()

    def expect(self, size: int) -> None:
        """Announce `size` bytes for the current phase."""
        self.transactions += size
        self.announced += size
        self._check_range()

    def complete(self, size: int) -> None:
        """Count `size` arrived bytes."""
        self.transactions -= size
        self._check_range()
        self._complete()

    def _check_range(self) -> None:
        if abs(self.transactions) > MAX_COUNT:
            raise BarrierError(
                f"mbarrier {self.offset:#x}: {self.transactions} outstanding bytes exceed "
                f"{MAX_COUNT}"
            )

    def _complete(self) -> None:
        if self.pending == 0 and self.transactions < 0:
            raise BarrierError(
                f"mbarrier {self.offset:#x}: phase {self.phase} got {-self.transactions} bytes "
                f"more than the {self.announced} announced"
            )
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            proxy.complete(self)
            self.pending = self.expected
            self.announced = 0

    def done(self, parity: int) -> bool:
        """True if the phase of that parity has completed (the other one is current)."""
        return parity != self.phase & 1

    def describe(self) -> str:
        """What it waits for."""
        return (
            f"mbarrier {self.offset:#x} in phase {self.phase}: {self.pending} of {self.expected} "
            f"arrivals and {self.transactions} of {self.announced} bytes are missing"
        )


@dataclass(slots=True)
class NamedBarrier:
    """One of the 16 barriers of a CTA; `count` and `arrived` are threads."""

    number: int
    count: int = 0
    arrived: int = 0
    generation: int = 0
    warps: list[int] = field(default_factory=list)
    arriving: proxy.Writes = field(default_factory=dict)
    arrived_writes: proxy.Writes = field(default_factory=dict)
    arriving_vector: np.ndarray | None = None
    vector: np.ndarray | None = None

    def arrive(self, warp: int, count: int, threads: int = 32) -> bool:
        """One warp arrives; True if that completed the generation."""
        if self.arrived and count != self.count:
            raise BarrierError(
                f"barrier {self.number}: warp {warp} says {count} threads, the warps "
                f"{self.warps} said {self.count}"
            )
        # A warp may count twice: shipping kernels let one warp `bar.arrive` for a missing partner
        # and then `bar.sync` for itself.
        self.count = count
        self.arrived += threads
        self.warps.append(warp)
        if self.arrived > count:
            raise BarrierError(
                f"barrier {self.number}: {self.arrived} threads arrived at a barrier of {count}, "
                f"warps {self.warps}"
            )
        if self.arrived == count:
            self.arrived, self.count, self.warps = 0, 0, []
            self.generation += 1
            return True
        return False

    def describe(self) -> str:
        """What it waits for."""
        return f"barrier {self.number}: {self.arrived} of {self.count} threads, warps {self.warps}"


@dataclass(slots=True)
class ClusterBarrier:
    """The barrier of a cluster; every thread of every CTA arrives once per generation."""

    threads: int
    arrived: int = 0
    generation: int = 0
    arriving: proxy.Writes = field(default_factory=dict)
    arrived_writes: proxy.Writes = field(default_factory=dict)
    arriving_vector: np.ndarray | None = None
    vector: np.ndarray | None = None

    def arrive(self, threads: int) -> None:
        """`threads` threads arrive."""
        self.arrived += threads
        if self.arrived >= self.threads:
            proxy.complete(self)
            self.arrived = 0
            self.generation += 1

    def describe(self) -> str:
        """What it waits for."""
        return f"cluster barrier: {self.arrived} of {self.threads} threads"
