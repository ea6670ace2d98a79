"""clusterlaunchcontrol: a running cluster takes over the work of one not yet started.

PTX ISA: clusterlaunchcontrol. The 16-byte response is opaque to programs; here its low word holds
x and y of the cancelled cluster's first CTA, its high word z and, in bit 63, success.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim import races
from ptxsim.decode import Decoder, Modifiers, Step, instruction
from ptxsim.errors import InvalidOperand
from ptxsim.isa.async_copy import each_lane, hold, release, scalar
from ptxsim.isa.loadstore import address_reader
from ptxsim.isa.sync import barrier_address
from ptxsim.machine import AsyncOp
from ptxsim.memory import CLEAN, OFFSET_MASK, RANK_SHIFT, WRITER
from ptxsim.ptx import Instruction, Vector
from ptxsim.values import Pair, bits64, uniform

RESPONSE_BYTES = 16
_SUCCESS = 63


@instruction("clusterlaunchcontrol.try_cancel")
def build_try_cancel(ins: Instruction, c: Decoder) -> Step:
    """try_cancel.async [response], [mbar]: the next cluster that waits to start never starts."""
    m = Modifiers(ins, skip=1)
    m.choice("async")
    m.flag("shared::cta")
    m.choice("mbarrier::complete_tx::bytes")
    everywhere = m.flag("multicast::cluster::all")
    m.type("b128")
    m.done()
    to = address_reader(c, ins.operands[0], "shared")
    signal = barrier_address(c, ins.operands[1], "shared")

    def one(warp: Any) -> None:
        cluster, machine = warp.cta.cluster, warp.cta.machine
        target, barrier = scalar(warp, to(warp)), scalar(warp, signal(warp))
        offset = target & OFFSET_MASK
        ctas = cluster.ctas if everywhere else [warp.cta]
        places = []
        for cta in ctas:
            rows = cta.shared.rows(offset, RESPONSE_BYTES)
            cta.shared.check_async_write(rows, ins.form)
            hold(cta.shared, rows, WRITER)
            where = cta.rank << RANK_SHIFT | barrier & OFFSET_MASK
            places.append((cta.shared, rows, cluster.barrier_at(where, None, ins.form)))

        def finish() -> None:
            first = machine.next_cluster()
            words = np.zeros(2, np.uint64)
            if first is not None:
                words[0] = first[0] | first[1] << 32
                words[1] = first[2] | 1 << _SUCCESS
            for shared, rows, found in places:
                release(shared, rows, WRITER)
                shared.data[offset : offset + RESPONSE_BYTES] = words.view(np.uint8)
                shared.state[offset : offset + RESPONSE_BYTES] = CLEAN
                races.finish_into(op, found)
                found.complete(RESPONSE_BYTES)

        signals = [barrier for *_, barrier in places]
        op = cluster.issue(
            AsyncOp("clusterlaunchcontrol.try_cancel", warp, ins.line, finish, signals)
        )
        races.copies(op)
        for shared, rows, _ in places:
            races.operand(op, shared, rows, True)

    return lambda warp: each_lane(warp, one)


@instruction("clusterlaunchcontrol.query_cancel")
def build_query(ins: Instruction, c: Decoder) -> Step:
    """query_cancel.is_canceled and .get_first_ctaid{::x,::y,::z} of a response."""
    m = Modifiers(ins, skip=1)
    axes = [f"get_first_ctaid::{axis}" for axis in "xyz"]
    what = m.choice("is_canceled", "get_first_ctaid", *axes)
    m.flag("v4")
    m.type("pred", "b32")
    m.type("b128")
    m.done()
    handle = c.read(ins.operands[1], 128)
    target = ins.operands[0]
    slots = c.writes(target, 32) if isinstance(target, Vector) else [c.write(target, 32)]

    def run(warp: Any) -> None:
        value = warp.registers[handle]
        lo, hi = value if value.__class__ is Pair else (0, 0)
        low, high = (uniform(bits64(v), warp.mask) for v in (lo, hi))
        if low is None or high is None:
            raise InvalidOperand("the response differs among the lanes")
        cancelled = bool(high >> _SUCCESS)
        if what == "is_canceled":
            warp.registers[slots[0]] = cancelled
            return
        coordinates = [low & 0xFFFFFFFF, low >> 32, high & 0x7FFFFFFF, 0]
        if not cancelled:
            # Undefined; compilers ask before they look at is_canceled.
            warp.cta.machine.suspect(
                InvalidOperand("get_first_ctaid of a request that cancelled nothing", line=ins.line)
            )
            coordinates = [0xFFFFFFFF] * 4
        if what != "get_first_ctaid":
            coordinates = [coordinates["xyz".index(what[-1])]]
        for slot, coordinate in zip(slots, coordinates, strict=False):
            warp.registers[slot] = coordinate

    return run
