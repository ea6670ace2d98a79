"""A tcgen05 GEMM of a CTA pair in PTX, written for these tests: D = A Bᵀ.

A [256, 64] and B [64, 64] bfloat16, D [256, 64] float32; one cluster of two CTAs, each with half
the rows of A and of B.  Both CTAs load into their own shared memory and signal the even one's
barrier; the even one multiplies for both and signals both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from kernels.tcgen05_gemm import MATRIX, aligned

import ptxsim
from ptxsim import tensor_maps

M, N, K = 256, 64, 64
A_BYTES, B_BYTES = M // 2 * K * 2, N // 2 * K * 2
BARRIERS = A_BYTES + B_BYTES
SHARED = BARRIERS + 32
FORM = 1 << 4 | 1 << 7 | 1 << 10 | (N >> 3) << 17 | (M >> 4) << 24
EVEN = 0xFEFFFFFF  # clears the lowest bit of the rank in a shared address


def _descriptor(name: str, address: str) -> str:
    return f"""
  shr.u32 %r0, {address}, 4;
  and.b32 %r0, %r0, 16383;
  cvt.u64.u32 {name}, %r0;
  or.b64 {name}, {name}, {MATRIX:#x};"""


def _multiply() -> str:
    steps = []
    for step in range(K // 16):
        steps.append(f"""
  setp.ne.u32 %enable, {step}, 0;
  tcgen05.mma.cta_group::2.kind::f16 [%tensor], %da, %db, %form, %enable;
  add.s64 %da, %da, 2;
  add.s64 %db, %db, 2;""")
    return "".join(steps)


def _results() -> str:
    d = ", ".join(f"%d{i}" for i in range(N))
    lines = [f"  tcgen05.ld.sync.aligned.32x32b.x64.b32 {{{d}}}, [%mine];"]
    lines.append("  tcgen05.wait::ld.sync.aligned;")
    for column in range(0, N, 4):
        four = ", ".join(f"%d{column + i}" for i in range(4))
        lines.append(f"  st.global.v4.b32 [%out+{4 * column}], {{{four}}};")
    return "\n".join(lines)


def _set_up() -> str:
    return f""".version 8.7
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry pair(
  .param .align 64 .b8 mapA[128],
  .param .align 64 .b8 mapB[128],
  .param .u64 result
)
.explicitcluster
.reqnctapercluster 2, 1, 1
.reqntid 128, 1, 1
{{
  .reg .pred %other, %one, %enable, %done;
  .reg .b32 %r0, %thread, %warp, %rank, %row, %base, %bars, %even, %at, %tensor, %mine, %form;
  .reg .b32 %d<64>;
  .reg .b16 %both;
  .reg .b64 %map, %out, %da, %db, %wide;
  mov.u32 %thread, %tid.x;
  shr.u32 %warp, %thread, 5;
  mov.u32 %rank, %cluster_ctarank;
  mov.u32 %base, smem;
  add.u32 %bars, %base, {BARRIERS};
  and.b32 %even, %bars, {EVEN:#x};
  setp.ne.u32 %other, %warp, 0;
  @%other bra set_up;
  add.u32 %at, %bars, 16;
  tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%at], 64;
  tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
  elect.sync %r0|%one, -1;
  @!%one bra set_up;
  mbarrier.init.shared::cta.b64 [%bars], 1;
  mbarrier.init.shared::cta.b64 [%bars+8], 1;
  fence.mbarrier_init.release.cluster;
"""


def _load_and_multiply() -> str:
    return f"""set_up:
  bar.warp.sync -1;
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  ld.shared.b32 %tensor, [%bars+16];
  setp.ne.u32 %other, %warp, 0;
  @%other bra store;
  elect.sync %r0|%one, -1;
  @!%one bra store;
  setp.ne.u32 %other, %rank, 0;
  @%other bra load;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bars], {2 * (A_BYTES + B_BYTES)};
load:
  shl.b32 %row, %rank, 7;
  mov.b64 %map, mapA;
  cvta.param.u64 %map, %map;
  cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
[%base], [%map, {{0, %row}}], [%even];
  shl.b32 %row, %rank, 5;
  add.u32 %at, %base, {A_BYTES};
  mov.b64 %map, mapB;
  cvta.param.u64 %map, %map;
  cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
[%at], [%map, {{0, %row}}], [%even];
  @%other bra store;
wait_loaded:
  mbarrier.try_wait.parity.shared::cta.b64 %done, [%bars], 0;
  @!%done bra wait_loaded;
  tcgen05.fence::after_thread_sync;
  mov.u32 %form, {FORM:#x};
{_descriptor("%da", "%base")}
  add.u32 %at, %base, {A_BYTES};
{_descriptor("%db", "%at")}
{_multiply()}
  mov.b16 %both, 3;
  add.u32 %at, %bars, 8;
  tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 \
[%at], %both;
"""


def _store() -> str:
    return f"""store:
  bar.warp.sync -1;
wait_multiplied:
  mbarrier.try_wait.parity.shared::cta.b64 %done, [%bars+8], 0;
  @!%done bra wait_multiplied;
  tcgen05.fence::after_thread_sync;
  shl.b32 %mine, %warp, 21;
  add.u32 %mine, %mine, %tensor;
  ld.param.u64 %out, [result];
  shl.b32 %row, %rank, 7;
  add.u32 %row, %row, %thread;
  mul.wide.u32 %wide, %row, {4 * N};
  add.s64 %out, %out, %wide;
{_results()}
  tcgen05.fence::before_thread_sync;
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  setp.ne.u32 %other, %warp, 0;
  @%other bra finish;
  tcgen05.dealloc.cta_group::2.sync.aligned.b32 %tensor, 64;
finish:
  ret;
}}
"""


def text() -> str:
    """The kernel's PTX."""
    return _set_up() + _load_and_multiply() + _store()


def launch(ptx: str, a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
    """D for bfloat16 bits of A and B."""
    a, b, d = aligned(a), aligned(b), aligned(np.zeros((M, N), np.float32))

    def tensor_map(x: np.ndarray, rows: int) -> bytes:
        return tensor_maps.encode(x.ctypes.data, "bf16", (K, len(x)), (K * 2,), (K, rows), 128)

    ptxsim.load(ptx).launch(
        2, 128, [tensor_map(a, M // 2), tensor_map(b, N // 2), d], shared=SHARED,
        memory=[a, b], **options,
    )  # fmt: skip
    return d
