"""Barriers and fences.  PTX ISA: bar, barrier, membar, fence, mbarrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim import proxy, races
from ptxsim.barriers import MAX_COUNT, Mbarrier
from ptxsim.decode import AGAIN, YIELD, Decoder, Modifiers, Step, instruction
from ptxsim.errors import BarrierError, InvalidOperand, Misaligned
from ptxsim.isa.loadstore import address_reader
from ptxsim.isa.warp import FULL, gather_lanes
from ptxsim.machine import AsyncOp, Wait
from ptxsim.memory import SHARED_BASE, split_shared
from ptxsim.ptx import Immediate, Instruction, Sink
from ptxsim.values import bits32, bits64, lanes, uniform


def uniform_int(warp: Any, slot: int, what: str) -> int:
    """A register that must hold one value in all active lanes."""
    value = warp.registers[slot]
    if value.__class__ is int:
        return int(value)
    same = uniform(value, warp.mask)
    if same is None:
        raise InvalidOperand(f"{what} differs among the lanes")
    return int(same)


# Named barriers.
@instruction("bar", "barrier")
def build_named_barrier(ins: Instruction, c: Decoder) -> Step:
    """bar.{sync,arrive} id{, n}: n threads, all of the CTA by default; arrive does not wait."""
    m = Modifiers(ins)
    m.flag("cta")
    waits = m.choice("sync", "arrive") == "sync"
    m.flag("aligned")
    m.done()
    number = c.read(ins.operands[0], 32)
    count = c.read(ins.operands[1], 32) if len(ins.operands) > 1 else None

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        cta = warp.cta
        which = uniform_int(warp, number, "the barrier number")
        if which > 15:
            raise BarrierError(f"barrier {which}: there are 16")
        threads = -(-cta.threads // 32) * 32
        if count is not None:
            threads = uniform_int(warp, count, "the thread count")
            if threads % 32 or not threads:
                raise BarrierError(f"barrier {which}: {threads} threads is no multiple of 32")
        barrier = cta.barriers[which]
        cta.machine.progress += 1
        generation = barrier.generation
        proxy.arrive(warp, barrier)
        if barrier.arrive(warp.index, threads):
            proxy.complete(barrier)
            proxy.get_past(warp, barrier)
            return None
        if not waits:
            return None

        warp.group.wait = _generation_wait(warp, barrier, generation)
        return YIELD

    return run


def _generation_wait(warp: Any, barrier: Any, generation: int) -> Wait:
    def passed() -> bool:
        if barrier.generation == generation:
            return False
        proxy.get_past(warp, barrier)
        return True

    return Wait(passed, barrier.describe)


@instruction("barrier.cluster")
def build_cluster_barrier(ins: Instruction, c: Decoder) -> Step:
    """barrier.cluster.{arrive,wait}: all threads of all CTAs of the cluster."""
    m = Modifiers(ins, skip=1)
    arrives = m.choice("arrive", "wait") == "arrive"
    m.flag("relaxed", "release", "acquire")
    m.flag("aligned")
    m.done()

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        barrier = warp.cta.cluster.barrier
        if arrives:
            if warp.cluster_generation is not None:
                raise BarrierError("barrier.cluster.arrive twice without a wait between")
            warp.cluster_generation = barrier.generation
            warp.cta.machine.progress += 1
            proxy.arrive(warp, barrier)
            barrier.arrive(warp.active)
            return None
        generation = warp.cluster_generation
        if generation is None:
            raise BarrierError("barrier.cluster.wait without an arrive before it")
        warp.cluster_generation = None
        if barrier.generation != generation:
            proxy.get_past(warp, barrier)
            return None
        warp.group.wait = _generation_wait(warp, barrier, generation)
        return YIELD

    return run


# mbarriers.
def barrier_address(c: Decoder, operand: Any, space: str) -> Callable[[Any], Any]:
    """Shared address of `[a]`, generic ones translated; an int or lanes."""
    read: Callable[[Any], Any] = address_reader(c, operand, space)
    if space != "generic":
        return read

    def generic(warp: Any) -> Any:
        value = read(warp)
        if value.__class__ is int:
            return value & ~SHARED_BASE
        return value & np.uint64(0xFFFFFFFF)

    return generic


def per_address(warp: Any, address: Any) -> list[tuple[int, int]]:
    """(address, number of active lanes) of a barrier operand."""
    if address.__class__ is int:
        return [(address, warp.active)]
    active = address if warp.mask is None else address[warp.mask]
    values, counts = np.unique(active, return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), strict=True))


def _space(m: Modifiers) -> tuple[str, bool]:
    space = m.choice("shared", "shared::cta", "shared::cluster", default="generic")
    return space, space == "shared::cluster"


@instruction("mbarrier.init", "mbarrier.inval")
def build_init(ins: Instruction, c: Decoder) -> Step:
    """mbarrier.init [a], n: phase 0, n arrivals; inval ends the object."""
    m = Modifiers(ins)
    start = m.choice("init", "inval") == "init"
    space, _ = _space(m)
    m.type("b64")
    m.done()
    address = barrier_address(c, ins.operands[0], space)
    count = c.read(ins.operands[1], 32) if start else None

    def run(warp: Any) -> None:
        cta = warp.cta
        for one, _ in per_address(warp, address(warp)):
            rank, offset = split_shared(one)
            if rank != cta.rank:
                raise InvalidOperand(f"mbarrier.{ins.mods[0]} in another CTA")
            if offset % 8:
                raise Misaligned(f"mbarrier at {offset:#x}: multiple of 8")
            cta.shared.check(offset, 8, 8)
            cta.machine.progress += 1
            if count is None:
                cta.cluster.barrier_at(one, cta.rank, "mbarrier.inval")
                cta.invalidate_barrier(offset)
                continue
            number = uniform_int(warp, count, "the arrival count")
            if not 0 < number <= MAX_COUNT:
                raise BarrierError(f"mbarrier.init with count {number}: 1..{MAX_COUNT}")
            old = cta.shared.barriers.get(offset)
            if old is not None and (old.pending != old.expected or old.transactions):
                raise BarrierError(f"mbarrier.init of a barrier in use: {old.describe()}")
            cta.initialise_barrier(offset, number)
            if cta.shared.shadow is not None:
                where = races.words(offset, 8)
                races.access(warp, cta.shared.shadow, where, True, "mbarrier.init")

    return run


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def build_arrive(ins: Instruction, c: Decoder) -> Step:
    """mbarrier.arrive{.expect_tx}: bytes first, then the arrival, as one step; arrive_drop too."""
    m = Modifiers(ins)
    drop = m.choice("arrive", "arrive_drop") == "arrive_drop"
    expects, m_nocomplete = m.flag("expect_tx"), m.flag("noComplete")
    m.flag("release", "relaxed")
    m.flag("cta", "cluster")
    space, remote = _space(m)
    m.type("b64")
    m.done()
    if m_nocomplete:
        raise m.unsupported(".noComplete")
    has_state = len(ins.operands) > 1 and not hasattr(ins.operands[0], "base")
    operands = ins.operands[1:] if has_state else ins.operands
    state = None
    if has_state and not isinstance(ins.operands[0], Sink):
        state = c.write(ins.operands[0])
    address = barrier_address(c, operands[0], space)
    extra = c.read(operands[1], 32) if len(operands) > 1 else None

    def run(warp: Any) -> None:
        cta = warp.cta
        target = address(warp)
        amounts = 1 if extra is None else bits32(warp.registers[extra])
        cta.machine.progress += 1
        for one, number in per_address(warp, target):
            barrier = cta.cluster.barrier_at(one, None if remote else cta.rank, ins.form)
            if state is not None:
                warp.registers[state] = barrier.phase & 1
            total = _total(warp, target, one, amounts, number)
            races.use(warp, barrier)
            proxy.arrive(warp, barrier)
            if expects:
                barrier.expect(total)
                barrier.arrive(number)
                continue
            if drop:
                barrier.expected -= total
            barrier.arrive(total)

    return run


def _total(warp: Any, target: Any, one: int, amounts: Any, number: int) -> int:
    """Sum of the per-lane amounts over the active lanes that name this barrier."""
    if amounts.__class__ is int:
        return int(amounts) * number
    chosen = np.ones(32, bool) if warp.mask is None else warp.mask
    if target.__class__ is not int:
        chosen = chosen & (target == one)
    return int(amounts[chosen].sum(dtype=np.int64))


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def build_transactions(ins: Instruction, c: Decoder) -> Step:
    """mbarrier.expect_tx / complete_tx [a], bytes: transaction count only, no arrival."""
    m = Modifiers(ins)
    expects = m.choice("expect_tx", "complete_tx") == "expect_tx"
    m.flag("relaxed")
    m.flag("cta", "cluster")
    space, remote = _space(m)
    m.type("b64")
    m.done()
    address, size = barrier_address(c, ins.operands[0], space), c.read(ins.operands[1], 32)

    def run(warp: Any) -> None:
        cta = warp.cta
        target = address(warp)
        cta.machine.progress += 1
        for one, number in per_address(warp, target):
            barrier = cta.cluster.barrier_at(one, None if remote else cta.rank, ins.form)
            total = _total(warp, target, one, bits32(warp.registers[size]), number)
            races.use(warp, barrier)
            if expects:
                barrier.expect(total)
            else:
                barrier.complete(total)

    return run


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def build_wait(ins: Instruction, c: Decoder) -> Step:
    """mbarrier.{try,test}_wait{.parity} p, [a], phase{, ns}.

    A failing try_wait blocks the warp until the phase completes; if nothing else can run it gives
    up and returns false, as the time limit on a chip would make it do.  test_wait never blocks.
    """
    m = Modifiers(ins)
    blocks = m.choice("try_wait", "test_wait") == "try_wait"
    m.flag("parity")
    m.flag("acquire", "relaxed")
    m.flag("cta", "cluster")
    space, _ = _space(m)
    m.type("b64")
    m.done()
    p = c.write(ins.operands[0], 1)
    address, parity = barrier_address(c, ins.operands[1], space), c.read(ins.operands[2], 32)
    for operand in ins.operands[3:]:
        c.read(operand, 32)  # a time limit is only a hint

    def run(warp: Any) -> Any:
        cta = warp.cta
        target, wanted = address(warp), warp.registers[parity]
        if target.__class__ is not int or wanted.__class__ is not int:
            return _wait_by_lanes(warp, target, wanted, p, blocks)
        barrier = cta.cluster.barrier_at(target, cta.rank, ins.form)
        races.use(warp, barrier)
        if barrier.done(wanted & 1):
            proxy.get_past(warp, barrier)
            warp.registers[p] = True
            return None
        if not blocks or warp.group.timed_out:
            warp.group.timed_out = False
            warp.registers[p] = False
            return None
        warp.group.wait = _phase_wait(barrier, wanted & 1)
        return AGAIN

    return run


def _phase_wait(barrier: Mbarrier, parity: int) -> Wait:
    return Wait(
        lambda: barrier.done(parity),
        lambda: f"waits for parity {parity} of {barrier.describe()}",
        may_time_out=True,
        barrier=barrier,
    )


def _wait_by_lanes(warp: Any, target: Any, wanted: Any, p: int, blocks: bool) -> Any:
    addresses = lanes(target, 32 if target.__class__ is int else 8 * target.itemsize).tolist()
    parities = lanes(bits64(wanted) if wanted.__class__ is int else wanted, 32).tolist()
    active = np.ones(32, bool) if warp.mask is None else warp.mask
    result, missing = np.zeros(32, bool), None
    for lane in np.flatnonzero(active).tolist():
        barrier = warp.cta.cluster.barrier_at(addresses[lane], warp.cta.rank, "mbarrier wait")
        result[lane] = barrier.done(parities[lane] & 1)
        if result[lane]:
            proxy.get_past(warp, barrier)
        else:
            missing = (barrier, parities[lane] & 1)
    if missing is not None and blocks and not warp.group.timed_out:
        warp.group.wait = _phase_wait(*missing)
        return AGAIN
    warp.group.timed_out = False
    warp.registers[p] = result
    return None


@instruction("mbarrier.pending_count")
def build_pending(ins: Instruction, c: Decoder) -> Step:
    """mbarrier.pending_count needs the opaque state token, which here holds the parity only."""
    raise c.error("the state token has no count here")


# Fences.
@instruction("fence", "membar")
def build_fence(ins: Instruction, c: Decoder) -> Step:
    """fence.proxy.async publishes generic stores (see proxy.py); the others order nothing more."""
    known = {
        "proxy",
        "async",
        "alias",
        "tensormap::generic",
        "async::generic",
        "async.shared::cta",
        "global",
        "shared::cta",
        "shared::cluster",
        "sc",
        "acq_rel",
        "acquire",
        "release",
        "cta",
        "cluster",
        "gpu",
        "sys",
        "gl",
        "mbarrier_init",
        "sync_restrict::shared::cta",
        "sync_restrict::shared::cluster",
    }
    m = Modifiers(ins)
    is_async = "proxy" in m.left and "async" in m.left and "global" not in m.left
    m.left = [x for x in m.left if x not in known]
    m.done()
    for operand in ins.operands:
        if hasattr(operand, "base"):
            c.address(operand)
        elif not isinstance(operand, Immediate):
            c.read(operand, 32)
    if is_async:
        return proxy.publish
    return lambda warp: None


def arrive_after_copies(warp: Any, line: int, barrier: Mbarrier, number: int) -> None:
    """Issue an arrival behind the warp's cp.async."""

    def arrive() -> None:
        proxy.arrive(warp, barrier)
        races.finish_into(op, barrier)
        barrier.arrive(number)

    op = AsyncOp("cp.async.mbarrier.arrive", warp, line, arrive, [barrier])
    warp.cta.cluster.issue(op, ("cp.async", warp.cta.rank, warp.index))


@instruction("cp.async.mbarrier.arrive")
def build_copy_arrive(ins: Instruction, c: Decoder) -> Step:
    """cp.async.mbarrier.arrive{.noinc}: arrives when this thread's earlier cp.async are done.

    Without .noinc the pending count is first raised by one, so the net effect on it is nil.
    """
    m = Modifiers(ins, skip=3)
    no_increment = m.flag("noinc")
    space, _ = _space(m)
    m.type("b64")
    m.done()
    address = barrier_address(c, ins.operands[0], space)

    def run(warp: Any) -> None:
        cta = warp.cta
        for one, number in per_address(warp, address(warp)):
            barrier = cta.cluster.barrier_at(one, cta.rank, ins.form)
            if not no_increment:
                barrier.pending += number
            arrive_after_copies(warp, ins.line, barrier, number)

    return run
