"""Data races on shared and tensor memory, by vector clocks; on only with `launch(..., races=True)`.

Each warp is an agent with a clock, and its asynchronous operations are a second agent; but copies
that signal mbarriers finish in any order, so that those of a warp that signal the same ones are an
agent of their own.  A vector holds, for each agent, up to which of its clock values everything has
happened before "now"; barriers carry vectors from those who arrive to those who get past.  The
shadow remembers of every word its last writer and last reader as (agent, clock).  An access races
if the one remembered is not covered by the vector of the accessing warp: then nothing but the
schedule orders the two.

Replicas are no race: compilers let several warps compute the same tile, and each store it by the
same instruction.  Whichever store comes last, the words hold the same; so words that a store finds
as it would leave them, written by that very instruction in another warp, are left out.  Loads and
later stores still have to be ordered, behind the replica that was stored last.

An operation counts as accessing when it is issued, and hands its vector to the barrier or group it
completes.  Of several readers only the last is remembered, the lanes of a warp are one agent, and
accesses narrower than a word are not tracked: races may be missed, none is invented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.errors import DataRace, LaunchError

AGENT_SHIFT = np.uint32(24)
CLOCKS = np.uint32((1 << 24) - 1)
MOST_AGENTS = 256


class Shadow:
    """Last accesses of each word; the arrays have the shape of the memory in words."""

    def __init__(self, *shape: int) -> None:
        self.writes = np.zeros(shape, np.uint32)
        self.reads = np.zeros(shape, np.uint32)
        self.write_lines = np.zeros(shape, np.uint32)
        self.read_lines = np.zeros(shape, np.uint32)

    def forget(self, index: Any) -> None:
        """Words whose past no longer matters."""
        self.writes[index] = 0
        self.reads[index] = 0


def start(warps: list[Any]) -> None:
    """Give all warps of a cluster their clocks."""
    if 2 * len(warps) > MOST_AGENTS:
        raise LaunchError(f"race detection takes clusters of at most {MOST_AGENTS // 2} warps")
    agents = Agents([*range(len(warps)), *range(len(warps))])
    for number, warp in enumerate(warps):
        warp.agent, warp.engine = number, number + len(warps)
        warp.agents = agents
        warp.vector = np.zeros(MOST_AGENTS, np.uint32)
        warp.vector[number] = 1


class Agents:
    """The agents of a cluster: `warps` has each one's warp, `copiers` those of copies, by warp and
    mbarriers, with the number of copies so far."""

    def __init__(self, warps: list[int]) -> None:
        self.warps = warps
        self.copiers: dict[tuple[int, ...], tuple[int, list[Any]]] = {}
        self.copied: dict[int, int] = {}

    def of(self, op: Any) -> int | None:
        """The agent of a copy; None if there are too many."""
        key = (op.warp.agent, *map(id, op.signals))
        if key not in self.copiers:
            if len(self.warps) == MOST_AGENTS:
                return None
            # The mbarriers are kept, since another may get the number of one that is gone.
            self.copiers[key] = (len(self.warps), list(op.signals))
            self.warps.append(op.warp.agent)
        return self.copiers[key][0]


# Edges.
def _join(into: np.ndarray | None, vector: np.ndarray) -> np.ndarray:
    if into is None:
        return vector.copy()
    np.maximum(into, vector, out=into)
    return into


def arrive(warp: Any, barrier: Any) -> None:
    """What the warp did so far happens before whoever gets past the barrier."""
    barrier.arriving_vector = _join(barrier.arriving_vector, warp.vector)
    warp.vector[warp.agent] += 1


def complete(barrier: Any) -> None:
    """All have arrived."""
    if barrier.arriving_vector is not None:
        barrier.vector = _join(barrier.vector, barrier.arriving_vector)
        barrier.arriving_vector = None


def get_past(warp: Any, barrier: Any) -> None:
    """The warp continues behind the barrier."""
    if barrier.vector is not None:
        np.maximum(warp.vector, barrier.vector, out=warp.vector)


def issue(op: Any) -> None:
    """An operation starts: behind all that its warp did, and behind its warp's earlier ones."""
    warp = op.warp
    warp.issued += 1
    op.vector = warp.vector.copy()
    op.vector[warp.engine] = warp.issued
    op.agent = warp.engine


def copies(op: Any) -> None:
    """The operation is a copy that signals mbarriers: it is behind all that its warp did, and
    behind the warp's earlier ones that signal the same, but no others."""
    if op.vector is None:
        return
    agents = op.warp.agents
    agent = agents.of(op)
    if agent is not None:
        agents.copied[agent] = agents.copied.get(agent, 0) + 1
        op.vector = op.warp.vector.copy()
        op.vector[agent] = agents.copied[agent]
        op.agent = agent


