"""The union kernel: a tile of neighbouring queries stays on chip while its blocks pass.

Persistent: a thread block for each SM, which takes tiles while there are some. See `config` for the
memory, `union_load` and `union_attend` for the roles.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402

from openmsa.kernels.common.compile import ANY, Build, fake  # noqa: E402
from openmsa.kernels.sm90.forward import forms, union_attend, union_load  # noqa: E402
from openmsa.kernels.sm90.forward.config import (  # noqa: E402
    BUFFERS,
    HEAD_DIM,
    REGISTERS,
    UNION_CONSUMERS,
    UNION_TILES,
    WARPS,
    Config,
    Union,
    UnionMeta,
)
from openmsa.kernels.sm90.forward.context import Maps, Numbers, UnionTensors  # noqa: E402
from openmsa.kernels.sm90.forward.setup import context_of, dtype_of  # noqa: E402

__all__ = ["UnionForward", "build"]


class UnionForward:
    """Outputs of the windows where the union way has won."""

    def __init__(self, config: Config) -> None:
        config.check()
        self.config = config

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, tensors: UnionTensors,
        numbers: Numbers, stream: Any,
    ) -> None:  # fmt: skip
        """q ``[Tq, Hq, D]``; k, v ``[Tk, Hkv, D]``; channels contiguous."""
        numbers = Numbers(*numbers)
        maps = Maps(
            *forms.rows_map(q, (self.config.group, self.config.queries)),
            *forms.block_map(k),
            *forms.block_map(v),
        )
        self.kernel(maps, UnionTensors(*tensors), numbers).launch(
            grid=(numbers.grid, 1, 1),
            block=(32 * WARPS * (UNION_CONSUMERS + 1), 1, 1),
            smem=self.config.union_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, maps: Maps, tensors: UnionTensors, numbers: Numbers) -> None:
        c = context_of(
            self.config, UnionTensors(*tensors), Numbers(*numbers), Union,
            UNION_TILES * UNION_CONSUMERS, (BUFFERS, int(UnionMeta.COUNT)),
        )  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        most, least = REGISTERS[UNION_CONSUMERS]
        if warp < WARPS * UNION_CONSUMERS:
            cute.arch.setmaxregister_increase(most)
            union_attend.run(c, warp // WARPS)
        else:
            cute.arch.setmaxregister_decrease(least)
            if warp == WARPS * UNION_CONSUMERS:
                union_load.run(c, maps)


def build(arch: str, config: Config, edges: int) -> Build:
    """The kernel of ``config``, whose tiles have lists of ``edges``."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        dtype = dtype_of(config)
        line = (ANY,)

        def rows() -> Any:
            return fake(dtype, (ANY, ANY, HEAD_DIM), strides=(ANY, ANY, 1), align=16)

        tensors = UnionTensors(
            lists=fake(torch.int32, (ANY, ANY, edges, 2), align=8),
            counts=fake(torch.int32, (ANY, ANY, 2)),
            counter=fake(torch.int32, line),
            tally=fake(torch.int32, (ANY, ANY, 3)),
            positions=fake(torch.int32, line),
            blocks=fake(torch.int32, (ANY, 3)),
            out=rows(),
            lse=fake(torch.float32, (ANY, ANY)),
        )
        numbers = Numbers(Float32(0), *(Int32(0) for _ in range(6)))
        return UnionForward(config), (rows(), rows(), rows(), tensors, numbers)

    facts = (("config", config), ("edges", edges), ("shared_bytes", config.union_bytes))
    return Build("forward_union", arch, facts, make)
