"""What stops a kernel: each check of the sanitizer, on a few lines of PTX, with its message."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import ptxsim

sys.path.insert(0, str(Path(__file__).parent))

import harness

REGISTERS = """
.reg .b32 %t, %w, %a, %v, %r0; .reg .b64 %x, %y; .reg .pred %p, %q; .reg .b32 %d<4>;
.shared .align 1024 .b8 buf[4096]; .shared .align 8 .b8 bar[16]; .local .align 8 .b8 stack[64];
"""
START = """
ld.param.u64 %x, [x];
mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; mad.wide.u32 %y, %t, 4, %x;
setp.eq.u32 %p, %t, 0;
"""


def run(body: str, block: int = 32, **options: object) -> np.ndarray:
    """Launch `body`; `x` is an array of 64 words, 64 mod 16 bytes from a page of its own."""
    x = np.arange(64, dtype=np.uint32)
    text = harness.kernel(START + body, (".u64 x",), REGISTERS)
    ptxsim.load(text).launch(1, block, [x], **options)  # type: ignore[arg-type]
    return x


CASES = [
    # Memory that nothing wrote.
    ("shared-unwritten", "mov.u32 %a, buf; ld.shared.u32 %v, [%a+8];", ptxsim.UninitialisedRead,
     "4 shared bytes at offset 0x408 were never written"),
    ("shared-partly-written", "mov.u32 %a, buf; st.shared.u32 [%a], %t; ld.shared.u64 %y, [%a];",
     ptxsim.UninitialisedRead, "8 shared bytes at offset 0x400 were never written"),
    ("local-unwritten", "mov.b64 %y, stack; ld.local.u32 %v, [%y];", ptxsim.UninitialisedRead,
     "4 local bytes were never written"),
    # Bounds.
    ("global-behind", "ld.global.u32 %v, [%x+256];", ptxsim.OutOfBounds, "lie in no buffer"),
    ("global-before", "st.global.u32 [%x+-4], %t;", ptxsim.OutOfBounds, "lie in no buffer"),
    ("global-one-lane", "mad.wide.u32 %y, %t, 12, %x; ld.global.u32 %v, [%y];",
     ptxsim.OutOfBounds, "lie in no buffer"),
    ("shared-null", "mov.u32 %a, 0; ld.shared.u32 %v, [%a];", ptxsim.OutOfBounds,
     "4 shared bytes at offset 0: the CTA has 1024"),
    ("shared-behind", "mov.u32 %a, buf; st.shared.u32 [%a+8192], %t;", ptxsim.OutOfBounds,
     "the CTA has 1024.."),
    ("local-behind", "mov.b64 %y, stack; st.local.u32 [%y+64], %t;", ptxsim.OutOfBounds,
     "the stack has 64 bytes"),
    # Alignment.
    ("global-misaligned", "ld.global.v2.u32 {%v, %a}, [%x+4];", ptxsim.Misaligned,
     "access of 8 bytes"),
    ("shared-misaligned", "mov.u32 %a, buf; st.shared.v4.u32 [%a+8], {%t, %t, %t, %t};",
     ptxsim.Misaligned, "shared access of 16 bytes at offset 0x408"),
    ("barrier-misaligned", "mov.u32 %a, bar; mbarrier.init.shared::cta.b64 [%a+4], 1;",
     ptxsim.Misaligned, "mbarrier at .*: multiple of 8"),
    # Barrier objects.
    ("barrier-read", "mov.u32 %a, bar; mbarrier.init.shared::cta.b64 [%a], 1;"
     "ld.shared.u64 %y, [%a];", ptxsim.BarrierError, "is read: an mbarrier lives there"),
    ("barrier-written", "mov.u32 %a, bar; mbarrier.init.shared::cta.b64 [%a], 1;"
     "st.shared.u32 [%a+4], %t;", ptxsim.BarrierError, "is written: an mbarrier"),
    ("barrier-too-many", "mov.u32 %a, bar; mbarrier.init.shared::cta.b64 [%a], 31;"
     "mbarrier.arrive.shared::cta.b64 _, [%a];", ptxsim.BarrierError,
     "32 arrivals, but phase 0 expects only 31 more of 31"),
    ("barrier-ended", "mov.u32 %a, bar; mbarrier.init.shared::cta.b64 [%a], 1;"
     "mbarrier.inval.shared::cta.b64 [%a]; mbarrier.arrive.shared::cta.b64 _, [%a];",
     ptxsim.BarrierError, "no mbarrier was initialised"),
    ("barrier-too-many-bytes", "mov.u32 %a, bar; mbarrier.init.shared::cta.b64 [%a], 1;"
     "@%p mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%a], 1048576;", ptxsim.BarrierError,
     "1048576 outstanding bytes exceed 1048575"),
    ("named-barrier-number", "bar.sync 16;", ptxsim.BarrierError, "barrier 16: there are 16"),
    # Copies.
    ("cp-async-not-waited", "mov.u32 %a, buf; mad.lo.u32 %a, %t, 4, %a;"
     "cp.async.ca.shared.global [%a], [%y], 4; ld.shared.u32 %v, [%a];", ptxsim.AsyncHazard,
     "is read while an unfinished copy"),
    ("cp-async-at-exit", "mov.u32 %a, buf; mad.lo.u32 %a, %t, 4, %a;"
     "cp.async.ca.shared.global [%a], [%y], 4; cp.async.commit_group;", ptxsim.AsyncHazard,
     "the kernel ended before cp.async of this line was waited for"),
    ("bulk-at-exit", "mov.u32 %a, bar; mbarrier.init.shared::cta.b64 [%a], 1; mov.u32 %v, buf;"
     "@%p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%v], [%x], 64, [%a];",
     ptxsim.AsyncHazard, "the kernel ended before cp.async.bulk of this line"),
    ("bulk-size", "mov.u32 %a, bar; mbarrier.init.shared::cta.b64 [%a], 1; mov.u32 %v, buf;"
     "@%p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%v], [%x], 24, [%a];",
     ptxsim.Misaligned, "16"),
    ("bulk-store-without-fence", "mov.u32 %a, buf; mad.lo.u32 %v, %t, 4, %a;"
     "st.shared.u32 [%v], %t; bar.sync 0;"
     "@%p cp.async.bulk.global.shared::cta.bulk_group [%x], [%a], 128;", ptxsim.MissingFence,
     "warp 0 wrote without a later fence.proxy.async"),
    # Divergence.
    ("inactive-source-lane", "setp.lt.u32 %q, %t, 16; @!%q bra end;"
     "shfl.sync.idx.b32 %v, %t, 20, 31, 0xffff; end:", ptxsim.InvalidOperand,
     "reads an inactive lane"),
    ("barrier-under-a-guard", "@%p bar.sync 0;", ptxsim.DivergenceError,
     "has a guard that holds in 0x00000001 only"),
    # Others.
    ("trap", "trap;", ptxsim.SimulationError, "the kernel executed `trap`"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "error", "message"), [c[1:] for c in CASES],
                         ids=[c[0] for c in CASES])  # fmt: skip
@pytest.mark.parametrize("seed", [0, 2])
def test_check(body: str, error: type[ptxsim.SimulationError], message: str, seed: int) -> None:
    with pytest.raises(error, match=message) as caught:
        run(body, seed=seed)
    assert type(caught.value) is error
    assert caught.value.line is not None
    assert caught.value.text
    assert caught.value.cta == (0, 0, 0)
    assert caught.value.warp == 0


def test_deadlock_tells_who_waits_on_what() -> None:
    body = """
    mov.u32 %a, bar;
    @%p mbarrier.init.shared::cta.b64 [%a], 2;
    bar.sync 0;
    setp.eq.u32 %q, %w, 1;
    @%q bra other;
    @%p mbarrier.arrive.shared::cta.b64 _, [%a];
    again: mbarrier.try_wait.parity.shared::cta.b64 %q, [%a], 0;
    @!%q bra again;
    bra end;
    other: bar.sync 3, 64;
    end:
    """
    with pytest.raises(ptxsim.Deadlock) as caught:
        run(body, block=64)
    told = str(caught.value)
    assert "warp 0" in told
    assert "waits for parity 0 of mbarrier" in told
    assert "in phase 0: 1 of 2 arrivals and 0 of 0 bytes are missing" in told
    assert "warp 1" in told
    assert "barrier 3: 32 of 64 threads, warps [1]" in told
    assert all(f"line {n}" in told for n in _lines(told))


def _lines(told: str) -> list[str]:
    rows = [row for row in told.split("\n") if row.startswith("  CTA")]
    assert len(rows) == 2
    return [row.split("line ")[1].split(":")[0] for row in rows]


def test_two_warps_on_different_counts_of_one_barrier() -> None:
    body = "setp.eq.u32 %q, %w, 1; @%q bra other; bar.sync 1, 96; bra end; other: bar.sync 1, 64;"
    with pytest.raises(ptxsim.BarrierError, match=r"warp \d says \d+ threads, the warps \[\d\]"):
        run(body + " end:", block=64)


def test_a_spin_that_nobody_ends_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    from ptxsim import machine

    defaults = machine.Options.__init__.__defaults__
    assert defaults is not None
    few = (*defaults[:-1], 2000)
    assert defaults[-1] > 100_000  # the limit on steps is the last field
    monkeypatch.setattr(machine.Options.__init__, "__defaults__", few)
    body = "again: ld.volatile.global.u32 %v, [%x]; setp.ne.u32 %q, %v, 99; @%q bra again;"
    with pytest.raises(ptxsim.Deadlock, match="livelock"):
        run(body)


def test_race_of_two_warps_on_shared_memory() -> None:
    body = """
    mov.u32 %a, buf; mad.lo.u32 %v, %t, 4, %a;
    st.shared.u32 [%v], %t;
    xor.b32 %v, %t, 32; mad.lo.u32 %v, %v, 4, %a;
    {sync}
    ld.shared.u32 %v, [%v];
    st.global.u32 [%y], %v;
    """
    for seed in range(4):
        with pytest.raises((ptxsim.DataRace, ptxsim.UninitialisedRead)):
            run(body.format(sync=""), block=64, seed=seed, races=True)
        x = run(body.format(sync="bar.sync 0;"), block=64, seed=seed, races=True)
        assert np.array_equal(x, np.arange(64) ^ 32)


WRITTEN_BY_THE_OTHER = r"a store writes what warp [01] has written"
REPLICAS = {
    "words": "st.shared.u32 [%a], %r0;",
    "vectors": "st.shared.v4.u32 [%a], {%r0, %r0, %v, %r0};",
    "one address": "mov.u32 %a, buf; mov.u32 %r0, 5; st.shared.u32 [%a], %r0;",
    "matrices": "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%a], {%r0, %v, %v, %r0};",
}


def replicas(store: str, odd: str = "", sync: str = "bar.sync 0;") -> str:
    """Both warps store the same; warp 1 does `odd` before; what is loaded goes to x."""
    return f"""
    and.b32 %r0, %t, 31;
    mov.u32 %a, buf; mad.lo.u32 %a, %r0, 16, %a;
    add.u32 %v, %r0, 7;
    setp.eq.u32 %q, %w, 1;
    {odd}
    {store}
    {sync}
    ld.shared.u32 %v, [%a];
    st.global.u32 [%y], %v;
    """


@pytest.mark.parametrize("form", REPLICAS)
def test_warps_that_store_the_same_are_no_race(form: str) -> None:
    for seed in range(4):
        x = run(replicas(REPLICAS[form]), block=64, seed=seed, races=True)
        assert np.array_equal(x[:32], x[32:])


@pytest.mark.parametrize("form", REPLICAS)
def test_stores_of_something_else_are_a_race_named_by_the_second_store(form: str) -> None:
    store = REPLICAS[form]
    if form == "one address":
        store = store.replace("mov.u32 %r0, 5;", "add.u32 %r0, %w, 5;")
    # One word of one lane differs.
    odd = "setp.eq.and.u32 %p, %r0, 17, %q; @%p add.u32 %r0, %r0, 1;"
    for seed in range(4):
        with pytest.raises(ptxsim.DataRace, match=WRITTEN_BY_THE_OTHER) as found:
            run(replicas(store, odd), block=64, seed=seed, races=True)
        assert found.value.text is not None
        assert found.value.text.startswith(("st.shared", "stmatrix"))
        assert f"written in line {found.value.line}," in found.value.message


def test_a_replica_orders_nothing() -> None:
    """Its words must still be waited for, and be done with before they are stored again."""
    store = REPLICAS["words"]
    with pytest.raises(ptxsim.DataRace, match="a load reads what warp 0 has written"):
        run(replicas("@!%q " + store, sync=""), block=64, races=True)
    again = "bar.sync 0; ld.shared.u32 %v, [%a];" + store
    for seed in range(4):
        with pytest.raises(ptxsim.DataRace, match=r"writes what warp . has read|a load reads"):
            run(replicas(store, sync=again), block=64, seed=seed, races=True)


def test_two_instructions_that_store_the_same_are_a_race() -> None:
    body = replicas("@%q st.shared.u32 [%a], 3;\n@!%q st.shared.u32 [%a], 3;")
    for seed in range(4):
        with pytest.raises(ptxsim.DataRace, match=WRITTEN_BY_THE_OTHER):
            run(body, block=64, seed=seed, races=True)


def test_race_of_a_warp_with_a_copy_of_its_own() -> None:
    """What a bulk store still reads is written over, by the warp that asked for it."""
    body = """
    mov.u32 %a, buf; mad.lo.u32 %v, %t, 4, %a;
    st.shared.u32 [%v], %t;
    fence.proxy.async.shared::cta; bar.warp.sync -1;
    @%p cp.async.bulk.global.shared::cta.bulk_group [%x], [%a], 128;
    cp.async.bulk.commit_group;
    {wait}
    mov.u32 %w, 0;
    again: add.u32 %w, %w, 1; setp.lt.u32 %q, %w, 50; @%q bra again;
    st.shared.u32 [%v], 99;
    cp.async.bulk.wait_group 0;
    """
    for seed in range(8):
        # The first where the copy happens to be done by then, the second where it is not.
        with pytest.raises((ptxsim.DataRace, ptxsim.AsyncHazard)):
            run(body.format(wait=""), seed=seed, races=True)
        x = run(body.format(wait="cp.async.bulk.wait_group.read 0;"), seed=seed, races=True)
        assert np.array_equal(x[:32], np.arange(32))


COPY = (
    "@%p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%a+{to}], [%x], 128, [%v+{bar}];\n"
)
AWAITED = """
{name}: mbarrier.try_wait.parity.shared::cta.b64 %q, [%v+{bar}], 0; @!%q bra {name};
"""


def two_copies(order: tuple[int, int], awaited: tuple[int, ...]) -> str:
    """Two copies with a barrier each, issued in ``order``; the first one's bytes are read."""
    copies = "".join(COPY.format(to=128 * which, bar=8 * which) for which in order)
    waits = "".join(AWAITED.format(name=f"again{which}", bar=8 * which) for which in awaited)
    return f"""
    mov.u32 %a, buf; mov.u32 %v, bar;
    @%p mbarrier.init.shared::cta.b64 [%v], 1;
    @%p mbarrier.init.shared::cta.b64 [%v+8], 1;
    @%p fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%v], 128;
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%v+8], 128;
    {copies}{waits}
    ld.shared.u32 %w, [%a+4];
    st.global.u32 [%y], %w;
    {"".join(AWAITED.format(name=f"last{which}", bar=8 * which) for which in order)}
    """


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_of_two_copies_the_barrier_of_one_says_nothing_of_the_other(order: tuple[int, int]) -> None:
    """Whichever was issued first, whether or not it happens to be done by then."""
    assert (run(two_copies(order, (0, 1)), races=True)[:32] == 1).all()
    assert (run(two_copies(order, (0,)), races=True)[:32] == 1).all()
    with pytest.raises(ptxsim.AsyncHazard, match="an unfinished copy"):
        run(two_copies(order, (1,)), seed=0)
    for seed in range(8):
        with pytest.raises((ptxsim.DataRace, ptxsim.AsyncHazard)):
            run(two_copies(order, (1,)), seed=seed, races=True)


