"""ldmatrix, stmatrix, movmatrix.  PTX ISA: Warp-level matrix load, store, transpose."""

from __future__ import annotations

import harness
import numpy as np
import pytest

import ptxsim

LANES = np.arange(32)
BYTES = 1024  # the rows' arena in shared memory


def fill(words: str = "ar") -> str:
    """Copies the arena from global memory: 32 bytes a lane."""
    return f"""
    .shared .align 128 .b8 arena[{BYTES}];
    .reg .b32 %{words}<9>;
    .reg .b64 %src;
    mov.u32 %{words}0, arena;
    ld.param.u64 %src, [image];
    mov.u32 %{words}8, %laneid;
    mad.wide.u32 %src, %{words}8, 32, %src;
    mad.lo.u32 %{words}1, %{words}8, 32, %{words}0;
    ld.global.v4.b32 {{%{words}2, %{words}3, %{words}4, %{words}5}}, [%src];
    st.shared.v4.b32 [%{words}1], {{%{words}2, %{words}3, %{words}4, %{words}5}};
    ld.global.v4.b32 {{%{words}2, %{words}3, %{words}4, %{words}5}}, [%src+16];
    st.shared.v4.b32 [%{words}1+16], {{%{words}2, %{words}3, %{words}4, %{words}5}};
    bar.sync 0;
    """


