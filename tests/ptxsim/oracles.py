"""Independent formulations of PTX arithmetic in Python integers, and operands that hurt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import harness
import numpy as np

Array = np.ndarray


def bits_of(kind: str) -> int:
    """Width of a type name such as u32, s64, b16."""
    return int(kind.lstrip("usbf"))


def signed(value: int, width: int) -> int:
    """Two's complement reading of `width` bits."""
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def reading(value: int, kind: str) -> int:
    """A register's bits as the integer that an instruction of this type sees."""
    return signed(value, bits_of(kind)) if kind[0] == "s" else value


def integers(width: int, count: int, rng: np.random.Generator) -> Array:
    """Unsigned words of `width` bits: corners of the range, single bits, small and random ones."""
    top = 1 << width
    corners = [0, 1, 2, 3, top - 1, top - 2, top // 2, top // 2 - 1, top // 2 + 1, top // 4]
    picks: list[int] = []
    for _ in range(count):
        how = rng.integers(4)
        if how == 0:
            picks.append(corners[rng.integers(len(corners))])
        elif how == 1:
            picks.append(1 << int(rng.integers(width)))
        elif how == 2:
            picks.append((int(rng.integers(-40, 40))) % top)
        else:
            picks.append(int.from_bytes(rng.bytes(width // 8), "little"))
    return np.array(picks, np.dtype(f"u{width // 8}"))


def check(
    body: str,
    inputs: Sequence[Array],
    output: Any,
    reference: Callable[..., int],
    patterns: Sequence[tuple[bool, ...]] | None = None,
) -> None:
    """Each thread's result has exactly the bits that `reference` gives for its operands' bits.

    Every operand is tried per lane and warp-uniform, since the simulator holds the two differently.
    """
    dtype = np.dtype(output)
    for uniform in patterns or harness.mixtures(len(inputs)):
        (got,) = harness.run(body, inputs, [dtype], uniform)
        seen = [harness.spread(i, u) for i, u in zip(inputs, uniform, strict=True)]
        rows = list(zip(*(s.tolist() for s in seen), strict=True))
        mask = 1 if dtype.kind == "b" else (1 << (8 * dtype.itemsize)) - 1
        want = [int(reference(*row)) & mask for row in rows]
        wrong = [n for n, (g, w) in enumerate(zip(got.tolist(), want, strict=True)) if g != w]
        assert not wrong, (
            f"{body} with uniform={uniform}: operands {[hex(v) for v in rows[wrong[0]]]} gave "
            f"{got.tolist()[wrong[0]]:#x}, expected {want[wrong[0]]:#x} ({len(wrong)} wrong)"
        )
