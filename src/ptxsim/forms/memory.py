"""Forms of control flow, loads and stores, address conversion and copies."""

from __future__ import annotations

from ptxsim.forms.grammar import Entry

_MOVE = "Data Movement and Conversion"
_ASYNC = "Data Movement and Conversion: Asynchronous copy"
_CONTROL = "Control Flow"
_MISC = "Miscellaneous"
_TYPES = "{b8,u8,s8,b16,u16,s16,b32,u32,s32,b64,u64,s64,f32,f64}"
_SPACES = "{,.global,.shared,.shared::cta,.shared::cluster,.local}"
_LOADS = "{,.global,.shared,.shared::cta,.shared::cluster,.local,.param,.const}"
_NO_FUNCTION = "no function here"
_BULK = "bulk copies: addresses and sizes are checked for multiples of 16"

_CODE = (
    Entry(
        f"{_MOVE}: mov",
        "mov.{b16,u16,s16,b32,u32,s32,b64,u64,s64,f32,f64}",
        "T, T",
        "registers, immediates, special registers, addresses of variables",
    ),
    Entry(f"{_MOVE}: mov", "mov.pred", "p, p"),
    Entry(f"{_MOVE}: mov", "mov.b32", "r, {h, h}", "pack; unpack alike, `_` drops a part"),
    Entry(f"{_MOVE}: mov", "mov.b64", "q, {r, r}", "pack; unpack alike, also four of 16 bits"),
    Entry(f"{_MOVE}: mov", "mov.b128", "x, {q, q}", "pack; unpack alike"),
    Entry(f"{_CONTROL}: bra", "bra{,.uni}", "LABEL"),
    Entry(f"{_CONTROL}: brx.idx", "brx.idx{,.uni}", "r, TABLE"),
    Entry(f"{_CONTROL}: ret, exit", "{ret,ret.uni,exit}", "", "a kernel's end; no functions"),
    Entry(f"{_MISC}: trap, brkpt", "{trap,brkpt}", "", "stops the run with its line"),
    Entry(f"{_MISC}: setmaxnreg", "setmaxnreg.{inc,dec}.sync.aligned.u32", "64", _NO_FUNCTION),
    Entry(f"{_MISC}: nanosleep", "nanosleep.u32", "r", _NO_FUNCTION),
    Entry(f"{_MISC}: pmevent", "pmevent", "1", _NO_FUNCTION),
    Entry(
        "Parallel Synchronization and Communication: griddepcontrol",
        "griddepcontrol.{launch_dependents,wait}",
        "",
        "launches run one after the other",
    ),
)

