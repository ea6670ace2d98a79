"""Forms of warp communication, barriers, fences and atomics."""

from __future__ import annotations

from ptxsim.forms.grammar import Entry

_SYNC = "Parallel Synchronization and Communication"
_MOVE = "Data Movement and Conversion"
_SHARED = "{,.shared,.shared::cta}"
_SPACES = "{,.global,.shared,.shared::cta,.shared::cluster}"
_ORDER = "ordering only: lanes and warps run in one total order"

_WARP = (
    Entry(f"{_MOVE}: shfl.sync", "shfl.sync.{up,down,bfly,idx}.b32", "r|p, r, r, r, r"),
    Entry(f"{_SYNC}: vote.sync", "vote.sync.{all,any,uni}.pred", "p, p, r"),
    Entry(f"{_SYNC}: vote.sync", "vote.sync.ballot.b32", "r, !p, r"),
    Entry(f"{_SYNC}: match.sync", "match.any.sync.{b32,b64}", "r, T, r"),
    Entry(f"{_SYNC}: match.sync", "match.all.sync.{b32,b64}", "r|p, T, r"),
    Entry(f"{_SYNC}: activemask", "activemask.b32", "r"),
    Entry(f"{_SYNC}: redux.sync", "redux.sync.{add,min,max}.{u32,s32}", "r, r, r"),
    Entry(f"{_SYNC}: redux.sync", "redux.sync.{and,or,xor}.b32", "r, r, r"),
    Entry(f"{_SYNC}: redux.sync", "redux.sync.{min,max}{,.abs}{,.NaN}.f32", "r, r, r"),
    Entry(f"{_SYNC}: elect.sync", "elect.sync", "r|p, r", "the lowest lane of the mask"),
    Entry(f"{_SYNC}: bar.warp.sync", "bar.warp.sync", "r"),
)

_BARRIERS = (
    Entry(f"{_SYNC}: bar, barrier", "bar{,.cta}.sync", "r, r"),
    Entry(f"{_SYNC}: bar, barrier", "bar{,.cta}.arrive", "r, r"),
    Entry(f"{_SYNC}: bar, barrier", "barrier{,.cta}.{sync,arrive}{,.aligned}", "r, r"),
    Entry(f"{_SYNC}: barrier.cluster", "barrier.cluster.arrive{,.release,.relaxed}{,.aligned}", ""),
    Entry(f"{_SYNC}: barrier.cluster", "barrier.cluster.wait{,.acquire}{,.aligned}", ""),
    Entry(f"{_SYNC}: mbarrier.init", f"mbarrier.init{_SHARED}.b64", "[q], r"),
    Entry(f"{_SYNC}: mbarrier.inval", f"mbarrier.inval{_SHARED}.b64", "[q]"),
    Entry(
        f"{_SYNC}: mbarrier.expect_tx, complete_tx",
        "mbarrier.{expect_tx,complete_tx}{,.relaxed.cta,.relaxed.cluster}"
        "{.shared,.shared::cta,.shared::cluster}.b64",
        "[r], r",
    ),
    Entry(
        f"{_SYNC}: mbarrier.arrive, arrive_drop",
        "mbarrier.{arrive,arrive_drop}{,.release.cta,.release.cluster}{,.shared,.shared::cta}.b64",
        "q, [q], r",
    ),
    Entry(
        f"{_SYNC}: mbarrier.arrive, arrive_drop",
        "mbarrier.{arrive,arrive_drop}.expect_tx{,.release.cta,.release.cluster}"
        "{,.shared,.shared::cta}.b64",
        "q, [q], r",
    ),
    Entry(
        f"{_SYNC}: mbarrier.arrive, arrive_drop",
        "mbarrier.{arrive,arrive_drop}{,.expect_tx}{,.release.cluster}.shared::cluster.b64",
        "_, [r], r",
        "also in another CTA of the cluster",
    ),
    Entry(
        f"{_SYNC}: mbarrier.test_wait, try_wait",
        "mbarrier.{test_wait,try_wait}.parity{,.acquire.cta,.acquire.cluster}"
        "{,.shared,.shared::cta}.b64",
        "p, [q], r",
        "a failing try_wait blocks; it times out when nothing else can run",
    ),
    Entry(
        f"{_SYNC}: mbarrier.test_wait, try_wait",
        "mbarrier.{test_wait,try_wait}{,.shared,.shared::cta}.b64",
        "p, [q], q",
        "the state is that of an arrive",
    ),
    Entry(
        f"{_SYNC}: cp.async.mbarrier.arrive",
        "cp.async.mbarrier.arrive{,.noinc}{,.shared,.shared::cta}.b64",
        "[q]",
    ),
    Entry(f"{_SYNC}: membar, fence", "membar.{cta,gl,sys}", "", _ORDER),
    Entry(
        f"{_SYNC}: membar, fence",
        "fence{,.sc,.acq_rel,.acquire,.release}.{cta,cluster,gpu,sys}",
        "",
        _ORDER,
    ),
    Entry(f"{_SYNC}: membar, fence", "fence.mbarrier_init.release.cluster", "", _ORDER),
    Entry(
        f"{_SYNC}: membar, fence",
        "fence.proxy.async{,.shared::cta,.shared::cluster}",
        "",
        "publishes generic shared-memory writes to copies and matrix instructions",
    ),
    Entry(
        f"{_SYNC}: membar, fence",
        "fence.proxy.tensormap::generic.acquire.{cta,cluster,gpu,sys}",
        "[q], 128",
        _ORDER,
    ),
    Entry(
        f"{_SYNC}: membar, fence",
        "fence.proxy.tensormap::generic.release.{cta,cluster,gpu,sys}",
        "",
        _ORDER,
    ),
    Entry(f"{_SYNC}: membar, fence", "fence.proxy.{alias,async.global}", "", _ORDER),
    Entry(
        f"{_SYNC}: clusterlaunchcontrol.try_cancel",
        "clusterlaunchcontrol.try_cancel.async{,.shared::cta}.mbarrier::complete_tx::bytes"
        "{,.multicast::cluster::all}.b128",
        "[r], [r]",
    ),
    Entry(
        f"{_SYNC}: clusterlaunchcontrol.query_cancel",
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128",
        "p, x",
    ),
    Entry(
        f"{_SYNC}: clusterlaunchcontrol.query_cancel",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid::{x,y,z}.b32.b128",
        "r, x",
    ),
    Entry(
        f"{_SYNC}: clusterlaunchcontrol.query_cancel",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128",
        "{r*4}, x",
    ),
)

