"""Tensor memory of one CTA: 128 lanes x 512 columns of 32 bits.  PTX ISA: Tensor Memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim.errors import AsyncHazard, TensorMemoryError, UninitialisedRead

LANES, COLUMNS = 128, 512
SLAB = 16  # the finest lane window that instructions use
WRITER = 1 << 16


class TensorMemory:
    """Cells with shadow: which columns are allocated, which cells written, which in flight."""

    def __init__(self) -> None:
        self.cells = np.zeros((LANES, COLUMNS), np.uint32)
        self.written = np.zeros((LANES, COLUMNS), bool)
        self.busy = np.zeros((LANES // SLAB, COLUMNS), np.uint32)
        self.allocations: dict[int, int] = {}
        self.permit = True
        self.group = 0
        # Of a pair: how many allocations and releases the CTA has come to, see `meet_peer`.
        self.meetings = 0
        self.shadow: Any = None  # a races.Shadow
        self.releasing: tuple[int, int] | None = None

    def find(self, columns: int) -> int | None:
        """First column of a free range, None if there is none now."""
        taken = np.zeros(COLUMNS, bool)
        for start, size in self.allocations.items():
            taken[start : start + size] = True
        for start in range(0, COLUMNS - columns + 1, columns):
            if not taken[start : start + columns].any():
                return start
        return None

    def allocate(self, start: int, columns: int) -> None:
        """Take columns start..start+columns-1; their contents are undefined."""
        self.allocations[start] = columns
        self.written[:, start : start + columns] = False
        if self.shadow is not None:
            self.shadow.forget((slice(None), slice(start, start + columns)))

    def release(self, address: int, columns: int) -> None:
        """Give back exactly one earlier allocation."""
        self.releasing = None
        start = address & 0xFFFF
        if self.allocations.get(start) != columns or address >> 16:
            raise TensorMemoryError(
                f"tcgen05.dealloc of {columns} columns at {address:#x}, but the allocations are "
                f"{self._list()}"
            )
        if self.busy[:, start : start + columns].any():
            raise AsyncHazard(
                f"tcgen05.dealloc of columns {start}..{start + columns - 1} while tcgen05 "
                "operations on them are unfinished"
            )
        del self.allocations[start]

    def _list(self) -> str:
        return ", ".join(f"{s}+{n}" for s, n in self.allocations.items()) or "none"

    def check_window(self, lane: int, rows: int, column: int, columns: int, what: str) -> None:
        """Inside tensor memory and inside one allocation."""
        inside = any(s <= column and column + columns <= s + n for s, n in self.allocations.items())
        if lane + rows > LANES or not inside:
            raise TensorMemoryError(
                f"{what} touches lanes {lane}..{lane + rows - 1}, columns {column}.."
                f"{column + columns - 1}; allocated: {self._list()}"
            )

    def check_idle(
        self, lane: int, rows: int, column: int, columns: int, what: str, writing: bool = False
    ) -> None:
        """No unfinished tcgen05 operation writes there (nor reads there, for a write)."""
        slabs = slice(lane // SLAB, -(-(lane + rows) // SLAB))
        busy = self.busy[slabs, column : column + columns]
        if (busy if writing else busy >> 16).any():
            raise AsyncHazard(
                f"{what} touches lanes {lane}..{lane + rows - 1}, columns {column}.."
                f"{column + columns - 1} before an unfinished tcgen05 operation is done with them"
            )

    def check_written(
        self, lanes: slice | np.ndarray, column: int, columns: int, what: str
    ) -> None:
        """Every cell of the window was written."""
        if not self.written[lanes, column : column + columns].all():
            raise UninitialisedRead(
                f"{what} reads tensor memory never written, in columns {column}.."
                f"{column + columns - 1}"
            )
