"""Generic-proxy loads and stores of one warp: addresses to bytes, with every check.

`load` gives the bytes of each lane as one element of 1, 2, 4, 8 or 16 bytes (two of 16 for 32); a
uniform address gives one Python integer.  `store` takes the same shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim import proxy, races
from ptxsim.errors import InvalidOperand, Misaligned, OutOfBounds, SimulationError
from ptxsim.memory import (
    LOCAL_BASE,
    OFFSET_MASK,
    PARAM_BASE,
    RANK_SHIFT,
    SHARED_BASE,
    SharedMemory,
)
from ptxsim.values import LANES, S64, U8, U32, U64

_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
_STEPS = np.arange(32)


def active_addresses(warp: Any, address: Any) -> Any:
    """The int, or the addresses of the active lanes only."""
    if address.__class__ is int or warp.mask is None:
        return address
    return address[warp.mask]


def lane_addresses(address: Any) -> np.ndarray:
    """Addresses from a register of 32 or 64 bits as 32 uint64 lanes."""
    if address.__class__ is int:
        return np.full(LANES, address, U64)
    wide: np.ndarray = address if address.dtype is U64 else address.astype(U64)
    return wide


def spread(warp: Any, values: np.ndarray) -> np.ndarray:
    """Values of the active lanes back in their places."""
    if warp.mask is None:
        return values
    out = np.zeros((LANES, *values.shape[1:]), values.dtype)
    out[warp.mask] = values
    return out


def shared_window(warp: Any, address: Any, cluster: bool) -> tuple[SharedMemory, Any]:
    """The CTA's memory that shared addresses fall into, and offsets in it."""
    first = address if address.__class__ is int else int(address[0])
    rank = first >> RANK_SHIFT
    ctas = warp.cta.cluster.ctas
    if rank != warp.cta.rank and (not cluster or rank >= len(ctas)):
        error = OutOfBounds(
            f"shared address {first:#x} is not in this {'cluster' if cluster else 'CTA'}"
        )
        error.address = first
        raise error
    shared = ctas[rank].shared
    if address.__class__ is int:
        return shared, address & OFFSET_MASK
    return shared, address.astype(S64) - shared.base


def load_shared(warp: Any, address: Any, size: int, cluster: bool = False) -> Any:
    """Bytes of shared memory, checked."""
    address = active_addresses(warp, address)
    shared, offsets = shared_window(warp, address, cluster)
    unit = min(size, 16)
    shared.check(offsets, size, size)
    index = offsets >> _SHIFT[unit]
    if size > 16:
        shared.check_read(offsets, size, shared.states[unit], index)
        index = (
            np.stack([index, index + 1], -1)
            if index.__class__ is not int
            else slice(index, index + 2)
        )
    shared.check_read(offsets, size, shared.states[unit], index)
    if shared.shadow is not None and size >= 4 and warp.tracked:
        races.access(warp, shared.shadow, races.words(offsets, size), False, "a load")
    values = shared.views[unit][index]
    if offsets.__class__ is int:
        return int.from_bytes(values.tobytes(), "little")
    return spread(warp, values)


def store_shared(warp: Any, address: Any, values: Any, size: int, cluster: bool = False) -> None:
    """Write shared memory; the bytes are unpublished to the async proxy until a fence."""
    address = active_addresses(warp, address)
    shared, offsets = shared_window(warp, address, cluster)
    low, high = shared.check(offsets, size, size)
    shared.check_write(offsets, size)
    unit = min(size, 16)
    mark = proxy.mark(warp)
    if offsets.__class__ is int:
        data = values if values.__class__ is int else _last_lane(warp, values)
        values = np.frombuffer(data.to_bytes(size, "little"), U8)
        index: Any = slice(offsets, offsets + size)
        _note_store(warp, shared, offsets, size, (shared.data, index, values))
        shared.data[index] = values
        shared.state[index] = mark
    else:
        index = offsets >> _SHIFT[unit]
        if values.__class__ is int:
            values = _elements(values, size)
        elif warp.mask is not None:
            values = values[warp.mask]
        if size > 16:
            raise InvalidOperand("a shared store of 32 bytes")
        _note_store(warp, shared, offsets, size, (shared.views[unit], index, values))
        shared.views[unit][index] = values
        index = (offsets[:, None] + np.arange(size)).reshape(-1) if size < 16 else offsets >> 4
        if size < 16:
            shared.state[index] = mark
        else:
            shared.states[16][index] = _mark16(mark)
    warp.cta.machine.stores += 1
    proxy.note(warp, shared, low, high + size)


def _note_store(
    warp: Any, shared: SharedMemory, offsets: Any, size: int, assignment: tuple[Any, Any, Any]
) -> None:
    """Look for races of the store that `memory[index] = values` will carry out."""
    if shared.shadow is None or size < 4 or not warp.tracked:
        return
    memory, index, values = assignment

    def repeats() -> np.ndarray:
        old = memory[index]
        new = np.ascontiguousarray(np.broadcast_to(values, old.shape), old.dtype)
        return np.asarray(old.view(U32) == new.view(U32))

    races.access(warp, shared.shadow, races.words(offsets, size), True, "a store", repeats)


