"""cp{.reduce}.async.bulk.tensor: boxes of 1-D to 5-D tensors.  PTX ISA: cp.async.bulk.tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim import races, tensor_maps
from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.errors import InvalidOperand, OutOfBounds
from ptxsim.isa.async_copy import destinations, each_lane, hold, release, scalar
from ptxsim.isa.atomic import REDUCTIONS, combine
from ptxsim.isa.loadstore import address_reader
from ptxsim.isa.sync import barrier_address, uniform_int
from ptxsim.machine import AsyncOp, Machine
from ptxsim.memory import OFFSET_MASK, PARAM_BASE, TILED, WRITER, SharedMemory
from ptxsim.ptx import Instruction, Memory, Vector
from ptxsim.tensor_maps import TensorMap
from ptxsim.values import U8, signed


def read_map(machine: Machine, address: int) -> TensorMap:
    """The tensor map at a generic address (parameters or global memory)."""
    if address & 63:
        raise InvalidOperand(f"a tensor map at {address:#x}: it must be 64-byte aligned")
    if address & PARAM_BASE:
        start = address - PARAM_BASE
        raw = machine.params[start : start + 64].tobytes()
        if len(raw) < 64:
            raise OutOfBounds(f"a tensor map at parameter offset {start}")
    else:
        raw = machine.memory.bytes_at(address, 64).tobytes()
    if raw not in _DECODED:
        if len(_DECODED) > 1000:
            _DECODED.clear()
        _DECODED[raw] = tensor_maps.decode(raw)
    return _DECODED[raw]


_DECODED: dict[bytes, TensorMap] = {}


def _coordinates(c: Decoder, operand: Any, rank: int) -> Callable[[Any], tuple[int, ...]]:
    if not isinstance(operand, Vector) or len(operand.items) != rank:
        raise c.error(f"{rank} coordinates are needed")
    slots = [c.read(item, 32) for item in operand.items]

    def read(warp: Any) -> tuple[int, ...]:
        values = []
        for slot in slots:
            value = signed(warp.registers[slot], 32)
            values.append(value if value.__class__ is int else int(value[np.argmax(warp.mask)]))
        return tuple(values)

    return read


def _map_operand(c: Decoder, operand: Any, rank: int) -> tuple[Any, Any]:
    if not isinstance(operand, Memory) or not operand.more:
        raise c.error("needs [map, {coordinates}]")
    plain = Memory(operand.base, operand.offset)
    return address_reader(c, plain, "generic"), _coordinates(c, operand.more[0], rank)


def fetch_box(machine: Machine, found: TensorMap, start: tuple[int, ...]) -> np.ndarray:
    """The dense bytes of a box, innermost mode fastest, filled outside the tensor."""
    offsets, inside = tensor_maps.box_coordinates(found, start)
    item = found.item
    bits = np.dtype(f"uint{8 * item}")
    out = np.full(offsets.shape, tensor_maps.fill_value(found), bits)
    if inside.any():
        low, high = int(offsets[inside].min()), int(offsets[inside].max()) + item
        raw = machine.memory.bytes_at(found.address + low, high - low)
        if (offsets % item).any() or found.address % item:
            raise InvalidOperand("tensor map with strides that split elements")
        table = raw[: len(raw) // item * item].view(bits)
        if inside.all():
            out = table[(offsets - low) // item]
        else:
            out[inside] = table[(offsets[inside] - low) // item]
    if tensor_maps.ELEMENT_NAMES[found.element] == "f32" and found.element == 8:
        raise InvalidOperand("flush-to-zero tensor maps are not supported")
    return np.ascontiguousarray(out).reshape(-1).view(U8)


def box_rows(found: TensorMap, shared: SharedMemory, offset: int) -> tuple[slice, np.ndarray]:
    """The 16-byte rows of a box in shared memory: the range, and their order after the swizzle."""
    whole = shared.rows(offset, found.box_bytes, 128)
    order = np.arange(whole.start, whole.stop)
    return whole, tensor_maps.swizzle_rows(order, found.swizzle)


@instruction("cp.async.bulk.tensor")
def build_tensor_copy(ins: Instruction, c: Decoder) -> Step:
    """cp.async.bulk.tensor: loads signal an mbarrier with a full box, stores join a bulk group."""
    if "bulk_group" in ins.mods:
        return _build_store(ins, c, reduces=False)
    m = Modifiers(ins, skip=3)
    rank = int(m.choice("1d", "2d", "3d", "4d", "5d")[0])
    m.choice("shared::cluster", "shared::cta")
    m.choice("global")
    m.flag("tile")
    m.choice("mbarrier::complete_tx::bytes")
    multicast = m.flag("multicast::cluster")
    pair = m.choice("cta_group::1", "cta_group::2", default="") == "cta_group::2"
    m.ignore_cache_hints()
    m.done()
    to = address_reader(c, ins.operands[0], "shared")
    address, coordinates = _map_operand(c, ins.operands[1], rank)
    signal = barrier_address(c, ins.operands[2], "shared")
    mask_slot = c.read(ins.operands[3], 16) if multicast else None
    for operand in ins.operands[4 if multicast else 3 :]:
        c.read(operand, 64)

    def one(warp: Any) -> None:
        cluster, machine = warp.cta.cluster, warp.cta.machine
        found = read_map(machine, scalar(warp, address(warp)))
        if len(found.dims) != rank:
            raise InvalidOperand(f"a {rank}-D copy with a {len(found.dims)}-D tensor map")
        start = coordinates(warp)
        chosen = None if mask_slot is None else uniform_int(warp, mask_slot, "the CTA mask")
        places = destinations(
            warp, scalar(warp, to(warp)), scalar(warp, signal(warp)), chosen, pair
        )
        targets = []
        for shared, offset, barrier in places:
            whole, order = box_rows(found, shared, offset)
            shared.check_async_write(whole, "cp.async.bulk.tensor")
            hold(shared, whole, WRITER)
            targets.append((shared, whole, order, barrier))

        def finish() -> None:
            data = fetch_box(machine, found, start).view(np.complex128)
            tag = TILED + tensor_maps.SWIZZLE_SPANS.index(found.swizzle)
            for shared, whole, order, barrier in targets:
                release(shared, whole, WRITER)
                shared.views[16][order] = data
                shared.state[whole.start * 16 : whole.stop * 16] = tag
                races.finish_into(op, barrier)
                barrier.complete(found.box_bytes)

        signals = [barrier for *_, barrier in targets]
        op = cluster.issue(AsyncOp("cp.async.bulk.tensor", warp, ins.line, finish, signals))
        races.copies(op)
        for shared, whole, _, barrier in targets:
            races.use(op, barrier)
            races.operand(op, shared, whole, True)

    return lambda warp: each_lane(warp, one)


@instruction("cp.reduce.async.bulk.tensor")
def build_tensor_reduce(ins: Instruction, c: Decoder) -> Step:
    """cp.reduce.async.bulk.tensor: elementwise reduction with the map's element type."""
    return _build_store(ins, c, reduces=True)


