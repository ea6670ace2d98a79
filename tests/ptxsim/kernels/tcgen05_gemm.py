"""A small tcgen05 GEMM in PTX, written for these tests: C = A Bᵀ + bias, one tile per CTA.

Shapes: A [M, K], B [64, K] and C [M, 64] bfloat16, bias [64] float32; M a multiple of 128,
K of 64.  192 threads: warps 0-3 initialise the accumulator and store the result, warp 4 loads the
tiles, warp 5 multiplies.  Two stages of A and B; all tiles have 128-byte swizzle.

Lines end in a tag, `//@tag`, by which `mutate` finds them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim import tensor_maps

TILE_M, TILE_N, TILE_K = 128, 64, 64
A_BYTES, B_BYTES = TILE_M * TILE_K * 2, TILE_N * TILE_K * 2
STAGE_B, STAGED_C, BARRIERS = 2 * A_BYTES, 2 * (A_BYTES + B_BYTES), 2 * (A_BYTES + B_BYTES) + 16384
FULL, EMPTY, ACCUMULATED, TENSOR_ADDRESS = 0, 16, 32, 40
SHARED = BARRIERS + 64
THREADS = 192
# Instruction descriptor: bf16 operands, float32 sums, both K-major, N 64, M 128.
FORM = 1 << 4 | 1 << 7 | 1 << 10 | (TILE_N >> 3) << 17 | (TILE_M >> 4) << 24
# Matrix descriptor without its address: stride 1024, the constant of bit 46, 128-byte swizzle.
MATRIX = (1024 >> 4) << 32 | 1 << 46 | 2 << 61
WAIT = """
{{
  .reg .pred done;
again:
  mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity};
  @!done bra again;
}} //@wait-{tag}"""


def _wait(barrier: str, parity: str, tag: str) -> str:
    return WAIT.format(barrier=barrier, parity=parity, tag=tag)


def _registers(prefix: str, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%{prefix}{first + i}" for i in range(count)) + "}"


def _setup() -> str:
    return f"""
  mov.u32 %thread, %tid.x;
  shr.u32 %warp, %thread, 5;
  mov.u32 %m0, %ctaid.x;
  shl.b32 %m0, %m0, 7;
  mov.u32 %base, smem;
  add.u32 %bars, %base, {BARRIERS};
  setp.ne.u32 %other, %warp, 4;
  @%other bra set_up;
  add.u32 %at, %bars, {TENSOR_ADDRESS};
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%at], 64; //@alloc
  tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
  elect.sync %r0|%one, -1;
  @!%one bra set_up;
  mbarrier.init.shared::cta.b64 [%bars+{FULL}], 1; //@init-full
  mbarrier.init.shared::cta.b64 [%bars+{FULL + 8}], 1;
  mbarrier.init.shared::cta.b64 [%bars+{EMPTY}], 1; //@init-empty
  mbarrier.init.shared::cta.b64 [%bars+{EMPTY + 8}], 1;
  mbarrier.init.shared::cta.b64 [%bars+{ACCUMULATED}], 1; //@init-accumulated
  fence.mbarrier_init.release.cluster;
set_up:
  bar.sync 0; //@sync-setup
  ld.shared.b32 %tensor, [%bars+{TENSOR_ADDRESS}];
  setp.eq.u32 %other, %warp, 4;
  @%other bra load;
  setp.eq.u32 %other, %warp, 5;
  @%other bra multiply;
"""


def _initialise() -> str:
    lines = ["  shl.b32 %lanes, %warp, 21;", "  add.u32 %mine, %tensor, %lanes; //@lanes"]
    for column in range(0, TILE_N, 4):
        lines.append(f"  ld.global.v4.b32 {_registers('d', 4, column)}, [%bias+{4 * column}];")
    lines.append(
        f"  tcgen05.st.sync.aligned.32x32b.x64.b32 [%mine], {_registers('d', 64)}; //@initialise"
    )
    lines.append("  tcgen05.wait::st.sync.aligned; //@wait-st")
    lines.append("  tcgen05.fence::before_thread_sync;")
    lines.append("  bar.arrive 1, 160; //@arrive-initialised")
    return "\n".join(lines)


