"""How the tables of forms are written, expanded, sampled and printed.

In a form, `{a,b}` stands for one of its alternatives (the empty one too) and `{8..64/8}` for a
number of that range in steps.  Cache operators, eviction priorities, `.L1::`/`.L2::` hints, and the
memory order and scope of ld, st, atom and red are left out: they are accepted without function.

`operands` are what tests put behind a form: registers of 16 (h), 32 (r) and 64 bits (q), predicates
(p), T of the width of the form's last type, D of its first type's, W of twice T's; `r*4` is a list.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ptxsim.ptx import TYPE_BYTES

_HINTS = re.compile(
    r"\.(?:L[12]::\w+(?:::\w+)?|ca|cg|cs|lu|cv|wb|wt|nc|unified|weak|relaxed|acquire|release|acq_rel"
    r"|volatile|mmio|cta|cluster|gpu|sys)(?=\.|$)"
)
_ORDERED = ("ld", "ldu", "st", "atom", "red", "prefetch")
_LETTERS = {8: "h", 16: "h", 32: "r", 64: "q", 128: "x"}
_SIZES = {**TYPE_BYTES, "e4m3x2": 2, "e5m2x2": 2}


@dataclass(frozen=True, slots=True)
class Entry:
    """Forms of one section of the ISA; `arch` is what the assembler needs, "" for sm_100a."""

    section: str
    forms: str
    operands: str
    note: str = ""
    arch: str = ""


def expand(forms: str) -> Iterator[str]:
    """Every concrete form."""
    parts = re.split(r"\{([^{}]*)\}", forms)
    fixed, choices = parts[0::2], [_alternatives(p) for p in parts[1::2]]
    for chosen in itertools.product(*choices):
        yield fixed[0] + "".join(c + f for c, f in zip(chosen, fixed[1:], strict=True))


def _alternatives(text: str) -> list[str]:
    found = re.fullmatch(r"(\d+)\.\.(\d+)/(\d+)", text)
    if found:
        first, last, step = map(int, found.groups())
        return [str(n) for n in range(first, last + 1, step)]
    return text.split(",")


def normal(form: str) -> str:
    """A form for comparisons: without what has no function, its modifiers in one fixed order.

    The decoder takes modifiers in any order, but for the order of types.
    """
    op = form.split(".")[0]
    if op in _ORDERED:
        form = _HINTS.sub("", form)
    form = re.sub(r"\.L2::\w+", "", form)
    parts = form.split(".")[1:]
    types = [p for p in parts if p in _SIZES or p == "pred"]
    return ".".join([op, *sorted(p for p in parts if p not in types), *types])


def sample(form: str, operands: str) -> str:
    """An instruction of this form, on registers %h0.., %r0.., %q0.., %x0.. and %p0.."""
    types = [m for m in form.split(".") if m in _SIZES]
    widths = {
        "T": 8 * _SIZES[types[-1]] if types else 0,
        "D": 8 * _SIZES[types[0]] if types else 0,
        "W": 16 * _SIZES[types[-1]] if types else 0,
    }
    counts = dict.fromkeys("hrqxp", 0)

    def register(match: re.Match[str]) -> str:
        letter = match[1]
        if letter in widths:
            letter = _LETTERS[widths[letter]]
        names = []
        for _ in range(_count(match[2], form)):
            names.append(f"%{letter}{counts[letter]}")
            counts[letter] += 1
        return ", ".join(names)

    text = re.sub(r"\b([TDWhrqxp])\b(?:\*(\w+))?", register, operands)
    return f"{form} {text};"


def _count(text: str | None, form: str) -> int:
    """How many registers a list has: a number, or what the form says."""
    if text is None:
        return 1
    if text.isdigit():
        return int(text)
    if text == "vector":  # .v2, .v4, .v8
        found = re.search(r"\.v([248])", form)
        return int(found[1]) if found else 1
    if text == "matrices":  # ldmatrix .x1, .x2, .x4
        found = re.search(r"\.x([124])", form)
        return int(found[1]) if found else 1
    if text == "cells":  # tcgen05.ld, tcgen05.st
        shape, times = re.search(r"\.(\w+)\.x(\d+)", form).groups()  # type: ignore[union-attr]
        return int(times) * {"16x128b": 2, "16x256b": 4}.get(shape, 1)
    n = int(re.search(r"m64n(\d+)k", form)[1])  # type: ignore[index]
    return n // 4 if re.search(r"k\d+\.f16", form) else n // 2  # wgmma accumulators


def markdown(chapters: Iterable[tuple[str, tuple[Entry, ...]]]) -> str:
    """The tables of the documentation."""
    lines: list[str] = []
    for title, entries in chapters:
        lines += [f"### {title}", "", "| form | PTX ISA section | note |", "| --- | --- | --- |"]
        lines += [f"| `{e.forms}` | {e.section} | {e.note} |" for e in entries]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
