"""Forms of the matrix instructions: of warps, of warpgroups (sm_90a), and tcgen05 (sm_100a)."""

from __future__ import annotations

from ptxsim.forms.grammar import Entry

_WARP = "Warp Level Matrix Multiply-Accumulate"
_GROUP = "Asynchronous Warpgroup Level Matrix"
_FIFTH = "TensorCore 5th Generation"
_SUMS = "products exact, sums in f32: a chip's order and inner width are not documented"
_TIMES = "{x1,x2,x4,x8,x16,x32,x64,x128}"
_ARRIVE = "mbarrier::arrive::one{,.shared::cluster}"

_WARPS = (
    Entry(
        f"{_WARP}: mma",
        "mma.sync.aligned.m16n8k16.row.col.f32.{f16.f16,bf16.bf16}.f32",
        "{r*4}, {r*4}, {r*2}, {r*4}",
        _SUMS,
    ),
    Entry(
        f"{_WARP}: mma",
        "mma.sync.aligned.m16n8k8.row.col.f32.{f16.f16,bf16.bf16}.f32",
        "{r*4}, {r*2}, {r}, {r*4}",
    ),
    Entry(
        f"{_WARP}: mma",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
        "{r*4}, {r*4}, {r*2}, {r*4}",
    ),
    Entry(
        f"{_WARP}: mma",
        "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32",
        "{r*4}, {r*2}, {r}, {r*4}",
    ),
    Entry(
        f"{_WARP}: mma",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16",
        "{r*2}, {r*4}, {r*2}, {r*2}",
    ),
    Entry(
        f"{_WARP}: mma",
        "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16",
        "{r*2}, {r*2}, {r}, {r*2}",
    ),
    Entry(
        f"{_WARP}: mma",
        "mma.sync.aligned.m16n8k32.row.col{,.satfinite}.s32.{s8,u8}.{s8,u8}.s32",
        "{r*4}, {r*4}, {r*2}, {r*4}",
    ),
    Entry(
        f"{_WARP}: mma",
        "mma.sync.aligned.m16n8k16.row.col{,.satfinite}.s32.{s8,u8}.{s8,u8}.s32",
        "{r*4}, {r*2}, {r}, {r*4}",
    ),
    Entry(
        f"{_WARP}: mma",
        "mma.sync.aligned.m16n8k32.row.col.f32.{e4m3,e5m2}.{e4m3,e5m2}.f32",
        "{r*4}, {r*4}, {r*2}, {r*4}",
    ),
    Entry(
        f"{_WARP}: ldmatrix",
        "ldmatrix.sync.aligned.m8n8.{x1,x2,x4}{,.trans}{.shared,.shared::cta}.b16",
        "{r*matrices}, [r]",
    ),
    Entry(
        f"{_WARP}: stmatrix",
        "stmatrix.sync.aligned.m8n8.{x1,x2,x4}{,.trans}{.shared,.shared::cta}.b16",
        "[r], {r*matrices}",
    ),
    Entry(f"{_WARP}: movmatrix", "movmatrix.sync.aligned.m8n8.trans.b16", "r, r"),
)

_GROUPS = (
    Entry(
        f"{_GROUP}: wgmma.mma_async",
        "wgmma.mma_async.sync.aligned.m64n{8..256/8}k16.f32.{f16.f16,bf16.bf16}",
        "{r*sums}, q, q, p, 1, 1, 0, 1",
        "A in shared memory; " + _SUMS,
        "sm_90a",
    ),
    Entry(
        f"{_GROUP}: wgmma.mma_async",
        "wgmma.mma_async.sync.aligned.m64n{8..256/8}k16.f16.f16.f16",
        "{r*sums}, q, q, p, 1, 1, 0, 1",
        "",
        "sm_90a",
    ),
    Entry(
        f"{_GROUP}: wgmma.mma_async",
        "wgmma.mma_async.sync.aligned.m64n{8..256/8}k8.f32.tf32.tf32",
        "{r*sums}, q, q, p, 1, 1",
        "",
        "sm_90a",
    ),
    Entry(
        f"{_GROUP}: wgmma.mma_async",
        "wgmma.mma_async.sync.aligned.m64n{8..256/8}k16.f32.{f16.f16,bf16.bf16}",
        "{r*sums}, {r*4}, q, p, 1, -1, 1",
        "A in registers (f16 sums and tf32 too)",
        "sm_90a",
    ),
    Entry(f"{_GROUP}: wgmma.fence", "wgmma.fence.sync.aligned", "", "", "sm_90a"),
    Entry(f"{_GROUP}: wgmma.commit_group", "wgmma.commit_group.sync.aligned", "", "", "sm_90a"),
    Entry(f"{_GROUP}: wgmma.wait_group", "wgmma.wait_group.sync.aligned", "1", "", "sm_90a"),
)

