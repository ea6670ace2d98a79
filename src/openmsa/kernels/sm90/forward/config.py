"""What the forward's two attention kernels agree on, and the plan of their memory. No DSL here.

Both have consumer warpgroups that own 64 (query, head) rows each, and one warp that asks the copy
engine for everything. Shared memory (bytes; elements have 16 bits)::

    key-major                                   union
    K and V    2 x 65,536   one key block       K and V    2 x 65,536   one key block
    rows       6 x 16,384   Q of a tile, then   rows       4 x 16,384   Q of 64 rows, then
                            its partial output                          their output
    meta       6 x 4 words and 2 a query        meta       2 x 6 words

A tile's output goes where its Q was.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from openmsa.kernels.common.budgets import check_registers, check_shared

__all__ = ["Config", "KeyMajor", "Meta", "Union", "UnionMeta", "arrivals"]

HEAD_DIM = 128
BLOCK = 128
ROWS = 64
"""Rows (query, head) of a consumer's tile."""

CHANNELS = 64
"""Channels of a copy's box: 128 bytes, the span of a swizzle."""

HALVES = HEAD_DIM // CHANNELS
TILE_BYTES = ROWS * HEAD_DIM * 2
BLOCK_BYTES = BLOCK * HEAD_DIM * 2
BUFFERS = 2
"""Key blocks in flight: K and V of each."""

EIGHT = 8
"""Rows of the atom of a 128-byte swizzle, 1,024 bytes. A tile of rows is ``[eight, half, row of
eight, channel]``, so that one copy brings all channels of a query's heads, and a query's rows are
one piece of memory."""

LANES = 32  # of a warp
WARPS = 4  # of a warpgroup
STOP = -1
"""Flags of a tile that is none: there is no more work."""

CHUNK = 128
"""Queries of a key-major task. K and V are read once a task. On an H200 (2026-12) 256 took 0.2 of
7.6 ms longer at 32,768 queries, as thread blocks end further apart."""

CONSUMERS = 3
"""Of the key-major kernel. With two its loads and its softmax are hidden less; see the profile in
docs/hardware/sm90.md."""

STAGES = 6
"""Key-major tiles in flight, those that consumers hold included."""

REGISTERS = {2: (232, 40), 3: (160, 32)}
"""Of a consumer's thread, and of a loader's, by consumers."""

UNION_CONSUMERS = 2
UNION_ROWS = UNION_CONSUMERS * ROWS
UNION_TILES = 2
"""Tiles of Q in flight."""

MOST_EDGES = 256
"""(query, block) pairs of a union tile at most; beyond, every window goes the key-major way."""


class KeyMajor(IntEnum):
    """Index of each mbarrier of the key-major kernel."""

    ROWS_FULL = 0
    ROWS_EMPTY = ROWS_FULL + STAGES
    K_FULL = ROWS_EMPTY + STAGES
    V_FULL = K_FULL + BUFFERS
    BLOCK_EMPTY = V_FULL + BUFFERS
    V_LANDED = BLOCK_EMPTY + BUFFERS
    ROWS_READ = V_LANDED + 1
    COUNT = ROWS_READ + CONSUMERS


class Union(IntEnum):
    """Index of each mbarrier of the union kernel."""

    ROWS_FULL = 0
    ROWS_EMPTY = ROWS_FULL + UNION_TILES
    K_FULL = ROWS_EMPTY + UNION_TILES
    V_FULL = K_FULL + BUFFERS
    K_EMPTY = V_FULL + BUFFERS
    V_EMPTY = K_EMPTY + BUFFERS
    V_LANDED = V_EMPTY + BUFFERS
    COUNT = V_LANDED + 1


