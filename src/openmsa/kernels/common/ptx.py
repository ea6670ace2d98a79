"""Instructions that the DSL has no function for, and small idioms around those it has."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402
from cutlass._mlir.dialects import llvm  # noqa: E402
from cutlass.cutlass_dsl import dsl_user_op  # noqa: E402

__all__ = [
    "add_f32",
    "add_f32x4",
    "add_s32",
    "arrive_lanes",
    "arrive_warp",
    "bulk_store",
    "fence_tmem_after",
    "fence_tmem_before",
    "store_matrices",
]


def _asm(text: str, operands: list[Any], constraints: str, loc: Any, ip: Any) -> None:
    llvm.inline_asm(
        None, operands, text, constraints, has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def add_f32(pointer: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """``*pointer += value`` in global memory, atomically and in no order."""
    address = pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    operands = [address, Float32(value).ir_value(loc=loc, ip=ip)]
    _asm("red.relaxed.gpu.global.add.f32 [$0], $1;", operands, "l,f", loc, ip)


@dsl_user_op
def add_s32(pointer: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """``*pointer += value`` in global memory, atomically."""
    address = pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    operands = [address, Int32(value).ir_value(loc=loc, ip=ip)]
    _asm("red.relaxed.gpu.global.add.s32 [$0], $1;", operands, "l,r", loc, ip)


@dsl_user_op
def add_f32x4(pointer: Any, values: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Four neighbours of global memory (16-byte aligned) += ``values``, each atomically."""
    address = pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    operands = [address] + [Float32(v).ir_value(loc=loc, ip=ip) for v in values]
    text = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    _asm(text, operands, "l,f,f,f,f", loc, ip)


@dsl_user_op
def fence_tmem_before(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's tensor memory accesses before the synchronisation that follows."""
    _asm("tcgen05.fence::before_thread_sync;", [], "", loc, ip)


@dsl_user_op
def fence_tmem_after(*, loc: Any = None, ip: Any = None) -> None:
    """Order the tensor memory accesses that follow after the synchronisation just made."""
    _asm("tcgen05.fence::after_thread_sync;", [], "", loc, ip)


@cute.jit
def arrive_warp(barrier: Any) -> None:
    """One arrival for the whole warp, after all of its lanes have come here."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def arrive_lanes(barrier: Any, expected: int = 0) -> None:
    """An arrival of each of the warp's lanes, and ``expected`` bytes of the copy engine's. For what
    lanes write and read themselves: compute-sanitizer's racecheck knows whose arrivals a phase
    waited for, not that one lane's came after ``__syncwarp`` (racecheck 2025.3 and 2026.4)."""
    if cutlass.const_expr(expected > 0):
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(barrier, expected)
    cute.arch.mbarrier_arrive(barrier)


@dsl_user_op
def store_matrices(address: Any, words: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Four 8 x 8 matrices of 16-bit elements from a warp's registers to shared memory: ``words``
    are this lane's two elements of each, ``address`` (16-byte aligned) is where row ``lane % 8`` of
    matrix ``lane // 8`` goes."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (address, *words)]
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
    _asm(text, operands, "r,r,r,r,r,~{memory}", loc, ip)


@dsl_user_op
def bulk_store(pointer: Any, address: Any, size: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Ask the copy engine for ``size`` bytes from the shared ``address`` to global memory; all are
    multiples of 16. Counts to this thread's open bulk group."""
    operands = [
        pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(address).ir_value(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip),
    ]
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    _asm(text, operands, "l,r,r,~{memory}", loc, ip)
