"""What the code of the backward kernel depends on, and the plan of its memory. No DSL here.

Shared memory (bytes; tiles are 128 x 128 elements of 16 bits)::

    K            32,768    one key block, for the length of a run
    V            32,768
    Q         2 x 32,768   one tile of (query, head) rows each
    dO        2 x 32,768
    dS           32,768    rows contiguous: the second operand of dQ^T = K^T dS^T
    scalars   2 x  1,152   per tile: lse, delta, and what the tile is
    barriers        <256

Tensor memory (columns of 32 bits, 128 lanes; 512 in all)::

      0..127   S^T (lanes are keys, columns rows), then P^T in 16 bits in 0..31 and 64..95
    128..255   dP^T, then dS^T in 16 bits in 128..159 and 192..223, then dQ^T (lanes are channels)
    256..383   dV of the run
    384..511   dK of the run

Two warpgroups share a tile: the first owns rows 0..63, the second rows 64..127. Each writes its P
and dS over columns that it alone has read, so that neither waits for the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from openmsa.contract.tasks import TILE_ROWS, queries_per_task
from openmsa.kernels.common.budgets import check_columns, check_registers, check_shared

__all__ = ["Barrier", "Config", "Meta", "Warps", "arrivals"]

HEAD_DIM = 128
BLOCK = 128
STAGES = 2
"""Tiles of Q and dO, and of scalars, in flight."""

COLUMN_S, COLUMN_DP, COLUMN_DV, COLUMN_DK, COLUMNS = 0, 128, 256, 384, 512


class Warps(IntEnum):
    """First warp of each role, and the number of warps. Register files are split by warpgroup."""

    COMPUTE = 0
    REDUCE = 8
    MMA = 12
    LOAD = 13
    SCALARS = 14
    IDLE = 15
    ALL = 16


REGISTERS = {"compute": 144, "reduce": 144, "others": 80}
"""A thread: 256 * 144 + 128 * 144 + 128 * 80 = 65,536, the whole register file."""


class Barrier(IntEnum):
    """Index of each mbarrier; those of Q, dO and scalars have one per stage."""

    K_FULL = 0
    K_LANDED = 1
    K_EMPTY = 2
    V_FULL = 3
    V_EMPTY = 4
    Q_FULL = 5
    Q_EMPTY = 7
    DO_FULL = 9
    DO_EMPTY = 11
    SCALARS_FULL = 13
    SCALARS_EMPTY = 15
    S_FULL = 17
    P_READY = 18
    DP_FULL = 19
    DS_READY = 20
    DV_DONE = 21
    DK_DONE = 22
    DQ_FULL = 23
    DQ_EMPTY = 24
    SUMS_FULL = 25
    SUMS_EMPTY = 26
    COUNT = 27


_COMPUTE, _REDUCE = Warps.REDUCE - Warps.COMPUTE, Warps.MMA - Warps.REDUCE

ARRIVERS = {
    Barrier.K_FULL: 1,  # the loader, with the bytes it asks for, or after it has zeroed rows
    Barrier.K_LANDED: 1,
    Barrier.K_EMPTY: 1,  # the tensor cores, once what was issued is done
    Barrier.V_FULL: 1,
    Barrier.V_EMPTY: 1,
    Barrier.Q_FULL: 1,
    Barrier.Q_EMPTY: 1,
    Barrier.DO_FULL: 1,
    Barrier.DO_EMPTY: 1,
    Barrier.SCALARS_FULL: 1,
    Barrier.SCALARS_EMPTY: _COMPUTE + _REDUCE + 1,  # its readers: both, and the products' warp
    Barrier.S_FULL: 1,
    Barrier.P_READY: _COMPUTE,
    Barrier.DP_FULL: 1,
    Barrier.DS_READY: _COMPUTE,
    Barrier.DV_DONE: 1,
    Barrier.DK_DONE: 1,
    Barrier.DQ_FULL: 1,
    Barrier.DQ_EMPTY: _REDUCE,
    Barrier.SUMS_FULL: 1,
    Barrier.SUMS_EMPTY: _REDUCE,
}
"""Arrivals that the roles make in a phase of each barrier, which waits for as many: one a warp that
reads or writes. A barrier with stages is named by its first."""


def arrivals(index: int) -> int:
    """Arrivals that complete a phase of the barrier at ``index``."""
    return ARRIVERS[max(barrier for barrier in ARRIVERS if barrier <= index)]


class Meta(IntEnum):
    """Integers of a tile's scalars."""

    HEAD = 0
    START = 1
    KEYS = 2
    OPENS = 3
    CLOSES = 4
    MASKED = 5
    COUNT = 8


@dataclass(frozen=True)
class Config:
    """Facts that change the code.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        group: query heads of a KV head: 8, 16, 32 or 64.
        deterministic: parts of dq go to slots, and each run of a key block has one place for its
            dk and dv, instead of atomics.
    """

    dtype: str
    group: int
    deterministic: bool = False

    def check(self) -> None:
        """Raise ValueError where a thread block would take more than an SM has."""
        check_registers(
            {
                "compute": (_COMPUTE, REGISTERS["compute"]),
                "reduce": (_REDUCE, REGISTERS["reduce"]),
                "others": (Warps.ALL - Warps.MMA, REGISTERS["others"]),
            }
        )
        check_shared(self.shared_bytes)
        regions = {"S": COLUMN_S, "dP": COLUMN_DP, "dV": COLUMN_DV, "dK": COLUMN_DK}
        check_columns({name: (first, BLOCK) for name, first in regions.items()}, COLUMNS)

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return queries_per_task(self.group)

    @property
    def scalar_words(self) -> int:
        """32-bit words of a tile's scalars: lse, delta, Meta, then query, limit, slot of each."""
        return 2 * TILE_ROWS + Meta.COUNT + 3 * self.queries

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block."""
        tiles = (2 + 2 * STAGES + 1) * TILE_ROWS * HEAD_DIM * 2
        return tiles + STAGES * self.scalar_words * 4 + Barrier.COUNT * 8 + 16