_TENSOR_MEMORY = (
    Entry(
        f"{_FIFTH}: tcgen05.alloc",
        "tcgen05.alloc.{cta_group::1,cta_group::2}.sync.aligned{,.shared::cta}.b32",
        "[r], 64",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.dealloc",
        "tcgen05.dealloc.{cta_group::1,cta_group::2}.sync.aligned.b32",
        "r, 64",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.relinquish_alloc_permit",
        "tcgen05.relinquish_alloc_permit.{cta_group::1,cta_group::2}.sync.aligned",
        "",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.ld",
        f"tcgen05.ld.sync.aligned.{{32x32b,16x64b}}.{_TIMES}{{,.pack::16b}}.b32",
        "{r*cells}, [r]",
        "values come at once; cells in flight are an error",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.ld",
        "tcgen05.ld.sync.aligned.16x128b.{x1,x2,x4,x8,x16,x32,x64}{,.pack::16b}.b32",
        "{r*cells}, [r]",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.ld",
        "tcgen05.ld.sync.aligned.16x256b.{x1,x2,x4,x8,x16,x32}{,.pack::16b}.b32",
        "{r*cells}, [r]",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.ld",
        f"tcgen05.ld.sync.aligned.16x32bx2.{_TIMES}{{,.pack::16b}}.b32",
        "{r*cells}, [r], 16",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.st",
        f"tcgen05.st.sync.aligned.{{32x32b,16x64b}}.{_TIMES}{{,.unpack::16b}}.b32",
        "[r], {r*cells}",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.st",
        "tcgen05.st.sync.aligned.16x128b.{x1,x2,x4,x8,x16,x32,x64}{,.unpack::16b}.b32",
        "[r], {r*cells}",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.st",
        "tcgen05.st.sync.aligned.16x256b.{x1,x2,x4,x8,x16,x32}{,.unpack::16b}.b32",
        "[r], {r*cells}",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.st",
        f"tcgen05.st.sync.aligned.16x32bx2.{_TIMES}{{,.unpack::16b}}.b32",
        "[r], 16, {r*cells}",
    ),
    Entry(f"{_FIFTH}: tcgen05.wait", "tcgen05.wait::{ld,st}.sync.aligned", ""),
    Entry(
        f"{_FIFTH}: tcgen05.fence",
        "tcgen05.fence::{before_thread_sync,after_thread_sync}",
        "",
        "ordering only; its absence is no error, since compilers leave it out",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.mma",
        "tcgen05.mma.cta_group::1.kind::{f16,tf32}",
        "[r], q, q, r, {r*4}, p",
        "lane mask optional; A also in tensor memory; " + _SUMS,
    ),
    Entry(
        f"{_FIFTH}: tcgen05.mma",
        "tcgen05.mma.cta_group::2.kind::{f16,tf32}",
        "[r], [r], q, r, {r*8}, p, 1",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.commit",
        f"tcgen05.commit.{{cta_group::1,cta_group::2}}.{_ARRIVE}.b64",
        "[r]",
    ),
    Entry(
        f"{_FIFTH}: tcgen05.commit",
        f"tcgen05.commit.{{cta_group::1,cta_group::2}}.{_ARRIVE}.multicast::cluster.b64",
        "[r], h",
    ),
)

MATRIX = (*_WARPS, *_GROUPS, *_TENSOR_MEMORY)
