"""Bit fields, shifts and permutations.  PTX ISA: Integer Arithmetic, Logic and Shift, prmt."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import Array, bits_of, check, integers, reading, signed

COUNT = 64
TOP = 0xFFFFFFFF


def words(*widths: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [integers(w, COUNT, rng) for w in widths]


def amounts(limit: int, seed: int = 1) -> Array:
    """Small counts, with some far beyond every width."""
    values = np.random.default_rng(seed).integers(0, limit, COUNT).astype(np.uint32)
    values[::13] = 0
    values[5::17] = 0x80000003
    return values


def field_bounds(width: int) -> list[Array]:
    """Positions and lengths.  The ISA allows 0..255; an H200 reads the low 8 bits of larger ones in
    32-bit fields, and all 32 in 64-bit ones, where such values are left out."""
    bounds = [amounts(width + 6), amounts(width + 6, seed=2)]
    return [b & np.uint32(255) for b in bounds] if width == 64 else bounds


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_shl_gives_zero_beyond_the_width(kind: str) -> None:
    width = bits_of(kind)
    inputs = [*words(width), amounts(width + 8)]
    check(
        f"shl.{kind} %d0, %a0, %a1;",
        inputs,
        f"u{width // 8}",
        lambda a, n: a << n if n < width else 0,
    )


@pytest.mark.parametrize("kind", ["b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64"])
def test_shr_fills_by_type_beyond_the_width_too(kind: str) -> None:
    width = bits_of(kind)
    inputs = [*words(width), amounts(width + 8)]
    check(
        f"shr.{kind} %d0, %a0, %a1;",
        inputs,
        f"u{width // 8}",
        lambda a, n: reading(a, kind) >> min(n, width),
    )


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_shf_shifts_a_pair_of_words(mode: str) -> None:
    def count(n: int) -> int:
        return n & 31 if mode == "wrap" else min(n, 32)

    inputs = [*words(32, 32), amounts(40)]
    check(
        f"shf.l.{mode}.b32 %d0, %a0, %a1, %a2;",
        inputs,
        "u4",
        lambda lo, hi, n: ((hi << 32 | lo) << count(n)) >> 32,
    )
    check(
        f"shf.r.{mode}.b32 %d0, %a0, %a1, %a2;",
        inputs,
        "u4",
        lambda lo, hi, n: (hi << 32 | lo) >> count(n),
    )


def test_lop3_follows_each_of_the_256_tables() -> None:
    """The ISA builds the table from ta=0xF0, tb=0xCC, tc=0xAA: bit i of it is f at index i."""
    import harness

    # One bit column per index, so that a single word of each operand covers all eight rows.
    columns = [0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA]
    rng = np.random.default_rng(3)
    inputs = [np.full(32, c, np.uint32) for c in columns]
    for values in inputs:
        values[1::2] = rng.integers(0, 1 << 32, 16, dtype=np.uint64).astype(np.uint32)
    body = "\n".join(
        f"lop3.b32 %d0, %a0, %a1, %a2, {table};\nxor.b32 %x, %d0, %x;\n"
        f"mul.lo.u32 %x, %x, 0x9E3779B1;"
        for table in range(256)
    )
    (got,) = harness.run(f"mov.u32 %x, 0;\n{body}\nmov.u32 %d0, %x;", inputs, ["u4"])
    for lane in range(32):
        a, b, c = (int(v[lane]) for v in inputs)
        rows = [0] * 8
        for bit in range(32):
            rows[(a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)] |= 1 << bit
        mixed = 0
        for table in range(256):
            value = sum(rows[i] for i in range(8) if table >> i & 1)
            mixed = (value ^ mixed) * 0x9E3779B1 & TOP
        assert int(got[lane]) == mixed
    for value, want in ((0x80, 0xF0 & 0xCC & 0xAA), (0xFE, 0xFE), (0x96, 0xF0 ^ 0xCC ^ 0xAA)):
        (got,) = harness.run(
            f"lop3.b32 %d0, %a0, %a1, %a2, {value};",
            [np.full(32, c, np.uint32) for c in columns],
            ["u4"],
            (True, True, True),
        )
        assert (got & 0xFF == want).all()


def test_prmt_picks_bytes_and_spreads_signs() -> None:
    def permute(a: int, b: int, selector: int) -> int:
        source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        out = 0
        for byte in range(4):
            nibble = selector >> (4 * byte) & 15
            value = source[nibble & 7]
            if nibble & 8:
                value = 255 if value & 128 else 0
            out |= value << (8 * byte)
        return out

    check("prmt.b32 %d0, %a0, %a1, %a2;", words(32, 32, 32), "u4", permute)
    check(
        "prmt.b32 %d0, %a0, %a1, 0x7531;", words(32, 32), "u4", lambda a, b: permute(a, b, 0x7531)
    )


# The table of the ISA's prmt page: bytes b3 b2 b1 b0 of the result for selectors 0..3.
PRMT_MODES = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


@pytest.mark.parametrize("mode", PRMT_MODES)
def test_prmt_modes(mode: str) -> None:
    def permute(a: int, b: int, selector: int) -> int:
        source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        picks = [int(x) for x in reversed(PRMT_MODES[mode][selector & 3])]
        return int.from_bytes(bytes(source[p] for p in picks), "little")

    check(f"prmt.b32.{mode} %d0, %a0, %a1, %a2;", words(32, 32, 32), "u4", permute)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfe_extracts_and_sign_extends_fields(kind: str) -> None:
    width = bits_of(kind)

    def extract(a: int, pos: int, length: int) -> int:
        """The ISA's loop, bit by bit."""
        pos, length, msb = pos & 255, length & 255, width - 1
        sign = 0
        if kind[0] == "s" and length:
            sign = a >> min(pos + length - 1, msb) & 1
        out = 0
        for i in range(width):
            bit = a >> (pos + i) & 1 if i < length and pos + i <= msb else sign
            out |= bit << i
        return out

    inputs = [*words(width), *field_bounds(width)]
    check(f"bfe.{kind} %d0, %a0, %a1, %a2;", inputs, f"u{width // 8}", extract)


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bfi_inserts_fields(kind: str) -> None:
    width = bits_of(kind)

    def insert(a: int, b: int, pos: int, length: int) -> int:
        pos, length = pos & 255, length & 255
        for i in range(length):
            if pos + i < width:
                b = b & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
        return b

    inputs = [*words(width, width), *field_bounds(width)]
    check(f"bfi.{kind} %d0, %a0, %a1, %a2, %a3;", inputs, f"u{width // 8}", insert)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfind_finds_the_top_bit_that_is_no_sign(kind: str) -> None:
    width = bits_of(kind)

    def find(a: int) -> int:
        if kind[0] == "s" and a >> (width - 1):
            a = ~a
        for at in range(width - 1, -1, -1):
            if a >> at & 1:
                return at
        return -1

    check(f"bfind.{kind} %d0, %a0;", words(width), "u4", find)
    check(
        f"bfind.shiftamt.{kind} %d0, %a0;",
        words(width),
        "u4",
        lambda a: -1 if find(a) < 0 else width - 1 - find(a),
    )


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_counts_and_reversal(kind: str) -> None:
    width = bits_of(kind)
    check(f"popc.{kind} %d0, %a0;", words(width), "u4", lambda a: bin(a).count("1"))
    check(
        f"clz.{kind} %d0, %a0;",
        words(width),
        "u4",
        lambda a: next((i for i in range(width) if a >> (width - 1 - i) & 1), width),
    )
    check(
        f"brev.{kind} %d0, %a0;",
        words(width),
        f"u{width // 8}",
        lambda a: sum((a >> i & 1) << (width - 1 - i) for i in range(width)),
    )


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_bmsk_and_szext(mode: str) -> None:
    def count(n: int) -> int:
        return n & 31 if mode == "wrap" else min(n, 32)

    inputs = [amounts(40), amounts(40, seed=2)]
    check(
        f"bmsk.{mode}.b32 %d0, %a0, %a1;",
        inputs,
        "u4",
        lambda a, b: sum(1 << i for i in range(count(a), min(32, count(a) + count(b)))),
    )
    inputs = [*words(32), amounts(40)]
    for kind in ("u32", "s32"):
        check(
            f"szext.{mode}.{kind} %d0, %a0, %a1;",
            inputs,
            "u4",
            lambda a, n, kind=kind: (
                0
                if count(n) == 0
                else signed(a, count(n))
                if kind == "s32"
                else a & ((1 << count(n)) - 1)
            ),
        )


