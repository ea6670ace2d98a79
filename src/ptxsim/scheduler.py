"""Runs the warps of clusters: schedules by seed, split warps, blocked groups, deadlocks.

Seed 0 runs each lane group until it blocks and finishes asynchronous operations only when nothing
else can run, those that somebody waits for before all others: the latest moment a chip could
choose.  Whatever is not waited for is then still in flight when it is touched.  Odd seeds draw
quanta, the order of warps and the moments of completion at random.  Even seeds give warps random
priorities, changed now and then: the highest that can run does, so that some warps get as far ahead
of others as the kernel's own synchronisation allows, and finish asynchronous operations either all
at once or as late as seed 0 does.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from ptxsim.barriers import Mbarrier
from ptxsim.decode import SWITCH, YIELD
from ptxsim.errors import AsyncHazard, BarrierError, Deadlock, SimulationError, TensorMemoryError
from ptxsim.machine import AsyncOp, Cluster, Cta, LaneGroup, Machine, Meet, Warp
from ptxsim.values import merge


class Scheduler:
    """Executes all clusters of a launch, one after the other, more at once only if one is stuck."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.random = random.Random(f"schedule {machine.options.seed}")  # small integers draw alike
        seed = machine.options.seed
        self.by_priority = seed > 0 and seed % 2 == 0
        self.lazy = seed == 0
        # How likely an operation finishes early: 0 as late as possible, 1 at once.
        self.eagerness = 0.0 if self.lazy else (0.2, 0.0, 0.7, 1.0)[(seed - 1) % 4]
        self.priorities: dict[Warp, float] = {}
        self.active: list[Cluster] = []

    def run(self) -> None:
        """Run clusters until the machine has no more."""
        with np.errstate(all="ignore"):
            while self._admit():
                self._run_active()

    def _admit(self) -> bool:
        first = self.machine.next_cluster()
        if first is not None:
            self.active.append(Cluster(self.machine, first))
        return first is not None

    def _groups(self) -> list[LaneGroup]:
        return [
            group
            for cluster in self.active
            for cta in cluster.ctas
            for warp in cta.warps
            for group in warp.groups
        ]

    def _run_active(self) -> None:
        machine = self.machine
        last_progress, spent = machine.progress + machine.stores, 0
        while self.active:
            ready = []
            for group in self._groups():
                wait = group.wait
                if wait is None or wait.ready():
                    group.wait = None
                    ready.append(group)
            if not ready and not self._unblock():
                return
            for group in self._order(ready):
                if group.wait is not None or group not in group.warp.groups:
                    continue
                before = machine.steps
                quantum = self.random.randint(1, 400) if self.eagerness % 1 else 20_000
                self._run_group(group, quantum)
                if machine.progress != last_progress:
                    last_progress, spent = machine.progress + machine.stores, 0
                spent += machine.steps - before
                if spent > machine.options.max_steps:
                    self._livelock(group)
                    spent = 0
                self._finish_some()
                if self.by_priority and (machine.steps - before == quantum or self._one_in(30)):
                    self.priorities[group.warp] = self.random.random() - (group.wait is None)
            self._retire()

    def _order(self, ready: list[LaneGroup]) -> list[LaneGroup]:
        """The lane groups to run now, in this order."""
        if self.lazy or len(ready) < 2:
            return ready
        if not self.by_priority:
            self.random.shuffle(ready)
            return ready
        for group in ready:
            if group.warp not in self.priorities:
                self.priorities[group.warp] = self.random.random()
        return [max(ready, key=lambda group: self.priorities[group.warp])]

    def _one_in(self, count: int) -> bool:
        return self.random.randrange(count) == 0

    def _finish_some(self) -> None:
        """Asynchronous operations that finish although warps could go on."""
        if self.eagerness == 1.0:
            for cluster in self.active:
                while cluster.finish_one(self.random.randrange):
                    pass
        elif self.eagerness and self.random.random() < self.eagerness:
            self.random.choice(self.active).finish_one(self.random.randrange)

    def _unblock(self) -> bool:
        """Nothing can run: finish an operation, time out a wait, start a cluster, or give up."""
        choose = (lambda n: 0) if self.lazy else self.random.randrange
        if not self.eagerness:
            waits = [group.wait for group in self._groups() if group.wait is not None]
            barriers = {id(wait.barrier) for wait in waits if wait.barrier is not None}
            if any(cluster.finish_awaited(barriers, choose) for cluster in self.active):
                return True
        for cluster in self.active:
            if cluster.finish_one(choose):
                return True
        progress = self.machine.progress
        for group in self._groups():
            if group.wait is not None and group.wait.may_time_out and group.timeouts != progress:
                # A try_wait may give up; code that polls ahead of its own work relies on it.  Once
                # per progress made: otherwise a lost arrival would spin for ever.
                group.timeouts = progress
                group.timed_out = True
                group.wait = None
                return True
        if self._admit():
            return True
        self._retire()
        if not self.active:
            return False
        raise self._deadlock()

    def _livelock(self, group: LaneGroup) -> None:
        """A spin on memory may wait for a cluster that has not started yet."""
        if self._admit() or self.machine.others_work():
            return
        raise self._located(
            Deadlock(
                f"livelock: {self.machine.options.max_steps} instructions without any barrier, "
                "copy or store"
            ),
            group.warp,
            group.pc,
        )

    def _retire(self) -> None:
        for cluster in list(self.active):
            if any(warp.groups for cta in cluster.ctas for warp in cta.warps):
                continue
            self._check_exit(cluster)
            self.active.remove(cluster)
            self.priorities.clear()  # holds warps; drawn again for those that run on

    def _check_exit(self, cluster: Cluster) -> None:
        """A finished cluster leaves nothing in flight and nothing allocated."""
        stores = {id(op) for cta in cluster.ctas for warp in cta.warps for op in stores_left(warp)}
        for op in [*cluster.loose, *(op for queue in cluster.queues.values() for op in queue)]:
            if op.name == "commit":
                continue  # an arrival nobody waits for harms nobody
            if id(op) in stores:
                op.finish()  # warned of when its thread ended
                continue
            error = AsyncHazard(
                f"the kernel ended before {op.name} of this line was waited for", line=op.line
            )
            error.warp, error.cta = op.warp.index, op.warp.cta.ctaid
            raise error
        for cta in cluster.ctas:
            for barrier in cta.shared.barriers.values():
                self._check_bytes(cta, barrier)
            if cta.tensor.allocations:
                error2 = TensorMemoryError(
                    "the kernel ended with tensor memory still allocated: "
                    + ", ".join(f"{s}+{n} columns" for s, n in cta.tensor.allocations.items())
                )
                error2.cta = cta.ctaid
                raise error2

    def _check_bytes(self, cta: Cta, barrier: Mbarrier) -> None:
        """Bytes that nobody announced are an error; announced ones that never came are what the
        tail of CUTLASS's producers leaves behind."""
        if not barrier.transactions:
            return
        error = BarrierError(f"the kernel ended with {barrier.describe()}")
        error.cta = cta.ctaid
        if barrier.transactions < 0:
            raise error
        self.machine.suspect(error)

    def _run_group(self, group: LaneGroup, quantum: int) -> None:
        warp, pc = group.warp, group.pc
        warp.group, warp.mask = group, group.mask
        steps = self.machine.program.steps
        masked = bool(group.meets) or len(warp.groups) > 1 or self.machine.options.races
        result: Any = None
        left = quantum
        try:
            if masked:
                pc, result, left = self._run_masked(group, quantum)
            else:
                while left:
                    left -= 1
                    result = steps[pc](warp)
                    if result is None:
                        pc += 1
                    elif result >= 0:
                        pc = result
                    else:
                        break
        except SimulationError as error:
            raise self._located(error, warp, group.pc if masked else pc) from None
        except Exception as error:
            wrong = SimulationError(f"the simulator failed here: {type(error).__name__}: {error}")
            raise self._located(wrong, warp, group.pc if masked else pc) from error
        finally:
            self.machine.steps += quantum - left
        if result == SWITCH:
            return  # the instruction has set the groups itself
        group.pc = pc + 1 if result == YIELD else pc  # AGAIN: the same instruction once more

    def _run_masked(self, group: LaneGroup, quantum: int) -> tuple[int, Any, int]:
        """Like the fast loop, but lanes elsewhere keep their registers, meetings are watched."""
        warp, program = group.warp, self.machine.program
        steps, defs = program.steps, program.defs
        registers = warp.registers
        keep = self._kept(group)
        stop = group.meets[-1].pc if group.meets else -1
        pc, left = group.pc, quantum
        mask = group.mask
        while left:
            if pc == stop:
                arrive(group)
                return pc, SWITCH, left
            left -= 1
            saved = [(s, w, registers[s]) for s, w in defs[pc] if keep >> s & 1]
            group.pc = pc
            result = steps[pc](warp)
            if saved and mask is not None:
                for slot, width, old in saved:
                    registers[slot] = merge(mask, old, registers[slot], width)
            if result is None:
                pc += 1
            elif result >= 0:
                pc = result
            else:
                return pc, result, left
        return pc, None, left

    def _kept(self, group: LaneGroup) -> int:
        """Registers that lanes outside `group` may still read."""
        live, keep = self.machine.program.live, 0
        for other in group.warp.groups:
            if other is not group:
                keep |= live[other.pc]
        meets = {m for other in group.warp.groups for m in other.meets}
        for meet in meets:
            if meet.arrived.any() or len(group.warp.groups) > 1:
                keep |= live[meet.pc]
        return keep

    def _located(self, error: SimulationError, warp: Warp, pc: int) -> SimulationError:
        code = self.machine.program.kernel.code
        if error.line is None and pc < len(code):
            error.line, error.text = code[pc].line, code[pc].text
        if error.warp is None:
            error.warp, error.cta = warp.index, warp.cta.ctaid
        first = max(0, pc - 8)
        error.trace = [(ins.line, ins.text) for ins in code[first : pc + 1]]
        return error

    def _deadlock(self) -> Deadlock:
        code = self.machine.program.kernel.code
        rows = []
        line = None
        for group in self._groups():
            if group.wait is None:
                continue
            at = code[min(group.pc, len(code) - 1)].line
            line = line or at
            lanes = "" if group.mask is None else f" ({int(group.mask.sum())} lanes)"
            rows.append(
                f"  CTA {group.warp.cta.ctaid} warp {group.warp.index}{lanes}, line {at}: "
                f"{group.wait.tell()}"
            )
        return Deadlock("deadlock: every warp waits\n" + "\n".join(rows), line=line)


