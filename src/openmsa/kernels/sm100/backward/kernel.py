"""The backward's device code: set-up of a thread block, and which warp does what."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import cutlass.utils as utils  # noqa: E402
import cutlass.utils.blackwell_helpers as sm100_utils  # noqa: E402
from cutlass import Float32, Int32, Int64  # noqa: E402
from cutlass.cute.nvgpu import cpasync, tcgen05  # noqa: E402

from openmsa.contract.tasks import TILE_ROWS  # noqa: E402
from openmsa.kernels.common.tiles import CHANNELS, block_layout, rows_layout, view  # noqa: E402
from openmsa.kernels.sm100.backward import compute, forms, load, mma, reduce, scalars  # noqa: E402
from openmsa.kernels.sm100.backward.config import (  # noqa: E402
    BLOCK,
    COLUMNS,
    HEAD_DIM,
    REGISTERS,
    STAGES,
    Barrier,
    Config,
    Warps,
    arrivals,
)
from openmsa.kernels.sm100.backward.context import (  # noqa: E402
    Context,
    Maps,
    Numbers,
    Operands,
    Tensors,
)
from openmsa.kernels.sm100.backward.load import HALVES  # noqa: E402
from openmsa.kernels.sm100.backward.walk import interval, launch_rows  # noqa: E402

__all__ = ["Backward"]

_TILE = (TILE_ROWS, BLOCK, HEAD_DIM)
_ALIGNMENT = 1024  # of a tile: eight rows of a 128-byte swizzle


class Backward:
    """dq, dk and dv of a launch's tasks; `config` has the memory plan, `mma` the order of work."""

    def __init__(self, config: Config) -> None:
        config.check()
        self.config = config
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, d_out: cute.Tensor,
        tensors: Tensors, numbers: Numbers, stream: Any,
    ) -> None:  # fmt: skip
        """q, d_out ``[Tq, Hq, D]``; k, v ``[Tk, Hkv, D]``; channels contiguous."""
        tensors = Tensors(*tensors)
        numbers = Numbers(*numbers)
        maps = Maps(
            *self._map(q, (2, 1, 0), self._rows_layout()),
            *self._map(d_out, (2, 1, 0), self._rows_layout()),
            *self._map(k, (2, 0, 1), block_layout(BLOCK, HALVES)),
            *self._map(v, (2, 0, 1), block_layout(BLOCK, HALVES)),
        )
        self.kernel(maps, tensors, numbers).launch(
            grid=(numbers.grid, 1, 1),
            block=(32 * Warps.ALL, 1, 1),
            smem=self.config.shared_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _map(self, x: cute.Tensor, order: Any, shared: Any) -> Any:
        """A tensor map over ``x`` with its modes in ``order``, and its coordinates."""
        box = shared.outer.shape[:3]
        op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        moved = cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(order)))
        one = cute.select(shared, mode=[0, 1, 2])
        info = cpasync.make_tiled_tma_atom(op, moved, one, box)
        return info[0], info[1]

    def _rows_layout(self) -> Any:
        return rows_layout(TILE_ROWS, self.config.group, HALVES, STAGES)

    @cute.kernel
    def kernel(self, maps: Maps, tensors: Tensors, numbers: Numbers) -> None:
        tensors = Tensors(*tensors)
        numbers = Numbers(*numbers)
        rows = launch_rows(tensors, numbers, self.config.deterministic)
        begin, end = interval(rows, numbers.num_sms, cute.arch.block_idx()[0])
        if begin < end:
            self._block(maps, tensors, numbers, begin, end)

    @cute.jit
    def _block(self, maps: Any, tensors: Any, numbers: Any, begin: Int32, end: Int32) -> None:
        shared = utils.SmemAllocator()
        tiles = [
            shared.allocate_array(
                self.dtype, count * TILE_ROWS * HEAD_DIM, byte_alignment=_ALIGNMENT
            )
            for count in (1, 1, STAGES, STAGES, 1)
        ]
        barriers = shared.allocate_array(Int64, int(Barrier.COUNT))
        floats = shared.allocate_tensor(
            Float32,
            cute.make_layout((STAGES, 2, TILE_ROWS), stride=(2 * TILE_ROWS, TILE_ROWS, 1)),
            byte_alignment=16,
        )
        words = self.config.scalar_words - 2 * TILE_ROWS
        ints = shared.allocate_tensor(
            Int32, cute.make_layout((STAGES, words), stride=(words, 1)), byte_alignment=16
        )
        holder = shared.allocate_array(Int32, 1)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == Warps.MMA:
            cute.arch.alloc_tmem(COLUMNS, holder)
            cute.arch.relinquish_tmem_alloc_permit()
        if warp == Warps.IDLE:
            with cute.arch.elect_one():
                for which in cutlass.range_constexpr(int(Barrier.COUNT)):
                    cute.arch.mbarrier_init(barriers + which, arrivals(which))
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        memory = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        c = Context(
            self.config, self.dtype, tensors, numbers, barriers, floats, ints, memory, begin, end
        )
        self._roles(c, maps, tiles, warp)
        cute.arch.sync_threads()
        if warp == Warps.MMA:
            cute.arch.dealloc_tmem(memory, COLUMNS)

    @cute.jit
    def _roles(self, c: Any, maps: Any, tiles: Any, warp: Int32) -> None:
        k, v, q, d_out, ds = tiles
        if warp < Warps.REDUCE:
            cute.arch.setmaxregister_increase(REGISTERS["compute"])
            layout = cute.make_composed_layout(
                cute.make_swizzle(3, 4, 3), 0,
                cute.make_layout((CHANNELS, BLOCK, HALVES), stride=(1, CHANNELS, BLOCK * CHANNELS)),
            )  # fmt: skip
            compute.run(c, view(ds, layout))
        elif warp < Warps.MMA:
            cute.arch.setmaxregister_increase(REGISTERS["reduce"])
            reduce.run(c)
        else:
            cute.arch.setmaxregister_decrease(REGISTERS["others"])
            if warp == Warps.MMA:
                mma.run(c, self._operands(k, v, q, d_out, ds))
            elif warp == Warps.LOAD:
                rows, block = self._rows_layout(), block_layout(BLOCK, HALVES)
                load.run(c, maps, view(q, rows), view(d_out, rows), view(k, block), view(v, block))
            elif warp == Warps.SCALARS:
                scalars.run(c)

    def _operands(self, k: Any, v: Any, q: Any, d_out: Any, ds: Any) -> Operands:
        scores, sums, parts = (form(self.dtype) for form in (forms.scores, forms.sums, forms.parts))

        def a(form: Any, tile: Any) -> Any:
            layout = sm100_utils.make_smem_layout_a(form, _TILE, self.dtype, 1)
            return form.make_fragment_A(view(tile, layout))

        def b(form: Any, tile: Any, stages: int) -> Any:
            layout = sm100_utils.make_smem_layout_b(form, _TILE, self.dtype, stages)
            return form.make_fragment_B(view(tile, layout))

        half = (TILE_ROWS, BLOCK, TILE_ROWS // 2)
        return Operands(
            halves=sm100_utils.make_smem_layout_a(sums, half, self.dtype, 1).outer,
            k_rows=a(scores, k),
            k_columns=a(parts, k),
            v_rows=a(scores, v),
            q_rows=b(scores, q, STAGES),
            q_columns=b(sums, q, STAGES),
            d_out_rows=b(scores, d_out, STAGES),
            d_out_columns=b(sums, d_out, STAGES),
            ds=b(parts, ds, 1),
        )
