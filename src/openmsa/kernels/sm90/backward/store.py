"""A warp adds its sums to global memory: dQ of a tile, and dV and dK of a task.

A warp has 16 rows (of dQ: heads of queries; of dV and dK: keys) and 64 channels of them at a time,
which it writes to shared memory, 32 channels (128 bytes, swizzled) to a box, and hands to the copy
engine, whose fp32 additions in the L2 cache nobody waits for.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402
from cutlass.cute.nvgpu import cpasync  # noqa: E402
from cutlass.cutlass_dsl import select_  # noqa: E402

from openmsa.kernels.sm90.backward import fixed  # noqa: E402
from openmsa.kernels.sm90.backward.config import HEAD_DIM, TILE_ROWS, Meta  # noqa: E402
from openmsa.kernels.sm90.backward.context import Context, Maps  # noqa: E402

__all__ = [
    "BOX", "WARP_ROWS", "Rows", "Task", "add_block", "await_turn", "drain", "end_turn", "send_rows",
    "task_of", "write_rows",
]  # fmt: skip

BOX = 32
"""Channels of a box: 128 bytes of fp32, the span of a swizzle."""

WARP_ROWS = 16
_WIDE = 64  # channels of a warp's turn
_BOXES = _WIDE // BOX
_BOX_ROWS = TILE_ROWS  # rows of a warpgroup: a box of shared memory


@dataclass(frozen=True)
class Rows:
    """Where a warp's 16 rows of dQ go: for each box of heads its query, -1 for none, and which box
    of heads of the tensor it is."""

    queries: Any
    boxes: Any


@cute.jit
def write_rows(c: Context, shared: Any, thread: Int32, stage: Any, dq: Any) -> Rows:
    """dQ of the warp's rows and of the warpgroup's 64 channels to shared memory. `send_rows` later
    hands it over: a fence at once would wait for what was just written."""
    warp = cute.arch.make_warp_uniform(thread % 128 // 32)
    group, heads = c.config.group, c.config.heads
    if cutlass.const_expr(c.config.deterministic):
        dq = _integers(c, stage, thread, dq)
    _begin()
    _write(shared, thread, dq, 0, WARP_ROWS)
    first = c.meta(stage, Meta.HEAD) * group
    rows = [warp * WARP_ROWS + piece * heads for piece in range(WARP_ROWS // heads)]
    return Rows(
        tuple(c.ints[stage, c.query_at(row // group)] for row in rows),
        tuple((first + row % group) // heads for row in rows),
    )


@cute.jit
def send_rows(c: Context, maps: Maps, shared: Any, thread: Int32, rows: Rows) -> None:
    """What `write_rows` has written."""
    half = cute.arch.make_warp_uniform(thread // 128)
    warp = cute.arch.make_warp_uniform(thread % 128 // 32)
    heads = c.config.heads
    shared = cute.recast_ptr(shared, dtype=Int32 if c.config.deterministic else Float32)
    tiles = cute.local_tile(maps.dq_at, (BOX, heads, 1), (None, None, None))
    _publish()
    for piece in cutlass.range_constexpr(WARP_ROWS // heads):
        row, query = warp * WARP_ROWS + piece * heads, rows.queries[piece]
        if query >= 0:
            for box in cutlass.range_constexpr(_BOXES):
                source = _box(shared, half, box, row, heads)
                channels = half * _BOXES + box
                _add(maps.dq, source, tiles[None, None, None, channels, rows.boxes[piece], query])
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _integers(c: Context, stage: Any, thread: Int32, dq: Any) -> Any:
    """dQ in its rows' units, to the nearest, plus `fixed.BIAS`.

    A conversion is an instruction of the unit that exponentials need, too, at an eighth of the rate
    of additions. So the value is added to a number so large that the sum's last bit is 2^8, and
    what that leaves to one whose last bit is 1: the bits of both sums are the integer and a bias.
    """
    found = cute.make_rmem_tensor(dq.layout, Int32)
    row = thread % 128 // 32 * WARP_ROWS + thread % 32 // 4
    factors = (c.floats[stage, 2, row], c.floats[stage, 2, row + 8])
    for i in cutlass.range_constexpr(cute.size(dq)):
        value = dq[i] * factors[i // 2 % 2]
        high = value + Float32(fixed.HIGH)
        low = value - (high - Float32(fixed.HIGH)) + Float32(fixed.LOW)
        found[i] = (high.bitcast(Int32) << fixed.SHIFT) + low.bitcast(Int32)
    return found


@dataclass(frozen=True)
class Task:
    """What a flush needs to know: KV head, schedule row, first key and keys of the block, and the
    edges of the row in earlier tasks and in this one."""

    head: Int32
    row: Int32
    start: Int32
    keys: Int32
    before: Int32
    edges: Int32


def task_of(c: Context, stage: Any) -> Task:
    """The task of the tile in ``stage``."""
    order = (Meta.HEAD, Meta.ROW, Meta.START, Meta.KEYS, Meta.BEFORE, Meta.EDGES)
    return Task(*(c.meta(stage, which) for which in order))


@cute.jit
def await_turn(c: Context, thread: Int32, task: Task) -> None:
    """Where sums are ordered: until dk and dv of the warp's keys hold all earlier tasks. Those were
    taken before this one, so that their thread blocks are running or done."""
    if cutlass.const_expr(c.config.deterministic):
        turn = _turn(c, thread, task)
        while cute.arch.load(turn, Int32, sem="acquire", scope="gpu") < task.before:
            pass
        cute.arch.fence_proxy("async.global")


@cute.jit
def end_turn(c: Context, thread: Int32, task: Task) -> None:
    """Where sums are ordered: the next task of the key block may add."""
    if cutlass.const_expr(c.config.deterministic):
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
        cute.arch.sync_warp()
        if thread % 32 == 0:
            cute.arch.atomic_add(_turn(c, thread, task), task.edges, sem="release", scope="gpu")


def _turn(c: Context, thread: Any, task: Task) -> Any:
    turns = c.tensors.turns
    return turns.iterator + ((task.head * turns.shape[1] + task.row) * 8 + thread // 32)


@cute.jit
def add_block(
    c: Context, atom: Any, at: Any, shared: Any, thread: Int32, task: Task, total: Any
) -> None:
    """dV or dK of the warp's 16 keys; those past a short block add zero to what lies there."""
    head, start, keys = task.head, task.start, task.keys
    half = cute.arch.make_warp_uniform(thread // 128)
    warp = cute.arch.make_warp_uniform(thread % 128 // 32)
    first = half * TILE_ROWS + warp * WARP_ROWS
    moved = cute.domain_offset((0, start + first, 0), at)
    tiles = cute.local_tile(moved, (BOX, WARP_ROWS, 1), (None, None, None))
    for turn in cutlass.range_constexpr(HEAD_DIM // _WIDE):
        _begin()
        _write(shared, thread, total, turn * _WIDE, keys - first)
        _publish()
        if first < keys:
            for box in cutlass.range_constexpr(_BOXES):
                _add(
                    atom,
                    _box(shared, half, box, warp * WARP_ROWS, WARP_ROWS),
                    tiles[None, None, None, turn * _BOXES + box, 0, head],
                )
        cute.arch.cp_async_bulk_commit_group()


def drain() -> None:
    """Until everything that the warp has handed over is in memory."""
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def _begin() -> None:
    """Until the warp's shared memory has been read."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()


@cute.jit
def _write(shared: Any, thread: Int32, values: Any, first: Any, live: Any) -> None:
    """64 channels from ``first`` on to shared memory; rows from ``live`` on are zero.

    A thread's two rows are 8 apart, and it has two neighbouring channels of every eight.

    Swizzling lets 16-byte pieces of a row's 128 bytes change places by the row's last three bits;
    rows 2 n and 2 n + 1 then have the same banks for the same 32 bytes. So odd rows write their
    eights in another order, and the 16 lanes that are served together meet no bank twice.
    """
    half, warp, lane = thread // 128, thread % 128 // 32, thread % 32
    row, pair = lane // 4, lane % 4
    odd = row % 2 != 0
    shared = cute.recast_ptr(shared, dtype=values.element_type)
    base = shared + (half * _BOXES * _BOX_ROWS + warp * WARP_ROWS + row) * BOX
    for box in cutlass.range_constexpr(_BOXES):
        for eight in cutlass.range_constexpr(4):
            at = (eight * 2 + pair // 2) ^ row ^ (row % 2 * 4)
            to = base + (at * 4 + pair % 2 * 2 + box * (_BOX_ROWS * BOX))
            for lower in cutlass.range_constexpr(2):
                two = cute.make_rmem_tensor(2, values.element_type)
                for i in cutlass.range_constexpr(2):
                    mine = first // 2 + box * 16 + lower * 2 + i
                    a, b = values[mine + eight * 4], values[mine + (eight ^ 2) * 4]
                    value = select_(odd, b, a)
                    two[i] = select_(row + lower * 8 < live, value, values.element_type(0))
                target = cute.make_tensor((to + lower * 8 * BOX).align(8), cute.make_layout(2))
                cute.autovec_copy(two, target)


@cute.jit
def _publish() -> None:
    """What the warp wrote to shared memory is there for the copy engine."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


def _box(shared: Any, half: Any, box: Any, row: Any, rows: int) -> Any:
    """``[channel, row, 1]`` of shared memory."""
    at = shared + ((half * _BOXES + box) * _BOX_ROWS + row) * BOX
    layout = cute.make_layout((BOX, rows, 1), stride=(1, BOX, 0))
    return cute.make_tensor(cute.recast_ptr(at.align(128), cute.make_swizzle(3, 4, 3)), layout)


@cute.jit
def _add(atom: Any, shared: Any, tile: Any) -> None:
    source, target = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(tile, 0, 3)
    )
    cute.copy(atom, source, target)
