"""atom and red: every operation and type, colliding lanes, vectors.  PTX ISA: atom, red."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import harness
import numpy as np
import pytest
from floats import FORMATS, decode, encode, exact_sum, rounded
from oracles import Array, bits_of, integers, reading

import ptxsim

COUNT = 32
SLOTS = 8  # lanes collide: lane l works on slot l % 8, lane after lane


def run_atomic(
    text: str, memory: Array, operands: list[Array], returns: str | None
) -> Array | None:
    """One warp; `text` uses %cell (address of the lane's slot) and %v0.. and writes %d."""
    width = operands[0].dtype.itemsize
    registers = [
        ".reg .b32 %t, %s;\n.reg .b64 %cell, %at, %wide;",
        *(f".reg .b{max(16, 8 * width)} %v{n};" for n in range(len(operands))),
        f".reg .b{max(16, 8 * width)} %d;",
    ]
    lines = [
        "mov.u32 %t, %tid.x;",
        f"and.b32 %s, %t, {SLOTS - 1};",
        f"ld.param.u64 %cell, [mem];\nmad.wide.u32 %cell, %s, {memory.nbytes // SLOTS}, %cell;",
    ]
    for number in range(len(operands)):
        lines.append(
            f"ld.param.u64 %at, [in{number}];\nmad.wide.u32 %at, %t, {width}, %at;\n"
            f"ld.global.b{8 * width} %v{number}, [%at];"
        )
    lines.append(text)
    out = np.zeros(COUNT, returns) if returns else None
    params = [".u64 mem", *(f".u64 in{n}" for n in range(len(operands)))]
    if out is not None:
        lines.append(
            f"ld.param.u64 %at, [out];\nmad.wide.u32 %at, %t, {width}, %at;\n"
            f"st.global.b{8 * width} [%at], %d;"
        )
        params.append(".u64 out")
    module = ptxsim.load(harness.kernel("\n".join(lines), params, "\n".join(registers)))
    module.launch(1, COUNT, [memory, *operands, *([] if out is None else [out])])
    return out


def expect(
    memory: Array, operands: list[Array], function: Callable[..., int]
) -> tuple[list[int], list[int]]:
    """Memory afterwards and each lane's old value, lane after lane."""
    cells, old = memory.tolist(), []
    top = (1 << (8 * memory.dtype.itemsize)) - 1
    for lane in range(COUNT):
        before = cells[lane % SLOTS]
        old.append(before)
        cells[lane % SLOTS] = function(before, *(int(o[lane]) for o in operands)) & top
    return cells, old


INTEGER_OPS: dict[str, tuple[tuple[str, ...], Callable[[int, int, str], int]]] = {
    "add": (("u32", "s32", "u64"), lambda a, b, k: a + b),
    "min": (("u32", "s32", "u64", "s64"), lambda a, b, k: min(a, b, key=lambda v: reading(v, k))),
    "max": (("u32", "s32", "u64", "s64"), lambda a, b, k: max(a, b, key=lambda v: reading(v, k))),
    "and": (("b32", "b64"), lambda a, b, k: a & b),
    "or": (("b32", "b64"), lambda a, b, k: a | b),
    "xor": (("b32", "b64"), lambda a, b, k: a ^ b),
    "exch": (("b32", "b64"), lambda a, b, k: b),
    "inc": (("u32",), lambda a, b, k: 0 if a >= b else a + 1),
    "dec": (("u32",), lambda a, b, k: b if a == 0 or a > b else a - 1),
}
FORMS = [(op, kind) for op, (kinds, _) in INTEGER_OPS.items() for kind in kinds]


@pytest.mark.parametrize(("op", "kind"), FORMS)
def test_integer_atomics_with_colliding_lanes(op: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    width = bits_of(kind)
    memory, values = integers(width, SLOTS, rng), integers(width, COUNT, rng)
    if op in ("inc", "dec"):
        memory, values = memory % np.uint32(5), np.full(COUNT, 4, np.uint32)
    cells, old = expect(memory, [values], lambda a, b: INTEGER_OPS[op][1](a, b, kind))
    touched = memory.copy()
    got = run_atomic(f"atom.global.{op}.{kind} %d, [%cell], %v0;", touched, [values], memory.dtype)
    assert got is not None
    assert got.tolist() == old
    assert touched.tolist() == cells
    if op != "exch":
        touched = memory.copy()
        run_atomic(f"red.relaxed.gpu.global.{op}.{kind} [%cell], %v0;", touched, [values], None)
        assert touched.tolist() == cells


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_compare_and_swap(kind: str) -> None:
    rng = np.random.default_rng(1)
    width = bits_of(kind)
    memory = rng.integers(0, 3, SLOTS).astype(f"u{width // 8}")
    compare, swap = (rng.integers(0, 3, COUNT).astype(memory.dtype) for _ in range(2))
    cells, old = expect(memory, [compare, swap], lambda a, b, c: c if a == b else a)
    text = f"atom.acq_rel.gpu.global.cas.{kind} %d, [%cell], %v0, %v1;"
    got = run_atomic(text, memory, [compare, swap], memory.dtype)
    assert got is not None
    assert got.tolist() == old
    assert memory.tolist() == cells


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_float_add_rounds_once_per_lane(kind: str) -> None:
    form = FORMATS[kind]
    rng = np.random.default_rng(2)
    numbers = [rounded(Fraction(float(v)), form) for v in rng.standard_normal(SLOTS + COUNT)]
    words = np.array([encode(n, form) for n in numbers], f"u{form.width // 8}")
    memory, values = words[:SLOTS].copy(), words[SLOTS:]

    def add(a: int, b: int) -> int:
        return encode(rounded(exact_sum(decode(a, form), decode(b, form), "rn"), form), form)

    cells, old = expect(memory, [values], add)
    suffix = f"noftz.{kind}" if form.width == 16 else kind
    got = run_atomic(f"atom.global.add.{suffix} %d, [%cell], %v0;", memory, [values], memory.dtype)
    assert got is not None
    assert got.tolist() == old
    assert memory.tolist() == cells


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_float_red(kind: str) -> None:
    form = FORMATS[kind.removesuffix("x2")]
    rng = np.random.default_rng(3)
    halves = [encode(rounded(Fraction(float(v)), form), form) for v in rng.standard_normal(80)]
    words = np.array(halves, np.uint16).view(np.uint32)
    memory, values = words[:SLOTS].copy(), words[SLOTS:].copy()

    def add(a: int, b: int) -> int:
        parts = [
            encode(rounded(exact_sum(decode(x, form), decode(y, form), "rn"), form), form)
            for x, y in ((a & 0xFFFF, b & 0xFFFF), (a >> 16, b >> 16))
        ]
        return parts[0] | parts[1] << 16

    cells, _ = expect(memory, [values], add)
    run_atomic(f"red.global.add.noftz.{kind} [%cell], %v0;", memory, [values], None)
    assert memory.tolist() == cells


@pytest.mark.parametrize(("vector", "kind"), [("v2", "f32"), ("v4", "f32")])
def test_vectors_of_f32(vector: str, kind: str) -> None:
    count = int(vector[1:])
    rng = np.random.default_rng(4)
    memory = rng.standard_normal((SLOTS, count)).astype(np.float32)
    values = [rng.standard_normal(COUNT).astype(np.float32) for _ in range(count)]
    want, old = memory.copy(), np.zeros(COUNT, np.float32)
    for lane in range(COUNT):
        old[lane] = want[lane % SLOTS, count - 1]
        for element in range(count):
            want[lane % SLOTS, element] += values[element][lane]
    names = ", ".join(f"%v{n}" for n in range(count))
    targets = ", ".join(["%wide0"] * (count - 1) + ["%d"])
    text = (
        f"{{ .reg .b32 %wide0;\natom.global.add.{vector}.{kind} {{{targets}}}, [%cell], "
        f"{{{names}}}; }}"
    )
    first = memory.copy()
    got = run_atomic(text, first, [v.view("u4") for v in values], "f4")
    np.testing.assert_array_equal(first, want)
    assert got is not None
    np.testing.assert_array_equal(got, old)
    second = memory.copy()
    text = f"red.global.add.{vector}.{kind} [%cell], {{{names}}};"
    run_atomic(text, second, [v.view("u4") for v in values], None)
    np.testing.assert_array_equal(second, want)


@pytest.mark.parametrize(("vector", "kind"), [("v2", "bf16x2"), ("v4", "f16x2"), ("v4", "bf16x2")])
def test_vectors_of_packed_halves(vector: str, kind: str) -> None:
    form = FORMATS[kind.removesuffix("x2")]
    count = int(vector[1:])
    rng = np.random.default_rng(5)
    numbers = [encode(rounded(Fraction(float(v)), form), form) for v in rng.standard_normal(512)]
    words = np.array(numbers, np.uint16)
    memory = words[: SLOTS * 2 * count].copy().view(np.uint32)
    values = words[-2 * COUNT :].copy().view(np.uint32)
    want = memory.view(np.uint16).tolist()
    for lane in range(COUNT):
        for element in range(2 * count):
            at = (lane % SLOTS) * 2 * count + element
            x, y = (
                decode(want[at], form),
                decode(int(values.view(np.uint16)[2 * lane + element % 2]), form),
            )
            want[at] = encode(rounded(exact_sum(x, y, "rn"), form), form)
    names = ", ".join(["%v0"] * count)
    run_atomic(
        f"red.global.add.noftz.{vector}.{kind} [%cell], {{{names}}};", memory, [values], None
    )
    assert memory.view(np.uint16).tolist() == want


def test_shared_memory_and_a_uniform_address() -> None:
    body = """
    .shared .align 4 .b32 total;
    mov.u32 %x, total;
    setp.eq.u32 %act, %lane, 0;
    @%act st.shared.u32 [%x], 100;
    bar.sync 0;
    atom.shared.add.u32 %d0, [%x], %a0;
    bar.sync 0;
    ld.shared.u32 %d1, [%x];
    """
    values = np.arange(32, dtype=np.uint32)
    old, total = harness.run(body, [values], ["u4", "u4"])
    assert (total == 100 + values.sum()).all()
    np.testing.assert_array_equal(old, 100 + np.cumsum(values) - values)


def test_shared_cells_chosen_by_each_lane() -> None:
    """32-bit shared addresses that differ by lane, with colliding and with inactive lanes."""
    body = """
    .shared .align 4 .b8 cells[64];
    mov.u32 %x, cells;
    mad.lo.u32 %y, %lane, 2, %x; and.b32 %y, %y, -4;
    st.shared.u32 [%y], 0;
    mad.lo.u32 %y, %a0, 4, %x;
    setp.lt.u32 %act, %lane, 21;
    @!%act bra OVER;
    atom.shared.add.u32 %d0, [%y], 1;
    red.shared.max.u32 [%y], %lane;
    OVER:
    bar.sync 0;
    mad.lo.u32 %y, %lane, 2, %x; and.b32 %y, %y, -4;
    ld.shared.u32 %d0, [%y];
    """
    picks = np.random.default_rng(7).integers(0, 16, 32).astype(np.uint32)
    (got,) = harness.run(body, [picks], ["u4"])
    for cell in range(16):
        members = [lane for lane in range(21) if picks[lane] == cell]
        want = max([len(members), *members]) if members else 0
        assert got[2 * cell] == want


def test_generic_addresses_reach_shared_memory() -> None:
    body = """
    .shared .align 8 .b64 cell;
    mov.u32 %x, cell;
    st.shared.u64 [%x], 5;
    bar.sync 0;
    cvt.u64.u32 %at, %x;
    cvta.shared.u64 %at, %at;
    red.add.u32 [%at], %a0;
    bar.sync 0;
    ld.u32 %d0, [%at];
    """
    (got,) = harness.run(body, [np.ones(32, np.uint32)], ["u4"])
    assert (got == 37).all()


def test_only_active_lanes_take_part() -> None:
    memory, values = np.zeros(SLOTS, np.uint32), np.ones(COUNT, np.uint32)
    text = "{ .reg .pred %p;\nsetp.lt.u32 %p, %t, 9;\n@%p red.global.add.u32 [%cell], %v0; }"
    run_atomic(text, memory, [values], None)
    assert memory.tolist() == [2, 1, 1, 1, 1, 1, 1, 1]


def test_atomics_check_bounds_alignment_and_forms() -> None:
    memory, values = np.zeros(SLOTS, np.uint32), np.ones(COUNT, np.uint32)
    with pytest.raises(ptxsim.OutOfBounds):
        run_atomic("red.global.add.u32 [%cell+64], %v0;", memory, [values], None)
    with pytest.raises(ptxsim.Misaligned):
        run_atomic("red.global.add.u32 [%cell+2], %v0;", memory, [values], None)
    for text in (
        "red.global.add.b32 [%cell], %v0;",
        "red.global.and.u32 [%cell], %v0;",
        "red.global.exch.b32 [%cell], %v0;",
        "red.global.inc.u64 [%cell], %v0;",
        "red.global.add.bf16x2 [%cell], %v0;",
        "red.global.add.s64 [%cell], %v0;",
        "red.global.min.f32 [%cell], %v0;",
        "red.global.add.v8.f32 [%cell], {%v0, %v0, %v0, %v0, %v0, %v0, %v0, %v0};",
        "red.global.add.v2.f32 [%cell], {%v0, %v0, %v0};",
    ):
        with pytest.raises(ptxsim.UnsupportedInstruction):
            run_atomic(text, memory, [values], None)
