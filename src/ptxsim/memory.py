"""Memory spaces with their shadow state.  PTX ISA: State Spaces, Memory Consistency.

Generic addresses are split into windows that no CPU pointer can fall into:

    global      as on the host: the addresses of the caller's arrays
    shared      SHARED_BASE | rank << 24 | offset      (rank: the CTA's rank in its cluster)
    local       LOCAL_BASE | offset, private to each lane
    param       PARAM_BASE | offset

The shadow of shared memory has two parts.  `state` holds a byte per byte: 0 nothing wrote it,
CLEAN written, TILED+s written by a tensor copy with swizzle code s, DIRTY+m written by
warp m % 32 through the generic proxy and not yet published to the async proxy by a
`fence.proxy.async` (see proxy.py).  `busy` holds a word per 16 bytes: readers in flight in the low
half, writers in flight in the high half, plus BARRIER where an mbarrier object lives (whose bytes
have state 0: the object is opaque, so reading it is an error like reading what was never written).
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Any

import numpy as np

from ptxsim.errors import (
    AsyncHazard,
    BarrierError,
    InvalidOperand,
    Misaligned,
    MissingFence,
    OutOfBounds,
    UninitialisedRead,
)
from ptxsim.tensor_maps import SWIZZLE_SPANS
from ptxsim.values import U32, U64, UNSIGNED

SHARED_BASE = 1 << 56
LOCAL_BASE = 1 << 57
PARAM_BASE = 1 << 58
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
FIRST_SHARED = 1024  # real chips reserve the first KiB; it also catches null pointers

CLEAN = 1
TILED = 2
DIRTY = 8
WRITER = 1 << 16
WRITERS = 0x7FFF0000
BARRIER = 1 << 31

_WIDE = np.dtype("complex128")  # stands for "16 opaque bytes": the widest element NumPy gathers
_VIEWS = {1: np.dtype("uint8"), 2: UNSIGNED[16], 4: U32, 8: U64, 16: _WIDE}


def views_of(data: np.ndarray) -> dict[int, np.ndarray]:
    """The same bytes as elements of 1, 2, 4, 8 and 16 bytes; the length is a multiple of 16."""
    return {size: data.view(dtype) for size, dtype in _VIEWS.items()}


def zeroed(size: int) -> np.ndarray:
    """`size` zero bytes, rounded up to 16 and 16-aligned."""
    size = -(-max(size, 1) // 16) * 16
    raw = np.zeros(size + 16, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + size]


class Region:
    """One host buffer, seen from the next lower multiple of 16 so that every view is aligned."""

    def __init__(self, base: int, size: int, name: str = "") -> None:
        self.base, self.size, self.name = base, size, name
        self.start = base & ~15
        length = -(-(base + size - self.start) // 16) * 16
        buffer = (ctypes.c_uint8 * length).from_address(self.start)
        self.views = views_of(np.frombuffer(memoryview(buffer), np.uint8))

    @property
    def end(self) -> int:
        return self.base + self.size


class GlobalMemory:
    """All host buffers of a launch, found by address."""

    def __init__(self, buffers: list[tuple[int, int]]) -> None:
        self.regions = [Region(b, s) for b, s in _joined(buffers)]
        self.starts = [r.base for r in self.regions]
        self.last: Region | None = self.regions[0] if self.regions else None

    def regions_as_extents(self) -> list[tuple[int, int]]:
        """(address, bytes) of each buffer, overlapping ones as one."""
        return [(region.base, region.size) for region in self.regions]

    def region(self, low: int, high: int) -> Region:
        """The buffer that holds the bytes low..high-1."""
        last = self.last
        if last is not None and last.base <= low and high <= last.base + last.size:
            return last
        number = bisect_right(self.starts, low) - 1
        if number >= 0:
            region = self.regions[number]
            if high <= region.end:
                self.last = region
                return region
        raise self._outside(low, high)

    def _outside(self, low: int, high: int) -> OutOfBounds:
        error = OutOfBounds(
            f"global bytes {low:#x}..{high - 1:#x} lie in no buffer of this launch"
            + "".join(f"; {r.base:#x}+{r.size}" for r in self.regions[:12])
        )
        error.address = low
        return error

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """A writable view of `size` bytes."""
        region = self.region(address, address + size)
        start = address - region.start
        return region.views[1][start : start + size]


def _joined(buffers: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted by address, overlapping ones merged (two tensors of one storage)."""
    merged: list[tuple[int, int]] = []
    for base, size in sorted(b for b in buffers if b[1]):
        if merged and base < merged[-1][0] + merged[-1][1]:
            first, length = merged[-1]
            merged[-1] = (first, max(length, base + size - first))
        else:
            merged.append((base, size))
    return merged