_ACCESS = (
    Entry(f"{_MOVE}: ld", f"ld{_LOADS}.{_TYPES}", "T, [q]", "generic without a space"),
    Entry(
        f"{_MOVE}: ld",
        "ld{,.global,.shared,.shared::cta,.shared::cluster,.local,.param,.const}.v2.{b8,u8,s8,b16,u16,s16,b32,u32,s32,b64,u64,s64,f32,f64}",
        "{T*2}, [q]",
    ),
    Entry(
        f"{_MOVE}: ld",
        "ld{,.global,.shared,.shared::cta,.shared::cluster,.local,.param,.const}.v4.{b8,u8,s8,b16,u16,s16,b32,u32,s32,f32}",
        "{T*4}, [q]",
    ),
    Entry(f"{_MOVE}: ld", "ld{,.global}.v8.{b32,u32,s32,f32}", "{r*8}, [q]"),
    Entry(f"{_MOVE}: ld", "ld{,.global}.v4.{b64,u64,s64,f64}", "{q*4}, [q]"),
    Entry(f"{_MOVE}: ldu", f"ldu{{,.global}}.{_TYPES}", "T, [q]"),
    Entry(f"{_MOVE}: st", f"st{_SPACES}.{_TYPES}", "[q], T"),
    Entry(
        f"{_MOVE}: st",
        "st{,.global,.shared,.shared::cta,.shared::cluster,.local}.v2.{b8,u8,s8,b16,u16,s16,b32,u32,s32,b64,u64,s64,f32,f64}",
        "[q], {T*2}",
    ),
    Entry(
        f"{_MOVE}: st",
        "st{,.global,.shared,.shared::cta,.shared::cluster,.local}.v4.{b8,u8,s8,b16,u16,s16,b32,u32,s32,f32}",
        "[q], {T*4}",
    ),
    Entry(f"{_MOVE}: st", "st{,.global}.v8.{b32,u32,s32,f32}", "[q], {r*8}"),
    Entry(f"{_MOVE}: st", "st{,.global}.v4.{b64,u64,s64,f64}", "[q], {q*4}"),
    Entry(f"{_MOVE}: prefetch", "prefetch{,.global,.local}.{L1,L2}", "[q]", _NO_FUNCTION),
    Entry(
        f"{_MOVE}: prefetch",
        "prefetch{,.global}.L2::{evict_last,evict_normal}",
        "[q]",
        _NO_FUNCTION,
    ),
    Entry(
        f"{_MOVE}: prefetch",
        "prefetch{,.param,.const}.tensormap",
        "[q]",
        "the map's address is checked",
    ),
    Entry(f"{_MOVE}: prefetchu", "prefetchu.L1", "[q]", _NO_FUNCTION),
    Entry(
        f"{_MOVE}: applypriority",
        "applypriority{,.global}.L2::evict_normal",
        "[q], 128",
        _NO_FUNCTION,
    ),
    Entry(
        f"{_MOVE}: createpolicy",
        "createpolicy.fractional.L2::{evict_last,evict_normal,evict_first,evict_unchanged}.b64",
        "q, 1.0",
        "any token",
    ),
    Entry(
        f"{_MOVE}: createpolicy",
        "createpolicy.range{,.global}.L2::evict_last.b64",
        "q, [q], r, r",
        "any token",
    ),
    Entry(
        f"{_MOVE}: cvta",
        "cvta{,.to}.{global,shared,shared::cta,shared::cluster,local,param,const}.u64",
        "q, q",
    ),
    Entry(
        f"{_MOVE}: isspacep",
        "isspacep.{global,shared,shared::cta,shared::cluster,local,param,const}",
        "p, q",
    ),
    Entry(f"{_MOVE}: mapa", "mapa{,.shared::cluster}.u64", "q, q, r"),
    Entry(f"{_MOVE}: mapa", "mapa.shared::cluster.u32", "r, r, r"),
    Entry(f"{_MOVE}: getctarank", "getctarank{,.shared::cluster}.u64", "r, q"),
    Entry(f"{_MOVE}: getctarank", "getctarank.shared::cluster.u32", "r, r"),
)

