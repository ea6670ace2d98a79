"""Independent formulations of PTX arithmetic in Python integers, and operands that hurt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import floats
import harness
import numpy as np
from floats import Format, Value

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


FLOATS_TRIED = 96
PATTERNS = {
    1: [(False,), (True,)],
    2: harness.mixtures(2),
    3: [(False,) * 3, (True,) * 3, (True, False, False), (False, False, True)],
}


def check_float(
    body: str,
    inputs: Sequence[Array],
    out: Format,
    reference: Callable[..., Value],
    source: Format | None = None,
    any_zero: bool = False,
) -> None:
    """Bit for bit, apart from NaN payloads (16-bit results have the ISA's canonical NaN 0x7FFF)."""
    source = source or out
    for uniform in PATTERNS[len(inputs)]:
        (got,) = harness.run(body, inputs, [f"u{out.width // 8}"], uniform)
        seen = [harness.spread(i, u).tolist() for i, u in zip(inputs, uniform, strict=True)]
        for row, bits in zip(zip(*seen, strict=True), got.tolist(), strict=True):
            want = reference(*(floats.decode(r, source) for r in row))
            where = f"{body} uniform={uniform} of {[hex(r) for r in row]}: {bits:#x}, want {want}"
            if want != want:
                ok = bits == 0x7FFF if out.width == 16 else floats.is_nan(bits, out)
                assert ok, where
            elif any_zero and want == 0:
                assert floats.decode(bits, out) == 0, where
            else:
                assert bits == floats.encode(want, out), f"{where} = {floats.encode(want, out):#x}"


def samples(form: Format, number: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [floats.random_bits(form, FLOATS_TRIED, rng) for _ in range(number)]
