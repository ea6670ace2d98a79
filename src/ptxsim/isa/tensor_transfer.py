"""tcgen05 allocation, loads, stores and waits.  PTX ISA 9.7.16.7-8, 9.7.16.11.

ld and st move data when they are issued, and are checked against what is still in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxsim import races
from ptxsim.access import store_shared
from ptxsim.decode import AGAIN, YIELD, Decoder, Modifiers, Step, instruction
from ptxsim.errors import TensorMemoryError
from ptxsim.isa.loadstore import address_reader
from ptxsim.isa.sync import uniform_int
from ptxsim.isa.warp import FULL, gather_lanes
from ptxsim.machine import Cta, Wait
from ptxsim.ptx import Immediate, Instruction, Memory
from ptxsim.values import bits32, lanes


def group_of(m: Modifiers) -> int:
    """The number of CTAs that work together, 1 or 2."""
    return int(m.choice("cta_group::1", "cta_group::2")[-1])


def use_group(warp: Any, group: int) -> None:
    """All tcgen05 instructions of a kernel use one cta_group; pairs need a cluster."""
    tensor = warp.cta.tensor
    if tensor.group not in (0, group):
        raise TensorMemoryError(f"cta_group::{group} after cta_group::{tensor.group}")
    if group == 2 and len(warp.cta.cluster.ctas) < 2:
        raise TensorMemoryError("cta_group::2 without a cluster of two CTAs")
    tensor.group = group


def pair_of(cta: Cta, group: int) -> list[Cta]:
    """The CTAs that an instruction of `cta` works on."""
    if group == 1:
        return [cta]
    even = cta.rank & ~1
    return [cta.cluster.ctas[even], cta.cluster.ctas[even + 1]]


def _meet_peer(warp: Any, group: int) -> bool:
    """With cta_group::2 a warp of each CTA of the pair performs allocation and release together:
    False if the executing one has to wait for the other (and goes on behind the instruction)."""
    if group == 1:
        return True
    mine, other = warp.cta.tensor, warp.cta.cluster.ctas[warp.cta.rank ^ 1].tensor
    mine.meetings += 1
    number = mine.meetings
    if other.meetings >= number:
        return True
    warp.group.wait = Wait(
        lambda: other.meetings >= number,
        lambda: "waits for the pair's other CTA to allocate or release tensor memory too",
    )
    return False


@instruction("tcgen05.alloc")
def build_alloc(ins: Instruction, c: Decoder) -> Step:
    """tcgen05.alloc [smem], columns: waits while none are free; with a pair both CTAs take part."""
    m = Modifiers(ins, skip=1)
    group = group_of(m)
    m.choice("sync")
    m.choice("aligned")
    m.flag("shared::cta")
    m.type("b32")
    m.done()
    where = address_reader(c, ins.operands[0], "shared")
    count = c.read(ins.operands[1], 32)

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        use_group(warp, group)
        columns = uniform_int(warp, count, "the column count")
        tensor = warp.cta.tensor
        if columns not in (32, 64, 128, 256, 512):
            raise TensorMemoryError(f"tcgen05.alloc of {columns} columns: a power of two, 32..512")
        if not tensor.permit:
            raise TensorMemoryError("tcgen05.alloc after relinquish_alloc_permit")
        start = tensor.find(columns)
        if start is None:
            warp.group.wait = Wait(
                lambda: tensor.find(columns) is not None,
                lambda: f"waits for {columns} free columns of tensor memory",
            )
            return AGAIN
        warp.cta.machine.progress += 1
        tensor.allocate(start, columns)
        target = where(warp)
        store_shared(warp, target if target.__class__ is int else int(target[0]), start, 4)
        return None if _meet_peer(warp, group) else YIELD

    return run


@instruction("tcgen05.dealloc", "tcgen05.relinquish_alloc_permit")
def build_dealloc(ins: Instruction, c: Decoder) -> Step:
    """tcgen05.dealloc taddr, columns: exactly one allocation; relinquish: no more allocs."""
    m = Modifiers(ins, skip=1)
    group = group_of(m)
    m.choice("sync")
    m.choice("aligned")
    if ins.mods[0] == "dealloc":
        m.type("b32")
    m.done()
    slots = [c.read(o, 32) for o in ins.operands]

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        use_group(warp, group)
        warp.cta.machine.progress += 1
        if not slots:
            warp.cta.tensor.permit = False
            return None
        address = uniform_int(warp, slots[0], "the tensor-memory address")
        columns = uniform_int(warp, slots[1], "the column count")
        _touch(warp, (0, 128, address & 0xFFFF, columns), "tcgen05.dealloc", True)
        warp.cta.tensor.releasing = (address, columns)
        if not _meet_peer(warp, group):
            return YIELD  # the one that comes second releases for both
        for cta in pair_of(warp.cta, group):
            if cta.tensor.releasing is not None:
                cta.tensor.release(*cta.tensor.releasing)
        return None

    return run


# Loads and stores.
@dataclass(frozen=True, slots=True)
class _Shape:
    """Where register r of lane l is: row and column relative to the address."""

    rows: int
    columns: int
    row: np.ndarray  # (registers, 32)
    column: np.ndarray


def shape_table(name: str, times: int, step: int = 0) -> _Shape:
    """The tables of PTX ISA 9.7.16.2.3 for .xN."""
    lane = np.arange(32)[None, :]
    if name == "32x32b":
        r = np.arange(times)[:, None]
        return _Shape(32, times, lane + 0 * r, r + 0 * lane)
    if name == "16x64b":
        r = np.arange(times)[:, None]
        return _Shape(16, 2 * times, lane // 4 + 8 * (lane % 2) + 0 * r, lane // 2 % 2 + 2 * r)
    if name == "16x128b":
        r = np.arange(2 * times)[:, None]
        return _Shape(16, 4 * times, lane // 4 + 8 * (r % 2), lane % 4 + 4 * (r // 2))
    if name == "16x256b":
        r = np.arange(4 * times)[:, None]
        return _Shape(
            16, 8 * times, lane // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (lane % 4) + 8 * (r // 4)
        )
    r = np.arange(times)[:, None]  # 16x32bx2
    return _Shape(16, step + times, lane % 16 + 0 * r, r + step * (lane // 16))


def _transfer(ins: Instruction, c: Decoder, m: Modifiers) -> tuple[_Shape, bool, Any]:
    m.choice("sync")
    m.choice("aligned")
    name = m.choice("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    times = int(m.choice(*(f"x{1 << i}" for i in range(8)))[1:])
    packed = m.flag("pack::16b", "unpack::16b")
    m.type("b32")
    m.done()
    memory = next(o for o in ins.operands if isinstance(o, Memory))
    step = 0
    if name == "16x32bx2":
        extra = next(o for o in ins.operands if isinstance(o, Immediate))
        step = extra.bits
    shape = shape_table(name, times, step)
    return shape, packed, c.address(memory)


def _window(warp: Any, address: int, shape: _Shape, packed: bool, what: str) -> tuple[int, int]:
    """Lane and column of the address, checked against the warp's 32 lanes and the allocation."""
    lane, column = address >> 16, address & 0xFFFF
    base = 32 * (warp.index % 4)
    if not base <= lane or lane + shape.rows > base + 32:
        raise TensorMemoryError(
            f"{what} at lane {lane}: warp {warp.index} reaches lanes {base}..{base + 31} only"
        )
    if (shape.rows == 32 and lane % 32) or lane % 16:
        raise TensorMemoryError(f"{what} at lane {lane}: not a multiple of the window's rows")
    columns = shape.columns * (2 if packed else 1)
    warp.cta.tensor.check_window(lane, shape.rows, column, columns, what)
    return lane, column