_COPIES = (
    Entry(f"{_ASYNC}: cp.async", "cp.async.ca.{shared,shared::cta}.global", "[r], [q], 8"),
    Entry(
        f"{_ASYNC}: cp.async",
        "cp.async.cg.{shared,shared::cta}.global",
        "[r], [q], 16, r",
        "with a source size, the rest is zero",
    ),
    Entry(f"{_ASYNC}: cp.async.commit_group", "cp.async.commit_group", ""),
    Entry(f"{_ASYNC}: cp.async.wait_group", "cp.async.wait_group", "1"),
    Entry(f"{_ASYNC}: cp.async.wait_all", "cp.async.wait_all", ""),
    Entry(
        f"{_ASYNC}: cp.async.bulk",
        "cp.async.bulk.{shared::cluster,shared::cta}.global.mbarrier::complete_tx::bytes",
        "[r], [q], r, [r]",
        _BULK,
    ),
    Entry(
        f"{_ASYNC}: cp.async.bulk",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
        "[r], [q], r, [r], h",
    ),
    Entry(
        f"{_ASYNC}: cp.async.bulk",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes",
        "[r], [r], r, [r]",
    ),
    Entry(f"{_ASYNC}: cp.async.bulk", "cp.async.bulk.global.shared::cta.bulk_group", "[q], [r], r"),
    Entry(
        f"{_ASYNC}: cp.reduce.async.bulk",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group"
        ".{add.u32,add.s32,add.u64,add.f32,add.f64,add.noftz.f16,add.noftz.bf16,min.u32,min.s32"
        ",min.u64,min.s64,min.f16,min.bf16,max.u32,max.s32,max.u64,max.s64,max.f16,max.bf16"
        ",inc.u32,dec.u32,and.b32,and.b64,or.b32,or.b64,xor.b32,xor.b64}",
        "[q], [r], r",
    ),
    Entry(f"{_ASYNC}: cp.async.bulk.commit_group", "cp.async.bulk.commit_group", ""),
    Entry(
        f"{_ASYNC}: cp.async.bulk.wait_group",
        "cp.async.bulk.wait_group{,.read}",
        "0",
        ".read waits for the write too",
    ),
    Entry(
        f"{_ASYNC}: cp.async.bulk.prefetch",
        "cp.async.bulk.prefetch.L2.global",
        "[q], r",
        _NO_FUNCTION,
    ),
    Entry(
        f"{_ASYNC}: cp.async.bulk.tensor",
        "cp.async.bulk.tensor.2d.{shared::cluster,shared::cta}.global{,.tile}"
        ".mbarrier::complete_tx::bytes{,.cta_group::1,.cta_group::2}",
        "[r], [q, {r*2}], [r]",
        "1d to 5d; swizzles none, 32, 64, 128 bytes; zero or NaN fill outside",
    ),
    Entry(
        f"{_ASYNC}: cp.async.bulk.tensor",
        "cp.async.bulk.tensor.2d.shared::cluster.global{,.tile}.mbarrier::complete_tx::bytes"
        ".multicast::cluster{,.cta_group::1,.cta_group::2}",
        "[r], [q, {r*2}], [r], h",
        "1d to 5d",
    ),
    Entry(
        f"{_ASYNC}: cp.async.bulk.tensor",
        "cp.async.bulk.tensor.3d.global.shared::cta{,.tile}.bulk_group",
        "[q, {r*3}], [r]",
        "1d to 5d",
    ),
    Entry(
        f"{_ASYNC}: cp.reduce.async.bulk.tensor",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.{add,min,max,inc,dec,and,or,xor}{,.tile}"
        ".bulk_group",
        "[q, {r*2}], [r]",
        "1d to 5d; the map's element type",
    ),
    Entry(
        f"{_ASYNC}: cp.async.bulk.prefetch.tensor",
        "cp.async.bulk.prefetch.tensor.2d.L2.global{,.tile}",
        "[q, {r*2}]",
        _NO_FUNCTION,
    ),
)

_MAPS = (
    Entry(
        f"{_MOVE}: tensormap.replace",
        "tensormap.replace.tile.global_address{,.global,.shared::cta}.b1024.b64",
        "[q], q",
    ),
    Entry(
        f"{_MOVE}: tensormap.replace",
        "tensormap.replace.tile.{rank,elemtype,interleave_layout,swizzle_mode,fill_mode}"
        "{,.global,.shared::cta}.b1024.b32",
        "[q], 1",
    ),
    Entry(
        f"{_MOVE}: tensormap.replace",
        "tensormap.replace.tile.{box_dim,global_dim,element_stride}{,.global,.shared::cta}"
        ".b1024.b32",
        "[q], 1, r",
    ),
    Entry(
        f"{_MOVE}: tensormap.replace",
        "tensormap.replace.tile.global_stride{,.global,.shared::cta}.b1024.b64",
        "[q], 1, q",
    ),
    Entry(
        "Parallel Synchronization and Communication: tensormap.cp_fenceproxy",
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.{cta,cluster,gpu,sys}"
        ".sync.aligned",
        "[q], [q], 128",
    ),
)

MEMORY = (*_CODE, *_ACCESS, *_COPIES, *_MAPS)
