"""Every kind of instruction under guards and behind branches: absent lanes keep theirs."""

from __future__ import annotations

import harness
import numpy as np
import pytest
from floats import FORMATS, random_bits

COUNT = 64  # two warps
INSTRUCTIONS = [
    ("add.u16 %d0, %a0, %a1;", "u2 u2", "u2"),
    ("add.s32 %d0, %a0, %a1;", "u4 u4", "u4"),
    ("sub.u64 %d0, %a0, %a1;", "u8 u8", "u8"),
    ("mul.wide.s32 %d0, %a0, %a1;", "u4 u4", "u8"),
    ("mad.hi.u32 %d0, %a0, %a1, %a1;", "u4 u4", "u4"),
    ("min.s32 %d0, %a0, %a1;", "u4 u4", "u4"),
    ("abs.s64 %d0, %a0;", "u8", "u8"),
    ("popc.b64 %d0, %a0;", "u8", "u4"),
    ("bfe.u32 %d0, %a0, 3, 9;", "u4", "u4"),
    ("prmt.b32 %d0, %a0, %a1, 0x2741;", "u4 u4", "u4"),
    ("lop3.b32 %d0, %a0, %a1, %a1, 0x6a;", "u4 u4", "u4"),
    ("shf.l.wrap.b32 %d0, %a0, %a1, 7;", "u4 u4", "u4"),
    ("shr.s32 %d0, %a0, %a1;", "u4 u4", "u4"),
    ("not.b16 %d0, %a0;", "u2", "u2"),
    ("dp4a.s32.u32 %d0, %a0, %a1, %a1;", "u4 u4", "u4"),
    ("fma.rn.f32 %d0, %a0, %a1, %a0;", "f4 f4", "f4"),
    ("fma.rz.f32 %d0, %a0, %a1, %a0;", "f4 f4", "f4"),
    ("add.rn.f64 %d0, %a0, %a1;", "f8 f8", "f8"),
    ("mul.rn.bf16x2 %d0, %a0, %a1;", "u4 u4", "u4"),
    ("fma.rn.f16 %d0, %a0, %a1, %a0;", "u2 u2", "u2"),
    ("fma.rn.f32x2 %d0, %a0, %a1, %a0;", "u8 u8", "u8"),
    ("max.NaN.f32 %d0, %a0, %a1;", "f4 f4", "f4"),
    ("ex2.approx.f32 %d0, %a0;", "f4", "f4"),
    ("neg.bf16 %d0, %a0;", "u2", "u2"),
    ("cvt.rn.bf16x2.f32 %d0, %a0, %a1;", "f4 f4", "u4"),
    ("cvt.rzi.s64.f32 %d0, %a0;", "f4", "u8"),
    ("cvt.u64.u32 %d0, %a0;", "u4", "u8"),
    ("cvt.rn.f32.u64 %d0, %a0;", "u8", "f4"),
    ("setp.lt.f32 %d0|%d1, %a0, %a1;", "f4 f4", "? ?"),
    ("setp.ge.u64 %d0, %a0, %a1;", "u8 u8", "?"),
    ("selp.b64 %d0, %a0, %a1, %a2;", "u8 u8 ?", "u8"),
    ("selp.f32 %d0, %a0, %a1, %a2;", "f4 f4 ?", "f4"),
    ("set.lt.u32.s32 %d0, %a0, %a1;", "u4 u4", "u4"),
    ("mov.b32 %d0, %a0;", "u4", "u4"),
    ("mov.pred %d0, %a0;", "?", "?"),
    ("mov.b64 %d0, {%a0, %a1};", "u4 u4", "u8"),
    ("mov.b64 {%d0, %d1}, %a0;", "u8", "u4 u4"),
    ("mov.b32 {%d0, %d1}, %a0;", "u4", "u2 u2"),
    ("and.pred %d0, %a0, %a1;", "? ?", "?"),
    ("mov.u32 %d0, %tid.x;", "u4", "u4"),
    ("mov.u32 %d0, %ctaid.x;", "u4", "u4"),
    ("mov.u32 %d0, 17;", "u4", "u4"),
    ("setp.ne.u32 %d0, 1, 1;", "u4", "?"),
]


