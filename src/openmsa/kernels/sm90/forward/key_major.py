"""The key-major kernel: one task's K and V stay on chip while its queries pass.

Persistent: a thread block for each SM, which takes tasks while there are some. See `config` for the
memory, `key_load` and `key_attend` for the roles.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any  # noqa: E402

import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402

from openmsa.kernels.common.compile import ANY, Build, fake  # noqa: E402
from openmsa.kernels.sm90.forward import forms, key_attend, key_load  # noqa: E402
from openmsa.kernels.sm90.forward.config import (  # noqa: E402
    CONSUMERS,
    HEAD_DIM,
    REGISTERS,
    STAGES,
    WARPS,
    Config,
    KeyMajor,
)
from openmsa.kernels.sm90.forward.context import KeyTensors, Maps, Numbers  # noqa: E402
from openmsa.kernels.sm90.forward.setup import context_of, dtype_of  # noqa: E402

__all__ = ["KeyMajorForward", "build"]


class KeyMajorForward:
    """Partial outputs of a window's tasks."""

    def __init__(self, config: Config) -> None:
        config.check()
        self.config = config

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, tensors: KeyTensors,
        numbers: Numbers, stream: Any,
    ) -> None:  # fmt: skip
        """q ``[Tq, Hq, D]``; k, v ``[Tk, Hkv, D]``; channels contiguous."""
        numbers = Numbers(*numbers)
        maps = Maps(
            *forms.rows_map(q, (self.config.group, 1)),
            *forms.block_map(k),
            *forms.block_map(v),
        )
        self.kernel(maps, KeyTensors(*tensors), numbers).launch(
            grid=(numbers.grid, 1, 1),
            block=(32 * WARPS * (CONSUMERS + 1), 1, 1),
            smem=self.config.shared_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, maps: Maps, tensors: KeyTensors, numbers: Numbers) -> None:
        c = context_of(
            self.config, KeyTensors(*tensors), Numbers(*numbers), KeyMajor, STAGES,
            (STAGES, self.config.words),
        )  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        most, least = REGISTERS[CONSUMERS]
        if warp < WARPS * CONSUMERS:
            cute.arch.setmaxregister_increase(most)
            key_attend.run(c, warp // WARPS)
        else:
            cute.arch.setmaxregister_decrease(least)
            if warp == WARPS * CONSUMERS:
                key_load.run(c, maps)


def build(arch: str, config: Config) -> Build:
    """The kernel of ``config``."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        dtype = dtype_of(config)
        line, table = (ANY,), (ANY, ANY)

        def rows() -> Any:
            return fake(dtype, (ANY, ANY, HEAD_DIM), strides=(ANY, ANY, 1), align=16)

        tensors = KeyTensors(
            tasks=fake(torch.int32, (ANY, 4), align=16),
            bounds=fake(torch.int32, line),
            counter=fake(torch.int32, line),
            queries=fake(torch.int32, table),
            slot_of=fake(torch.uint8, table, align=1),
            positions=fake(torch.int32, line),
            blocks=fake(torch.int32, (ANY, 3)),
            unfit=fake(torch.int32, table),
            tally=fake(torch.int32, (ANY, ANY, 3)),
            v=rows(),
            slots=fake(dtype, (ANY, config.group * HEAD_DIM), align=16),
            slot_lse=fake(torch.float32, (ANY, config.group)),
        )
        numbers = Numbers(Float32(0), *(Int32(0) for _ in range(6)))
        return KeyMajorForward(config), (rows(), rows(), rows(), tensors, numbers)

    facts = (("config", config), ("shared_bytes", config.shared_bytes))
    return Build("forward_key_major", arch, facts, make)