class Transfer:
    """A tcgen05.st, which is done for others once the warp has executed wait::st."""

    __slots__ = ("agent", "line", "vector", "warp")

    def __init__(self, warp: Any) -> None:
        self.warp, self.line = warp, line_of(warp)
        self.agent, self.vector = 0, None
        issue(self)


def transfers_done(warp: Any) -> None:
    """tcgen05.wait::st."""
    if warp.vector is not None:
        warp.vector[warp.engine] = warp.issued


def finish_into(op: Any, barrier: Any) -> None:
    """The operation arrives at a barrier on its completion."""
    if op.vector is not None:
        barrier.arriving_vector = _join(barrier.arriving_vector, op.vector)


def waited(warp: Any, ops: list[Any]) -> None:
    """The warp has waited for these operations of its own."""
    if warp.vector is not None:
        for op in ops:
            np.maximum(warp.vector, op.vector, out=warp.vector)


def synchronise(warp: Any) -> None:
    """An atomic or ordered access of shared memory: it may be anybody's lock or flag, so it is
    ordered behind and before all others of the CTA."""
    arrive(warp, warp.cta.ordered)
    complete(warp.cta.ordered)
    get_past(warp, warp.cta.ordered)


def as_flag(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step whose accesses of shared memory are ordered and atomic: no races among themselves."""

    def run(warp: Any) -> Any:
        if warp.vector is None:
            return step(warp)
        synchronise(warp)
        warp.tracked = False
        try:
            return step(warp)
        finally:
            warp.tracked = True

    return run


# Accesses.
def words(offsets: Any, size: int) -> Any:
    """Index of the words at byte offsets (an int or lanes)."""
    count = max(1, size // 4)
    if offsets.__class__ is int:
        return slice(offsets >> 2, (offsets >> 2) + count)
    return (offsets >> 2)[:, None] + np.arange(count)


def rows(index: Any) -> Any:
    """Index of the words in 16-byte rows (a slice or numbers)."""
    if isinstance(index, slice):
        return slice(index.start * 4, index.stop * 4)
    return np.asarray(index)[..., None] * 4 + np.arange(4)


def access(
    actor: Any,
    shadow: Shadow,
    index: Any,
    writing: bool,
    what: str,
    repeats: Callable[[], np.ndarray] | None = None,
) -> None:
    """Check and remember an access by a warp or an operation; `repeats` says of each word whether
    a store leaves it as it is."""
    vector, agent = actor.vector, actor.agent
    own = agent  # operations of a warp keep their order; the warp itself has to wait for them
    line = actor.line if hasattr(actor, "line") else line_of(actor)

    def replicas() -> Any:
        lines = shadow.write_lines[index]
        return repeats is not None and (lines == line) & repeats().reshape(lines.shape)

    warps = (actor.warp if hasattr(actor, "warp") else actor).agents.warps
    words = (own, what, writing, "written", warps)
    _check(vector, shadow.writes, shadow.write_lines, index, words, replicas)
    if writing:
        _check(vector, shadow.reads, shadow.read_lines, index, (own, what, writing, "read", warps))
    epoch = np.uint32(agent << int(AGENT_SHIFT) | int(vector[agent]))
    if writing:
        shadow.writes[index], shadow.write_lines[index] = epoch, line
    else:
        shadow.reads[index], shadow.read_lines[index] = epoch, line


def operand(op: Any, shared: Any, index: Any, writing: bool) -> None:
    """An operation accesses 16-byte rows of shared memory."""
    if shared.shadow is not None:
        access(op, shared.shadow, rows(index), writing, op.name)


def use(actor: Any, barrier: Any) -> None:
    """An mbarrier is used: somebody must have initialised it before."""
    if actor.vector is not None:
        index = words(barrier.offset, 8)
        access(actor, barrier.home.shadow, index, False, "an operation on an mbarrier")


def line_of(warp: Any) -> int:
    """The PTX line that the warp executes."""
    return int(warp.cta.machine.program.kernel.code[warp.group.pc].line)


def _check(
    vector: np.ndarray,
    epochs: np.ndarray,
    lines: np.ndarray,
    index: Any,
    words: tuple[Any, ...],
    harmless: Callable[[], Any] = lambda: False,
) -> None:
    old = epochs[index]
    bad = (old & CLOCKS) > vector[old >> AGENT_SHIFT]
    own, what, writing, before, warps = words
    if bad.any():
        bad &= (old >> AGENT_SHIFT) != own
    if bad.any():
        bad &= np.logical_not(harmless())
    if not bad.any():
        return
    at = int(np.flatnonzero(bad.reshape(-1))[0])
    agent = int(old.reshape(-1)[at] >> AGENT_SHIFT)
    warp = warps[agent]
    who = f"warp {warp}" if agent == warp else f"an operation of warp {warp}"
    raise DataRace(
        f"data race: {what} {'writes' if writing else 'reads'} what {who} has {before} in line "
        f"{int(lines[index].reshape(-1)[at])}, and nothing orders the two"
    )
