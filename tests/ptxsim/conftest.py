"""Says at the end what a GPU was compared with (PTXSIM_CHIP=1)."""

from __future__ import annotations

import chip
import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if chip.WANTED:
        counts = ", ".join(f"{number} {what}" for what, number in sorted(chip.COUNTS.items()))
        terminalreporter.write_line(f"kernels on {chip.driver().target}: {counts or 'none'}")
