"""ld, st, mov, cvta, isspacep: every space, width and vector.  PTX ISA: Data Movement."""

from __future__ import annotations

import harness
import numpy as np
import pytest

import ptxsim

LANES = np.arange(32)
SETUP = """
.reg .b32 %t, %s<4>; .reg .b64 %q, %o, %g<4>; .reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %d<8>;
.reg .pred %p;
mov.u32 %t, %tid.x;
"""
BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "b32": 4, "u32": 4, "s32": 4,
         "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip


def launch(body: str, args: list, params: list[str], block: int = 32, **options) -> None:
    ptxsim.load(harness.kernel(body, params, SETUP)).launch(1, block, args, **options)


def image(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


def registers(kind: str, count: int) -> list[str]:
    """Registers wide enough; 8-bit values live in 16 bits."""
    letter = {1: "h", 2: "h", 4: "r", 8: "d"}[BYTES[kind]]
    return [f"%{letter}{n}" for n in range(count)]


FORMS = [(kind, 1) for kind in BYTES]
FORMS += [(kind, 2) for kind in ("b8", "b16", "b32", "b64", "f32")]
FORMS += [(kind, 4) for kind in ("b8", "b16", "b32", "f32")]


@pytest.mark.parametrize("space", ["global", "shared", "local", "generic"])
@pytest.mark.parametrize(("kind", "count"), FORMS)
def test_copies_through_a_space(kind: str, count: int, space: str) -> None:
    """Global to the space and back, each lane its own place."""
    size = BYTES[kind] * count
    names = registers(kind, count)
    listed = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    vector = "" if count == 1 else f".v{count}"
    form = f"{vector}.{kind}"
    address = {
        "global": "ld.param.u64 %q, [scratch]; mad.wide.u32 %q, %t, %z, %q;",
        "shared": "mov.u64 %q, arena; mad.wide.u32 %q, %t, %z, %q;",
        "local": "mov.u64 %q, stack;",
        "generic": "mov.u64 %q, arena; mad.wide.u32 %q, %t, %z, %q; cvta.shared.u64 %q, %q;",
    }[space].replace("%z", str(size))
    prefix = "" if space == "generic" else f".{space}"
    body = f"""
    .shared .align 16 .b8 arena[1024]; .local .align 16 .b8 stack[16];
    ld.param.u64 %o, [in]; mad.wide.u32 %o, %t, {size}, %o;
    {address}
    ld.global{form} {listed}, [%o];
    st{prefix}{form} [%q], {listed};
    mov.b16 %h0, 0; mov.b32 %r0, 0; mov.b64 %d0, 0;
    ld{prefix}{form} {listed}, [%q];
    ld.param.u64 %o, [out]; mad.wide.u32 %o, %t, {size}, %o;
    st.global{form} [%o], {listed};
    """
    source, scratch, out = (
        image(32 * size),
        np.zeros(32 * size, np.uint8),
        np.zeros(32 * size, "u1"),
    )
    launch(body, [source, scratch, out], [".u64 in", ".u64 scratch", ".u64 out"])
    np.testing.assert_array_equal(out, source)


def test_256_bit_global_accesses() -> None:
    body = """
    ld.param.u64 %o, [in]; mad.wide.u32 %o, %t, 32, %o;
    ld.param.u64 %q, [out]; mad.wide.u32 %q, %t, 32, %q;
    ld.global.v8.b32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%o];
    st.global.v8.b32 [%q], {%r7, %r1, %r2, %r3, %r4, %r5, %r6, %r0};
    ld.global.v4.b64 {%d0, %d1, %d2, %d3}, [%o+1024];
    st.global.v4.b64 [%q+1024], {%d0, %d1, %d3, %d2};
    """
    raw = np.zeros(4096 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    source, out = raw[start : start + 2048], np.zeros(2048 + 64, np.uint8)
    source[:] = image(2048)
    out = out[-out.ctypes.data % 64 :][:2048]
    launch(body, [source, out], [".u64 in", ".u64 out"])
    words = source.view(np.uint32).reshape(2, 32, 8)[0][:, [7, 1, 2, 3, 4, 5, 6, 0]]
    np.testing.assert_array_equal(out[:1024].view(np.uint32).reshape(32, 8), words)
    longs = source.view(np.uint64).reshape(2, 32, 4)[1][:, [0, 1, 3, 2]]
    np.testing.assert_array_equal(out[1024:].view(np.uint64).reshape(32, 4), longs)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("kind", ["u8", "s8", "u16", "s16", "b8", "b16"])
def test_narrow_loads_fill_wide_registers_by_their_sign(kind: str, uniform: bool) -> None:
    size = BYTES[kind]
    step = 0 if uniform else size
    body = f"""
    ld.param.u64 %o, [in]; mad.wide.u32 %o, %t, {step}, %o;
    {"ld.param.u64 %o, [in];" if uniform else ""}
    ld.global.{kind} %r0, [%o];
    ld.global.{kind} %d0, [%o];
    ld.param.u64 %q, [out]; mad.wide.u32 %q, %t, 16, %q;
    st.global.b64 [%q], %d0;
    st.global.b32 [%q+8], %r0;
    """
    source = image(32 * size, seed=3)
    out = np.zeros((32, 2), np.uint64)
    launch(body, [source, out], [".u64 in", ".u64 out"])
    values = source.view(f"{'i' if kind[0] == 's' else 'u'}{size}").astype(np.int64)
    values = np.repeat(values[:1], 32) if uniform else values
    np.testing.assert_array_equal(out[:, 0], values.astype(np.uint64))
    np.testing.assert_array_equal(out[:, 1], values.astype(np.uint32))


def test_parameters_of_every_width() -> None:
    body = """
    ld.param.u8 %r0, [a]; ld.param.s16 %r1, [b]; ld.param.f32 %r2, [c]; ld.param.u64 %d0, [d];
    ld.param.v2.b32 {%r3, %r4}, [e+8]; ld.param.b8 %r5, [e+3];
    mov.b64 %q, e; add.u64 %q, %q, 12; ld.param.b32 %r6, [%q];
    mov.b64 %g0, e; cvta.param.u64 %g0, %g0; ld.b32 %r7, [%g0+4];
    ld.param.u64 %o, [out];
    st.global.b32 [%o], %r0; st.global.b32 [%o+4], %r1; st.global.b32 [%o+8], %r2;
    st.global.b32 [%o+12], %r3; st.global.b32 [%o+16], %r4; st.global.b32 [%o+20], %r5;
    st.global.b32 [%o+24], %r6; st.global.b32 [%o+28], %r7; st.global.b64 [%o+32], %d0;
    """
    out = np.zeros(10, np.uint32)
    struct = np.arange(16, dtype=np.uint8)
    params = [".u8 a", ".s16 b", ".f32 c", ".u64 d", ".align 8 .b8 e[16]", ".u64 out"]
    launch(body, [200, -3, 1.5, 1 << 40, struct.tobytes(), out], params)
    words = struct.view(np.uint32)
    want = [200, 0xFFFFFFFD, 0x3FC00000, words[2], words[3], 3, words[3], words[1], 0, 256]
    np.testing.assert_array_equal(out, np.array(want, np.uint32))


def test_variables_of_a_module() -> None:
    text = harness.kernel(
        """
        mov.u64 %q, table; mad.wide.u32 %q, %t, 4, %q;
        ld.const.b32 %r0, [%q];
        mov.u64 %o, counter; ld.global.b32 %r1, [%o]; add.u32 %r0, %r0, %r1;
        ld.param.u64 %o, [out]; mad.wide.u32 %o, %t, 4, %o; st.global.b32 [%o], %r0;
        """,
        [".u64 out"],
        SETUP,
    )
    values = ", ".join(str(n * n) for n in range(32))
    text = text.replace(
        ".visible",
        f".const .align 4 .b32 table[32] = {{{values}}};\n.global .b32 counter = 1000;\n.visible",
    )
    out = np.zeros(32, np.uint32)
    ptxsim.load(text).launch(1, 32, [out])
    np.testing.assert_array_equal(out, LANES**2 + 1000)


def test_generic_addresses_and_their_windows() -> None:
    body = """
    .shared .align 8 .b8 arena[8]; .local .align 8 .b8 stack[8];
    mov.u64 %g0, arena; cvta.shared.u64 %g0, %g0;
    mov.u64 %g1, stack; cvta.local.u64 %g1, %g1;
    ld.param.u64 %g2, [out]; cvta.to.global.u64 %g2, %g2;
    mov.b32 %r0, 0;
    isspacep.shared %p, %g0; selp.b32 %r1, 1, 0, %p; or.b32 %r0, %r0, %r1;
    isspacep.local %p, %g1; selp.b32 %r1, 2, 0, %p; or.b32 %r0, %r0, %r1;
    isspacep.global %p, %g2; selp.b32 %r1, 4, 0, %p; or.b32 %r0, %r0, %r1;
    isspacep.shared %p, %g2; selp.b32 %r1, 8, 0, %p; or.b32 %r0, %r0, %r1;
    isspacep.global %p, %g0; selp.b32 %r1, 16, 0, %p; or.b32 %r0, %r0, %r1;
    st.b32 [%g1], %t; ld.b32 %r1, [%g1]; add.u32 %r0, %r0, %r1;
    cvta.to.local.u64 %g1, %g1; ld.local.b32 %r1, [%g1]; add.u32 %r0, %r0, %r1;
    mad.wide.u32 %g2, %t, 4, %g2; st.b32 [%g2], %r0;
    """
    out = np.zeros(32, np.uint32)
    launch(body, [out], [".u64 out"])
    np.testing.assert_array_equal(out, 7 + 2 * LANES)


def test_lanes_in_different_buffers() -> None:
    a, b = np.full(1, 5, np.uint32), np.full(1, 7, np.uint32)
    body = """
    ld.param.u64 %g0, [a]; ld.param.u64 %g1, [b];
    and.b32 %r0, %t, 1; setp.eq.u32 %p, %r0, 0; selp.b64 %q, %g0, %g1, %p;
    ld.global.b32 %r0, [%q];
    ld.param.u64 %o, [out]; mad.wide.u32 %o, %t, 4, %o; st.global.b32 [%o], %r0;
    """
    out = np.zeros(32, np.uint32)
    launch(body, [a, b, out], [".u64 a", ".u64 b", ".u64 out"])
    np.testing.assert_array_equal(out, np.where(LANES % 2, 7, 5))


def test_lanes_that_store_to_one_place_leave_one_of_their_values() -> None:
    out = np.zeros(1, np.uint32)
    launch("ld.param.u64 %o, [out]; st.global.b32 [%o], %t;", [out], [".u64 out"])
    assert out[0] in LANES


ARENA = ".shared .align 16 .b8 arena[64]; mov.u32 %s0, arena;"
FAULTS = {
    "beyond a buffer": (
        "ld.param.u64 %o, [x]; mad.wide.u32 %o, %t, 4, %o; ld.global.b32 %r0, [%o];",
        ptxsim.OutOfBounds,
    ),
    "before a buffer": ("ld.param.u64 %o, [x]; ld.global.b32 %r0, [%o+-4];", ptxsim.OutOfBounds),
    "null": ("mov.u64 %o, 0; ld.global.b32 %r0, [%o];", ptxsim.OutOfBounds),
    "beyond shared memory": (
        ARENA + "st.shared.b32 [%s0+64], %t;",
        ptxsim.OutOfBounds,
    ),
    "shared null": (
        ".shared .b32 one; mov.u32 %s0, 0; ld.shared.b32 %r0, [%s0];",
        ptxsim.OutOfBounds,
    ),
    "beyond the stack": (
        ".local .align 16 .b8 stack[16]; mov.u64 %o, stack; st.local.b32 [%o+16], %t;",
        ptxsim.OutOfBounds,
    ),
    "misaligned": ("ld.param.u64 %o, [x]; ld.global.b32 %r0, [%o+2];", ptxsim.Misaligned),
    "misaligned vector": (
        "ld.param.u64 %o, [x]; ld.global.v2.b32 {%r0, %r1}, [%o+4];",
        ptxsim.Misaligned,
    ),
    "misaligned shared": (ARENA + "st.shared.b64 [%s0+4], %d0;", ptxsim.Misaligned),
    "unwritten shared": (ARENA + "ld.shared.b32 %r0, [%s0];", ptxsim.UninitialisedRead),
    "partly written shared": (
        ARENA + "st.shared.b16 [%s0], %h0; ld.shared.b32 %r0, [%s0];",
        ptxsim.UninitialisedRead,
    ),
    "unwritten local": (
        ".local .align 16 .b8 stack[16]; mov.u64 %o, stack; ld.local.b32 %r0, [%o];",
        ptxsim.UninitialisedRead,
    ),
    "an mbarrier read": (
        ARENA + "mbarrier.init.shared.b64 [%s0], 1; ld.shared.b32 %r0, [%s0];",
        ptxsim.BarrierError,
    ),
    "an mbarrier written": (
        ARENA + "mbarrier.init.shared.b64 [%s0], 1; st.shared.b32 [%s0+4], %t;",
        ptxsim.BarrierError,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    body, kind = FAULTS[name]
    raw = np.zeros(256, np.uint8)
    x = raw[-raw.ctypes.data % 64 :][:64].view(np.uint32).copy()
    with pytest.raises(kind) as caught:
        launch(body + "\nexit;", [x], [".u64 x"])
    error = caught.value
    assert error.line is not None
    assert error.text.split(".")[0] in ("ld", "st")
    assert (error.warp, error.cta) == (0, (0, 0, 0))
    assert error.address is not None or name == "beyond the stack" or "local" in name


def test_a_float_argument_of_an_integer_parameter_is_an_error() -> None:
    with pytest.raises(ptxsim.LaunchError):
        launch("exit;", ["text"], [".u64 x"])
    with pytest.raises(ptxsim.LaunchError, match="1 arguments, 2 given"):
        launch("exit;", [1, 2], [".u64 x"])
    with pytest.raises(ptxsim.LaunchError, match="3 bytes given, 8 expected"):
        launch("exit;", [b"abc"], [".u64 x"])
