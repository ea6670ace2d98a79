"""The state of a running launch: machine, clusters, CTAs, warps and their lane groups."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ptxsim import races
from ptxsim.barriers import ClusterBarrier, Mbarrier, NamedBarrier
from ptxsim.decode import Program
from ptxsim.errors import BarrierError, InvalidOperand, SimulationError
from ptxsim.memory import (
    BARRIER,
    FIRST_SHARED,
    RANK_SHIFT,
    GlobalMemory,
    LocalMemory,
    SharedMemory,
    split_shared,
)
from ptxsim.tensor_memory import TensorMemory
from ptxsim.values import LANE_IDS, LANES

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Options:
    """How to run: schedule seed, strict warnings as errors, limits."""

    seed: int = 0
    strict: bool = False
    races: bool = False
    max_steps: int = (
        5_000_000  # steps without any barrier, copy or store before a livelock is called
    )


@dataclass(slots=True)
class Machine:
    """One launch."""

    program: Program
    memory: GlobalMemory
    params: np.ndarray
    grid: Shape
    block: Shape
    cluster: Shape
    shared: int
    options: Options
    # The first CTA of the next cluster to start (or to cancel); None if all have started.
    next_cluster: Callable[[], Shape | None] = lambda: None
    # Do other processes still run clusters of this launch?  See parallel.py.
    others_work: Callable[[], bool] = lambda: False
    atomic: Any = field(default_factory=contextlib.nullcontext)  # held by read-modify-writes
    param_values: dict[int, list[int]] = field(default_factory=dict)  # of each ld.param, by index
    warnings: list[str] = field(default_factory=list)
    steps: int = 0
    progress: int = 0  # barrier arrivals, operations issued and finished, exits
    stores: int = 0  # memory writes: they keep a spin from being called a livelock

    def suspect(self, error: SimulationError) -> None:
        """A rule that shipping code is known to break: an error if strict, else a warning."""
        if self.options.strict:
            raise error
        text = str(error)
        if text not in self.warnings:
            self.warnings.append(text)


class AsyncOp:
    """An operation of an engine: copies, matrix instructions, their completion signals.

    `signals` are the mbarriers that its completion arrives at, or brings bytes to; `awaited` says
    that its warp waits for it.
    """

    __slots__ = (
        "agent", "awaited", "done", "line", "name", "run", "signal_ids", "signals", "vector", "warp"
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        warp: Warp,
        line: int,
        run: Callable[[], None],
        signals: Sequence[Mbarrier] = (),
    ) -> None:
        self.name, self.warp, self.line, self.run = name, warp, line, run
        self.signals, self.signal_ids = tuple(signals), frozenset(map(id, signals))
        self.awaited = False
        self.done = False
        self.agent, self.vector = 0, None  # for race detection

    def finish(self) -> None:
        """Carry it out; an error names the line that issued it."""
        try:
            self.run()
        except SimulationError as error:
            if error.line is None:
                error.line, error.warp, error.cta = self.line, self.warp.index, self.warp.cta.ctaid
            raise
        self.done = True


class Wait:
    """Why a lane group is blocked: a test, words for the deadlock report, and the mbarrier or the
    operations that it waits for."""

    __slots__ = ("barrier", "may_time_out", "ready", "tell")

    def __init__(
        self,
        ready: Callable[[], bool],
        tell: Callable[[], str],
        may_time_out: bool = False,
        barrier: Mbarrier | None = None,
        ops: Sequence[AsyncOp] = (),
    ) -> None:
        self.ready, self.tell, self.may_time_out, self.barrier = ready, tell, may_time_out, barrier
        for op in ops:
            op.awaited = True


class Meet:
    """Where the lanes of a split warp come together again."""

    __slots__ = ("arrived", "expected", "parents", "pc")

    def __init__(self, pc: int, expected: np.ndarray, parents: tuple[Meet, ...]) -> None:
        self.pc, self.expected, self.parents = pc, expected, parents
        self.arrived = np.zeros(LANES, bool)


class LaneGroup:
    """Lanes of one warp that run in step; `mask` None means all 32."""

    __slots__ = ("mask", "meets", "pc", "timed_out", "timeouts", "wait", "warp")

    def __init__(
        self, warp: Warp, pc: int, mask: np.ndarray | None, meets: tuple[Meet, ...] = ()
    ) -> None:
        self.warp, self.pc, self.mask, self.meets = warp, pc, mask, meets
        self.wait: Wait | None = None
        self.timed_out = False
        self.timeouts = 0


class Cluster:
    """CTAs that run together, and the operations in flight among them."""

    def __init__(self, machine: Machine, first: Shape) -> None:
        self.machine = machine
        self.ctas: list[Cta] = []
        shape = machine.cluster
        for rank in range(shape[0] * shape[1] * shape[2]):
            x, rest = rank % shape[0], rank // shape[0]
            y, z = rest % shape[1], rest // shape[1]
            ctaid = (first[0] + x, first[1] + y, first[2] + z)
            self.ctas.append(Cta(self, rank, (x, y, z), ctaid))
        threads = len(self.ctas) * machine.block[0] * machine.block[1] * machine.block[2]
        self.barrier = ClusterBarrier(threads)
        if machine.options.races:
            races.start([warp for cta in self.ctas for warp in cta.warps])
        self.queues: dict[Any, deque[AsyncOp]] = {}
        self.loose: list[AsyncOp] = []

    def issue(self, op: AsyncOp, queue: Any = None) -> AsyncOp:
        """Start an operation: in order within `queue`, or independent of all others."""
        self.machine.progress += 1
        if op.warp.vector is not None:
            races.issue(op)
        if queue is None:
            self.loose.append(op)
        else:
            self.queues.setdefault(queue, deque()).append(op)
        return op

    def pending(self) -> int:
        """Operations in flight."""
        return len(self.loose) + sum(map(len, self.queues.values()))

    def finish_one(self, choose: Callable[[int], int]) -> bool:
        """Let one operation that may finish now do so; False if there is none."""
        heads = [q for q in self.queues.values() if q]
        total = len(heads) + len(self.loose)
        if not total:
            return False
        number = choose(total)
        if number < len(self.loose):
            op = self.loose.pop(number)
        else:
            op = heads[number - len(self.loose)].popleft()
        self._finish(op)
        return True

    def finish_awaited(self, barriers: set[int], choose: Callable[[int], int]) -> bool:
        """The same for one that a warp waits for, that signals one of `barriers` (by `id`), or that
        is in the queue before such a one."""

        def awaited(op: AsyncOp) -> bool:
            return op.awaited or not barriers.isdisjoint(op.signal_ids)

        loose = [op for op in self.loose if awaited(op)]
        queues = [queue for queue in self.queues.values() if any(map(awaited, queue))]
        if not loose and not queues:
            return False
        number = choose(len(loose) + len(queues))
        if number < len(loose):
            op = loose[number]
            self.loose.remove(op)
        else:
            op = queues[number - len(loose)].popleft()
        self._finish(op)
        return True

    def _finish(self, op: AsyncOp) -> None:
        self.machine.progress += 1
        op.finish()

    def barrier_at(self, address: int, own: int | None, what: str) -> Mbarrier:
        """The mbarrier at a shared address; `own` restricts it to that CTA."""
        rank, offset = split_shared(address)
        if rank >= len(self.ctas) or (own is not None and rank != own):
            raise InvalidOperand(f"{what}: shared address {address:#x} is in another CTA")
        barrier = self.ctas[rank].shared.barriers.get(offset)
        if barrier is None:
            raise BarrierError(
                f"{what}: no mbarrier was initialised at shared address {address:#x}"
            )
        return barrier  # type: ignore[no-any-return]


class Cta:
    """One thread block."""

    def __init__(self, cluster: Cluster, rank: int, in_cluster: Shape, ctaid: Shape) -> None:
        self.cluster, self.rank, self.in_cluster, self.ctaid = cluster, rank, in_cluster, ctaid
        machine = cluster.machine
        self.machine = machine
        static = machine.program.decoder.static_shared
        self.shared = SharedMemory(static + machine.shared, rank)
        self.tensor = TensorMemory()
        self.barriers = [NamedBarrier(number) for number in range(16)]
        block = machine.block
        threads = block[0] * block[1] * block[2]
        self.threads = threads
        self.ordered = NamedBarrier(-1)  # stands for atomics and flags: see races.synchronise
        if machine.options.races:
            self.shared.shadow = races.Shadow(len(self.shared.data) // 4)
            self.tensor.shadow = races.Shadow(*self.tensor.cells.shape)
        self.warps = [Warp(self, number, threads) for number in range(-(-threads // LANES))]

    def initialise_barrier(self, offset: int, count: int) -> None:
        """mbarrier.init; the object is opaque to reads and writes from then on."""
        shared = self.shared
        shared.barriers[offset] = Mbarrier(offset, count, count, home=shared)
        shared.state[offset : offset + 8] = 0
        shared.busy[offset >> 4] |= BARRIER

    def invalidate_barrier(self, offset: int) -> None:
        """mbarrier.inval: the bytes are plain memory again."""
        del self.shared.barriers[offset]
        if (offset ^ 8) not in self.shared.barriers:
            self.shared.busy[offset >> 4] &= ~np.uint32(BARRIER)


class Warp:
    """32 lanes: registers, lane groups and the asynchronous groups of its threads."""

    __slots__ = (
        "agent",
        "agents",
        "bulk_groups",
        "bulk_open",
        "carry",
        "cluster_generation",
        "copy_groups",
        "copy_open",
        "cta",
        "dirty",
        "engine",
        "exited",
        "group",
        "groups",
        "index",
        "issued",
        "known_writes",
        "local",
        "mask",
        "registers",
        "stores",
        "tracked",
        "vector",
        "wgmma_fenced",
        "wgmma_groups",
        "wgmma_open",
        "write_number",
    )

    def __init__(self, cta: Cta, index: int, threads: int) -> None:
        self.cta, self.index = cta, index
        machine = cta.machine
        count = min(LANES, threads - LANES * index)
        mask = None if count == LANES else count > LANE_IDS
        self.mask = mask
        self.exited = np.zeros(LANES, bool) if mask is None else ~mask
        self.groups = [LaneGroup(self, 0, mask)]
        self.group = self.groups[0]
        self.registers: list[Any] = machine.program.initial_registers()
        self.local = LocalMemory(machine.program.decoder.local_size)
        self.carry: Any = 0
        self.cluster_generation: int | None = None  # set between a cluster arrive and its wait
        # Groups of copies (bulk and plain) and of wgmmas: the open one and the committed ones.
        self.bulk_open: list[AsyncOp] = []
        self.bulk_groups: deque[list[AsyncOp]] = deque()
        self.copy_open: list[AsyncOp] = []
        self.copy_groups: deque[list[AsyncOp]] = deque()
        self.wgmma_open: list[AsyncOp] = []
        self.wgmma_groups: deque[list[AsyncOp]] = deque()
        self.wgmma_fenced = False
        # Generic writes not yet published to the async proxy, own ones and others': see proxy.py.
        self.dirty: dict[tuple[SharedMemory, int], tuple[int, int]] = {}
        self.known_writes: dict[tuple[SharedMemory, int], tuple[int, int]] = {}
        self.write_number = 0
        # For race detection: see races.py.
        self.agent, self.engine, self.issued = 0, 0, 0
        self.agents: races.Agents | None = None
        self.vector: np.ndarray | None = None
        self.tracked = True
        self.stores: list[tuple[int, int, int, int]] = []  # tcgen05.st windows before wait::st
        self._set_specials(index, threads)

    def _set_specials(self, index: int, threads: int) -> None:
        decoder = self.cta.machine.program.decoder
        for name, slot in decoder.specials.items():
            self.registers[slot] = special(name, self)
        base = self.cta.rank << RANK_SHIFT
        for slot, offset in decoder.shared_symbols.items():
            self.registers[slot] = base + FIRST_SHARED + offset

    @property
    def active(self) -> int:
        """Number of active lanes."""
        return LANES if self.mask is None else int(self.mask.sum())

    def lanes_alive(self) -> np.ndarray:
        """Lanes that have not exited."""
        return ~self.exited


@lru_cache(maxsize=4096)
def _thread_coordinates(block: Shape, axis: int, index: int) -> Any:
    linear = np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * index)
    divisor = (1, block[0], block[0] * block[1])[axis]
    values = linear // np.uint32(divisor) % np.uint32(block[axis])
    first = int(values[0])
    return first if (values == first).all() else values.astype(np.uint32)


_ONE = np.uint32(1)
_BELOW = (_ONE << LANE_IDS) - _ONE
_LANE_REGISTERS = {
    "laneid": LANE_IDS,
    "lanemask_eq": _ONE << LANE_IDS,
    "lanemask_lt": _BELOW,
    "lanemask_le": _BELOW | _ONE << LANE_IDS,
    "lanemask_gt": ~(_BELOW | _ONE << LANE_IDS),
    "lanemask_ge": ~_BELOW,
}


def special(name: str, warp: Warp) -> Any:
    """The value of a special register for one warp.  PTX ISA chapter 10."""
    cta, machine = warp.cta, warp.cta.machine
    stem, _, axis_name = name[1:].partition(".")
    axis = "xyz".find(axis_name) if axis_name else 0
    if stem == "tid":
        return _thread_coordinates(machine.block, axis, warp.index)
    if stem in _LANE_REGISTERS:
        return _LANE_REGISTERS[stem]
    if stem.startswith(("clock", "globaltimer")):
        return 0  # `mov` reads a running count instead, see isa/control.py
    grid, cluster = machine.grid, machine.cluster
    shapes = {
        "ntid": machine.block,
        "ctaid": cta.ctaid,
        "nctaid": grid,
        "cluster_ctaid": cta.in_cluster,
        "cluster_nctaid": cluster,
        "clusterid": tuple(c // n for c, n in zip(cta.ctaid, cluster, strict=True)),
        "nclusterid": tuple(g // c for g, c in zip(grid, cluster, strict=True)),
    }
    if stem in shapes:
        return int(shapes[stem][axis])
    plain = {
        "warpid": warp.index,
        "nwarpid": -(-cta.threads // LANES),
        "smid": (cta.ctaid[0] + grid[0] * (cta.ctaid[1] + grid[1] * cta.ctaid[2])) % 148,
        "nsmid": 148,
        "gridid": 0,
        "cluster_ctarank": cta.rank,
        "cluster_nctarank": cluster[0] * cluster[1] * cluster[2],
        "is_explicit_cluster": cluster != (1, 1, 1),
        "dynamic_smem_size": machine.shared,
        "total_smem_size": machine.shared + machine.program.decoder.static_shared,
    }
    if stem in plain:
        return plain[stem]
    raise SimulationError(f"special register {name} is not supported")
