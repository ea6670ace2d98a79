"""The SM100 backward as a launch module gives it, until one does: see `catalogue.MODULES`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from cutlass import Float32, Int32

from openmsa.kernels.build import Build
from openmsa.kernels.common.compile import ANY, fake
from openmsa.kernels.sm100.backward.config import Config
from openmsa.kernels.sm100.backward.context import Numbers, Tensors
from openmsa.kernels.sm100.backward.kernel import Backward
from openmsa.kernels.sm100.backward.roofline import roofline


def builds(arch: str) -> tuple[Build, ...]:
    config = Config("bfloat16", 16)
    return (
        Build(
            "backward", arch, (("config", config),), partial(_make, config), config.shared_bytes,
            partial(roofline, config, arch),
        ),
    )  # fmt: skip


def _make(config: Config) -> tuple[Any, tuple[Any, ...]]:
    def floats(*shape: int) -> Any:
        return fake(torch.float32, shape, align=16)

    def numbers(*shape: int) -> Any:
        return fake(torch.int32, shape, align=16)

    rows = fake(torch.bfloat16, (ANY, 64, 128), align=16)
    keys = fake(torch.bfloat16, (ANY, 4, 128), align=16)
    tensors = Tensors(
        lse=floats(ANY, 64), delta=floats(ANY, 64), tasks=numbers(ANY, 4), bounds=numbers(ANY),
        queries=numbers(4, ANY), positions=numbers(ANY), blocks=numbers(ANY, 3),
        indices=numbers(4, ANY, 16), dq=floats(ANY, 64, 128), dk=floats(ANY, 4, 128),
        dv=floats(ANY, 4, 128), parts=floats(ANY, 2, 128, 128), part_rows=numbers(ANY, 4),
    )  # fmt: skip
    zeros = Numbers(Float32(0), Float32(0), *(Int32(0) for _ in range(5)))
    return Backward(config), (rows, keys, keys, rows, tensors, zeros)