_MARKS: dict[int, Any] = {}


def _mark16(mark: int) -> Any:
    if mark not in _MARKS:
        _MARKS[mark] = np.full(16, mark, U8).view(np.complex128)[0]
    return _MARKS[mark]


def _elements(value: int, size: int) -> Any:
    """A uniform integer as one element of `size` bytes."""
    raw = np.frombuffer(value.to_bytes(size, "little"), U8)
    return raw.view(np.complex128 if size == 16 else np.dtype(f"uint{8 * size}"))[0]


def _last_lane(warp: Any, values: np.ndarray) -> int:
    """Lanes that store to one address: one of them wins; here the last active one."""
    lane = LANES - 1 if warp.mask is None else int(np.flatnonzero(warp.mask)[-1])
    return int.from_bytes(np.ascontiguousarray(values[lane]).tobytes(), "little")


def check_alignment(address: Any, size: int) -> None:
    """Natural alignment of the whole access."""
    if address.__class__ is int:
        wrong = address if address & (size - 1) else None
    else:
        bad = (address & np.uint64(size - 1)) != 0
        wrong = int(address[bad][0]) if bad.any() else None
    if wrong is not None:
        error = Misaligned(f"access of {size} bytes at {wrong:#x}")
        error.address = wrong
        raise error


def load_global(warp: Any, address: Any, size: int) -> Any:
    """Bytes of a host buffer."""
    memory = warp.cta.machine.memory
    unit = min(size, 16)
    if address.__class__ is int:
        check_alignment(address, size)
        return int.from_bytes(memory.bytes_at(address, size).tobytes(), "little")
    address = active_addresses(warp, address)
    check_alignment(address, size)
    low, high = int(address.min()), int(address.max()) + size
    try:
        region = memory.region(low, high)
    except OutOfBounds:
        return spread(warp, _gather_slowly(memory, address, size))
    index = (address - np.uint64(region.start)).view(S64) >> _SHIFT[unit]
    if size > 16:
        index = np.stack([index, index + 1], -1)
    return spread(warp, region.views[unit][index])


def _gather_slowly(memory: Any, address: np.ndarray, size: int) -> np.ndarray:
    """Lanes in different buffers: one by one, so that the one outside of all is named."""
    rows = [memory.bytes_at(a, size).tobytes() for a in address.tolist()]
    unit = min(size, 16)
    dtype = np.dtype(np.complex128) if unit == 16 else np.dtype(f"uint{8 * unit}")
    flat = np.frombuffer(b"".join(rows), dtype)
    return flat.reshape(-1, 2) if size > 16 else flat


def store_global(warp: Any, address: Any, values: Any, size: int) -> None:
    """Write host buffers."""
    memory = warp.cta.machine.memory
    warp.cta.machine.stores += 1
    unit = min(size, 16)
    if address.__class__ is int:
        check_alignment(address, size)
        data = values if values.__class__ is int else _last_lane(warp, values)
        memory.bytes_at(address, size)[:] = np.frombuffer(data.to_bytes(size, "little"), U8)
        return
    address = active_addresses(warp, address)
    check_alignment(address, size)
    if values.__class__ is int:
        values = np.frombuffer(values.to_bytes(size, "little"), U8)
        values = values.view(np.complex128 if unit == 16 else np.dtype(f"uint{8 * unit}"))
        values = values if size > 16 else values[0]
    elif warp.mask is not None:
        values = values[warp.mask]
    low, high = int(address.min()), int(address.max()) + size
    try:
        region = memory.region(low, high)
    except OutOfBounds:
        rows = np.broadcast_to(values, (len(address), *np.shape(values)[1:]))
        for one, row in zip(address.tolist(), rows, strict=True):
            raw = np.frombuffer(np.ascontiguousarray(row).tobytes(), U8)
            memory.bytes_at(one, size)[:] = raw
        return
    index = (address - np.uint64(region.start)).view(S64) >> _SHIFT[unit]
    if size > 16:
        index = np.stack([index, index + 1], -1)
    region.views[unit][index] = values


