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
    EIGHT,
    HALVES,
    HEAD_DIM,
    ROWS,
)

__all__ = [
    "block_box", "block_map", "k_operand", "multiply", "q_operand", "rows_box", "rows_map",
    "scores", "sums", "v_operand", "weights", "zeros",
]  # fmt: skip

_EIGHT = EIGHT * CHANNELS
_BLOCK_HALF = BLOCK * CHANNELS


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
    """Of ``tiles`` tiles of rows, in the order of `config.EIGHT` each in shared memory."""
    layout = cute.make_layout(
        ((EIGHT, ROWS // EIGHT), (CHANNELS, HALVES), tiles),
        stride=((CHANNELS, HALVES * _EIGHT), (1, _EIGHT), ROWS * HEAD_DIM),
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


def block_map(x: cute.Tensor) -> Any:
    """A tensor map over K or V, ``x [key, head, channel]``, whose box has 64 channels of a block's
    keys. The copy atom, and coordinates ``(channel, head, key)``."""
    return _map(x, cute.select(x.layout, mode=[2, 1, 0]), _half_layout())


def block_box(atom: Any, at: Any, pointer: Any) -> Any:
    """What `cute.copy` takes: targets ``[., half, buffer]`` of the buffers at ``pointer`` and
    sources ``[., half, head, block]``."""
    shared = _half_layout()
    targets = cute.make_layout(
        (shared.shape, HALVES, BUFFERS),
        stride=(shared.stride, _BLOCK_HALF, HALVES * _BLOCK_HALF),
    )
    boxes = cute.local_tile(at, shared.shape, (None, None, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), _swizzled(pointer, targets), cute.group_modes(boxes, 0, 3)
    )


def _half_layout() -> Any:
    return cute.make_layout((CHANNELS, 1, BLOCK), stride=(1, CHANNELS, CHANNELS))


def rows_map(q: cute.Tensor, box: tuple[int, int]) -> Any:
    """A tensor map over ``q [query, head, channel]`` whose box has all channels of (heads, queries)
    in the order of `config.EIGHT`. The copy atom, and coordinates ``(channel of a half, head of
    eight, half, eight heads, query)``."""
    (queries, heads, _), (step, line, _) = q.layout.shape, q.layout.stride
    moved = cute.make_layout(
        (CHANNELS, EIGHT, HALVES, heads // EIGHT, queries),
        stride=(1, line, CHANNELS, line * EIGHT, step),
    )
    return _map(q, moved, _rows_layout(box))


def _map(x: cute.Tensor, layout: Any, box: Any) -> Any:
    """A tensor map over the elements of ``x`` in the order of ``layout``, by ``box`` of shared
    memory, swizzled."""
    swizzled = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, box)
    op = cpasync.CopyBulkTensorTileG2SOp()
    info = cpasync.make_tiled_tma_atom(
        op, cute.make_tensor(x.iterator, layout), swizzled, box.shape
    )
    return info[0], info[1]


def rows_box(atom: Any, at: Any, pointer: Any, box: tuple[int, int], tiles: int) -> Any:
    """What `cute.copy` takes: targets ``[., box, tile]`` and sources ``[., head box, query box]``
    of boxes of (heads, queries), for ``tiles`` tiles of rows at ``pointer``."""
    shared, size = _rows_layout(box), box[0] * box[1] * HEAD_DIM
    targets = cute.make_layout(
        (shared.shape, ROWS * HEAD_DIM // size, tiles),
        stride=(shared.stride, size, ROWS * HEAD_DIM),
    )
    boxes = cute.local_tile(at, shared.shape, (0, 0, 0, None, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), _swizzled(pointer, targets), cute.group_modes(boxes, 0, 5)
    )


def _rows_layout(box: tuple[int, int]) -> Any:
    heads, queries = box
    return cute.make_layout(
        (CHANNELS, EIGHT, HALVES, heads // EIGHT, queries),
        stride=(1, CHANNELS, _EIGHT, HALVES * _EIGHT, heads * HEAD_DIM),
    )
