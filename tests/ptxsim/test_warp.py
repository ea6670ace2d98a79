"""Communication within a warp.  PTX ISA: shfl, vote, match, redux, elect, activemask."""

from __future__ import annotations

import harness
import numpy as np
import pytest
from floats import FORMATS, decode, random_bits

import ptxsim

LANES = np.arange(32)
FULL = 0xFFFFFFFF
VALUES = (np.random.default_rng(0).integers(0, 1 << 32, 32, dtype=np.uint64)).astype(np.uint32)


def source_lane(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The ISA's description of shfl: c holds the clamp value and the segment mask."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    highest = (lane & segment) | (clamp & ~segment)
    lowest = lane & segment
    if mode == "up":
        j = lane - b
        inside = j >= highest
    elif mode == "down":
        j = lane + b
        inside = j <= highest
    elif mode == "bfly":
        j = lane ^ b
        inside = j <= highest
    else:
        j = lowest | (b & ~segment)
        inside = j <= highest
    return (j if inside else lane), inside


@pytest.mark.parametrize("width", [32, 16, 8, 2])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl_in_segments(mode: str, width: int) -> None:
    """CUDA's c operand: segment mask 32 - width in bits 8-12, clamp 0 for up and 31 otherwise."""
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    for b in (0, 1, 3, 8, 17, 31):
        text = f"shfl.sync.{mode}.b32 %d0|%d1, %a0, {b}, {c}, 0xffffffff;"
        got, inside = harness.run(text, [VALUES], ["u4", bool])
        for lane in range(32):
            source, ok = source_lane(mode, lane, b, c)
            assert got[lane] == VALUES[source]
            assert inside[lane] == ok


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl_with_operands_that_differ_by_lane(mode: str) -> None:
    rng = np.random.default_rng(1)
    b = rng.integers(0, 40, 32).astype(np.uint32)
    c = (rng.integers(0, 32, 32) << 8 | rng.integers(0, 32, 32)).astype(np.uint32)
    text = f"shfl.sync.{mode}.b32 %d0|%d1, %a0, %a1, %a2, 0xffffffff;"
    got, inside = harness.run(text, [VALUES, b, c], ["u4", bool])
    for lane in range(32):
        source, ok = source_lane(mode, lane, int(b[lane]), int(c[lane]))
        assert got[lane] == VALUES[source]
        assert inside[lane] == ok


def test_shfl_of_a_uniform_value_and_of_floats() -> None:
    (got,) = harness.run("shfl.sync.bfly.b32 %d0, %a0, 1, 31, -1;", [VALUES], ["u4"], (True,))
    assert (got == VALUES[0]).all()
    floats = np.linspace(-1, 1, 32, dtype=np.float32)
    body = "add.f32 %x, %a0, %a0;\nshfl.sync.down.b32 %y, %x, 16, 31, -1;\nadd.f32 %d0, %x, %y;"
    (got,) = harness.run(body, [floats.view("u4")], ["f4"])
    np.testing.assert_array_equal(got[:16], 2 * floats[:16] + 2 * floats[16:])


def test_shfl_from_an_inactive_lane_is_an_error() -> None:
    body = (
        "setp.lt.u32 %act, %lane, 16;\nmov.u32 %d0, 0;\n"
        "@%act shfl.sync.down.b32 %d0, %a0, 8, 31, 0x0000ffff;"
    )
    with pytest.raises(ptxsim.InvalidOperand, match="reads an inactive lane") as caught:
        harness.run(body, [VALUES], ["u4"])
    assert "shfl.sync.down" in str(caught.value)
    assert caught.value.warp == 0


def test_shfl_by_half_a_warp_leaves_the_other_half_alone() -> None:
    body = (
        "setp.lt.u32 %act, %lane, 16;\nmov.u32 %d0, 7;\n"
        "@%act shfl.sync.bfly.b32 %d0, %a0, 1, 31, 0x0000ffff;"
    )
    (got,) = harness.run(body, [VALUES], ["u4"])
    np.testing.assert_array_equal(got[:16], VALUES[LANES[:16] ^ 1])
    assert (got[16:] == 7).all()


PREDICATES = [
    np.zeros(32, bool),
    np.ones(32, bool),
    LANES == 5,
    LANES != 31,
    np.random.default_rng(3).integers(0, 2, 32).astype(bool),
]


@pytest.mark.parametrize("negated", [False, True])
def test_vote(negated: bool) -> None:
    sign = "!" if negated else ""
    for p in PREDICATES:
        seen = p != negated
        ballot = sum(1 << i for i in range(32) if seen[i])
        for uniform in ((False,), (True,)):
            if uniform[0]:
                seen = np.full(32, p[0] != negated)
                ballot = FULL if seen[0] else 0
            for mode, want in (
                ("all", seen.all()),
                ("any", seen.any()),
                ("uni", seen.all() or not seen.any()),
            ):
                text = f"vote.sync.{mode}.pred %d0, {sign}%a0, 0xffffffff;"
                (got,) = harness.run(text, [p], [bool], uniform)
                assert (got == want).all(), mode
            (got,) = harness.run(f"vote.sync.ballot.b32 %d0, {sign}%a0, -1;", [p], ["u4"], uniform)
            assert (got == ballot).all()


def test_vote_counts_members_only() -> None:
    body = (
        "setp.ge.u32 %act, %lane, 8;\nmov.u32 %d0, 0;\n"
        "@%act vote.sync.ballot.b32 %d0, %a0, 0xffffff00;"
    )
    (got,) = harness.run(body, [np.ones(32, bool)], ["u4"])
    assert (got[8:] == 0xFFFFFF00).all()
    assert (got[:8] == 0).all()


@pytest.mark.parametrize("width", [32, 64])
def test_match(width: int) -> None:
    rng = np.random.default_rng(4)
    values = rng.integers(0, 4, 32).astype(f"u{width // 8}") << np.array(
        width - 4, f"u{width // 8}"
    )
    (got,) = harness.run(f"match.any.sync.b{width} %d0, %a0, 0xffffffff;", [values], ["u4"])
    for lane in range(32):
        assert got[lane] == sum(1 << i for i in range(32) if values[i] == values[lane])
    text = f"match.all.sync.b{width} %d0|%d1, %a0, 0xffffffff;"
    got, same = harness.run(text, [values], ["u4", bool])
    assert (got == 0).all()
    assert not same.any()
    got, same = harness.run(text, [values], ["u4", bool], (True,))
    assert (got == FULL).all()
    assert same.all()


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("op", ["add", "min", "max"])
def test_redux_of_integers(op: str, kind: str) -> None:
    values = VALUES.view(np.int32 if kind == "s32" else np.uint32).astype(object)
    want = {"add": values.sum(), "min": values.min(), "max": values.max()}[op] & FULL
    (got,) = harness.run(f"redux.sync.{op}.{kind} %d0, %a0, 0xffffffff;", [VALUES], ["u4"])
    assert (got == want).all()
    total = int(values[0]) * 32 if op == "add" else int(values[0])
    (got,) = harness.run(f"redux.sync.{op}.{kind} %d0, %a0, -1;", [VALUES], ["u4"], (True,))
    assert (got == total & FULL).all()


def test_redux_of_bits_over_some_lanes() -> None:
    for op, function in (
        ("and", np.bitwise_and),
        ("or", np.bitwise_or),
        ("xor", np.bitwise_xor),
    ):
        body = (
            "setp.lt.u32 %act, %lane, 20;\nmov.u32 %d0, 0;\n"
            f"@%act redux.sync.{op}.b32 %d0, %a0, 0x000fffff;"
        )
        (got,) = harness.run(body, [VALUES], ["u4"])
        assert (got[:20] == function.reduce(VALUES[:20])).all()


@pytest.mark.parametrize("modifier", ["", ".abs", ".NaN", ".abs.NaN"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_redux_of_f32(op: str, modifier: str) -> None:
    """A NaN is passed over unless `.NaN`, which gives the canonical one."""
    form = FORMATS["f32"]
    for seed in range(6):
        bits = random_bits(form, 32, np.random.default_rng(seed))
        if seed % 2:
            bits = bits & 0xBFFFFFFF  # no NaN
        numbers = [decode(int(b), form) for b in bits]
        if "abs" in modifier:
            numbers = [abs(n) for n in numbers]
        real = [n for n in numbers if n == n]
        (got,) = harness.run(f"redux.sync.{op}{modifier}.f32 %d0, %a0, -1;", [bits], ["u4"])
        assert len(set(got.tolist())) == 1
        if "NaN" in modifier and len(real) < 32:
            assert got[0] == 0x7FFFFFFF
        else:
            assert decode(int(got[0]), form) == {"min": min, "max": max}[op](real)


def test_elect_names_the_lowest_lane_and_always_the_same() -> None:
    text = "elect.sync %d0|%d1, 0xffffffff;"
    leader, is_leader = harness.run(text, [VALUES], ["u4", bool])
    assert (leader == 0).all()
    np.testing.assert_array_equal(is_leader, LANES == 0)
    body = (
        "setp.ge.u32 %act, %lane, 9;\nmov.u32 %d0, 99;\nsetp.ne.u32 %d1, %lane, %lane;\n"
        "@%act elect.sync %d0|%d1, 0xfffffe00;"
    )
    leader, is_leader = harness.run(body, [VALUES], ["u4", bool])
    assert (leader[9:] == 9).all()
    np.testing.assert_array_equal(is_leader, LANES == 9)
    (is_leader,) = harness.run("elect.sync _|%d0, -1;", [VALUES], [bool])
    np.testing.assert_array_equal(is_leader, LANES == 0)


def test_activemask_follows_divergence() -> None:
    body = """
    setp.lt.u32 %act, %lane, 5;
    @%act bra LOW;
    activemask.b32 %d0;
    bra MEET;
    LOW:
    activemask.b32 %d0;
    MEET:
    activemask.b32 %d1;
    """
    inside, after = harness.run(body, [VALUES], ["u4", "u4"])
    assert (inside[:5] == 0x1F).all()
    assert (inside[5:] == FULL & ~0x1F).all()
    assert (after == FULL).all()


def test_sync_waits_for_lanes_on_both_sides_of_a_branch() -> None:
    """A full-mask shuffle behind a branch: it runs once the lanes of both paths are there."""
    body = """
    setp.lt.u32 %act, %lane, 5;
    mov.u32 %x, 1;
    @%act bra LOW;
    mov.u32 %x, 2;
    LOW:
    shfl.sync.idx.b32 %d0, %x, 31, 31, 0xffffffff;
    """
    (got,) = harness.run(body, [VALUES], ["u4"])
    assert (got == 2).all()


def test_lane_masks_and_ids() -> None:
    registers = {
        "%laneid": LANES,
        "%lanemask_eq": 1 << LANES,
        "%lanemask_lt": (1 << LANES) - 1,
        "%lanemask_le": (2 << LANES) - 1,
        "%lanemask_gt": FULL & ~((2 << LANES) - 1),
        "%lanemask_ge": FULL & ~((1 << LANES) - 1),
    }
    for name, want in registers.items():
        (got,) = harness.run(f"mov.u32 %d0, {name};", [VALUES], ["u4"])
        np.testing.assert_array_equal(got, np.asarray(want).astype(np.uint32), err_msg=name)


def test_a_member_mask_without_the_caller_is_an_error() -> None:
    body = (
        "setp.lt.u32 %act, %lane, 5;\nmov.u32 %d0, 0;\n@%act redux.sync.add.u32 %d0, %a0, 0xff00;"
    )
    with pytest.raises(ptxsim.InvalidOperand, match="member mask"):
        harness.run(body, [VALUES], ["u4"])


def test_a_guard_that_keeps_members_out_is_an_error() -> None:
    body = "setp.lt.u32 %act, %lane, 5;\nmov.u32 %d0, 0;\n@%act redux.sync.add.u32 %d0, %a0, -1;"
    with pytest.raises(ptxsim.DivergenceError, match="guard"):
        harness.run(body, [VALUES], ["u4"])


def test_lanes_that_never_come_are_a_deadlock() -> None:
    body = """
    setp.lt.u32 %act, %lane, 5;
    mov.u32 %d0, 0;
    @%act bra LOW;
    redux.sync.add.u32 %d0, %a0, 0xffffffff;
    bra MEET;
    LOW:
    redux.sync.add.u32 %d0, %a0, 0xffffffff;
    MEET:
    """
    with pytest.raises(ptxsim.Deadlock, match="have not reached this instruction"):
        harness.run(body, [VALUES], ["u4"])