def gather(rows: np.ndarray, image: np.ndarray, number: int) -> np.ndarray:
    """Matrix `number`: its eight rows lie at the addresses of lanes 8 * number ..."""
    return np.stack(
        [image.view(np.uint16)[a // 2 : a // 2 + 8] for a in rows[8 * number : 8 * number + 8]]
    )


ROWS = np.random.default_rng(1).permutation(BYTES // 16)[:32].astype(np.uint32) * 16
IMAGE = np.random.default_rng(0).integers(0, 256, BYTES).astype(np.uint8)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, trans: bool) -> None:
    """Lane l holds elements (l/4, 2(l%4)) and the next of each matrix, or of its transpose."""
    targets = ", ".join(f"%q{n}" for n in range(count))
    stores = "\n".join(f"st.global.b32 [%dst+{128 * n}], %q{n};" for n in range(count))
    body = f"""{fill()}
    .reg .b32 %q<4>, %row; .reg .b64 %dst, %p;
    ld.param.u64 %p, [rows];
    mad.wide.u32 %p, %ar8, 4, %p;
    ld.global.b32 %row, [%p];
    add.u32 %row, %row, %ar0;
    ldmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 {{{targets}}}, [%row];
    ld.param.u64 %dst, [out];
    mad.wide.u32 %dst, %ar8, 4, %dst;
    {stores}
    """
    out = np.zeros((count, 32), np.uint32)
    # Lanes beyond 8 * count give no address: what they hold must not matter.
    rows = ROWS.copy()
    rows[8 * count :] = 0x7FFFFF00
    text = harness.kernel(body, [".u64 image", ".u64 rows", ".u64 out"])
    ptxsim.load(text).launch(1, 32, [IMAGE, rows, out])
    for number in range(count):
        matrix = gather(rows, IMAGE, number)
        if trans:
            matrix = matrix.T
        for lane in range(32):
            row, column = lane // 4, 2 * (lane % 4)
            want = int(matrix[row, column]) | int(matrix[row, column + 1]) << 16
            assert out[number, lane] == want


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count: int, trans: bool) -> None:
    sources = ", ".join(f"%q{n}" for n in range(count))
    loads = "\n".join(f"ld.global.b32 %q{n}, [%src2+{128 * n}];" for n in range(count))
    body = f"""{fill()}
    .reg .b32 %q<4>, %row; .reg .b64 %dst, %p, %src2;
    ld.param.u64 %p, [rows];
    mad.wide.u32 %p, %ar8, 4, %p;
    ld.global.b32 %row, [%p];
    add.u32 %row, %row, %ar0;
    ld.param.u64 %src2, [words];
    mad.wide.u32 %src2, %ar8, 4, %src2;
    {loads}
    stmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 [%row], {{{sources}}};
    bar.sync 0;
    ld.param.u64 %dst, [out];
    mad.wide.u32 %dst, %ar8, 32, %dst;
    ld.shared.v4.b32 {{%ar2, %ar3, %ar4, %ar5}}, [%ar1];
    st.global.v4.b32 [%dst], {{%ar2, %ar3, %ar4, %ar5}};
    ld.shared.v4.b32 {{%ar2, %ar3, %ar4, %ar5}}, [%ar1+16];
    st.global.v4.b32 [%dst+16], {{%ar2, %ar3, %ar4, %ar5}};
    """
    words = (
        np.random.default_rng(2).integers(0, 1 << 32, (4, 32), dtype=np.uint64).astype(np.uint32)
    )
    out = np.zeros(BYTES, np.uint8)
    rows = ROWS.copy()
    rows[8 * count :] = 0x7FFFFF00
    text = harness.kernel(body, [".u64 image", ".u64 rows", ".u64 words", ".u64 out"])
    ptxsim.load(text).launch(1, 32, [IMAGE, rows, words, out])
    want = IMAGE.view(np.uint16).copy()
    for number in range(count):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, 2 * (lane % 4) + half
                if trans:
                    row, column = column, row
                want[rows[8 * number + row] // 2 + column] = (
                    words[number, lane] >> (16 * half) & 0xFFFF
                )
    np.testing.assert_array_equal(out.view(np.uint16), want)


def test_addresses_may_be_of_64_bits() -> None:
    body = f"""{fill()}
    .reg .b32 %q<4>; .reg .b64 %row, %dst;
    mad.lo.u32 %ar2, %ar8, 16, %ar0; cvt.u64.u32 %row, %ar2;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%q0, %q1, %q2, %q3}}, [%row];
    ld.param.u64 %dst, [out]; mad.wide.u32 %dst, %ar8, 4, %dst;
    st.global.b32 [%dst], %q0; st.global.b32 [%dst+128], %q3;
    """
    out = np.zeros((2, 32), np.uint32)
    text = harness.kernel(body, [".u64 image", ".u64 out"])
    ptxsim.load(text).launch(1, 32, [IMAGE, out])
    words = IMAGE.view(np.uint32).reshape(64, 4)
    np.testing.assert_array_equal(out[0], words[:8].reshape(-1))
    np.testing.assert_array_equal(out[1], words[24:32].reshape(-1))


def test_movmatrix_transposes_across_the_warp() -> None:
    words = np.random.default_rng(3).integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32)
    (got,) = harness.run("movmatrix.sync.aligned.m8n8.trans.b16 %d0, %a0;", [words], ["u4"])
    matrix = words.view(np.uint16).reshape(8, 8)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(8, 8), matrix.T)


def test_a_row_that_is_not_16_aligned_is_an_error() -> None:
    body = f"""{fill()}
    .reg .b32 %q, %row;
    add.u32 %row, %ar0, 8;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%q}}, [%row];
    """
    with pytest.raises(ptxsim.Misaligned) as caught:
        ptxsim.load(harness.kernel(body, [".u64 image"])).launch(1, 32, [IMAGE])
    assert "ldmatrix" in str(caught.value)


def test_rows_that_nothing_wrote_are_an_error() -> None:
    body = """
    .shared .align 16 .b8 arena[128];
    .reg .b32 %q, %row;
    mov.u32 %row, arena;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%q}, [%row];
    """
    with pytest.raises(ptxsim.UninitialisedRead):
        ptxsim.load(harness.kernel(body)).launch(1, 32, [])


def test_part_of_a_warp_is_an_error() -> None:
    body = """
    .shared .align 16 .b8 arena[128];
    .reg .b32 %q, %row; .reg .pred %p;
    mov.u32 %row, %laneid;
    setp.lt.u32 %p, %row, 8;
    mov.u32 %row, arena;
    @%p ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%q}, [%row];
    """
    with pytest.raises(ptxsim.DivergenceError):
        ptxsim.load(harness.kernel(body)).launch(1, 32, [])