def test_atomics_and_flags_are_no_races() -> None:
    body = """
    mov.u32 %a, buf;
    @%p st.shared.u32 [%a], 0;
    @%p st.shared.u32 [%a+4], 7;
    bar.sync 0;
    setp.eq.u32 %q, %w, 1;
    @%q bra other;
    st.shared.u32 [%a+4], 8;
    atom.shared.exch.b32 %v, [%a], 1;
    bra end;
    other: ld.acquire.cta.shared.u32 %v, [%a]; setp.eq.u32 %q, %v, 0; @%q bra other;
    ld.shared.u32 %v, [%a+4];
    st.global.u32 [%y], %v;
    end:
    """
    for seed in range(4):
        x = run(body, block=64, seed=seed, races=True)
        assert (x[32:] == 8).all()


def test_warnings_become_errors_if_strict() -> None:
    body = "mov.u32 %a, bar; @%p mbarrier.init.shared::cta.b64 [%a], 1;"
    body += "@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%a], 64;"
    x = np.arange(64, dtype=np.uint32)
    module = ptxsim.load(harness.kernel(START + body, (".u64 x",), REGISTERS))
    found = module.launch(1, 32, [x])
    assert len(found.warnings) == 1
    assert "64 of 64 bytes are missing" in found.warnings[0]
    with pytest.raises(ptxsim.BarrierError, match="64 of 64 bytes are missing"):
        module.launch(1, 32, [x], strict=True)