def global_elements(
    warp: Any, address: np.ndarray, size: int, item: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """A buffer as unsigned elements of `item` bytes, and the index of the `size` bytes at each
    address, one row each; None if the addresses lie in several buffers."""
    check_alignment(address, size)
    low, high = int(address.min()), int(address.max()) + size
    try:
        region = warp.cta.machine.memory.region(low, high)
    except OutOfBounds:
        return None
    warp.cta.machine.stores += 1
    index = (address - np.uint64(region.start)).view(S64) >> _SHIFT[item]
    return region.views[item], index[:, None] + _STEPS[: size // item]


def load_param(warp: Any, address: Any, size: int) -> Any:
    """Bytes of the kernel's parameters."""
    params = warp.cta.machine.params
    if address.__class__ is not int:
        rows = [_param_bytes(params, a, size) for a in lane_addresses(address).tolist()]
        flat = np.frombuffer(b"".join(rows), np.dtype(f"uint{8 * min(size, 8)}"))
        if size <= 8:
            return flat
        return flat.view(np.complex128).reshape(LANES, -1)[:, 0]
    return int.from_bytes(_param_bytes(params, address, size), "little")


def _param_bytes(params: np.ndarray, address: int, size: int) -> bytes:
    if address + size > len(params):
        raise OutOfBounds(f"{size} parameter bytes at offset {address}: there are {len(params)}")
    return params[address : address + size].tobytes()


def _local_index(warp: Any, address: Any, size: int) -> tuple[np.ndarray, np.ndarray]:
    memory = warp.local
    offsets = lane_addresses(address).view(S64)
    active = np.arange(LANES) if warp.mask is None else np.flatnonzero(warp.mask)
    offsets = offsets[active]
    if (offsets & (size - 1)).any():
        raise Misaligned(f"local access of {size} bytes at offset {int(offsets[0])}")
    if offsets.min() < 0 or offsets.max() + size > memory.size:
        raise OutOfBounds(f"local offset {int(offsets.max())}: the stack has {memory.size} bytes")
    return active[:, None], offsets[:, None] + np.arange(size)


def load_local(warp: Any, address: Any, size: int) -> Any:
    """Bytes of the lanes' own stacks."""
    from ptxsim.errors import UninitialisedRead

    row, column = _local_index(warp, address, size)
    if not warp.local.written[row, column].all():
        raise UninitialisedRead(f"{size} local bytes were never written")
    raw = np.ascontiguousarray(warp.local.data[row, column])
    unit = min(size, 16)
    dtype = np.dtype(np.complex128) if unit == 16 else np.dtype(f"uint{8 * unit}")
    out = raw.view(dtype)
    return spread(warp, out if size > 16 else out[:, 0])


def store_local(warp: Any, address: Any, values: Any, size: int) -> None:
    """Write the lanes' own stacks."""
    row, column = _local_index(warp, address, size)
    if values.__class__ is int:
        raw = np.frombuffer(values.to_bytes(size, "little"), U8)[None]
    else:
        values = values if warp.mask is None else values[warp.mask]
        raw = np.ascontiguousarray(values).view(U8).reshape(len(row), size)
    warp.local.data[row, column] = raw
    warp.local.written[row, column] = True


_WINDOWS = ((SHARED_BASE, "shared"), (LOCAL_BASE, "local"), (PARAM_BASE, "param"))


def space_of(warp: Any, address: Any) -> tuple[str, Any]:
    """Which window generic addresses fall into, and the address in that space."""
    first = address
    if address.__class__ is not int:
        first = int(address[0] if warp.mask is None else address[warp.mask][0])
    for base, name in _WINDOWS:
        if first & base:
            if address.__class__ is int:
                return name, address - base
            inner = address - np.uint64(base)
            active = inner if warp.mask is None else inner[warp.mask]
            if int(active.max()) >= base:
                raise SimulationError("lanes of one generic access are in different state spaces")
            return name, inner
    return "global", address


def load(warp: Any, space: str, address: Any, size: int) -> Any:
    """Load from a state space or a generic address."""
    if space == "generic":
        space, address = space_of(warp, address)
        if space == "shared":
            space = "shared::cluster"
    if space == "shared":
        return load_shared(warp, address, size)
    if space == "shared::cluster":
        return load_shared(warp, address, size, cluster=True)
    if space in ("global", "const"):
        return load_global(warp, address, size)
    return load_local(warp, address, size) if space == "local" else load_param(warp, address, size)


def store(warp: Any, space: str, address: Any, values: Any, size: int) -> None:
    """Store to a state space or a generic address."""
    if space == "generic":
        space, address = space_of(warp, address)
        if space == "shared":
            space = "shared::cluster"
    if space == "shared":
        store_shared(warp, address, values, size)
    elif space == "shared::cluster":
        store_shared(warp, address, values, size, cluster=True)
    elif space == "global":
        store_global(warp, address, values, size)
    elif space == "local":
        store_local(warp, address, values, size)
    else:
        raise InvalidOperand(f"a store to .{space}")


def join(parts: list[Any], size: int) -> Any:
    """Element values of `size` bytes as the one value that `store` takes."""
    if all(p.__class__ is int for p in parts):
        value = 0
        for number, part in enumerate(parts):
            value |= part << (8 * size * number)
        return value
    dtype = np.dtype(f"uint{8 * size}")
    table = np.empty((LANES, len(parts)), dtype)
    for number, part in enumerate(parts):
        table[:, number] = part if part.__class__ is int else part.view(dtype)
    total = size * len(parts)
    if total == size:
        return table[:, 0]
    if total > 16:
        return table.view(np.complex128)
    return table.view(np.complex128 if total == 16 else np.dtype(f"uint{8 * total}"))[:, 0]


def split(value: Any, size: int, count: int) -> list[Any]:
    """What `load` gave as `count` element values of `size` bytes."""
    if value.__class__ is int:
        mask = (1 << (8 * size)) - 1
        return [value >> (8 * size * i) & mask for i in range(count)]
    if count == 1:
        return [value]
    table = np.ascontiguousarray(value).view(np.dtype(f"uint{8 * size}")).reshape(LANES, count)
    return list(np.ascontiguousarray(table.T))