def test_fns_counts_set_bits_from_a_base() -> None:
    def find(mask: int, base: int, n: int) -> int:
        n = signed(n, 32)
        if n == 0:
            return base if mask >> base & 1 else -1
        positions = range(base, 32) if n > 0 else range(base, -1, -1)
        ones = [p for p in positions if mask >> p & 1]
        return ones[abs(n) - 1] if len(ones) >= abs(n) else -1

    bases = np.random.default_rng(5).integers(0, 32, COUNT).astype(np.uint32)
    steps = np.random.default_rng(6).integers(-6, 7, COUNT).astype(np.int32).view(np.uint32)
    check("fns.b32 %d0, %a0, %a1, %a2;", [*words(32), bases, steps], "u4", find)


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_not_and_cnot(kind: str) -> None:
    width = bits_of(kind)
    check(f"not.{kind} %d0, %a0;", words(width), f"u{width // 8}", lambda a: ~a)
    check(f"cnot.{kind} %d0, %a0;", words(width), f"u{width // 8}", lambda a: int(a == 0))


def test_logic_of_predicates() -> None:
    rng = np.random.default_rng(8)
    a, b = (rng.integers(0, 2, COUNT).astype(bool) for _ in range(2))
    check("and.pred %d0, %a0, %a1;", [a, b], bool, lambda x, y: x and y)
    check("or.pred %d0, %a0, %a1;", [a, b], bool, lambda x, y: x or y)
    check("xor.pred %d0, %a0, %a1;", [a, b], bool, lambda x, y: x != y)
    check("not.pred %d0, %a0;", [a], bool, lambda x: not x)
    check("mov.pred %d0, %a0;", [a], bool, lambda x: x)