def _touch(warp: Any, window: tuple[int, int, int, int], what: str, writing: bool) -> None:
    """An access by a warp to (lane, rows, column, columns), for race detection."""
    lane, rows, column, columns = window
    shadow = warp.cta.tensor.shadow
    if shadow is not None:
        cells = (slice(lane, lane + rows), slice(column, column + columns))
        actor = races.Transfer(warp) if what == "tcgen05.st" else warp
        races.access(actor, shadow, cells, writing, what)


@instruction("tcgen05.ld")
def build_load(ins: Instruction, c: Decoder) -> Step:
    """tcgen05.ld of all shapes; values are delivered at once, in-flight cells are an error."""
    m = Modifiers(ins, skip=1)
    shape, packed, (slot, offset) = _transfer(ins, c, m)
    slots = c.writes(ins.operands[0], 32)
    if len(slots) != len(shape.row):
        raise m.unsupported(f"{len(slots)} registers instead of {len(shape.row)}")
    straight = shape.rows == 32 and not packed

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        r, tensor = warp.registers, warp.cta.tensor
        address = (uniform_int(warp, slot, "the tensor-memory address") + offset) & 0xFFFFFFFF
        lane, column = _window(warp, address, shape, packed, "tcgen05.ld")
        columns = shape.columns * (2 if packed else 1)
        _touch(warp, (lane, shape.rows, column, columns), "tcgen05.ld", False)
        tensor.check_idle(lane, shape.rows, column, columns, "tcgen05.ld")
        if straight:
            tensor.check_written(slice(lane, lane + 32), column, columns, "tcgen05.ld")
            block = tensor.cells[lane : lane + 32, column : column + columns]
            for target, row in zip(slots, np.ascontiguousarray(block.T), strict=True):
                r[target] = row
            return None
        rows, cols = shape.row + lane, shape.column
        index = (rows, column + cols) if not packed else (rows, column + 2 * cols)
        if not tensor.written[index].all():
            tensor.check_written(slice(lane, lane + shape.rows), column, columns, "tcgen05.ld")
        values = tensor.cells[index]
        if packed:
            high = tensor.cells[rows, column + 2 * cols + 1]
            values = (values & np.uint32(0xFFFF)) | high << np.uint32(16)
        for target, row in zip(slots, values, strict=True):
            r[target] = row
        return None

    return run


