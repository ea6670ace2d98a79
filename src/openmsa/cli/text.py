"""Words for terminals: numbers with units, tables, and a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

__all__ = ["Progress", "flops", "flops_per_second", "seconds", "size", "table", "write"]


def write(text: str = "") -> None:
    """One line to stdout, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def seconds(value: float) -> str:
    """``0.0123 -> "12.3 ms"``."""
    return _scaled(value, 1000, ("s", "ms", "us"), down=True)


def size(value: float | None) -> str:
    """Bytes, ``2**30 -> "1.00 GiB"``; a dash for None."""
    return "-" if value is None else _scaled(value / 2**20, 1024, ("MiB", "GiB", "TiB"))


def flops(value: float) -> str:
    """``4.7e11 -> "470 GFLOP"``."""
    return _scaled(value / 1e9, 1000, ("GFLOP", "TFLOP", "PFLOP"))


def flops_per_second(value: float) -> str:
    """``1.2e11 -> "120 GFLOP/s"``."""
    return flops(value) + "/s"


def _scaled(value: float, step: int, units: Sequence[str], down: bool = False) -> str:
    """Three significant digits in the unit that keeps the number readable."""
    unit = 0
    while unit + 1 < len(units) and (0 < value < 0.9995 if down else value >= step - 0.5):
        value = value * step if down else value / step
        unit += 1
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[unit]}"


class Progress:
    """A bar on stderr; plain lines where that is no terminal.

    Args:
        total: the work in any unit, so that the bar moves evenly.
        stream: where to draw, stderr by default.
    """

    def __init__(self, total: float, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.total, self.done, self.label = max(total, 1e-9), 0.0, ""
        self.begin = time.perf_counter()
        self.live = self.stream.isatty()

    def start(self, label: str) -> None:
        """Name what runs now."""
        self.label = label
        if self.live:
            self._draw()
        else:
            self.stream.write(f"[{time.perf_counter() - self.begin:5.1f} s] {label}\n")
            self.stream.flush()

    def add(self, amount: float) -> None:
        """Count finished work."""
        self.done = min(self.done + amount, self.total)
        if self.live:
            self._draw()

    def close(self) -> None:
        """Clear the bar."""
        if self.live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def _draw(self) -> None:
        share = self.done / self.total
        bar = "#" * round(28 * share)
        spent = time.perf_counter() - self.begin
        self.stream.write(f"\r\x1b[K[{bar:<28}] {share:4.0%} {spent:5.1f} s  {self.label}")
        self.stream.flush()
