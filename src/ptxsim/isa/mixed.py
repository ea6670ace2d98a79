"""Mixed-precision arithmetic.  PTX ISA: Mixed Precision Floating Point Instructions (sm_100)."""

from __future__ import annotations

from typing import Any

from ptxsim.decode import Decoder, Modifiers, Step
from ptxsim.isa import floating
from ptxsim.ptx import Instruction
from ptxsim.values import f32, from_float


def build_mixed(ins: Instruction, c: Decoder) -> Step:
    """add, sub, fma .f32.{f16,bf16}: the first operands are narrow; one rounding."""
    m = Modifiers(ins)
    m.type("f32")
    kind = m.type("f16", "bf16")
    mode = m.choice(*floating.ROUNDINGS, default=None if ins.op == "fma" else "rn")
    saturate = m.flag("sat")
    m.done()
    if ins.op not in ("add", "sub", "fma"):
        raise m.unsupported("no such mixed precision")
    function = floating.rounded(ins.op, mode)
    if saturate:
        function = floating.clamped(function, saturate)
    narrow = [c.read(o, 16) for o in ins.operands[1:-1]]
    last, d = c.read(ins.operands[-1], 32), c.write(ins.operands[0])
    read = floating.read_narrow(kind)

    def run(warp: Any) -> None:
        r = warp.registers
        r[d] = from_float(function(*[read(r[s]) for s in narrow], f32(r[last])))

    return run
