"""wgmma with every swizzle, both majors, A from shared memory or registers.  PTX ISA: wgmma."""

from __future__ import annotations

from dataclasses import dataclass

import harness
import numpy as np
import pytest
import torch

import ptxsim

CODES = {0: 0, 128: 1, 64: 2, 32: 3}  # bits 62-63 of the matrix descriptor
FIRST = 1024  # dynamic shared memory starts here
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def bits(values: np.ndarray, kind: str) -> np.ndarray:
    """Values as words of the type (tf32: f32 with 13 low bits that the instruction ignores)."""
    if kind == "tf32":
        return values.astype(np.float32).view(np.uint32)
    tensor = torch.from_numpy(values.astype(np.float32)).to(DTYPES[kind])
    return tensor.view(torch.int16).numpy().view(np.uint16)


def numbers(words: np.ndarray, kind: str) -> np.ndarray:
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return torch.from_numpy(words.view(np.int16)).view(DTYPES[kind]).double().numpy()


def swizzled(dense: np.ndarray, span: int) -> np.ndarray:
    """What a tensor copy with this swizzle leaves of a dense tile at a 1024-aligned address."""
    offsets = np.arange(dense.size)
    if span:
        offsets = offsets ^ ((offsets >> 7) & (span // 16 - 1)) << 4
    out = np.empty_like(dense)
    out[offsets] = dense
    return out


@dataclass(frozen=True)
class Tile:
    """An operand as it lies in shared memory: image, descriptor fields, step per K of 32 bytes."""

    image: np.ndarray
    leading: int
    stride: int
    span: int
    step: int
    mn_major: bool

    def descriptor(self, start: int) -> int:
        return (
            (start >> 4)
            | (self.leading >> 4) << 16
            | (self.stride >> 4) << 32
            | CODES[self.span] << 62
        )


def k_major(words: np.ndarray, span: int) -> Tile:
    """(rows, K) of `span` bytes of K; without swizzle, core matrices of 8 x 16 bytes."""
    rows, row_bytes = words.shape[0], words.shape[1] * words.itemsize
    raw = words.view(np.uint8).reshape(rows, row_bytes)
    if span == 0:  # core matrices: along K first, then along the rows
        core = raw.reshape(rows // 8, 8, row_bytes // 16, 16).transpose(0, 2, 1, 3)
        return Tile(core.reshape(-1), 128, 8 * row_bytes, 0, 256, False)
    assert row_bytes == span
    return Tile(swizzled(raw.reshape(-1), span), 16, 8 * span, span, 32, False)


def mn_major(words: np.ndarray, span: int) -> Tile:
    """(K, M or N) 16-bit words: chunks of `span` bytes along M or N, with all K rows of each."""
    k, extent = words.shape
    if span == 0:  # core matrices of 8 k rows by 8 elements
        core = words.reshape(k // 8, 8, extent // 8, 8).transpose(0, 2, 1, 3)
        image = np.ascontiguousarray(core).view(np.uint8).reshape(-1)
        # Without swizzle LBO and SBO change roles: SBO steps along M or N, LBO along K.
        return Tile(image, 16 * extent, 128, 0, 32 * extent, True)
    chunk = span // 2
    pieces = words.reshape(k, extent // chunk, chunk).transpose(1, 0, 2)
    image = np.ascontiguousarray(pieces).view(np.uint8).reshape(-1)
    return Tile(swizzled(image, span), k * span, 8 * span, span, 16 * span, True)


@dataclass(frozen=True)
class Plan:
    """One kernel: shape, types, and what to leave out."""

    n: int
    kind: str = "bf16"
    out: str = "f32"
    signs: tuple[int, int] = (1, 1)
    proxy_fence: bool = True
    fence: bool = True
    wait: bool = True

    @property
    def k(self) -> int:
        return 8 if self.kind == "tf32" else 16

    @property
    def registers(self) -> int:
        return self.n // 2 if self.out == "f32" else self.n // 4


def source(plan: Plan, a: Tile | None, b: Tile, steps: int, accumulate: bool) -> str:
    """Copies the images to shared memory, multiplies, stores D; A in registers if `a` is None."""
    a_bytes = 0 if a is None else -(-a.image.size // 1024) * 1024
    total = a_bytes + b.image.size
    count = plan.registers
    d = ", ".join(f"%d{i}" for i in range(count))
    lines = [
        ".reg .b32 %t, %w, %d<128>, %ra<64>; .reg .b64 %p, %q; .reg .pred %acc, %more;",
        "mov.u32 %t, %tid.x; mov.b32 %w, dyn;",
        "ld.param.u64 %p, [image]; mad.wide.u32 %p, %t, 16, %p; mad.lo.u32 %w, %t, 16, %w;",
    ]
    for block in range(-(-total // 2048)):
        lines.append(
            f"ld.global.v4.b32 {{%d0, %d1, %d2, %d3}}, [%p+{2048 * block}];\n"
            f"st.shared.v4.b32 [%w+{2048 * block}], {{%d0, %d1, %d2, %d3}};"
        )
    lines += ["fence.proxy.async.shared::cta;"] if plan.proxy_fence else []
    lines += ["bar.sync 0;", "ld.param.u64 %p, [c]; mad.wide.u32 %p, %t, %N, %p;"]
    lines += [f"ld.global.b32 %d{i}, [%p+{4 * i}];" for i in range(count)]
    if a is None:
        lines.append("ld.param.u64 %q, [fragments]; mad.wide.u32 %q, %t, %S, %q;")
        lines += [f"ld.global.b32 %ra{i}, [%q+{4 * i}];" for i in range(4 * steps)]
    test = "eq" if accumulate else "ne"
    lines.append(f"setp.{test}.u32 %acc, %t, %t; setp.eq.u32 %more, %t, %t;")
    lines += ["wgmma.fence.sync.aligned;"] if plan.fence else []
    for step in range(steps):
        b_word = b.descriptor(FIRST + a_bytes + step * b.step)
        if a is None:
            left = "{" + ", ".join(f"%ra{4 * step + i}" for i in range(4)) + "}"
        else:
            left = str(a.descriptor(FIRST + step * a.step))
        flags = "" if plan.kind == "tf32" else f", {int(b.mn_major)}"
        if flags and a is not None:
            flags = f", {int(a.mn_major)}{flags}"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{plan.n}k{plan.k}"
            f".{plan.out}.{plan.kind}.{plan.kind} "
            f"{{{d}}}, {left}, {b_word}, {'%more' if step else '%acc'}, "
            f"{plan.signs[0]}, {plan.signs[1]}{flags};"
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    lines += ["wgmma.wait_group.sync.aligned 0;"] if plan.wait else []
    lines.append("ld.param.u64 %p, [out]; mad.wide.u32 %p, %t, %N, %p;")
    lines += [f"st.global.b32 [%p+{4 * i}], %d{i};" for i in range(count)]
    params = [".u64 image", ".u64 fragments", ".u64 c", ".u64 out"]
    text = harness.kernel("\n".join(lines), params)
    text = text.replace("%N", str(4 * count)).replace("%S", str(16 * steps))
    return text.replace("sm_100a\n", "sm_90a\n").replace(
        ".visible", ".extern .shared .align 1024 .b8 dyn[];\n.visible"
    )


def place(thread: int, i: int) -> tuple[int, int]:
    """(row, column) of f32 register i of a thread of the warpgroup."""
    warp, lane = thread // 32, thread % 32
    return 16 * warp + lane // 4 + 8 * (i // 2 % 2), 2 * (lane % 4) + i % 2 + 8 * (i // 4)


def fragments(a: np.ndarray, steps: int, kind: str) -> np.ndarray:
    """A (64, K) as the registers of 128 threads: four 32-bit words per K step."""
    k = a.shape[1] // steps
    out = np.zeros((128, 4 * steps), np.uint32)
    for thread in range(128):
        warp, lane = thread // 32, thread % 32
        for step in range(steps):
            for i in range(4):
                row = 16 * warp + lane // 4 + 8 * (i % 2)
                if kind == "tf32":
                    out[thread, 4 * step + i] = a[row, k * step + lane % 4 + 4 * (i // 2)]
                    continue
                column = k * step + 2 * (lane % 4) + 8 * (i // 2)
                out[thread, 4 * step + i] = int(a[row, column]) | int(a[row, column + 1]) << 16
    return out


def multiply(
    plan: Plan, a: Tile | np.ndarray, b: Tile, steps: int, c: np.ndarray | None = None, **options
) -> np.ndarray:
    """D as a (64, n) matrix; `a` is a Tile, or the (64, K) words for the register form."""
    tile = a if isinstance(a, Tile) else None
    parts = [] if tile is None else [np.pad(tile.image, (0, -tile.image.size % 1024))]
    image = np.concatenate([*parts, b.image])
    image = np.pad(image, (0, -image.size % 2048))
    words = (
        fragments(a, steps, plan.kind) if isinstance(a, np.ndarray) else np.zeros((128, 4), "u4")
    )
    start = np.zeros((128, plan.registers), np.uint32)
    if c is not None:
        start = spread(c, plan)
    out = np.zeros_like(start)
    module = ptxsim.load(source(plan, tile, b, steps, c is not None))
    module.launch(1, 128, [image, words, start, out], shared=image.size, **options)
    return collect(out, plan)


def spread(c: np.ndarray, plan: Plan) -> np.ndarray:
    """A (64, n) matrix as D registers."""
    values = np.zeros((128, plan.n // 2), np.float32 if plan.out == "f32" else np.float16)
    for thread in range(128):
        for i in range(plan.n // 2):
            values[thread, i] = c[place(thread, i)]
    return values.view(np.uint32)


def collect(registers: np.ndarray, plan: Plan) -> np.ndarray:
    values = registers.view(np.float32 if plan.out == "f32" else np.float16)
    out = np.full((64, plan.n), np.nan)
    for thread in range(128):
        for i in range(plan.n // 2):
            out[place(thread, i)] = values[thread, i]
    return out


def integers(rows: int, k: int, seed: int, kind: str) -> np.ndarray:
    """Small integers, exact in every type and sum: a wrong index cannot hide in rounding."""
    values = np.random.default_rng(seed).integers(-4, 5, (rows, k)).astype(np.float32)
    return bits(values, kind)


@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32"])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_k_major_operands_in_every_swizzle(span: int, kind: str) -> None:
    plan = Plan(24, kind)
    steps = span // 32 or 4
    a, b = integers(64, plan.k * steps, 1, kind), integers(24, plan.k * steps, 2, kind)
    got = multiply(plan, k_major(a, span), k_major(b, span), steps)
    np.testing.assert_array_equal(got, numbers(a, kind) @ numbers(b, kind).T)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("majors", ["mn/k", "k/mn", "mn/mn"])
def test_transposed_operands_in_every_swizzle(majors: str, span: int, kind: str) -> None:
    plan, steps = Plan(128, kind), 2
    a_major, b_major = majors.split("/")
    a, b = integers(64, 32, 3, kind), integers(128, 32, 4, kind)

    def tile(words: np.ndarray, major: str) -> Tile:
        if major == "mn":
            return mn_major(np.ascontiguousarray(words.T), span)
        # 64 bytes of K fill a 64-byte span; of 32 bytes, a box per step.
        return boxes(words, 32) if span == 32 else k_major(words, min(span, 64))

    a_tile, b_tile = tile(a, a_major), tile(b, b_major)
    got = multiply(plan, a_tile, b_tile, steps)
    np.testing.assert_array_equal(got, numbers(a, kind) @ numbers(b, kind).T)


def boxes(words: np.ndarray, span: int) -> Tile:
    """K-major in boxes of `span` bytes, one after the other, a K step each."""
    per_box = span // words.itemsize
    parts = [
        k_major(np.ascontiguousarray(words[:, at : at + per_box]), span).image
        for at in range(0, words.shape[1], per_box)
    ]
    return Tile(np.concatenate(parts), 16, 8 * span, span, words.shape[0] * span, False)


@pytest.mark.parametrize("n", [8, 40, 64, 256])
def test_n_and_accumulation(n: int) -> None:
    plan = Plan(n)
    a, b = integers(64, 64, 5, "bf16"), integers(n, 64, 6, "bf16")
    c = np.random.default_rng(7).integers(-99, 99, (64, n)).astype(np.float64)
    want = numbers(a, "bf16") @ numbers(b, "bf16").T
    got = multiply(plan, k_major(a, 128), k_major(b, 128), 4, c)
    np.testing.assert_array_equal(got, want + c)
    got = multiply(plan, k_major(a, 128), k_major(b, 128), 4)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32"])
def test_a_from_registers(kind: str) -> None:
    plan = Plan(32, kind)
    a, b = integers(64, 4 * plan.k, 8, kind), integers(32, 4 * plan.k, 9, kind)
    got = multiply(plan, a, k_major(b, 128), 4)
    np.testing.assert_array_equal(got, numbers(a, kind) @ numbers(b, kind).T)


def test_a_from_registers_and_b_transposed() -> None:
    plan = Plan(64)
    a, b = integers(64, 32, 10, "bf16"), integers(64, 32, 11, "bf16")
    got = multiply(plan, a, mn_major(np.ascontiguousarray(b.T), 128), 2)
    np.testing.assert_array_equal(got, numbers(a, "bf16") @ numbers(b, "bf16").T)


@pytest.mark.parametrize("signs", [(-1, 1), (1, -1), (-1, -1)])
def test_negated_operands(signs: tuple[int, int]) -> None:
    plan = Plan(16, signs=signs)
    a, b = integers(64, 64, 12, "bf16"), integers(16, 64, 13, "bf16")
    got = multiply(plan, k_major(a, 128), k_major(b, 128), 4)
    np.testing.assert_array_equal(
        got, signs[0] * signs[1] * numbers(a, "bf16") @ numbers(b, "bf16").T
    )


def test_f16_accumulators() -> None:
    plan = Plan(32, "f16", "f16")
    a, b = integers(64, 64, 14, "f16"), integers(32, 64, 15, "f16")
    c = np.random.default_rng(16).integers(-50, 50, (64, 32)).astype(np.float64)
    got = multiply(plan, k_major(a, 128), k_major(b, 128), 4, c)
    np.testing.assert_array_equal(got, numbers(a, "f16") @ numbers(b, "f16").T + c)


def test_random_values_are_accurate_in_f32() -> None:
    rng = np.random.default_rng(17)
    a, b = (bits(rng.standard_normal((r, 64)), "bf16") for r in (64, 128))
    want = numbers(a, "bf16") @ numbers(b, "bf16").T
    size = np.abs(numbers(a, "bf16")) @ np.abs(numbers(b, "bf16")).T
    got = multiply(Plan(128), k_major(a, 128), k_major(b, 128), 4)
    assert (np.abs(got - want) <= 64 * 2.0**-24 * size).all()


def operands() -> tuple[Tile, Tile]:
    return k_major(integers(64, 64, 1, "bf16"), 128), k_major(integers(8, 64, 2, "bf16"), 128)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_missing_proxy_fence_is_found(seed: int) -> None:
    with pytest.raises(ptxsim.MissingFence, match=r"fence\.proxy\.async") as caught:
        multiply(Plan(8, proxy_fence=False), *operands(), 4, seed=seed)
    assert "wgmma.mma_async" in str(caught.value)


def test_a_missing_wgmma_fence_is_found() -> None:
    with pytest.raises(ptxsim.MissingFence, match=r"wgmma\.fence"):
        multiply(Plan(8, fence=False), *operands(), 4, np.zeros((64, 8)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_results_used_before_they_are_waited_for_are_found(seed: int) -> None:
    with pytest.raises(ptxsim.AsyncHazard, match=r"wait_group") as caught:
        multiply(Plan(8, wait=False), *operands(), 4, seed=seed)
    assert caught.value.line is not None


def test_a_descriptor_outside_shared_memory_is_found() -> None:
    a, b = operands()
    far = Tile(b.image, b.leading, 0x3FFF0, b.span, b.step, False)
    with pytest.raises(ptxsim.OutOfBounds):
        multiply(Plan(16), a, far, 4)
