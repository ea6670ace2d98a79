"""Whole kernels of our own, in PTX: from a vector addition to a tcgen05 GEMM of a CTA pair."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import ptxsim

sys.path.insert(0, str(Path(__file__).parent))

import harness

from kernels import pair_gemm

ADD = harness.kernel(
    """
    ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; ld.param.u64 %z, [z]; ld.param.u32 %n, [n];
    mov.u32 %i, %ctaid.x; mov.u32 %r, %ntid.x; mul.lo.u32 %i, %i, %r;
    mov.u32 %r, %tid.x; add.u32 %i, %i, %r;
    setp.ge.u32 %p, %i, %n;
    @%p bra end;
    mad.wide.u32 %x, %i, 4, %x; mad.wide.u32 %y, %i, 4, %y; mad.wide.u32 %z, %i, 4, %z;
    ld.global.f32 %a, [%x]; ld.global.f32 %b, [%y];
    add.f32 %a, %a, %b;
    st.global.f32 [%z], %a;
    end:
    """,
    (".u64 x", ".u64 y", ".u64 z", ".u32 n"),
    ".reg .b32 %i, %r, %n; .reg .f32 %a, %b; .reg .b64 %x, %y, %z; .reg .pred %p;",
    name="add",
)

# Each CTA reverses its 128 numbers through shared memory; warps read what other warps wrote.
REVERSE = harness.kernel(
    """
    ld.param.u64 %x, [x];
    mov.u32 %t, %tid.x; mov.u32 %i, %ctaid.x; mad.lo.u32 %i, %i, 128, %t;
    mad.wide.u32 %x, %i, 4, %x;
    ld.global.u32 %v, [%x];
    mov.u32 %at, row; mad.lo.u32 %to, %t, 4, %at;
    st.shared.u32 [%to], %v;
    bar.sync 0;
    sub.u32 %t, 127, %t; mad.lo.u32 %to, %t, 4, %at;
    ld.shared.u32 %v, [%to];
    st.global.u32 [%x], %v;
    """,
    (".u64 x",),
    ".reg .b32 %t, %i, %v, %at, %to; .reg .b64 %x; .shared .align 4 .b8 row[512];",
    name="reverse",
)

# Counts values into 8 bins: atomics of all CTAs on the same words.
HISTOGRAM = harness.kernel(
    """
    ld.param.u64 %x, [x]; ld.param.u64 %h, [h];
    mov.u32 %t, %tid.x; mov.u32 %i, %ctaid.x; mad.lo.u32 %i, %i, 128, %t;
    mad.wide.u32 %x, %i, 4, %x;
    ld.global.u32 %v, [%x];
    mad.wide.u32 %h, %v, 4, %h;
    red.global.add.u32 [%h], 1;
    """,
    (".u64 x", ".u64 h"),
    ".reg .b32 %t, %i, %v; .reg .b64 %x, %h;",
    name="histogram",
)

# A ring of two CTAs: each writes its rank into the other's shared memory and signals its barrier.
NEIGHBOURS = harness.kernel(
    """
    ld.param.u64 %x, [x];
    mov.u32 %me, %cluster_ctarank; xor.b32 %you, %me, 1;
    mov.u32 %at, word;
    mov.u32 %bar, gate;
    mov.u32 %t, %tid.x;
    setp.ne.u32 %p, %t, 0;
    @!%p mbarrier.init.shared::cta.b64 [%bar], 1;
    @!%p fence.mbarrier_init.release.cluster;
    bar.warp.sync -1;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p bra wait;
    mapa.shared::cluster.u32 %to, %at, %you;
    add.u32 %v, %me, 40;
    st.shared::cluster.u32 [%to], %v;
    mapa.shared::cluster.u32 %to, %bar, %you;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%to];
    wait:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %q, [%bar], 0;
    @!%q bra wait;
    ld.shared.u32 %v, [%at];
    mov.u32 %i, %ctaid.x; mad.lo.u32 %i, %i, 32, %t;
    mad.wide.u32 %x, %i, 4, %x;
    st.global.u32 [%x], %v;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """,
    (".u64 x",),
    ".reg .b32 %me, %you, %at, %bar, %t, %to, %v, %i; .reg .b64 %x; .reg .pred %p, %q;"
    " .shared .align 8 .b8 gate[8]; .shared .align 4 .b8 word[4];",
    name="neighbours",
)


@pytest.mark.parametrize("processes", [1, 2])
def test_vector_addition_leaves_the_rest_alone(processes: int) -> None:
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal(1000).astype(np.float32) for _ in "xy")
    z = np.full(1000, 7, np.float32)
    ptxsim.load(ADD).launch(8, 128, [x, y, z, 990], processes=processes)
    assert np.array_equal(z[:990], x[:990] + y[:990])
    assert (z[990:] == 7).all()


def test_torch_tensors_are_used_in_place() -> None:
    torch = pytest.importorskip("torch")
    x, y, z = torch.arange(64.0), torch.ones(64), torch.zeros(128)[64:]
    ptxsim.load(ADD).launch(1, 64, [x, y, z, 64])
    assert torch.equal(z, torch.arange(64.0) + 1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("processes", [1, 2])
def test_barrier_orders_shared_memory(seed: int, processes: int) -> None:
    x = np.arange(512, dtype=np.uint32)
    expected = x.reshape(4, 128)[:, ::-1].reshape(-1).copy()
    ptxsim.load(REVERSE).launch(4, 128, [x], seed=seed, races=True, processes=processes)
    assert np.array_equal(x, expected)


@pytest.mark.parametrize("processes", [1, 2])
def test_atomics_of_all_blocks_are_counted(processes: int) -> None:
    x = np.random.default_rng(1).integers(0, 8, 128 * 40).astype(np.uint32)
    bins = np.zeros(8, np.uint32)
    ptxsim.load(HISTOGRAM).launch(40, 128, [x, bins], processes=processes)
    assert np.array_equal(bins, np.bincount(x, minlength=8))


@pytest.mark.parametrize("seed", range(5))
def test_cluster_writes_and_signals_its_neighbour(seed: int) -> None:
    x = np.zeros(128, np.uint32)
    ptxsim.load(NEIGHBOURS).launch(4, 32, [x], cluster=2, seed=seed, races=True)
    assert np.array_equal(x, np.repeat([41, 40, 41, 40], 32))


def test_neighbours_without_a_first_cluster_barrier_are_an_error() -> None:
    broken = NEIGHBOURS.replace("barrier.cluster.arrive.aligned;", "", 1)
    broken = broken.replace("barrier.cluster.wait.aligned;", "", 1)
    message = "what warp [01] has written in line|no mbarrier was initialised"
    for seed in range(5):
        with pytest.raises((ptxsim.DataRace, ptxsim.BarrierError), match=message):
            ptxsim.load(broken).launch(
                2, 32, [np.zeros(64, np.uint32)], cluster=2, seed=seed, races=True
            )


def test_error_in_a_process_names_line_and_block() -> None:
    x, y, z = (np.zeros(1000, np.float32) for _ in "xyz")
    with pytest.raises(ptxsim.OutOfBounds, match="lie in no buffer") as caught:
        ptxsim.load(ADD).launch(8, 128, [x, y, z, 1024], processes=2)
    assert "ld.global.f32 %a" in str(caught.value.text)
    assert caught.value.cta == (7, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_pair_of_blocks_multiplies_together(seed: int) -> None:
    generator = np.random.default_rng(2)
    wide = [generator.integers(-8, 9, shape).astype(np.float32) for shape in ((256, 64), (64, 64))]
    a, b = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in wide)
    d = pair_gemm.launch(pair_gemm.text(), a, b, seed=seed, races=True)
    assert np.array_equal(d, wide[0] @ wide[1].T)


def test_pair_that_forgets_its_second_half_is_a_deadlock() -> None:
    broken = (
        pair_gemm.text()
        .replace(".multicast::cluster.b64", ".b64")
        .replace("[%at], %both;", "[%at];")
    )
    zeros = np.zeros((256, 64), np.uint16), np.zeros((64, 64), np.uint16)
    with pytest.raises(ptxsim.Deadlock, match=r"CTA \(1, 0, 0\) warp \d.*waits for parity 0"):
        pair_gemm.launch(broken, *zeros)


# Every thread of four warps adds 0.1 * (1 + its number) to one word, in the order of arrival.
SUM = harness.kernel(
    """
    ld.param.u64 %x, [x];
    mov.u32 %t, %tid.x; add.u32 %t, %t, 1; cvt.rn.f32.u32 %v, %t; mul.f32 %v, %v, 0f3DCCCCCD;
    red.global.add.f32 [%x], %v;
    """,
    (".u64 x",),
    ".reg .b32 %t; .reg .f32 %v; .reg .b64 %x;",
    name="total",
)


def test_schedules_agree_on_a_correct_kernel() -> None:
    x = np.arange(512, dtype=np.uint32)
    module = ptxsim.load(REVERSE)
    outcomes = ptxsim.explore(lambda seed: module.launch(4, 128, [x], seed=seed), [x])
    assert [o.seed for o in outcomes] == [0, 1, 2, 3, 4]
    assert all(o.agrees for o in outcomes)
    assert np.array_equal(x, np.arange(512).reshape(4, 128)[:, ::-1].reshape(-1))


def test_schedules_disagree_without_a_barrier() -> None:
    x = np.arange(512, dtype=np.uint32)
    module = ptxsim.load(REVERSE.replace("bar.sync 0;", ""))
    outcomes = ptxsim.explore(lambda seed: module.launch(4, 128, [x], seed=seed), [x])
    assert not all(o.agrees for o in outcomes)
    assert any(isinstance(o.error, ptxsim.UninitialisedRead) for o in outcomes)


def test_schedules_show_the_order_of_float_atomics() -> None:
    x = np.zeros(1, np.float32)
    module = ptxsim.load(SUM)
    sums = []

    def run(seed: int) -> None:
        module.launch(1, 128, [x], seed=seed)
        sums.append(float(x[0]))

    outcomes = ptxsim.explore(run, [x], seeds=range(12))
    assert all(o.error is None for o in outcomes)
    assert np.allclose(sums, 0.1 * 128 * 129 / 2, rtol=1e-5)
    assert len(set(sums)) > 1
    assert any(o.differing[0] for o in outcomes)