_ARRIVERS: dict[type[IntEnum], dict[int, int]] = {
    KeyMajor: {
        # Each lane arrives where lanes write and read words themselves, and for K, with which the
        # union's words come; otherwise one of a warp.
        KeyMajor.ROWS_FULL: LANES,  # the loader, with the bytes it asks for
        KeyMajor.ROWS_EMPTY: WARPS * LANES,  # the warps of the tile's consumer
        KeyMajor.K_FULL: LANES,
        KeyMajor.V_FULL: 1,  # the loader, with the bytes, or after it has changed rows
        KeyMajor.BLOCK_EMPTY: WARPS * CONSUMERS,  # the loader, for those without a tile
        KeyMajor.V_LANDED: 1,
        KeyMajor.ROWS_READ: WARPS,  # each consumer's, once its scores are there
    },
    Union: {
        Union.ROWS_FULL: 1,
        Union.ROWS_EMPTY: WARPS * UNION_CONSUMERS,
        Union.K_FULL: LANES,  # the words of a turn come with K, and go with it
        Union.V_FULL: 1,
        Union.K_EMPTY: WARPS * UNION_CONSUMERS * LANES,
        Union.V_EMPTY: WARPS * UNION_CONSUMERS,
        Union.V_LANDED: 1,
    },
}


def arrivals(barriers: type[IntEnum], index: int) -> int:
    """Arrivals that complete a phase of the barrier at ``index``."""
    named = _ARRIVERS[barriers]
    return named[max(first for first in named if first <= index)]


class Meta(IntEnum):
    """Words of a key-major tile; two a query follow: the keys that it sees, and its slot or -1.

    Flags: buffer, the parity of its turn, and the bits below; `STOP` where there is no tile.
    """

    FLAGS = 0
    HEAD = 1
    START = 2
    KEYS = 3
    COUNT = 4


PARITY, MASKED, CLOSES, UNFIT = 2, 4, 8, 16
"""Bits of a tile's flags: parity of the buffer's turn; some row does not see the whole block; the
consumer's last tile of the block; values of V that are not finite were set to zero."""


class UnionMeta(IntEnum):
    """Words of a block in a union kernel's buffer.

    ``MEMBERS``: bit i for the tile's query i. A turn with ``LEFT`` 0 has no block: the tile reads
    nothing (and ``TILE`` is `STOP` where there is no tile).
    """

    TILE = 0
    LEFT = 1
    MASKED = 2
    MEMBERS = 3
    KEYS = 4
    POSITION = 5
    COUNT = 6


@dataclass(frozen=True)
class Config:
    """Facts that change the code.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        group: query heads of a KV head: 8, 16, 32 or 64.
    """

    dtype: str
    group: int

    def check(self) -> None:
        """Raise ValueError where a thread block would take more than an SM has."""
        for consumers in (CONSUMERS, UNION_CONSUMERS):
            most, least = REGISTERS[consumers]
            check_registers({"attend": (consumers * WARPS, most), "load": (WARPS, least)})
        check_shared(self.shared_bytes)
        check_shared(self.union_bytes)

    @property
    def shift(self) -> int:
        """Of a row's number, to have that of its query."""
        return self.group.bit_length() - 1

    @property
    def queries(self) -> int:
        """Queries of a consumer's tile."""
        return ROWS // self.group

    @property
    def union_queries(self) -> int:
        """Queries of a union tile."""
        return UNION_ROWS // self.group

    @property
    def union_cost(self) -> int:
        """What a block of a union costs, in (query, block) edges of the key-major way, whose rows
        cost twice as much each: partial outputs are written and read again."""
        return UNION_ROWS // 2 // self.group

    @property
    def words(self) -> int:
        """Words of a key-major tile."""
        return Meta.COUNT + 2 * self.queries

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a key-major thread block."""
        tiles = BUFFERS * 2 * BLOCK_BYTES + STAGES * TILE_BYTES
        return tiles + STAGES * self.words * 4 + KeyMajor.COUNT * 8 + 16

    @property
    def union_bytes(self) -> int:
        """Shared memory of a union thread block."""
        tiles = BUFFERS * 2 * BLOCK_BYTES + UNION_TILES * UNION_CONSUMERS * TILE_BYTES
        return tiles + BUFFERS * UnionMeta.COUNT * 4 + Union.COUNT * 8 + 16
