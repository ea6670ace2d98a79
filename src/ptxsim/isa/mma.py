"""mma.sync, ldmatrix, stmatrix, movmatrix.  PTX ISA: Warp Level Matrix Instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim import access
from ptxsim.decode import AGAIN, Decoder, Modifiers, Step, instruction
from ptxsim.isa.loadstore import address_reader
from ptxsim.isa.matrix import widen
from ptxsim.isa.warp import FULL, gather_lanes
from ptxsim.ptx import Instruction
from ptxsim.values import F32, LANES, U32, bits32, lanes

_LANE = np.arange(LANES)
_SHAPES = {"m16n8k16": 16, "m16n8k8": 8, "m16n8k4": 4}


def _words(warp: Any, slots: list[int]) -> np.ndarray:
    return np.stack([lanes(bits32(warp.registers[s]), 32) for s in slots])


def _fragment(words: np.ndarray, kind: str, a: bool, k: int) -> np.ndarray:
    """A as (16, K) or B as (8, K) float32 from registers (rows of `words`)."""
    rows = 16 if a else 8
    out = np.empty((rows, k), F32)
    per_word = 1 if kind == "tf32" else 2
    for i, word in enumerate(words):
        row = _LANE // 4 + (8 * (i % 2) if a else 0)
        block = i // 2 if a else i
        for half in range(per_word):
            if per_word == 2:
                values = (word >> np.uint32(16 * half)).astype(np.uint16)
                column = 2 * (_LANE % 4) + half + 8 * block
            else:
                values, column = word, _LANE % 4 + 4 * block
            out[row, column] = widen(values, kind)
    return out


@instruction("mma.sync")
def build_mma(ins: Instruction, c: Decoder) -> Step:
    """mma.sync.aligned.m16n8k{4,8,16}.row.col.{f32,f16}.kind.kind.{f32,f16} d, a, b, c."""
    m = Modifiers(ins, skip=1)
    m.choice("aligned")
    k = _SHAPES[m.choice(*_SHAPES)]
    m.choice("row")
    m.choice("col")
    d_kind = m.type("f32", "f16")
    kind = m.type("f16", "bf16", "tf32")
    if m.type("f16", "bf16", "tf32") != kind or m.type("f32", "f16") != d_kind:
        raise m.unsupported("mixed types")
    m.done()
    d = c.writes(ins.operands[0], 32)
    a, b, z = (c.reads(o, 32) for o in ins.operands[1:4])
    item = 4 if kind == "tf32" else 2
    if len(a) != 16 * k * item // 128 or len(b) != 8 * k * item // 128:
        raise m.unsupported(f"{len(a)} A and {len(b)} B registers for K {k}")
    i = np.arange(4)[:, None]
    row, column = _LANE // 4 + 8 * (i // 2), 2 * (_LANE % 4) + i % 2

    def run(warp: Any) -> Any:
        if not gather_lanes(warp, FULL):
            return AGAIN
        left = _fragment(_words(warp, a), kind, True, k)
        right = _fragment(_words(warp, b), kind, False, k)
        result = (left @ right.T)[row, column]
        old = _words(warp, z)
        if d_kind == "f32":
            values = list(result + old.view(F32))
        else:
            low = (old & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(F32)
            high = (old >> np.uint32(16)).astype(np.uint16).view(np.float16).astype(F32)
            total = result + np.stack([low[0], high[0], low[1], high[1]])
            half = total.astype(np.float16).view(np.uint16).astype(U32)
            values = [half[0] | half[1] << np.uint32(16), half[2] | half[3] << np.uint32(16)]
        for slot, value in zip(d, values, strict=True):
            warp.registers[slot] = value
        return None

    return run


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
