"""Which generic writes the async proxy may see.  PTX ISA: Memory Consistency Model, proxies.

A write through the generic proxy is visible to copies and matrix instructions if a
`fence.proxy.async` lies on the path from it to them: executed by the writer, or by a thread that
synchronised with the writer afterwards.  So each write is marked with its warp and with a number
that changes at the warp's arrivals on barriers; whoever gets past a barrier knows of the marks that
arrived there, and a fence publishes the executing warp's own marks and those it knows of.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim import races
from ptxsim.memory import CLEAN, DIRTY

WARPS = 32  # of a CTA, at most
NUMBERS = 7  # of marks a warp goes through in turn: DIRTY + 7 * 32 values fit a byte

# For a memory and a mark, the lowest and highest offset where bytes with it may lie.
Writes = dict[tuple[Any, int], tuple[int, int]]


def mark(warp: Any) -> int:
    """The state of bytes that this warp writes now."""
    return int(DIRTY + warp.index + WARPS * warp.write_number)


def note(warp: Any, shared: Any, low: int, high: int) -> None:
    """The warp has marked bytes within low..high-1."""
    key = (shared, mark(warp))
    first, last = warp.dirty.get(key, (low, high))
    warp.dirty[key] = (min(first, low), max(last, high))


def join(into: Writes, more: Writes) -> None:
    """Add knowledge to knowledge."""
    for key, (low, high) in more.items():
        first, last = into.get(key, (low, high))
        into[key] = (min(first, low), max(last, high))


def arrive(warp: Any, barrier: Any) -> None:
    """The warp arrives at a barrier: later writes are told apart from those before."""
    if warp.dirty:
        join(barrier.arriving, warp.dirty)
        warp.write_number = (warp.write_number + 1) % NUMBERS
    if warp.known_writes:
        join(barrier.arriving, warp.known_writes)
    if warp.vector is not None:
        races.arrive(warp, barrier)


def complete(barrier: Any) -> None:
    """A phase of the barrier is complete: what arrived is known to all who get past it."""
    if barrier.arriving:
        join(barrier.arrived_writes, barrier.arriving)
        barrier.arriving = {}
    races.complete(barrier)


def get_past(warp: Any, barrier: Any) -> None:
    """The warp's wait for the barrier is over."""
    if barrier.arrived_writes:
        join(warp.known_writes, barrier.arrived_writes)
    if warp.vector is not None:
        races.get_past(warp, barrier)


def publish(warp: Any) -> None:
    """fence.proxy.async: the async proxy may see the writes that the warp made or knows of."""
    join(warp.dirty, warp.known_writes)
    by_memory: dict[Any, list[Any]] = {}
    for (shared, state), (low, high) in warp.dirty.items():
        found = by_memory.setdefault(shared, [low, high, np.zeros(256, bool)])
        found[0], found[1] = min(found[0], low), max(found[1], high)
        found[2][state] = True
    for shared, (low, high, chosen) in by_memory.items():
        state = shared.state[low:high]
        np.putmask(state, chosen[state], CLEAN)
    warp.dirty.clear()
    warp.known_writes.clear()
