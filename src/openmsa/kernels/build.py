"""What is compiled, and what a kernel's unit of work costs at best. Imports no DSL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Build", "Roofline"]


@dataclass(frozen=True)
class Build:
    """One compilation.

    Attributes:
        name: of the kernel, for reports and files.
        arch: ``"sm_100a"``, say.
        facts: what its code depends on, in a fixed order: plain values, types of PyTorch, or
            dataclasses of these. ``shared_bytes``, where there is one, is the dynamic shared memory
            that a thread block is launched with, which compiled code does not tell.
        make: called without arguments when the compilation is due; gives the function to compile
            and its arguments but the stream: fake tensors, and numbers of the right type.
    """

    name: str
    arch: str
    facts: tuple[tuple[str, Any], ...]
    make: Callable[[], tuple[Any, tuple[Any, ...]]]

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells builds apart."""
        return (self.name, self.arch, self.facts)


@dataclass(frozen=True)
class Roofline:
    """Cycles and bytes of one unit of a kernel's work on one SM, each pipe at its peak.

    Attributes:
        unit: what is counted.
        needed: tensor-pipe cycles of the products that the mathematics asks for.
        cycles: pipe -> item -> cycles. Pipes work side by side, the items of one pipe in turn.
        bytes: what goes to and from L2 -> bytes.
    """

    unit: str
    needed: int
    cycles: Mapping[str, Mapping[str, int]]
    bytes: Mapping[str, int]

    def total(self, pipe: str) -> int:
        """Cycles of one pipe."""
        return sum(self.cycles[pipe].values())

    @property
    def bound(self) -> str:
        """The pipe that takes longest; the first one of equals."""
        return max(self.cycles, key=self.total)
