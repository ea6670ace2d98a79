"""What a consumer does with a tile's scores and sums in registers.

A thread has two rows of 64, 8 apart, and of each the columns ``8 j + 2 (lane % 4)`` and the next:
element ``c + 2 r + 4 j`` is row r, column c of group j. Four neighbouring lanes share a row.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402
from cutlass.cutlass_dsl import select_  # noqa: E402

from openmsa.kernels.common.ptx import store_matrices  # noqa: E402
from openmsa.kernels.sm90.forward.config import BLOCK, CHANNELS, EIGHT, HALVES  # noqa: E402

__all__ = ["exponentials", "hide", "highest", "lane_rows", "scaled", "stage_out", "total"]

_GROUPS = BLOCK // 8
_INFINITY = float("inf")


def at(row: int, column: int) -> int:
    """Element of the thread's ``row`` and its ``column``, both counted from 0."""
    return column % 2 + 2 * row + 4 * (column // 2)


@cute.jit
def lane_rows() -> tuple[Int32, Int32]:
    """The first of this thread's two rows of the tile, and its first column."""
    thread = cute.arch.thread_idx()[0]
    return (thread >> 1 & 0x30) + (thread >> 2 & 7), (thread & 3) * 2


@cute.jit
def hide(s: Any, row: Any, column: Int32, visible: Int32) -> None:
    """Set the scores of keys from ``visible`` on to -inf."""
    for i in cutlass.range_constexpr(2 * _GROUPS):
        key = column + (8 * (i // 2) + i % 2)
        s[at(row, i)] = select_(key < visible, s[at(row, i)], Float32(-_INFINITY))


@cute.jit
def highest(s: Any, row: Any) -> Float32:
    """The greatest score of a row."""
    found = s[at(row, 0)]
    for i in cutlass.range_constexpr(1, 2 * _GROUPS):
        found = cute.arch.fmax(found, s[at(row, i)])
    for power in cutlass.range_constexpr(2):
        found = cute.arch.fmax(found, cute.arch.shuffle_sync_bfly(found, 1 << power))
    return found


@cute.jit
def exponentials(s: Any, row: Any, scale_log2: Float32, shift: Float32) -> Float32:
    """``s = exp2(s * scale_log2 - shift)`` in place; this thread's part of the row's sum."""
    found = Float32(0.0)
    for i in cutlass.range_constexpr(2 * _GROUPS):
        p = cute.math.exp2(s[at(row, i)] * scale_log2 - shift, fastmath=True)
        s[at(row, i)] = p
        found += p
    return found


@cute.jit
def total(part: Float32) -> Float32:
    """A row's sum from its four lanes' parts."""
    for power in cutlass.range_constexpr(2):
        part += cute.arch.shuffle_sync_bfly(part, 1 << power)
    return part


@cute.jit
def scaled(o: Any, row: Any, factor: Float32) -> None:
    """Multiply a row."""
    for i in cutlass.range_constexpr(2 * _GROUPS):
        o[at(row, i)] = o[at(row, i)] * factor


@cute.jit
def stage_out(o: Any, dtype: Any, address: Int32) -> None:
    """Write this warp's 16 rows into the tile at ``address`` of shared memory, ordered as by
    `config.EIGHT`, and swizzled as the copy engine does 128-byte rows."""
    rounded = cute.make_rmem_tensor(o.shape, dtype)
    rounded.store(o.load().to(dtype))
    words = cute.recast_tensor(rounded, Int32)
    thread = cute.arch.thread_idx()[0]
    row = (thread >> 1 & 0x30) + (thread & 15)
    first = address + (row // EIGHT * (HALVES * EIGHT) + row % EIGHT) * (CHANNELS * 2)
    piece = (thread >> 4 & 1) ^ (thread & 7)
    for group in cutlass.range_constexpr(0, _GROUPS, 2):
        half, inside = group // 8, group % 8
        to = first + half * (EIGHT * CHANNELS * 2) + ((piece ^ inside) << 4)
        store_matrices(to, [words[2 * group + i] for i in range(4)])
