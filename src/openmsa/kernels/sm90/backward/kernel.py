"""The backward's device code: set-up of a thread block, and which warp does what."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import cutlass.utils as utils  # noqa: E402
from cutlass import Float32, Int32, Int64  # noqa: E402
from cutlass.cute.nvgpu import cpasync  # noqa: E402

from openmsa.kernels.common.tiles import CHANNELS, block_layout, rows_layout, view  # noqa: E402
from openmsa.kernels.sm90.backward import compute, load  # noqa: E402
from openmsa.kernels.sm90.backward.config import (  # noqa: E402
    BLOCK,
    BUFFERS,
    CONSUMERS,
    HEAD_DIM,
    REGISTERS,
    STAGES,
    TILE_ROWS,
    Barrier,
    Config,
    arrivals,
)
from openmsa.kernels.sm90.backward.context import (  # noqa: E402
    Context,
    Maps,
    Numbers,
    Sums,
    Tensors,
    Tiles,
)
from openmsa.kernels.sm90.backward.load import HALVES  # noqa: E402
from openmsa.kernels.sm90.backward.store import BOX, WARP_ROWS  # noqa: E402

__all__ = ["Backward"]

_ALIGNMENT = 1024  # of a tile: eight rows of a 128-byte swizzle
_PRODUCER = CONSUMERS * 4  # the first warp behind the consumers'


class Backward:
    """dq, dk and dv of a launch's tasks; `config` has the memory plan, `compute` the products."""

    def __init__(self, config: Config) -> None:
        config.check()
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, d_out: cute.Tensor,
        sums: Sums, tensors: Tensors, numbers: Numbers, grid: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """q, d_out ``[Tq, Hq, D]``; k, v ``[Tk, Hkv, D]``; channels contiguous."""
        sums = Sums(*sums)
        tensors = Tensors(*tensors)
        numbers = Numbers(*numbers)
        group, heads = self.config.group, self.config.heads
        fetch, add = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyReduceBulkTensorTileS2GOp()
        by_head, by_row = (2, 1, 0), (2, 0, 1)
        maps = Maps(
            *self._map(fetch, q, by_head, (CHANNELS, group, 1)),
            *self._map(fetch, d_out, by_head, (CHANNELS, group, 1)),
            *self._map(fetch, k, by_row, (CHANNELS, BLOCK, 1)),
            *self._map(fetch, v, by_row, (CHANNELS, BLOCK, 1)),
            *self._map(add, sums.dq, by_head, (BOX, heads, 1)),
            *self._map(add, sums.dk, by_row, (BOX, WARP_ROWS, 1)),
            *self._map(add, sums.dv, by_row, (BOX, WARP_ROWS, 1)),
        )
        self.kernel(maps, tensors, numbers).launch(
            grid=(grid, 1, 1),
            block=(self.config.threads, 1, 1),
            smem=self.config.shared_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _map(self, op: Any, x: cute.Tensor, order: Any, box: Any) -> Any:
        """A tensor map over ``x`` with its modes in ``order``, and its coordinates."""
        moved = cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(order)))
        layout = cute.make_layout(box, stride=(1, box[0], 0))
        shared = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, layout)
        info = cpasync.make_tiled_tma_atom(op, moved, shared, box)
        return info[0], info[1]

    @cute.kernel
    def kernel(self, maps: Maps, tensors: Tensors, numbers: Numbers) -> None:
        tensors = Tensors(*tensors)
        numbers = Numbers(*numbers)
        shared = utils.SmemAllocator()

        def tile(dtype: Any, elements: int) -> Any:
            return shared.allocate_array(dtype, elements, byte_alignment=_ALIGNMENT)

        rows = STAGES * TILE_ROWS * HEAD_DIM
        tiles = Tiles(
            tile(self.dtype, BLOCK * HEAD_DIM),
            tile(self.dtype, BLOCK * HEAD_DIM),
            tile(self.dtype, rows),
            tile(self.dtype, rows),
            tile(self.dtype, BUFFERS * TILE_ROWS * BLOCK),
            tile(Float32, TILE_ROWS * HEAD_DIM),
        )
        terms = self.config.floats
        floats = shared.allocate_tensor(
            Float32,
            cute.make_layout((STAGES, terms, TILE_ROWS), stride=(terms * TILE_ROWS, TILE_ROWS, 1)),
            byte_alignment=16,
        )
        words = self.config.words
        ints = shared.allocate_tensor(
            Int32, cute.make_layout((STAGES, words), stride=(words, 1)), byte_alignment=16
        )
        barriers = shared.allocate_array(Int64, int(Barrier.COUNT), byte_alignment=16)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == _PRODUCER:
            with cute.arch.elect_one():
                for which in cutlass.range_constexpr(int(Barrier.COUNT)):
                    cute.arch.mbarrier_init(barriers + which, arrivals(which))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        c = Context(self.config, self.dtype, tensors, numbers, barriers, floats, ints)
        if warp >= _PRODUCER:
            cute.arch.setmaxregister_decrease(REGISTERS["producer"])
            if warp == _PRODUCER:
                rows_layout, block = self._rows_layout(), block_layout(BLOCK, HALVES)
                load.run(
                    c, maps, view(tiles.q, rows_layout),
                    view(tiles.d_out, rows_layout), view(tiles.k, block),
                    view(tiles.v, block),
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(REGISTERS["consumers"])
            compute.run(c, maps, tiles)

    def _rows_layout(self) -> Any:
        return rows_layout(TILE_ROWS, self.config.group, HALVES, STAGES)