def _build_store(ins: Instruction, c: Decoder, reduces: bool) -> Step:
    m = Modifiers(ins, skip=4 if reduces else 3)
    rank = int(m.choice("1d", "2d", "3d", "4d", "5d")[0])
    m.choice("global")
    m.choice("shared::cta")
    m.flag("tile")
    m.choice("bulk_group")
    name = m.choice(*REDUCTIONS) if reduces else ""
    m.ignore_cache_hints()
    m.done()
    address, coordinates = _map_operand(c, ins.operands[0], rank)
    source = address_reader(c, ins.operands[1], "shared")
    for operand in ins.operands[2:]:
        c.read(operand, 64)

    def one(warp: Any) -> None:
        cta = warp.cta
        found = read_map(cta.machine, scalar(warp, address(warp)))
        if len(found.dims) != rank:
            raise InvalidOperand(f"a {rank}-D copy with a {len(found.dims)}-D tensor map")
        start, shared = coordinates(warp), cta.shared
        offset = scalar(warp, source(warp)) & OFFSET_MASK
        whole, order = box_rows(found, shared, offset)
        shared.check_async_read(whole, ins.form.split(".global")[0])
        hold(shared, whole, 1)

        def finish() -> None:
            release(shared, whole, 1)
            with cta.machine.atomic:
                write_box(cta.machine, found, start, shared.views[16][order], name)

        op = cta.cluster.issue(AsyncOp("cp.async.bulk.tensor", warp, ins.line, finish))
        races.operand(op, shared, whole, False)
        warp.bulk_open.append(op)

    return lambda warp: each_lane(warp, one)


def write_box(
    machine: Machine, found: TensorMap, start: tuple[int, ...], data: np.ndarray, reduction: str
) -> None:
    """Write (or reduce) a dense box into the tensor; elements outside it are dropped."""
    offsets, inside = tensor_maps.box_coordinates(found, start)
    if not inside.any():
        return
    item = found.item
    bits = np.dtype(f"uint{8 * item}")
    values = np.ascontiguousarray(data).view(bits)[: offsets.size].reshape(offsets.shape)
    low, high = int(offsets[inside].min()), int(offsets[inside].max()) + item
    table = machine.memory.bytes_at(found.address + low, high - low).view(bits)
    index = (offsets[inside] - low) // item
    chosen = np.ascontiguousarray(values[inside])
    if reduction:
        kind = tensor_maps.ELEMENT_NAMES[found.element].replace("u8", "u16")
        chosen = np.ascontiguousarray(combine(reduction, kind)(table[index], chosen)).view(bits)
    table[index] = chosen