_ATOMICS = (
    Entry(
        f"{_SYNC}: atom",
        f"atom{_SPACES}.add.{{u32,s32,u64,f32,f64}}",
        "T, [q], T",
        "lanes one after the other",
    ),
    Entry(f"{_SYNC}: atom", f"atom{_SPACES}.add.noftz.{{f16,bf16,f16x2,bf16x2}}", "T, [q], T"),
    Entry(f"{_SYNC}: atom", f"atom{_SPACES}.{{min,max}}.{{u32,s32,u64,s64}}", "T, [q], T"),
    Entry(f"{_SYNC}: atom", f"atom{_SPACES}.{{and,or,xor,exch}}.{{b32,b64}}", "T, [q], T"),
    Entry(f"{_SYNC}: atom", f"atom{_SPACES}.{{inc,dec}}.u32", "r, [q], r"),
    Entry(f"{_SYNC}: atom", f"atom{_SPACES}.cas.{{b16,b32,b64}}", "T, [q], T, T"),
    Entry(f"{_SYNC}: atom", "atom{,.global}.add.{v2,v4}.f32", "{r*vector}, [q], {r*vector}"),
    Entry(
        f"{_SYNC}: atom",
        "atom{,.global}.{add,min,max}.noftz.{v2.f16,v4.f16,v8.f16,v2.bf16,v4.bf16,v8.bf16,v2.f16x2"
        ",v4.f16x2,v2.bf16x2,v4.bf16x2}",
        "{T*vector}, [q], {T*vector}",
    ),
    Entry(f"{_SYNC}: red", f"red{_SPACES}.add.{{u32,s32,u64,f32,f64}}", "[q], T"),
    Entry(f"{_SYNC}: red", f"red{_SPACES}.add.noftz.{{f16,bf16,f16x2,bf16x2}}", "[q], T"),
    Entry(f"{_SYNC}: red", f"red{_SPACES}.{{min,max}}.{{u32,s32,u64,s64}}", "[q], T"),
    Entry(f"{_SYNC}: red", f"red{_SPACES}.{{and,or,xor}}.{{b32,b64}}", "[q], T"),
    Entry(f"{_SYNC}: red", f"red{_SPACES}.{{inc,dec}}.u32", "[q], r"),
    Entry(f"{_SYNC}: red", "red{,.global}.add.{v2,v4}.f32", "[q], {r*vector}"),
    Entry(
        f"{_SYNC}: red",
        "red{,.global}.{add,min,max}.noftz.{v2.f16,v4.f16,v8.f16,v2.bf16,v4.bf16,v8.bf16,v2.f16x2"
        ",v4.f16x2,v2.bf16x2,v4.bf16x2}",
        "[q], {T*vector}",
    ),
)

SYNCHRONISATION = (*_WARP, *_BARRIERS, *_ATOMICS)