def split(warp: Warp, meet_pc: int, sides: list[tuple[int, np.ndarray]]) -> int:
    """Divide the running group: each side is (pc, lanes); they meet at `meet_pc`."""
    group = warp.group
    whole = np.ones(32, bool) & ~warp.exited if group.mask is None else group.mask
    meets = group.meets
    if not meets or meets[-1].pc != meet_pc:
        meets = (*meets, Meet(meet_pc, whole.copy(), meets))
    warp.groups.remove(group)
    new = [LaneGroup(warp, pc, lanes, meets) for pc, lanes in sides]
    warp.groups.extend(new)
    for part in new:
        if part.pc == meet_pc:
            arrive(part)
    return SWITCH


def arrive(group: LaneGroup) -> None:
    """The group has reached its meeting point: its lanes wait there for the others."""
    meet, warp = group.meets[-1], group.warp
    meet.arrived |= group.mask if group.mask is not None else True
    warp.groups.remove(group)
    _release(warp, meet)


def _release(warp: Warp, meet: Meet) -> None:
    while (meet.arrived == meet.expected).all():
        if not meet.expected.any():
            return
        mask: np.ndarray | None = meet.expected
        parents = meet.parents
        if parents and parents[-1].pc == meet.pc:
            parents[-1].arrived |= meet.expected
            meet = parents[-1]
            continue
        if meet.expected.all() and not parents:
            mask = None
        warp.groups.append(LaneGroup(warp, meet.pc, mask, parents))
        return


