"""The two products of attention on 64 rows, their operands in shared memory, and tensor maps.

A form is made anew wherever it is used: setting whether it adds to its sums changes the object, and
what a loop or a branch has changed cannot be used outside of it.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass.cute as cute  # noqa: E402
from cutlass import Float32  # noqa: E402
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup  # noqa: E402

from openmsa.kernels.sm90.forward.config import (  # noqa: E402
    BLOCK,
    BUFFERS,
    CHANNELS,
    HALVES,
    HEAD_DIM,
    ROWS,
)

__all__ = [
    "BLOCK_BOX", "box_of", "k_operand", "map_of", "multiply", "q_operand", "scores", "sums",
    "v_operand", "weights", "zeros",
]  # fmt: skip

_HALF = ROWS * CHANNELS
_BLOCK_HALF = BLOCK * CHANNELS

BLOCK_BOX = (1, BLOCK)
"""Heads and rows of a box of K or V."""


def scores(dtype: Any) -> Any:
    """S = Q K^T: 64 rows by 128 keys, channels contiguous in both operands."""
    return _form(dtype, OperandMajorMode.K, warpgroup.OperandSource.SMEM)


def sums(dtype: Any) -> Any:
    """O = P V: 64 rows by 128 channels. P is in registers, V has channels contiguous."""
    return _form(dtype, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)


def _form(dtype: Any, b: Any, source: Any) -> Any:
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, BLOCK, 16), source, OperandMajorMode.K, b)
    return cute.make_tiled_mma(op)


def zeros(form: Any) -> Any:
    """Registers of a product's sums, ``((2, 2, 16), 1, 1)``: neighbouring columns, rows 8 apart,
    groups of 8 columns. Not yet zero."""
    return cute.make_rmem_tensor(form.partition_shape_C((ROWS, BLOCK)), Float32)


def weights(dtype: Any) -> Any:
    """Registers of P, ``((2, 2, 2), 1, 8)``: element by element where `zeros` has the scores."""
    shape = sums(dtype).partition_shape_A((ROWS, BLOCK))
    return cute.make_rmem_tensor(cute.make_layout(shape), dtype)


def q_operand(dtype: Any, pointer: Any, tiles: int) -> Any:
    """Of ``tiles`` tiles of rows, ``[half, row, channel]`` each in shared memory."""
    layout = cute.make_layout(
        (ROWS, (CHANNELS, HALVES), tiles), stride=(CHANNELS, (1, _HALF), HALVES * _HALF)
    )
    form = scores(dtype)
    return form.make_fragment_A(form.get_slice(0).partition_A(_swizzled(pointer, layout)))


def k_operand(dtype: Any, pointer: Any) -> Any:
    """Of the buffers of K, ``[half, key, channel]`` each in shared memory."""
    layout = cute.make_layout(
        (BLOCK, (CHANNELS, HALVES), BUFFERS),
        stride=(CHANNELS, (1, _BLOCK_HALF), HALVES * _BLOCK_HALF),
    )
    form = scores(dtype)
    return form.make_fragment_B(form.get_slice(0).partition_B(_swizzled(pointer, layout)))


def v_operand(dtype: Any, pointer: Any) -> Any:
    """Of the buffers of V, ``[half, key, channel]`` each in shared memory."""
    layout = cute.make_layout(
        ((CHANNELS, HALVES), BLOCK, BUFFERS),
        stride=((1, _BLOCK_HALF), CHANNELS, HALVES * _BLOCK_HALF),
    )
    form = sums(dtype)
    return form.make_fragment_B(form.get_slice(0).partition_B(_swizzled(pointer, layout)))


def _swizzled(pointer: Any, layout: Any) -> cute.Tensor:
    swizzle = cute.make_swizzle(3, 4, 3)
    return cute.make_tensor(cute.recast_ptr(pointer, swizzle, dtype=pointer.dtype), layout)


def multiply(form: Any, a: Any, b: Any, total: Any, adds: bool) -> None:
    """Issue ``total (+)= a b`` as one group; ``a`` and ``b`` are one tile's."""
    warpgroup.fence()
    for step in range(HEAD_DIM // 16):
        form.set(warpgroup.Field.ACCUMULATE, adds or step > 0)
        cute.gemm(form, total, a[None, None, step], b[None, None, step], total)
    warpgroup.commit_group()


def map_of(x: cute.Tensor, box: tuple[int, int]) -> Any:
    """A tensor map over ``x [row, head, channel]`` whose box has 64 channels of (heads, rows),
    heads before rows. The copy atom, and coordinates ``(channel, head, row)``."""
    heads, rows = box
    shared = cute.make_layout((CHANNELS, heads, rows), stride=(1, CHANNELS, heads * CHANNELS))
    swizzled = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, shared)
    moved = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 1, 0]))
    op = cpasync.CopyBulkTensorTileG2SOp()
    info = cpasync.make_tiled_tma_atom(op, moved, swizzled, shared.shape)
    return info[0], info[1]


def box_of(
    atom: Any, at: Any, pointer: Any, box: tuple[int, int], tile_rows: int, tiles: int
) -> Any:
    """What `cute.copy` takes: targets ``[., box, half, tile]`` and sources ``[., half, head box,
    row box]``, of boxes of (heads, rows).

    ``tiles`` tiles lie at ``pointer``, each ``[half, box, row, head, channel]``.
    """
    heads, rows = box
    size, half = rows * heads * CHANNELS, tile_rows * CHANNELS
    shared = _swizzled(
        pointer,
        cute.make_layout(
            ((CHANNELS, heads, rows), half // size, HALVES, tiles),
            stride=((1, CHANNELS, heads * CHANNELS), size, half, HALVES * half),
        ),
    )
    boxes = cute.local_tile(at, (CHANNELS, heads, rows), (None, None, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), shared, cute.group_modes(boxes, 0, 3)
    )