def values(kinds: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    found = []
    for kind in kinds.split():
        if kind == "?":
            found.append(rng.integers(0, 2, COUNT).astype(bool))
        elif kind[0] == "f":
            form = FORMATS[{"f4": "f32", "f8": "f64"}[kind]]
            found.append(random_bits(form, COUNT, rng).view(kind))
        else:
            found.append(rng.integers(0, 1 << 63, COUNT, dtype=np.uint64).astype(kind))
    return found


def before(outputs: list[str]) -> str:
    """What the destinations hold at first."""
    lines = []
    for number, kind in enumerate(outputs):
        if kind == "?":
            lines.append(f"setp.eq.u32 %d{number}, %lane, %lane;")
        else:
            lines.append(f"mov.b{8 * int(kind[1])} %d{number}, {100 + number};")
    return "\n".join(lines)


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Equal bits, NaNs alike."""
    bits = a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}")
    return bits | (np.isnan(a) & np.isnan(b)) if a.dtype.kind == "f" else bits


ACT = "setp.ge.u32 %act, %lane, 13;"
PLACES = {
    "guard": "{act}\n@%act {text}",
    "guard against": "setp.lt.u32 %act, %lane, 13;\n@!%act {text}",
    "branch": "{act}\n@!%act bra OVER;\n{text}\nOVER:",
    "other side": "{act}\n@%act bra IN;\nbra OVER;\nIN:\n{text}\nOVER:",
    "loop": "{act}\nmov.u32 %x, 0;\nAGAIN:\n@!%act bra OVER;\n{text}\nadd.u32 %x, %x, 1;\n"
    "setp.lt.u32 %act, %x, 3;\nbra AGAIN;\nOVER:",
}


@pytest.mark.parametrize("text", INSTRUCTIONS, ids=lambda row: row[0].split()[0])
def test_lanes_that_do_not_execute_keep_their_registers(text: tuple[str, str, str]) -> None:
    instruction, kinds, outputs = text
    wanted = outputs.split()
    inputs = values(kinds)
    dtypes = [np.dtype(k) for k in wanted]
    for uniform in ((False,) * len(inputs), (True,) * len(inputs)):
        full = harness.run(instruction, inputs, dtypes, uniform)
        first = harness.run(before(wanted), inputs, dtypes, uniform)
        there = np.arange(COUNT) % 32 >= 13
        for name, place in PLACES.items():
            body = f"{before(wanted)}\n{place.format(act=ACT, text=instruction)}"
            for seed in (0, 1) if name == "branch" else (0,):
                got = harness.run(body, inputs, dtypes, uniform, seed=seed)
                for mine, all_of_them, old in zip(got, full, first, strict=True):
                    expected = np.where(there, all_of_them, old)
                    assert same(mine, expected).all(), (name, instruction, uniform, seed)


@pytest.mark.parametrize("place", PLACES)
def test_loads_and_stores_behind_masks(place: str) -> None:
    """A vector load, a store and an atomic: memory of the lanes that are not there stays."""
    memory = """
    .shared .align 16 .b8 cells[1024];
    mov.u32 %y, %tid.x; and.b32 %y, %y, 31; mad.lo.u32 %y, %y, 16, 0; mov.u32 %byt, cells;
    add.u32 %y, %y, %byt;
    st.shared.v4.b32 [%y], {%lane, %lane, %lane, 5};
    bar.warp.sync -1;
    """.replace("%byt", "%same")
    text = """ld.shared.v2.b32 {%d0, %d1}, [%y+8];"""
    store = """st.shared.b32 [%y+4], %a0;"""
    add = """red.shared.add.u32 [%y+12], %a0;"""
    body = f"{memory}\nmov.u32 %d0, 100; mov.u32 %d1, 101;"
    for number, one in enumerate((text, store, add)):
        piece = PLACES[place].format(act=ACT, text=one)
        for label in ("OVER", "IN", "AGAIN"):
            piece = piece.replace(label, f"{label}{number}")
        body += "\n" + piece
    body += "\nld.shared.b32 %d2, [%y+4];\nld.shared.b32 %d3, [%y+12];"
    (a,) = values("u4")
    a = a[:32]
    d0, d1, d2, d3 = harness.run(body, [a], ["u4"] * 4)
    there = np.arange(32) >= 13
    turns = 3 if place == "loop" else 1
    np.testing.assert_array_equal(d0, np.where(there, np.arange(32), 100))
    np.testing.assert_array_equal(d1, np.where(there, 5, 101))
    np.testing.assert_array_equal(d2, np.where(there, a, np.arange(32)))
    np.testing.assert_array_equal(d3, np.where(there, 5 + turns * a, 5).astype(np.uint32))
