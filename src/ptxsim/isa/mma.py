"""mma.sync, ldmatrix, stmatrix, movmatrix.  PTX ISA: Warp Level Matrix Instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim import access
from ptxsim.decode import AGAIN, Decoder, Modifiers, Step, instruction
from ptxsim.isa.loadstore import address_reader
from ptxsim.isa.matrix import widen
from ptxsim.isa.rounding import float8_values
from ptxsim.isa.warp import FULL, gather_lanes
from ptxsim.ptx import Instruction
from ptxsim.values import F32, LANES, U32, bits32, lanes

_LANE = np.arange(LANES)
_SHAPES = {"m16n8k32": 32, "m16n8k16": 16, "m16n8k8": 8, "m16n8k4": 4}
_ITEM = {"tf32": 4, "f16": 2, "bf16": 2, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1}
# K of each element size, and the element kinds that may meet, by accumulator.
_DEPTHS = {4: (4, 8), 2: (8, 16), 1: (16, 32)}
_PARTNERS = (("f16",), ("bf16",), ("tf32",), ("s8", "u8"), ("e4m3", "e5m2"))
_SUMS = {"f32": ("f16", "bf16", "tf32", "e4m3", "e5m2"), "f16": ("f16",), "s32": ("s8", "u8")}


def _words(warp: Any, slots: list[int]) -> np.ndarray:
    return np.stack([lanes(bits32(warp.registers[s]), 32) for s in slots])


def _numbers(raw: np.ndarray, kind: str) -> Any:
    """Elements of one register per lane, its low bits, as float32."""
    if kind in ("s8", "u8"):
        return raw.view(np.int8 if kind == "s8" else np.uint8).astype(F32)
    if kind in ("e4m3", "e5m2"):
        return float8_values(kind)[raw]
    return widen(raw, kind)


def _fragment(words: np.ndarray, kind: str, a: bool, k: int) -> np.ndarray:
    """A as (16, K) or B as (8, K) float32 from registers (rows of `words`)."""
    rows = 16 if a else 8
    out = np.empty((rows, k), F32)
    bits = 8 * _ITEM[kind]
    per_word = 32 // bits
    for i, word in enumerate(words):
        row = _LANE // 4 + (8 * (i % 2) if a else 0)
        block = i // 2 if a else i
        for part in range(per_word):
            values = (word >> np.uint32(bits * part)).astype(np.dtype(f"uint{bits}"))
            column = per_word * (_LANE % 4) + part + 4 * per_word * block
            out[row, column] = _numbers(values, kind)
    return out


@instruction("mma.sync")
def build_mma(ins: Instruction, c: Decoder) -> Step:
    """mma.sync.aligned.m16n8kK.row.col{.satfinite}.sum.a.b.sum d, a, b, c."""
    m = Modifiers(ins, skip=1)
    m.choice("aligned")
    k = _SHAPES[m.choice(*_SHAPES)]
    m.choice("row")
    m.choice("col")
    clamp = m.flag("satfinite")
    d_kind, a_kind, b_kind = m.type(*_SUMS), m.type(*_ITEM), m.type(*_ITEM)
    if m.type(*_SUMS) != d_kind or a_kind not in _SUMS[d_kind]:
        raise m.unsupported("these types of sums and factors")
    if not any(a_kind in group and b_kind in group for group in _PARTNERS):
        raise m.unsupported("factors of these types")
    item = _ITEM[a_kind]
    if k not in _DEPTHS[item] or (clamp and d_kind != "s32") or (k == 16 and "e" in a_kind):
        raise m.unsupported(f"this form with K {k}")
    m.done()
    d = c.writes(ins.operands[0], 32)
    a, b, z = (c.reads(o, 32) for o in ins.operands[1:4])
    if len(a) != 16 * k * item // 128 or len(b) != 8 * k * item // 128:
        raise m.unsupported(f"{len(a)} A and {len(b)} B registers for K {k}")
    i = np.arange(4)[:, None]
    row, column = _LANE // 4 + 8 * (i // 2), 2 * (_LANE % 4) + i % 2
    add = {"f32": _add_f32, "f16": _add_f16, "s32": _add_clamped if clamp else _add_s32}[d_kind]

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        left = _fragment(_words(warp, a), a_kind, True, k)
        right = _fragment(_words(warp, b), b_kind, False, k)
        # Sums of 32 products of 8-bit integers are exact in float32 too.
        values = add((left @ right.T)[row, column], _words(warp, z))
        for slot, value in zip(d, values, strict=True):
            warp.registers[slot] = value
        return None

    return run


def _add_f32(result: np.ndarray, old: np.ndarray) -> list[Any]:
    return list(result + old.view(F32))


def _add_f16(result: np.ndarray, old: np.ndarray) -> list[Any]:
    low = (old & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(F32)
    high = (old >> np.uint32(16)).astype(np.uint16).view(np.float16).astype(F32)
    total = result + np.stack([low[0], high[0], low[1], high[1]])
    half = total.astype(np.float16).view(np.uint16).astype(U32)
    return [half[0] | half[1] << np.uint32(16), half[2] | half[3] << np.uint32(16)]


def _add_s32(result: np.ndarray, old: np.ndarray) -> list[Any]:
    return list(result.astype(np.int32) + old.view(np.int32))


def _add_clamped(result: np.ndarray, old: np.ndarray) -> list[Any]:
    total = result.astype(np.int64) + old.view(np.int32)
    return list(np.clip(total, -(1 << 31), (1 << 31) - 1).astype(np.int32))


def _matrix_modifiers(ins: Instruction) -> tuple[Modifiers, int, bool]:
    m = Modifiers(ins)
    m.choice("sync")
    m.choice("aligned")
    m.choice("m8n8")
    count = int(m.choice("x1", "x2", "x4")[1:])
    transposed = m.flag("trans")
    m.choice("shared", "shared::cta")
    m.type("b16")
    m.done()
    return m, count, transposed


def _row_addresses(warp: Any, address: Any, count: int) -> np.ndarray:
    """Addresses of the 8 * count rows: lanes 8i..8i+7 give matrix i."""
    return access.lane_addresses(address)[: 8 * count]


@instruction("ldmatrix")
def build_load(ins: Instruction, c: Decoder) -> Step:
    """ldmatrix.m8n8.x{1,2,4}{.trans}: lane l gets elements (l/4, 2(l%4)) and the next."""
    m, count, transposed = _matrix_modifiers(ins)
    d = c.writes(ins.operands[0], 32)
    address = address_reader(c, ins.operands[1], "shared")
    if len(d) != count:
        raise m.unsupported(f"{len(d)} registers for x{count}")

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        rows = _row_addresses(warp, address(warp), count)
        outer = warp.mask
        padded = np.resize(rows, LANES)
        warp.mask = None if count == 4 else 8 * count > _LANE
        try:
            raw = access.load_shared(warp, padded, 16)
        finally:
            warp.mask = outer
        matrices = np.ascontiguousarray(raw).view(np.uint16).reshape(4, 8, 8)
        for number, slot in enumerate(d):
            matrix = matrices[number].T if transposed else matrices[number]
            pairs = np.ascontiguousarray(matrix).view(U32)
            warp.registers[slot] = pairs.reshape(LANES)
        return None

    return run


@instruction("stmatrix")
def build_store(ins: Instruction, c: Decoder) -> Step:
    """stmatrix.m8n8.x{1,2,4}{.trans}: the inverse map of ldmatrix."""
    m, count, transposed = _matrix_modifiers(ins)
    address = address_reader(c, ins.operands[0], "shared")
    sources = c.reads(ins.operands[1], 32)
    if len(sources) != count:
        raise m.unsupported(f"{len(sources)} registers for x{count}")

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        table = np.zeros((4, 8, 8), np.uint16)
        for number, slot in enumerate(sources):
            words = np.ascontiguousarray(lanes(bits32(warp.registers[slot]), 32))
            matrix = words.view(np.uint16).reshape(8, 8)
            table[number] = matrix.T if transposed else matrix
        rows = np.resize(_row_addresses(warp, address(warp), count), LANES)
        outer = warp.mask
        warp.mask = None if count == 4 else 8 * count > _LANE
        try:
            values = np.ascontiguousarray(table).reshape(LANES, 8).view(np.complex128)[:, 0]
            access.store_shared(warp, rows, values, 16)
        finally:
            warp.mask = outer
        return None

    return run


@instruction("movmatrix")
def build_transpose(ins: Instruction, c: Decoder) -> Step:
    """movmatrix.sync.aligned.m8n8.trans.b16: transpose of an 8x8 matrix spread over the warp."""
    m = Modifiers(ins)
    for name in ("sync", "aligned", "m8n8", "trans"):
        m.choice(name)
    m.type("b16")
    m.done()
    a, d = c.read(ins.operands[1], 32), c.write(ins.operands[0])

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        words = np.ascontiguousarray(lanes(bits32(warp.registers[a]), 32))
        matrix = np.ascontiguousarray(words.view(np.uint16).reshape(8, 8).T)
        warp.registers[d] = matrix.view(U32).reshape(LANES)
        return None

    return run
