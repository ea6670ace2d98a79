"""mma.sync: fragments of every shape and type.  PTX ISA: Matrix Fragments for mma, mma."""

from __future__ import annotations

from collections.abc import Sequence

import harness
import numpy as np
import pytest
import torch

import ptxsim

# (shape K, type) pairs with the ISA's m16n8 fragments.
CASES = [(16, "bf16"), (16, "f16"), (8, "bf16"), (8, "f16"), (8, "tf32"), (4, "tf32")]


def narrow(values: np.ndarray, kind: str) -> np.ndarray:
    """Random values as this type's bits: 16-bit words, or 32-bit ones for tf32."""
    if kind == "tf32":
        return (values.astype(np.float32).view(np.uint32) & 0xFFFFE000).astype(np.uint32)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    return (
        torch.from_numpy(values.astype(np.float32)).to(dtype).view(torch.int16).numpy().view("u2")
    )


def widen(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind == "tf32":
        return bits.view(np.float32).astype(np.float64)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    return torch.from_numpy(bits.view("i2")).view(dtype).double().numpy()


def a_place(lane: int, i: int, kind: str) -> tuple[int, int]:
    """(row, k) of element i of A, as in the figures of the ISA; 16-bit elements pair up."""
    group, within = lane >> 2, lane % 4
    if kind == "tf32":
        return group + 8 * (i % 2), within + 4 * (i // 2)
    row = group if (0 <= i < 2) or (4 <= i < 6) else group + 8
    return row, within * 2 + (i & 1) + (8 if i >= 4 else 0)


def b_place(lane: int, i: int, kind: str) -> tuple[int, int]:
    """(k, column) of element i of B."""
    group, within = lane >> 2, lane % 4
    if kind == "tf32":
        return within + 4 * i, group
    return within * 2 + (i & 1) + (8 if i >= 2 else 0), group


def c_place(lane: int, i: int) -> tuple[int, int]:
    group, within = lane >> 2, lane % 4
    return group + (8 if i >= 2 else 0), within * 2 + (i & 1)


def fragment(matrix: np.ndarray, place, count: int, kind: str) -> np.ndarray:
    """Registers (number, lane) of the matrix's elements."""
    values = np.zeros((32, count), matrix.dtype)
    for lane in range(32):
        for i in range(count):
            values[lane, i] = matrix[place(lane, i, kind)]
    packed = np.ascontiguousarray(values)
    return (packed if values.dtype == np.float64 else packed.view(np.uint32)).T


def run_mma(
    form: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, slack: Sequence[np.ndarray] = ()
) -> np.ndarray:
    """D's registers (number, lane)."""
    names = {
        name: [f"%a{start + n}" for n in range(len(rows))]
        for name, rows, start in (
            ("a", a, 0),
            ("b", b, len(a)),
            ("c", c, len(a) + len(b)),
        )
    }
    listed = {k: "{" + ", ".join(v) + "}" for k, v in names.items()}
    targets = "{" + ", ".join(f"%d{n}" for n in range(len(c))) + "}"
    body = f"{form} {targets}, {listed['a']}, {listed['b']}, {listed['c']};"
    return np.stack(harness.run(body, [*a, *b, *c], ["u4"] * len(c), slack=slack))


@pytest.mark.parametrize(("k", "kind"), CASES)
def test_f32_accumulation(k: int, kind: str) -> None:
    rng = np.random.default_rng(k)
    a, b = narrow(rng.standard_normal((16, k)), kind), narrow(rng.standard_normal((k, 8)), kind)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    per_lane = 16 * k // 32, 8 * k // 32
    form = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32"
    want = widen(a, kind) @ widen(b, kind) + c
    size = np.abs(widen(a, kind)) @ np.abs(widen(b, kind)) + np.abs(c)
    # A tensor core aligns its products to the largest and truncates: an ulp of that each.
    slack = fragment((k + 1) * 2.0**-22 * size, lambda lane, i, _: c_place(lane, i), 4, "f64")
    words = run_mma(
        form,
        fragment(a, a_place, per_lane[0], kind),
        fragment(b, b_place, per_lane[1], kind),
        fragment(c.view(np.uint32), lambda lane, i, _: c_place(lane, i), 4, kind),
        slack,
    )
    for lane in range(32):
        for i in range(4):
            row, column = c_place(lane, i)
            got = words[i, lane : lane + 1].view(np.float32)[0]
            assert abs(got - want[row, column]) <= (k + 1) * 2.0**-24 * size[row, column]


@pytest.mark.parametrize("k", [16, 8])
def test_f16_accumulation(k: int) -> None:
    rng = np.random.default_rng(k)
    a, b = narrow(rng.standard_normal((16, k)), "f16"), narrow(rng.standard_normal((k, 8)), "f16")
    c = narrow(rng.standard_normal((16, 8)), "f16")
    form = f"mma.sync.aligned.m16n8k{k}.row.col.f16.f16.f16.f16"
    words = run_mma(
        form,
        fragment(a, a_place, k // 2, "f16"),
        fragment(b, b_place, k // 4, "f16"),
        fragment(c, lambda lane, i, _: c_place(lane, i), 4, "f16"),
    )
    want = widen(a, "f16") @ widen(b, "f16") + widen(c, "f16")
    halves = np.ascontiguousarray(words.T).view(np.float16)
    for lane in range(32):
        for i in range(4):
            exact = want[c_place(lane, i)]
            assert abs(halves[lane, i] - exact) <= 2.0**-11 * abs(exact) + 2.0**-14


def test_products_of_small_integers_are_exact() -> None:
    """No rounding hides a swapped index here: every entry is a different integer."""
    a = narrow(np.arange(256).reshape(16, 16) % 61, "bf16")
    b = narrow(np.arange(128).reshape(16, 8) % 53, "bf16")
    c = np.zeros((16, 8), np.float32)
    words = run_mma(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        fragment(a, a_place, 8, "bf16"),
        fragment(b, b_place, 4, "bf16"),
        fragment(c.view(np.uint32), lambda lane, i, _: c_place(lane, i), 4, "bf16"),
    )
    want = widen(a, "bf16") @ widen(b, "bf16")
    for lane in range(32):
        for i in range(4):
            assert words[i, lane : lane + 1].view(np.float32)[0] == want[c_place(lane, i)]


def a_place8(lane: int, i: int, kind: str) -> tuple[int, int]:
    """(row, k) of byte i of A, as the figures of m16n8k16 and k32 tell it."""
    group, within = lane >> 2, lane % 4
    row = group if i < 4 or 8 <= i < 12 else group + 8
    return row, within * 4 + (i & 3) + (16 if i >= 8 else 0)


def b_place8(lane: int, i: int, kind: str) -> tuple[int, int]:
    group, within = lane >> 2, lane % 4
    return within * 4 + (i & 3) + (16 if i >= 4 else 0), group


@pytest.mark.parametrize("k", [16, 32])
@pytest.mark.parametrize("clamp", ["", ".satfinite"])
@pytest.mark.parametrize("kinds", ["s8.s8", "u8.s8", "s8.u8", "u8.u8"])
def test_8_bit_integers(kinds: str, clamp: str, k: int) -> None:
    rng = np.random.default_rng(k)
    dtypes = [np.int8 if kind == "s8" else np.uint8 for kind in kinds.split(".")]
    a, b = (
        rng.integers(0, 256, shape).astype(np.uint8).view(dtype)
        for shape, dtype in zip(((16, k), (k, 8)), dtypes, strict=True)
    )
    c = rng.integers(-(1 << 31), 1 << 31, (16, 8)).astype(np.int32)
    c[0], c[1] = (1 << 31) - 1, -(1 << 31)
    words = run_mma(
        f"mma.sync.aligned.m16n8k{k}.row.col{clamp}.s32.{kinds}.s32",
        fragment(a.view(np.uint8), a_place8, k // 2, "s8"),
        fragment(b.view(np.uint8), b_place8, k // 4, "s8"),
        fragment(c.view(np.uint32), lambda lane, i, _: c_place(lane, i), 4, "s32"),
    )
    want = a.astype(np.int64) @ b.astype(np.int64) + c
    want = np.clip(want, -(1 << 31), (1 << 31) - 1) if clamp else want.astype(np.int32)
    for lane in range(32):
        for i in range(4):
            assert words[i, lane : lane + 1].view(np.int32)[0] == want[c_place(lane, i)]


@pytest.mark.parametrize("kinds", ["e4m3.e4m3", "e5m2.e5m2", "e4m3.e5m2", "e5m2.e4m3"])
def test_float8(kinds: str) -> None:
    rng = np.random.default_rng(5)
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    tensors = [
        torch.from_numpy(rng.standard_normal(shape)).float().to(dtypes[kind])
        for shape, kind in zip(((16, 32), (32, 8)), kinds.split("."), strict=True)
    ]
    a, b = (t.view(torch.uint8).numpy() for t in tensors)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    words = run_mma(
        f"mma.sync.aligned.m16n8k32.row.col.f32.{kinds}.f32",
        fragment(a, a_place8, 16, "e4m3"),
        fragment(b, b_place8, 8, "e4m3"),
        fragment(c.view(np.uint32), lambda lane, i, _: c_place(lane, i), 4, "f32"),
    )
    left, right = (t.double().numpy() for t in tensors)
    want, size = left @ right + c, np.abs(left) @ np.abs(right) + np.abs(c)
    for lane in range(32):
        for i in range(4):
            at = c_place(lane, i)
            assert abs(words[i, lane : lane + 1].view(np.float32)[0] - want[at]) <= 2e-6 * size[at]


def test_other_shapes_and_layouts_are_errors() -> None:
    zero = [np.zeros(32, np.uint32)] * 10
    names = "{%a0, %a1, %a2, %a3}, {%a4, %a5}, {%a6, %a7, %a8, %a9}"
    for form in (
        "mma.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.row.f32.bf16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32",
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32",
        "mma.sync.aligned.m16n8k32.row.col.f32.s8.s8.f32",
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.s8.f32",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32",
    ):
        with pytest.raises(ptxsim.UnsupportedInstruction) as caught:
            harness.run(f"{form} {{%d0, %d1, %d2, %d3}}, {names};", zero, ["u4"] * 4)
        assert caught.value.line is not None