class SharedMemory:
    """Shared memory of one CTA."""

    def __init__(self, size: int, rank: int) -> None:
        self.rank = rank
        self.base = rank << RANK_SHIFT
        self.limit = FIRST_SHARED + size
        data = zeroed(self.limit)
        self.data = data
        self.views = views_of(data)
        self.state = zeroed(self.limit)
        self.states = views_of(self.state)
        self.busy = np.zeros(len(data) // 16, np.uint32)
        self.barriers: dict[int, Any] = {}
        self.shadow: Any = None  # a races.Shadow

    # Checks of generic accesses.  `offsets` is an int or an array of byte offsets.
    def check(self, offsets: Any, size: int, align: int) -> tuple[int, int]:
        """Bounds and alignment; gives the lowest and the highest offset."""
        if offsets.__class__ is int:
            low = high = offsets
            bad = offsets % align
        else:
            low, high = int(offsets.min()), int(offsets.max())
            bad = align > 1 and (offsets & (align - 1)).any()
        if low < FIRST_SHARED or high + size > self.limit:
            error = OutOfBounds(
                f"{size} shared bytes at offset {low if low < FIRST_SHARED else high}: the CTA has"
                f" {FIRST_SHARED}..{self.limit - 1}"
            )
            error.address = low if low < FIRST_SHARED else high
            raise error
        if bad:
            wrong = offsets
            if offsets.__class__ is not int:
                wrong = int(offsets[(offsets & (align - 1)) != 0][0])
            error2 = Misaligned(f"shared access of {align} bytes at offset {wrong:#x}")
            error2.address = wrong
            raise error2
        return low, high

    def check_read(self, offsets: Any, size: int, states: np.ndarray, index: Any) -> None:
        """Every byte was written, and no unfinished operation is going to write it."""
        busy = self.busy[offsets >> 4] & WRITERS
        if busy.__class__ is np.ndarray:
            if busy.any():
                raise self._in_flight(int(offsets[busy != 0][0]), "read")
        elif busy:
            raise self._in_flight(offsets, "read")
        if b"\0" in states[index].tobytes():
            raise self._unwritten(offsets, size)

    def check_write(self, offsets: Any, size: int) -> None:
        """No unfinished operation reads or writes there, and no mbarrier lives there."""
        busy = self.busy[offsets >> 4]
        if busy.__class__ is np.ndarray:
            if busy.any():
                self._check_write_slowly(offsets[busy != 0], busy[busy != 0], size)
        elif busy:
            self._check_write_slowly(np.array([offsets]), np.array([busy]), size)

    def _check_write_slowly(self, offsets: np.ndarray, busy: np.ndarray, size: int) -> None:
        for offset, word in zip(offsets.tolist(), busy.tolist(), strict=True):
            if word & ~BARRIER:
                raise self._in_flight(offset, "written")
            for start in range(offset & ~7, offset + size, 8):
                if start in self.barriers:
                    error = BarrierError(f"shared offset {offset:#x} is written: an mbarrier")
                    error.address = offset
                    raise error

    def _in_flight(self, offset: int, verb: str) -> AsyncHazard:
        does = "writes" if int(self.busy[offset >> 4]) & WRITERS else "reads"
        error = AsyncHazard(
            f"shared offset {offset:#x} is {verb} while an unfinished copy or matrix instruction "
            f"{does} it"
        )
        error.address = offset
        return error

    def _unwritten(self, offsets: Any, size: int) -> UninitialisedRead | BarrierError:
        first = offsets
        if offsets.__class__ is not int:
            holes = [o for o in offsets.tolist() if not self.state[o : o + size].all()]
            first = holes[0] if holes else int(offsets[0])
        error: UninitialisedRead | BarrierError
        if first & ~7 in self.barriers:
            error = BarrierError(f"shared offset {first:#x} is read: an mbarrier lives there")
        else:
            error = UninitialisedRead(
                f"{size} shared bytes at offset {first:#x} were never written"
            )
        error.address = first
        return error

    # Checks of the async proxy, on 16-byte rows (`index`: a slice or an array of row numbers).
    def check_async_read(self, index: Any, what: str, span: int | None = None) -> None:
        """Operands of copies and matrix instructions: written, published, not in flight.

        `span` is the swizzle in bytes by which a matrix descriptor reads: rows that a tensor copy
        wrote must have been laid out with the same one.
        """
        states = np.ascontiguousarray(self.states[16][index]).view(np.uint8)
        if states.size == 0:
            return
        busy = self.busy[index] & WRITERS
        if busy.any():
            raise self._first(
                AsyncHazard,
                f"{what} reads shared bytes that an unfinished operation writes",
                index,
                np.repeat(busy != 0, 16),
            )
        if not states.min():
            raise self._first(
                UninitialisedRead, f"{what} reads shared bytes never written", index, states == 0
            )
        if states.max() >= DIRTY:
            dirty = states >= DIRTY
            warp = (int(states[dirty][0]) - DIRTY) % 32
            raise self._first(
                MissingFence,
                f"{what} reads shared bytes that warp {warp} wrote without a later "
                "fence.proxy.async",
                index,
                dirty,
            )
        if span is not None:
            wrong = (states != TILED + SWIZZLE_SPANS.index(span)) & (states != CLEAN)
            if wrong.any():
                wrote = SWIZZLE_SPANS[int(states[wrong][0]) - TILED]
                message = f"{what} reads with a {span}-byte swizzle what a copy wrote with {wrote}"
                raise self._first(InvalidOperand, message, index, wrong)

    def check_async_write(self, index: Any, what: str, shared_rows: bool = False) -> None:
        """Destinations of copies: nobody reads or writes them, no mbarrier is in them.

        `shared_rows`: other writers may have parts of these 16-byte rows, as theirs alone.
        """
        busy = self.busy[index]
        if shared_rows:
            busy = busy & ~np.uint32(WRITERS)
        if busy.any():
            raise self._first(
                AsyncHazard,
                f"{what} writes shared bytes in use by an unfinished operation or an mbarrier",
                index,
                np.repeat(busy != 0, 16),
            )

    def _first(self, kind: Any, message: str, index: Any, bad: np.ndarray) -> Any:
        rows = np.arange(len(self.busy))[index].reshape(-1)
        byte = int(np.flatnonzero(bad.reshape(-1))[0])
        offset = int(rows[byte // 16]) * 16 + byte % 16
        error = kind(f"{message}: offset {offset:#x}")
        error.address = offset
        return error

    def rows(self, offset: int, size: int, align: int = 16) -> slice:
        """The 16-byte rows of a byte range, checked against the window."""
        if offset % align:
            error = Misaligned(f"shared offset {offset:#x} of an async copy: multiple of {align}")
            error.address = offset
            raise error
        if offset < FIRST_SHARED or offset + size > self.limit:
            error2 = OutOfBounds(
                f"async access to shared offsets {offset}..{offset + size - 1}: the CTA has "
                f"{FIRST_SHARED}..{self.limit - 1}"
            )
            error2.address = offset
            raise error2
        return slice(offset >> 4, -(-(offset + size) // 16))


class LocalMemory:
    """Per-lane stack of one warp: row `lane` holds the lane's bytes."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // 16) * 16
        self.data = np.zeros((32, self.size), np.uint8)
        self.written = np.zeros((32, self.size), bool)


def split_shared(address: int) -> tuple[int, int]:
    """Rank and offset of a 32-bit shared address."""
    if address >> 32:
        raise InvalidOperand(f"{address:#x} is no 32-bit shared address")
    return address >> RANK_SHIFT, address & OFFSET_MASK