@instruction("tcgen05.st")
def build_store(ins: Instruction, c: Decoder) -> Step:
    """tcgen05.st of all shapes; until wait::st the cells may not be used by others."""
    m = Modifiers(ins, skip=1)
    shape, packed, (slot, offset) = _transfer(ins, c, m)
    source = next(o for o in reversed(ins.operands) if not isinstance(o, (Memory, Immediate)))
    slots = c.reads(source, 32)
    if len(slots) != len(shape.row):
        raise m.unsupported(f"{len(slots)} registers instead of {len(shape.row)}")

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        r, tensor = warp.registers, warp.cta.tensor
        address = (uniform_int(warp, slot, "the tensor-memory address") + offset) & 0xFFFFFFFF
        lane, column = _window(warp, address, shape, packed, "tcgen05.st")
        columns = shape.columns * (2 if packed else 1)
        _touch(warp, (lane, shape.rows, column, columns), "tcgen05.st", True)
        tensor.check_idle(lane, shape.rows, column, columns, "tcgen05.st", writing=True)
        values = np.stack([lanes(bits32(r[s]), 32) for s in slots])
        rows, cols = shape.row + lane, shape.column
        if packed:
            tensor.cells[rows, column + 2 * cols] = values & np.uint32(0xFFFF)
            tensor.cells[rows, column + 2 * cols + 1] = values >> np.uint32(16)
        else:
            tensor.cells[rows, column + cols] = values
        tensor.written[lane : lane + shape.rows, column : column + columns] = True
        warp.stores.append((lane, shape.rows, column, columns))
        return None

    return run


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def build_wait(ins: Instruction, c: Decoder) -> Step:
    """tcgen05.wait::{ld,st}: this thread's transfers are complete."""
    m = Modifiers(ins, skip=1)
    m.choice("sync")
    m.choice("aligned")
    m.done()
    stores = ins.mods[0] == "wait::st"

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        if stores:
            races.transfers_done(warp)
            warp.stores.clear()
        return None

    return run


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def build_fence(ins: Instruction, c: Decoder) -> Step:
    """tcgen05.fence: ordering only; shipping compilers leave it out, so its absence is no error."""
    Modifiers(ins, skip=1).done()
    return lambda warp: None
