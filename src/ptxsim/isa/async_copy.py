"""cp.async and the bulk copies without tensors.  PTX ISA 9.7.9.25.3 (cp.async), .4-5 (bulk)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim import proxy, races
from ptxsim.access import lane_addresses
from ptxsim.decode import YIELD, Decoder, Modifiers, Step, instruction
from ptxsim.errors import InvalidOperand, Misaligned
from ptxsim.isa.atomic import REDUCTIONS, reduce_into
from ptxsim.isa.loadstore import address_reader
from ptxsim.isa.sync import barrier_address, uniform_int
from ptxsim.machine import AsyncOp, Wait
from ptxsim.memory import CLEAN, WRITER, SharedMemory, split_shared
from ptxsim.ptx import Instruction, Memory
from ptxsim.values import U8, bits32, lanes


# cp.async: 4, 8 or 16 bytes per thread.
@instruction("cp.async.ca", "cp.async.cg")
def build_copy(ins: Instruction, c: Decoder) -> Step:
    """cp.async.{ca,cg}.shared.global [d], [s], cp{, src}: bytes from src to cp are zeros."""
    m = Modifiers(ins, skip=1)
    m.ignore_cache_hints()
    m.choice("shared", "shared::cta")
    m.choice("global")
    m.done()
    to, source = (
        address_reader(c, ins.operands[0], "shared"),
        address_reader(c, ins.operands[1], "global"),
    )
    size = ins.operands[2].bits  # type: ignore[union-attr]
    extra = c.read(ins.operands[3], 32) if len(ins.operands) > 3 else None
    if size not in (4, 8, 16) or (ins.mods[1] == "cg" and size != 16):
        raise c.error(f"copies of {size} bytes")

    def run(warp: Any) -> None:
        cta = warp.cta
        active = np.ones(32, bool) if warp.mask is None else warp.mask
        offsets = lane_addresses(to(warp)).view(np.int64)[active] - cta.shared.base
        sources = lane_addresses(source(warp))[active].tolist()
        sizes = [size] * len(sources)
        if extra is not None:
            sizes = lanes(bits32(warp.registers[extra]), 32)[active].tolist()
        shared = cta.shared
        low, high = shared.check(offsets, size, size)
        rows = np.unique(offsets >> 4)
        # Copies of less than 16 bytes may share a row, the grain of what is in flight.
        shared.check_async_write(rows, "cp.async", shared_rows=size < 16)
        shared.busy[rows] += np.uint32(WRITER)

        def finish() -> None:
            for offset, address, count in zip(offsets.tolist(), sources, sizes, strict=True):
                data = np.zeros(size, U8)
                if count:
                    data[:count] = cta.machine.memory.bytes_at(address, count)
                shared.data[offset : offset + size] = data
                shared.state[offset : offset + size] = proxy.mark(warp)
            shared.busy[rows] -= np.uint32(WRITER)
            # Like generic stores: the async proxy needs a fence before it reads them.
            proxy.note(warp, shared, low, high + size)

        op = AsyncOp("cp.async", warp, ins.line, finish)
        cta.cluster.issue(op, ("cp.async", cta.rank, warp.index))
        if shared.shadow is not None:
            races.access(op, shared.shadow, races.words(offsets, size), True, op.name)
        warp.copy_open.append(op)

    return run


def group_step(name: str, limit: int | None) -> Step:
    """commit_group (limit None) or wait_group N of one kind of asynchronous operation."""

    def commit(warp: Any) -> None:
        groups, pending = getattr(warp, name + "_groups"), getattr(warp, name + "_open")
        groups.append(list(pending))
        pending.clear()

    def wait(warp: Any) -> Any:
        groups, most = getattr(warp, name + "_groups"), limit or 0
        ops = [op for group in list(groups)[: max(0, len(groups) - most)] for op in group]

        def passed() -> bool:
            if not all(op.done for op in ops):
                return False
            races.waited(warp, ops)
            while len(groups) > most:
                groups.popleft()
            return True

        if passed():
            return None
        warp.group.wait = Wait(
            passed,
            lambda: f"waits for {len(ops)} operations, the first of line {ops[0].line}",
            ops=ops,
        )
        return YIELD

    return commit if limit is None else wait


@instruction("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all")
def build_copy_group(ins: Instruction, c: Decoder) -> Step:
    """cp.async.commit_group / wait_group N / wait_all (which takes uncommitted copies too)."""
    Modifiers(ins, skip=2).done()
    if ins.mods[1] == "commit_group":
        return group_step("copy", None)
    if ins.mods[1] == "wait_group":
        return group_step("copy", ins.operands[0].bits)  # type: ignore[union-attr]
    commit, wait = group_step("copy", None), group_step("copy", 0)

    def wait_all(warp: Any) -> Any:
        commit(warp)
        return wait(warp)

    return wait_all


@instruction("cp.async.bulk.commit_group", "cp.async.bulk.wait_group")
def build_bulk_group(ins: Instruction, c: Decoder) -> Step:
    """cp.async.bulk.commit_group / wait_group{.read} N: reads and writes end together here."""
    m = Modifiers(ins, skip=3)
    m.flag("read")
    m.done()
    if ins.mods[2] == "commit_group":
        return group_step("bulk", None)
    return group_step("bulk", ins.operands[0].bits)  # type: ignore[union-attr]


# Bulk copies.
def each_lane(warp: Any, function: Callable[[Any], None]) -> None:
    """Run a single-thread operation for each active lane, one after the other."""
    outer = warp.mask
    active = range(32) if outer is None else np.flatnonzero(outer).tolist()
    try:
        for lane in active:
            one = np.zeros(32, bool)
            one[lane] = True
            warp.mask = one
            function(warp)
    finally:
        warp.mask = outer


def scalar(warp: Any, value: Any) -> int:
    """The operand value of the one active lane."""
    if value.__class__ is int:
        return int(value)
    return int(value[np.flatnonzero(warp.mask)[0]])


def hold(shared: SharedMemory, rows: Any, amount: int) -> None:
    """Mark rows as read (1) or written (WRITER) by an operation in flight."""
    shared.busy[rows] += np.uint32(amount)


def release(shared: SharedMemory, rows: Any, amount: int) -> None:
    """Undo `hold`."""
    shared.busy[rows] -= np.uint32(amount)


def check_bulk(size: int, *addresses: int) -> None:
    """Sizes and addresses of bulk copies are multiples of 16."""
    for value in (size, *addresses):
        if value % 16:
            error = Misaligned(f"bulk copy with {value:#x}: addresses and size are multiples of 16")
            error.address = value
            raise error


@instruction("cp.async.bulk.shared::cluster", "cp.async.bulk.shared::cta")
def build_bulk_to_shared(ins: Instruction, c: Decoder) -> Step:
    """cp.async.bulk from global or own shared memory to (another CTA's) shared memory."""
    m = Modifiers(ins, skip=2)
    m.choice("shared::cluster", "shared::cta")
    from_global = m.flag("global")
    if not from_global:
        m.choice("shared::cta")
    m.choice("mbarrier::complete_tx::bytes")
    multicast = m.flag("multicast::cluster")
    m.ignore_cache_hints()
    m.done()
    to = address_reader(c, ins.operands[0], "shared")
    source = address_reader(c, ins.operands[1], "global" if from_global else "shared")
    count = c.read(ins.operands[2], 32)
    signal = barrier_address(c, ins.operands[3], "shared")
    mask_slot = c.read(ins.operands[4], 16) if multicast else None
    for operand in ins.operands[5 if multicast else 4 :]:
        c.read(operand, 64)

    def one(warp: Any) -> None:
        cluster, machine = warp.cta.cluster, warp.cta.machine
        size = scalar(warp, bits32(warp.registers[count]))
        address, target = scalar(warp, source(warp)), scalar(warp, to(warp))
        check_bulk(size, address, target)
        if from_global:
            machine.memory.bytes_at(address, size)
        else:
            source_rank, source_offset = split_shared(address)
            own = cluster.ctas[source_rank].shared
            source_rows = own.rows(source_offset, size)
            own.check_async_read(source_rows, "cp.async.bulk")
            hold(own, source_rows, 1)
        chosen = None if mask_slot is None else uniform_int(warp, mask_slot, "the CTA mask")
        places = destinations(warp, target, scalar(warp, signal(warp)), chosen)
        for shared, offset, _ in places:
            rows = shared.rows(offset, size)
            shared.check_async_write(rows, "cp.async.bulk")
            hold(shared, rows, WRITER)

        def finish() -> None:
            if from_global:
                data = machine.memory.bytes_at(address, size).copy()
            else:
                data = own.data[source_offset : source_offset + size].copy()
                release(own, source_rows, 1)
            for shared, offset, barrier in places:
                release(shared, shared.rows(offset, size), WRITER)
                shared.data[offset : offset + size] = data
                shared.state[offset : offset + size] = CLEAN
                races.finish_into(op, barrier)
                barrier.complete(size)

        signals = [barrier for *_, barrier in places]
        op = cluster.issue(AsyncOp("cp.async.bulk", warp, ins.line, finish, signals))
        races.copies(op)
        if not from_global:
            races.operand(op, own, source_rows, False)
        for shared, offset, barrier in places:
            races.use(op, barrier)
            races.operand(op, shared, shared.rows(offset, size), True)

    return lambda warp: each_lane(warp, one)


def destinations(
    warp: Any, target: int, barrier: int, chosen: int | None, pair_group: bool = False
) -> list[tuple[SharedMemory, int, Any]]:
    """(memory, offset, mbarrier) of each CTA that a copy writes to.

    A multicast writes to the same offset in each CTA of the mask and signals the barrier at the
    same offset there.  With cta_group::2 the rank parity of the barrier operand names the CTA of
    each destination's pair that is signalled.
    """
    cluster = warp.cta.cluster
    rank, offset = split_shared(target)
    barrier_rank, barrier_offset = split_shared(barrier)
    ranks = [rank] if chosen is None else [r for r in range(16) if chosen >> r & 1]
    places = []
    for number in ranks:
        if number >= len(cluster.ctas):
            raise InvalidOperand(f"a copy to rank {number} of {len(cluster.ctas)} CTAs")
        signalled = number
        if pair_group:
            signalled = (number & ~1) | (barrier_rank & 1)
        elif chosen is None:
            signalled = barrier_rank
            if signalled != number:
                raise InvalidOperand("the mbarrier of a copy is not in the destination CTA")
        where = signalled << 24 | barrier_offset
        found = cluster.barrier_at(where, None, "the copy's mbarrier operand")
        places.append((cluster.ctas[number].shared, offset, found))
    return places


@instruction("cp.async.bulk.global", "cp.reduce.async.bulk.global")
def build_bulk_to_global(ins: Instruction, c: Decoder) -> Step:
    """cp{.reduce}.async.bulk.global.shared::cta.bulk_group [d], [s], size."""
    reduces = ins.mods[0] == "reduce"
    m = Modifiers(ins, skip=3 if reduces else 2)
    m.choice("global")
    m.choice("shared::cta")
    m.choice("bulk_group")
    m.ignore_cache_hints()
    name, kind = "", "u8"
    if reduces:
        m.flag("noftz")
        name = m.choice(*REDUCTIONS)
        kind = m.type("u32", "s32", "b32", "u64", "s64", "b64", "f16", "bf16", "f32", "f64")
    m.done()
    to, source = (
        address_reader(c, ins.operands[0], "global"),
        address_reader(c, ins.operands[1], "shared"),
    )
    count = c.read(ins.operands[2], 32)
    for operand in ins.operands[3:]:
        c.read(operand, 64)

    def one(warp: Any) -> None:
        cta = warp.cta
        size = scalar(warp, bits32(warp.registers[count]))
        address, start = scalar(warp, to(warp)), scalar(warp, source(warp))
        check_bulk(size, address, start)
        rank, offset = split_shared(start)
        if rank != cta.rank:
            raise InvalidOperand("a bulk store from another CTA's shared memory")
        shared = cta.shared
        rows = shared.rows(offset, size)
        shared.check_async_read(rows, ins.form)
        target = cta.machine.memory.bytes_at(address, size)
        hold(shared, rows, 1)

        def finish() -> None:
            release(shared, rows, 1)
            data = shared.data[offset : offset + size]
            if reduces:
                with cta.machine.atomic:
                    reduce_into(target, data, name, kind)
            else:
                target[:] = data

        op = cta.cluster.issue(AsyncOp(ins.form.split(".global")[0], warp, ins.line, finish))
        races.operand(op, shared, rows, False)
        warp.bulk_open.append(op)

    return lambda warp: each_lane(warp, one)


@instruction("cp.async.bulk.prefetch")
def build_bulk_prefetch(ins: Instruction, c: Decoder) -> Step:
    """cp.async.bulk.prefetch{.tensor}: no effect on values."""
    m = Modifiers(ins, skip=3)
    m.ignore_cache_hints()
    m.flag("tensor")
    m.flag("1d", "2d", "3d", "4d", "5d")
    m.choice("L2")
    m.choice("global")
    m.flag("tile")
    m.done()
    for operand in ins.operands:
        if isinstance(operand, Memory):
            c.address(operand)
    return lambda warp: None
