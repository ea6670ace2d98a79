"""What one warp executed last: a run is repeated with its instructions recorded.

A run is a function of the launch and its seed, so the second time the same warp comes to the same
failure; only this time its last instructions and what they wrote are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxsim.decode import Program, Step
from ptxsim.values import Pair

SHOWN_LANES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One executed instruction: the lanes that were active and the registers it wrote."""

    line: int
    text: str
    lanes: int
    written: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lanes = "" if self.lanes == 0xFFFFFFFF else f"  lanes {self.lanes:#010x}"
        values = "".join(f"\n        {name} = {value}" for name, value in self.written)
        return f"{self.line:6}  {self.text}{lanes}{values}"


class Tracer:
    """Records the last `keep` instructions of one warp; `program` is what to run instead."""

    def __init__(
        self, program: Program, cta: tuple[int, int, int], warp: int, keep: int = 20
    ) -> None:
        self.cta, self.warp = cta, warp
        self.rows: deque[Row] = deque(maxlen=keep)
        self._names = {r.slot: r.name for r in program.kernel.registers}
        self._code, self._defs = program.kernel.code, program.defs
        steps = [self._recorded(pc, step) for pc, step in enumerate(program.steps)]
        self.program = replace(program, steps=steps)

    def _recorded(self, pc: int, step: Step) -> Callable[[Any], Any]:
        if pc >= len(self._code):
            return step

        def run(warp: Any) -> Any:
            if warp.index != self.warp or warp.cta.ctaid != self.cta:
                return step(warp)
            try:
                return step(warp)
            finally:
                self._record(pc, warp)

        return run

    def _record(self, pc: int, warp: Any) -> None:
        ins = self._code[pc]
        written = tuple(
            (self._names[slot], describe(warp.registers[slot], width))
            for slot, width in self._defs[pc]
            if slot in self._names
        )
        mask = warp.mask
        lanes = 0xFFFFFFFF if mask is None else sum(1 << int(lane) for lane in np.flatnonzero(mask))
        row = Row(ins.line, ins.text, lanes, written)
        # A blocked instruction runs again and again; once is enough to see that it waits.
        if not self.rows or self.rows[-1] != row:
            self.rows.append(row)


def describe(value: Any, width: int) -> str:
    """A register's contents for people: hexadecimal, floats where the simulator holds floats."""
    if value.__class__ is bool:
        return str(value).lower()
    if value.__class__ is int:
        return f"{value:#x}"
    if value.__class__ is Pair:
        return f"{{{describe(value.lo, 32)}, {describe(value.hi, 32)}}}"
    if not isinstance(value, np.ndarray):
        return "(not known yet)"  # the result of an unfinished matrix instruction
    if value.dtype.kind == "b":
        return f"lanes {sum(1 << int(lane) for lane in np.flatnonzero(value)):#010x}"
    shown = value[:SHOWN_LANES].tolist()
    texts = [f"{v:.9g}" if isinstance(v, float) else f"{v & ((1 << width) - 1):#x}" for v in shown]
    return f"[{', '.join(texts)}, ...]"