def _store() -> str:
    lines = [
        _wait(f"%bars+{ACCUMULATED}", "0", "accumulated"),
        "  tcgen05.fence::after_thread_sync;",
        f"  tcgen05.ld.sync.aligned.32x32b.x64.b32 {_registers('d', 64)}, [%mine]; //@read",
        "  tcgen05.wait::ld.sync.aligned;",
        f"  add.u32 %to, %base, {STAGED_C};",
        "  shl.b32 %r0, %thread, 7;",
        "  add.u32 %to, %to, %r0;",
        "  and.b32 %row, %thread, 7;",
    ]
    for pair in range(TILE_N // 2):
        lines.append(f"  cvt.rn.bf16x2.f32 %c{pair}, %d{2 * pair + 1}, %d{2 * pair};")
    for piece in range(8):
        lines += [
            f"  xor.b32 %r0, %row, {piece};",
            "  shl.b32 %r0, %r0, 4;",
            "  add.u32 %at, %to, %r0;",
            f"  st.shared.v4.b32 [%at], {_registers('c', 4, 4 * piece)}; //@stage-{piece}",
        ]
    lines.append(f"""
  fence.proxy.async.shared::cta; //@fence
  bar.sync 2, 128; //@sync-staged
  setp.ne.u32 %other, %thread, 0;
  @%other bra finish;
  add.u32 %at, %base, {STAGED_C};
  mov.b64 %map, mapC;
  cvta.param.u64 %map, %map;
  cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%map, {{0, %m0}}], [%at]; //@store
  cp.async.bulk.commit_group; //@commit-store
  cp.async.bulk.wait_group 0; //@wait-store
  bra finish;
""")
    return "\n".join(lines)


def _load() -> str:
    return f"""
load:
  mov.u32 %k, 0;
load_next:
  and.b32 %stage, %k, 1;
  shr.u32 %phase, %k, 1;
  and.b32 %phase, %phase, 1;
  xor.b32 %phase, %phase, 1; //@parity-empty
  shl.b32 %r0, %stage, 3;
  add.u32 %full, %bars, %r0;
  add.u32 %empty, %full, {EMPTY};
{_wait("%empty", "%phase", "empty")}
  elect.sync %r0|%one, -1;
  @!%one bra load_issued;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%full], {A_BYTES + B_BYTES}; //@expect
  shl.b32 %k0, %k, 6;
  mad.lo.u32 %at, %stage, {A_BYTES}, %base;
  mov.b64 %map, mapA;
  cvta.param.u64 %map, %map;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
[%at], [%map, {{%k0, %m0}}], [%full]; //@load-a
  mad.lo.u32 %at, %stage, {B_BYTES}, %base;
  add.u32 %at, %at, {STAGE_B};
  mov.b64 %map, mapB;
  cvta.param.u64 %map, %map;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
[%at], [%map, {{%k0, 0}}], [%full]; //@load-b
load_issued:
  bar.warp.sync -1;
  add.u32 %k, %k, 1;
  setp.lt.u32 %more, %k, %tiles;
  @%more bra load_next;
  bra finish;
"""


def _descriptor(name: str, address: str) -> str:
    return f"""  shr.u32 %r0, {address}, 4;
  and.b32 %r0, %r0, 16383;
  cvt.u64.u32 {name}, %r0;
  or.b64 {name}, {name}, {MATRIX:#x}; //@matrix-{name[1:]}"""


def _multiply() -> str:
    steps = []
    for step in range(TILE_K // 16):
        steps.append(f"""  setp.ne.u32 %enable, %form, 0; //@enable-{step}
  tcgen05.mma.cta_group::1.kind::f16 [%tensor], %da, %db, %form, %enable; //@mma-{step}
  add.s64 %da, %da, 2; //@step-a-{step}
  add.s64 %db, %db, 2;""")
    issued = "\n".join(steps)
    return f"""
multiply:
  bar.sync 1, 160; //@sync-initialised
  tcgen05.fence::after_thread_sync;
  mov.u32 %k, 0;
  mov.u32 %form, {FORM:#x}; //@form
multiply_next:
  and.b32 %stage, %k, 1;
  shr.u32 %phase, %k, 1;
  and.b32 %phase, %phase, 1; //@parity-full
  shl.b32 %r0, %stage, 3;
  add.u32 %full, %bars, %r0;
  add.u32 %empty, %full, {EMPTY};
{_wait("%full", "%phase", "full")}
  tcgen05.fence::after_thread_sync;
  elect.sync %r0|%one, -1; //@elect-mma
  @!%one bra multiplied;
  mad.lo.u32 %at, %stage, {A_BYTES}, %base;
{_descriptor("%da", "%at")}
  mad.lo.u32 %at, %stage, {B_BYTES}, %base;
  add.u32 %at, %at, {STAGE_B};
{_descriptor("%db", "%at")}
{issued}
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%empty]; //@commit-empty
multiplied:
  bar.warp.sync -1;
  add.u32 %k, %k, 1;
  setp.lt.u32 %more, %k, %tiles;
  @%more bra multiply_next;
  elect.sync %r0|%one, -1;
  @!%one bra finish;
  add.u32 %at, %bars, {ACCUMULATED};
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%at]; //@commit-accumulated
  bra finish;
"""


def _finish() -> str:
    return """
finish:
  bar.warp.sync -1;
  tcgen05.fence::before_thread_sync;
  bar.sync 0; //@sync-finish
  setp.ne.u32 %other, %warp, 4;
  @%other bra done;
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tensor, 64; //@dealloc
done:
  ret;
"""


def text() -> str:
    """The kernel's PTX."""
    return f""".version 8.7
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry gemm(
  .param .align 64 .b8 mapA[128],
  .param .align 64 .b8 mapB[128],
  .param .align 64 .b8 mapC[128],
  .param .u64 bias,
  .param .u32 tiles
)
.reqntid {THREADS}, 1, 1
{{
  .reg .pred %other, %one, %more, %enable;
  .reg .b32 %r0, %thread, %warp, %m0, %base, %bars, %at, %tensor, %lanes, %mine, %to, %row;
  .reg .b32 %k, %k0, %tiles, %stage, %phase, %full, %empty, %form, %d<64>, %c<32>;
  .reg .b64 %map, %bias, %da, %db;
  ld.param.u64 %bias, [bias];
  ld.param.u32 %tiles, [tiles];
{_setup()}
{_initialise()}
{_store()}
{_load()}
{_multiply()}
{_finish()}
}}
"""


def mutate(tag: str, change: Any) -> str:
    """The kernel with the one line that ends in `//@tag` replaced; None drops it.

    `change` is a string, or a function of the old line.  For a `wait-` block the whole wait goes.
    """
    lines = text().split("\n")
    where = [i for i, line in enumerate(lines) if line.endswith(f"//@{tag}")]
    assert len(where) == 1, f"{len(where)} lines are tagged {tag}"
    at = where[0]
    if lines[at].startswith("}"):
        first = max(i for i in range(at) if lines[i].strip() == "{")
        lines[first : at + 1] = [change or ""]
    elif change is None:
        lines[at] = ""
    else:
        lines[at] = change(lines[at]) if callable(change) else change
    return "\n".join(lines)


def problem(rows: int = 256, depth: int = 320, seed: int = 0) -> dict[str, np.ndarray]:
    """Operands as bfloat16 bits or float32, and the float64 result."""
    generator = np.random.default_rng(seed)

    def narrow(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        wide = generator.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16
        return wide.astype(np.uint16), (wide << 16).astype(np.uint32).view(np.float32)

    a, a_wide = narrow((rows, depth))
    b, b_wide = narrow((TILE_N, depth))
    bias = generator.standard_normal(TILE_N).astype(np.float32)
    expected = a_wide.astype(np.float64) @ b_wide.astype(np.float64).T + bias
    return {"a": aligned(a), "b": aligned(b), "bias": aligned(bias), "expected": expected}


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 256 bytes, as device allocations are."""
    raw = np.zeros(values.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    out = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    out[...] = values
    return out


def launch(ptx: str, data: dict[str, np.ndarray], **options: Any) -> np.ndarray:
    """Run the kernel; C as float32."""
    import ptxsim

    a, b = data["a"], data["b"]
    rows, depth = a.shape
    c = aligned(np.zeros((rows, TILE_N), np.uint16))

    def tensor_map(x: np.ndarray, height: int) -> bytes:
        return tensor_maps.encode(
            x.ctypes.data, "bf16", x.shape[::-1], (x.shape[1] * 2,), (64, height), 128
        )

    ptxsim.load(ptx).launch(
        rows // TILE_M,
        THREADS,
        [
            tensor_map(a, TILE_M),
            tensor_map(b, TILE_N),
            tensor_map(c, TILE_M),
            data["bias"],
            depth // TILE_K,
        ],
        shared=SHARED,
        memory=[a, b, c],
        **options,
    )
    return (c.astype(np.uint32) << 16).view(np.float32)
