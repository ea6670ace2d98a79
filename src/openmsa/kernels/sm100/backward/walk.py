"""`openmsa.kernels.schedule.cta_walk` on the device."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Int32  # noqa: E402

from openmsa.kernels.schedule import FEW_ROWS, ROWS_FEW, ROWS_MANY, SHORTEST_TAIL  # noqa: E402
from openmsa.kernels.sm100.backward.context import Numbers, Tensors  # noqa: E402

__all__ = ["interval", "launch_rows"]


@cute.jit
def launch_rows(tensors: Tensors, numbers: Numbers, deterministic: Any) -> Int32:
    """Task rows of the launch: all of them, or those of one window of every KV head."""
    rows = Int32(0)
    if cutlass.const_expr(deterministic):
        at = numbers.window
        for _ in range(tensors.dk.shape[1]):
            rows += tensors.bounds[at + 1] - tensors.bounds[at]
            at += numbers.num_windows
    else:
        rows = tensors.bounds[0]
    return rows


@cute.jit
def interval(rows: Int32, num_sms: Int32, cta: Int32) -> tuple[Int32, Int32]:
    """First row and end of CTA ``cta``; both at the end for one without work."""
    size = Int32(ROWS_MANY)
    if rows <= FEW_ROWS:
        size = Int32(ROWS_FEW)
    full = rows // (num_sms * size) * num_sms
    rest = rows - full * size
    tail = _larger(Int32(SHORTEST_TAIL), (rest + num_sms - 1) // num_sms)
    first, length = cta * size, size
    if cta >= full:
        first = full * size + (cta - full) * tail
        length = tail
    begin = _smaller(first, rows)
    return begin, _smaller(first + length, rows)


@cute.jit
def _smaller(a: Int32, b: Int32) -> Int32:
    found = a
    if b < a:
        found = b
    return found


@cute.jit
def _larger(a: Int32, b: Int32) -> Int32:
    found = a
    if b > a:
        found = b
    return found
