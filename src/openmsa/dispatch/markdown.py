"""The support table of the README, generated so that it cannot drift from the dispatch table."""

from __future__ import annotations

from openmsa.dispatch.table import ORDER, STAGES, TABLE, Cell

__all__ = ["support_table"]


def support_table() -> str:
    """Backends by stage as a Markdown table; every cell says what it rests on."""
    rows = ["| stage | " + " | ".join(f"`{name}`" for name in ORDER) + " |"]
    rows.append("|---|" + "---|" * len(ORDER))
    for stages in STAGES.values():
        for stage in stages:
            cells = " | ".join(_families(TABLE[name][stage]) for name in ORDER)
            rows.append(f"| {stage} | {cells} |")
    return "\n".join(rows)


def _families(cell: Cell) -> str:
    return ", ".join(dict.fromkeys(_cell(one) for one in cell.families))


def _cell(cell: Cell) -> str:
    if cell.fused:
        return f"in {cell.fused}"
    if cell.launcher is None:
        return "none yet"
    return f"{cell.evidence} ({cell.where})"
