"""Operand gathering shared by tcgen05 and wgmma: matrix descriptors.

PTX ISA: Shared Memory Matrix Layout, Matrix Descriptor Format.

A descriptor names a matrix in shared memory by 16-byte rows; which row holds which elements follows
the canonical layouts.  Tables of row numbers are cached: kernels use few descriptors many times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ptxsim.errors import InvalidOperand
from ptxsim.memory import SharedMemory
from ptxsim.tensor_maps import swizzle_rows
from ptxsim.values import F32, U32

# Swizzle codes of bits 61-63: none, 128B with 32B atoms, 128B, 64B, 32B.
_SPANS = {0: 0, 2: 128, 4: 64, 6: 32}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A decoded 64-bit shared-memory matrix descriptor; all sizes in bytes."""

    start: int
    leading: int
    stride: int
    span: int


@lru_cache(maxsize=4096)
def decode_descriptor(bits: int, blackwell: bool) -> Descriptor:
    """Fields of a descriptor of tcgen05 (bit 46 set) or wgmma (bit 46 clear)."""
    if (bits >> 46 & 1) != blackwell:
        raise InvalidOperand(
            f"matrix descriptor {bits:#018x}: bit 46 must be {int(blackwell)} for "
            f"{'tcgen05' if blackwell else 'wgmma'}"
        )
    if bits >> 49 & 7:
        raise InvalidOperand(f"matrix descriptor {bits:#018x}: a base offset is not supported")
    if bits >> 52 & 1:
        raise InvalidOperand(f"matrix descriptor {bits:#018x}: absolute leading offsets")
    code = bits >> 61
    if code not in _SPANS:
        raise InvalidOperand(f"matrix descriptor {bits:#018x}: swizzle code {code}")
    return Descriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, _SPANS[code]
    )


@lru_cache(maxsize=8192)
def operand_rows(bits: int, blackwell: bool, mn_major: bool, extent: int, item: int) -> np.ndarray:
    """16-byte row numbers of an operand with `extent` rows (M or N) and 32 bytes of K.

    K-major: shape (extent, 2), the two 16-byte halves of each row.  MN-major: shape
    (32 / item, extent * item / 16): for each k the pieces along M or N.
    """
    d = decode_descriptor(bits, blackwell)
    if not mn_major:
        r = np.arange(extent)[:, None]
        piece = np.arange(2)[None, :]
        if d.span:
            if d.start % d.span + 32 > d.span:
                raise InvalidOperand(
                    f"matrix descriptor {bits:#018x}: 32 bytes of K leave the {d.span}-byte span"
                )
            offset = (r % 8) * d.span + (r // 8) * d.stride + piece * 16
        else:
            offset = (r % 8) * 16 + (r // 8) * d.stride + piece * d.leading
    else:
        k = np.arange(32 // item)[:, None]
        piece = np.arange(extent * item // 16)[None, :]
        if d.span:
            per_span = d.span // 16
            offset = (
                (piece % per_span) * 16
                + (piece // per_span) * d.leading
                + (k % 8) * d.span
                + (k // 8) * d.stride
            )
        else:
            offset = piece * d.stride + (k % 8) * 16 + (k // 8) * d.leading
    return swizzle_rows((offset + d.start) >> 4, d.span)


def check_rows(shared: SharedMemory, rows: np.ndarray, bits: int, what: str) -> None:
    """The operand of descriptor `bits` lies in the CTA's shared memory and may be read now."""
    shared.rows(int(rows.min()) * 16, 16)
    shared.rows(int(rows.max()) * 16, 16)
    shared.check_async_read(rows, what, _SPANS[bits >> 61])


def read_operand(shared: SharedMemory, rows: np.ndarray, kind: str, mn_major: bool) -> np.ndarray:
    """The operand as float32, shape (M or N, K)."""
    raw = shared.views[16][rows]
    values = widen(raw.reshape(rows.shape[0], -1), kind)
    return values.T if mn_major else values


def widen(raw: np.ndarray, kind: str) -> np.ndarray:
    """Bits of f16, bf16 or tf32 elements (rows of any integer or opaque dtype) as float32."""
    raw = np.ascontiguousarray(raw)
    if kind == "bf16":
        return (raw.view(np.uint16).astype(U32) << 16).view(F32)
    if kind == "f16":
        return raw.view(np.float16).astype(F32)
    return (raw.view(U32) & np.uint32(0xFFFFE000)).view(F32)  # tf32: the low 13 bits are ignored


def product(a: np.ndarray, b: np.ndarray) -> Any:
    """a @ b.T in float32; the chip's order and internal width of the sums are not documented."""
    return a @ b.T
