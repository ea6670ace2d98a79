"""Sizes, memory and roles of the backward's thread block. No DSL here: testable on any machine.

A tile is 64 rows, that is ``64 / group`` gathered queries with their ``group`` heads, against a
block of 128 keys. Two consumer warpgroups have 64 keys each, whose dk and dv (64 x 128 fp32 each)
stay in registers for a task; P and dS pass through registers too, and dS through shared memory,
because dQ sums over all 128 keys. Half of the channels of dQ fall to each warpgroup.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from openmsa.kernels.common.budgets import check_registers, check_shared

__all__ = [
    "BLOCK",
    "BUFFERS",
    "BY_LANE",
    "CHUNK",
    "CONSUMERS",
    "HEAD_DIM",
    "LANES",
    "REGISTERS",
    "STAGES",
    "TILE_ROWS",
    "WINDOWS",
    "Barrier",
    "Config",
    "Meta",
    "arrivals",
    "window_of",
]

BLOCK = 128
HEAD_DIM = 128
TILE_ROWS = 64
STAGES = 3
BUFFERS = 2
"""Tiles of dS: a warpgroup may be a tile ahead of the other."""

CONSUMERS = 2  # warpgroups
CHUNK = 256
"""Queries of a task: a thread block's dk and dv are added up once a task."""

LANES = 32
_WARPS = 4  # of a warpgroup
REGISTERS = {"consumers": 240, "producer": 24}


WINDOWS = (1024, 2048, 4096)
"""Queries of a window of the work order, so that a window's dq stays in the L2 cache: with 64 heads
1,024 queries have 32 MiB of it."""


def window_of(queries_per_block: float) -> int:
    """One of `WINDOWS`, for key blocks that are read by ``queries_per_block`` of 1,024 queries.

    The short one leaves fewer blocks whose queries of a window take more than one task, for whose
    sums the deterministic kernel waits in turn. But every task brings a block and adds up dk and
    dv, however few its queries are: where 12,288 queries read 1,449 blocks, 16 each, windows of
    1,024 leave tasks of 11.
    """
    if queries_per_block > 64:
        return WINDOWS[0]
    return WINDOWS[1] if queries_per_block > 16 else WINDOWS[2]


class Barrier(IntEnum):
    """The mbarriers; those of a ring have one for each of its stages."""

    Q_FULL = 0
    Q_EMPTY = Q_FULL + STAGES
    DO_FULL = Q_EMPTY + STAGES
    DO_EMPTY = DO_FULL + STAGES
    DS_FULL = DO_EMPTY + STAGES
    DS_EMPTY = DS_FULL + BUFFERS
    K_LANDED = DS_EMPTY + BUFFERS
    K_FULL = K_LANDED + 1
    V_FULL = K_FULL + 1
    KV_EMPTY = V_FULL + 1
    COUNT = KV_EMPTY + 1


ARRIVERS = {
    Barrier.Q_FULL: 1,  # the loader, with the bytes it asks for
    Barrier.Q_EMPTY: CONSUMERS * _WARPS,  # each consumer warp, once
    Barrier.DO_FULL: 1,
    Barrier.DO_EMPTY: CONSUMERS * _WARPS,
    Barrier.DS_FULL: CONSUMERS * _WARPS,
    Barrier.DS_EMPTY: CONSUMERS * _WARPS,
    Barrier.K_LANDED: 1,
    Barrier.K_FULL: 1,
    Barrier.V_FULL: 1,
    Barrier.KV_EMPTY: CONSUMERS * _WARPS,
}
"""Warps that complete a phase of each barrier. A ring is named by its first."""

BY_LANE = (Barrier.Q_FULL, Barrier.Q_EMPTY)
"""Where each lane of a warp arrives, not one: these guard what lanes write and read themselves."""


def arrivals(index: int) -> int:
    """Arrivals that complete a phase of the barrier at ``index``."""
    ring = max(barrier for barrier in ARRIVERS if barrier <= index)
    return ARRIVERS[ring] * (LANES if ring in BY_LANE else 1)


class Meta(IntEnum):
    """Integers of a tile: what the loader tells the consumers."""

    TILES = 0  # of the task; 0 for no more tasks
    MASKED = 1
    HEAD = 2
    ROW = 3
    START = 4
    KEYS = 5
    BEFORE = 6  # edges of the key block in earlier tasks
    EDGES = 7  # of the task
    COUNT = 8


@dataclass(frozen=True)
class Config:
    """Facts that change the code.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        group: query heads of a KV head: 8, 16, 32 or 64.
        deterministic: dq is summed as integers, and dk and dv are added in the order of tasks.
    """

    dtype: str
    group: int
    deterministic: bool = False

    def check(self) -> None:
        """Raise ValueError where a thread block would take more than an SM has."""
        check_registers(
            {
                "consumers": (CONSUMERS * _WARPS, REGISTERS["consumers"]),
                "producer": (_WARPS, REGISTERS["producer"]),
            }
        )
        check_shared(self.shared_bytes)

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return TILE_ROWS // self.group

    @property
    def heads(self) -> int:
        """Heads of one box of dq: a warp has 16 rows."""
        return min(self.group, 16)

    @property
    def words(self) -> int:
        """Integers of a tile: Meta, then the query and the number of visible keys of each slot."""
        return Meta.COUNT + 2 * self.queries

    @property
    def floats(self) -> int:
        """Terms of a row: of lse, of delta, and the factor that makes its dq an integer."""
        return 3 if self.deterministic else 2

    @property
    def threads(self) -> int:
        return (CONSUMERS + 1) * _WARPS * LANES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block."""
        blocks = 2 * BLOCK * HEAD_DIM * 2
        rows = 2 * STAGES * TILE_ROWS * HEAD_DIM * 2
        ds = BUFFERS * TILE_ROWS * BLOCK * 2
        dq = TILE_ROWS * HEAD_DIM * 4
        floats = STAGES * self.floats * TILE_ROWS * 4
        # Rounded up for the alignment of what follows the integers.
        ints = -(-STAGES * self.words * 4 // 16) * 16
        return blocks + rows + ds + dq + floats + ints + Barrier.COUNT * 8
