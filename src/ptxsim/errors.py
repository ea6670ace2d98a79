"""Every way a simulation can stop, each naming the PTX line, the warp and the address."""

from __future__ import annotations


class SimulationError(Exception):
    """Base of all errors; the fields are None where they do not apply."""

    def __init__(self, message: str, *, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.text: str | None = None
        self.warp: int | None = None
        self.cta: tuple[int, int, int] | None = None
        self.address: int | None = None
        self.source: str | None = None
        self.trace: list[tuple[int, str]] = []

    def __str__(self) -> str:
        where = []
        if self.line is not None:
            where.append(f"line {self.line}")
        if self.cta is not None:
            where.append(f"CTA {self.cta}")
        if self.warp is not None:
            where.append(f"warp {self.warp}")
        if self.address is not None:
            where.append(f"address {self.address:#x}")
        text = f"{self.message} [{', '.join(where)}]" if where else self.message
        if self.text:
            text += f"\n    {self.text}"
        return text


class ParseError(SimulationError):
    """The text is not PTX as this parser knows it."""


class UnsupportedInstruction(SimulationError):
    """An instruction, modifier or operand form without semantics here."""


class LaunchError(SimulationError):
    """The launch itself is wrong: arguments, shapes, shared memory."""


class UninitialisedRead(SimulationError):
    """Memory that nothing wrote is read."""


class OutOfBounds(SimulationError):
    """An address outside every known buffer or window."""


class Misaligned(SimulationError):
    """An address that is not a multiple of the access size."""


class AsyncHazard(SimulationError):
    """Memory of an unfinished asynchronous operation is touched, or a group is not waited for."""


class MissingFence(SimulationError):
    """The async proxy reads generic writes that no `fence.proxy.async` published."""


class DataRace(SimulationError):
    """Two warps access the same bytes, one of them writing, and nothing orders the two."""


class BarrierError(SimulationError):
    """A barrier is used against its rules: counts, phases, initialisation."""


class Deadlock(SimulationError):
    """No warp can go on; the message lists who waits on what."""


class TensorMemoryError(SimulationError):
    """Tensor memory outside an allocation or lane window, leaked or freed twice."""


class DivergenceError(SimulationError):
    """A warp-wide instruction is reached by part of its lanes."""


class InvalidOperand(SimulationError):
    """A descriptor, map or operand value that no chip accepts."""
