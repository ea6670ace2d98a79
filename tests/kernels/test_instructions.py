"""What is read from PTX: pipes, tensor memory, and matrix products with their loops."""

from __future__ import annotations

import pytest

from openmsa.kernels.common.instructions import PIPES, Product, by_pipe, products, tensor_columns

HEAD = """
.version 8.7
.target sm_100a
.extern .shared .align 1024 .b8 memory[];
.visible .entry f(.param .u64 f_param_0)
.reqntid 512, 1, 1
{
\t.reg .b32 %r<9>;
"""


def pipes(*lines: str) -> dict[str, int]:
    found = by_pipe(HEAD + "\n".join(lines) + "\n}\n")
    assert set(found) == set(PIPES)
    return {pipe: count for pipe, count in found.items() if count}


@pytest.mark.parametrize(
    ("pipe", "line"),
    [
        ("tensor", "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, {%r3, %r3}, %p1;"),
        ("tensor", "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1, %f2}, %rd1, %rd2;"),
        ("tensor", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2};"),
        ("copy engine", "cp.async.bulk.tensor.3d.shared::cta.global [%r1], [%rd1, {%r2}], [%r3];"),
        ("copy engine", "cp.reduce.async.bulk.global.shared::cta.add.f32 [%rd1], [%r1], 4;"),
        ("barriers", "cp.async.bulk.commit_group;"),
        ("barriers", "mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 10000000;"),
        ("barriers", "fence.proxy.async.shared::cta;"),
        ("barriers", "bar.sync 0;"),
        ("barriers", "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%r1];"),
        ("barriers", "tcgen05.wait::ld.sync.aligned;"),
        ("barriers", "wgmma.fence.sync.aligned;"),
        ("tensor memory", "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3];"),
        ("mufu", "ex2.approx.ftz.f32 %f1, %f2;"),
        ("mufu", "@%p1 rcp.approx.f32 %f1, %f2;"),
        ("fma", "fma.rn.f32 %f1, %f2, %f3, %f4;"),
        ("fma", "@!%p1 sub.f32 %f1, %f2, %f3;"),
        ("alu", "add.s64 %rd1, %rd2, %rd3;"),
        ("alu", "cvt.rn.bf16x2.f32 %r1, %f1, %f2;"),
        ("alu", "fns.b32 %r1, %r2, %r3, %r4;"),
        ("shared", "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5+16];"),
        ("shared", "st.shared::cta.b32 [%r1], %r2;"),
        ("shared", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];"),
        ("shared", "atom.shared.add.u32 %r1, [%r2], %r3;"),
        ("global", "ld.global.nc.v2.b32 {%r1, %r2}, [%rd1];"),
        ("global", "red.relaxed.gpu.global.add.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};"),
        ("global", "ld.b32 %r1, [%rd1];"),
        ("local", "st.local.b32 [%rd1], %r1;"),
        ("moves", "ld.param.b64 %rd1, [f_param_0];"),
        ("moves", "mov.b64 %rd1, {%r1, %r2};"),
        ("control", "@%p1 bra $L__BB0_1;"),
        ("control", "elect.sync %r1|%p1, -1;"),
    ],
)  # fmt: skip
def test_each_instruction_has_a_pipe(pipe: str, line: str) -> None:
    assert pipes(line) == {pipe: 1}


def test_every_statement_counts_and_nothing_else() -> None:
    found = pipes(
        "// fma.rn.f32 %f1, %f2, %f3, %f4;",
        "$L__BB0_1: add.s32 %r1, %r1, 1; add.s32 %r2, %r2, 1;",
        "/* ex2.approx.f32 %f1, %f2;",
        "*/",
        "{",
        ".reg .pred P1;",
        "WAIT:",
        "@P1 bra.uni DONE; bra.uni WAIT;",
        "DONE:",
        "}",
    )
    assert found == {"alu": 2, "control": 2}


def test_tensor_memory_comes_from_a_number_or_a_register() -> None:
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {};"
    assert tensor_columns(HEAD + "mov.b32 %r2, 256;" + alloc.format("%r2") + "}") == 256
    assert tensor_columns(HEAD + alloc.format("128") + alloc.format("0x20") + "}") == 160
    assert tensor_columns(HEAD + "}") == 0


DESCRIPTOR = 8 << 24 | 16 << 17 | 0x490  # M 128, N 128


def mma(target: str, first: str) -> str:
    operands = f"[{target}], {first}, %rd2, %r2, {{%r3, %r3, %r3, %r3}}, %p1"
    return f"mov.b32 %r2, {DESCRIPTOR};\ntcgen05.mma.cta_group::1.kind::f16 {operands};"


def test_products_have_shapes_sources_and_loops() -> None:
    found = products(
        HEAD
        + "\n".join(
            [
                mma("%r7", "%rd1"),
                "$OUTER:",
                mma("%r8", "[%r7]"),
                "@%p2 bra $SKIP;",
                "$INNER:",
                mma("%r9", "%rd1"),
                "@%p3 bra $INNER;",
                "$SKIP:",
                "@%p4 bra $OUTER;",
                "bra.uni $END;",
                "$END: ret;",
            ]
        )
        + "}"
    )
    assert found == (
        Product(128, 128, 16, "SS", "%r7", "%rd1", 0),
        Product(128, 128, 16, "TS", "%r8", "[%r7]", 1),
        Product(128, 128, 16, "SS", "%r9", "%rd1", 2),
    )


def test_two_ways_back_are_one_loop() -> None:
    lines = ["$L:", mma("%r7", "%rd1"), "@%p1 bra $L;", "add.s32 %r1, %r1, 1;", "bra.uni $L;"]
    (found,) = products(HEAD + "\n".join(lines) + "}")
    assert found.loop == 1


def test_products_of_hopper_say_their_shape() -> None:
    name = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
    lines = [f"{name} {{%f1, %f2}}, %rd1, %rd2, p, 1, 1, 0, 0;"]
    lines += [f"{name} {{%f1, %f2}}, {{%r1, %r2, %r3, %r4}}, %rd2, p, 1, 1, 1;"]
    first, second = products(HEAD + "\n".join(lines) + "}")
    assert (first.m, first.n, first.k, first.source) == (64, 128, 16, "SS")
    assert (second.m, second.n, second.k, second.source) == (64, 128, 16, "RS")
