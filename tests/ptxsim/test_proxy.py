"""Generic writes seen by the async proxy: where on the path a fence.proxy.async may stand."""

from __future__ import annotations

import harness
import numpy as np
import pytest

import ptxsim

FENCE = "fence.proxy.async.shared::cta;"


def source(writer: str, meet: str, reader: str) -> str:
    """Warp 0 writes 16 bytes a lane, warp 1 sends them off by a bulk copy."""
    body = f"""
    .shared .align 128 .b8 tile[512];
    .shared .align 8 .b64 bar;
    .reg .b32 %t, %w, %b, %at; .reg .b64 %out, %state; .reg .pred %first, %lead, %done;
    mov.u32 %t, %tid.x; mov.u32 %w, tile; mov.u32 %b, bar;
    setp.lt.u32 %first, %t, 32; setp.eq.u32 %lead, %t, 32;
    setp.eq.u32 %done, %t, 0;
    @%done mbarrier.init.shared.b64 [%b], 32;
    bar.sync 0;
    mad.lo.u32 %at, %t, 16, %w;
    @%first st.shared.v4.b32 [%at], {{%t, %t, %t, %t}};
    {writer}
    {meet}
    {reader}
    ld.param.u64 %out, [out];
    @%lead cp.async.bulk.global.shared::cta.bulk_group [%out], [%w], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    """
    return harness.kernel(body, [".u64 out"])


BAR = "bar.sync 1;"
MBARRIER = """
@%first mbarrier.arrive.shared.b64 %state, [%b];
@%first bra OVER;
WAIT:
mbarrier.try_wait.parity.shared.b64 %done, [%b], 0;
@!%done bra WAIT;
OVER:
"""


def run(text: str, seed: int) -> None:
    out = np.zeros(128, np.uint32)
    ptxsim.load(text).launch(1, 64, [out], seed=seed)
    np.testing.assert_array_equal(out, np.repeat(np.arange(32), 4))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("meet", [BAR, MBARRIER], ids=["bar", "mbarrier"])
def test_the_writer_may_fence_before_the_barrier(meet: str, seed: int) -> None:
    run(source(FENCE, meet, ""), seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("meet", [BAR, MBARRIER], ids=["bar", "mbarrier"])
def test_the_reader_may_fence_after_the_barrier(meet: str, seed: int) -> None:
    run(source("", meet, FENCE), seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("meet", [BAR, MBARRIER], ids=["bar", "mbarrier"])
def test_no_fence_is_an_error(meet: str, seed: int) -> None:
    with pytest.raises(ptxsim.MissingFence, match="warp 0 wrote"):
        run(source("", meet, ""), seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_fence_of_the_reader_before_the_barrier_is_too_early(seed: int) -> None:
    """The reader's fence publishes what it knows of: at that point, nothing of the writer's."""
    only_reader = f"@%first bra SKIP;\n{FENCE}\nSKIP:"
    with pytest.raises(ptxsim.MissingFence, match="warp 0 wrote"):
        run(source(only_reader, BAR, ""), seed)


def test_writes_after_the_arrival_are_not_known_to_the_reader() -> None:
    later = f"{BAR}\n@%first st.shared.b32 [%at], 7;\nbar.sync 2;"
    text = source("", later, "").replace("bar.sync 2;", f"@!%first {FENCE}\nbar.sync 2;")
    with pytest.raises(ptxsim.MissingFence, match="warp 0 wrote"):
        run(text, 0)