def exit_lanes(warp: Warp) -> int:
    """The running group's lanes end; those that wait for them elsewhere wait no longer."""
    group = warp.group
    lanes = group.mask if group.mask is not None else np.ones(32, bool)
    warp.exited = warp.exited | lanes
    if warp.exited.all():
        _check_groups(warp)
    warp.groups.remove(group)
    warp.cta.machine.progress += 1
    for meet in reversed(group.meets):
        meet.expected = meet.expected & ~lanes
    if group.meets:
        _release_after_exit(warp, group.meets)
    return SWITCH


def _check_groups(warp: Warp) -> None:
    """Bulk stores read shared memory: their thread must not end before it knows them done.

    Only an error if strict, since FlashAttention-4's backward ends so.  Groups waited for are gone
    from the list, whatever the schedule let finish by itself.
    """
    left = stores_left(warp)
    if left:
        error = AsyncHazard(
            f"the thread ends without cp.async.bulk.wait_group for {left[0].name} of this line",
            line=left[0].line,
        )
        warp.cta.machine.suspect(error)


def stores_left(warp: Warp) -> list[AsyncOp]:
    """Bulk stores that the warp has not waited for."""
    return [*warp.bulk_open, *(op for group in warp.bulk_groups for op in group)]


def _release_after_exit(warp: Warp, meets: tuple[Meet, ...]) -> None:
    for meet in reversed(meets):
        if meet.expected.any():
            if (meet.arrived & meet.expected == meet.expected).all():
                meet.arrived = meet.arrived & meet.expected
                _release(warp, meet)
            return
