"""The kernels compiled ahead of time for a device that need not be there.

The stages run on CPU tensors with every launch replaced by a compilation, so that what is compiled
is what they would launch: the same arguments, sizes and options. No kernel runs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from openmsa.backends.triton import backward, forward, schedule, selection
from openmsa.backends.triton.sizes import assume
from openmsa.contract.documents import Documents
from openmsa.contract.problem import AttentionConfig, Saved, SelectionConfig

__all__ = ["ARCHITECTURES", "Compiled", "compile_ahead"]

ARCHITECTURES: dict[str, tuple[tuple[int, int], int]] = {
    "sm_80": ((8, 0), 163 * 1024),
    "sm_89": ((8, 9), 99 * 1024),
    "sm_90": ((9, 0), 227 * 1024),
    "sm_100": ((10, 0), 227 * 1024),
    "sm_120": ((12, 0), 99 * 1024),
}
"""Compute capability, and the bytes of shared memory that a thread block may opt in to (CUDA
programming guide, table of technical specifications per compute capability)."""


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled.

    Attributes:
        stage: of the pipeline.
        kernel: the kernel's name.
        warps: of a thread block.
        registers: of a thread.
        shared: bytes of a thread block.
        tensor: columns of tensor memory of a thread block, on 10.x. With more than 512 of them
            Triton's kernel is a lone trap, and its launch an error.
        stack: bytes of a thread's local memory, which is where spilled registers go.
        seconds: of the compilation, about 0 where a cache had it.
    """

    stage: str
    kernel: str
    warps: int
    registers: int
    shared: int
    tensor: int
    stack: int
    seconds: float


def compile_ahead(
    capability: tuple[int, int],
    shared_memory: int,
    *,
    heads: tuple[int, int] = (64, 4),
    head_dim: int = 128,
    block_size: int = 128,
    topk: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Compiled]:
    """Compile every kernel of a training step for a compute capability.

    ``shared_memory`` is what a thread block of the device may use, in bytes; ``heads`` are those of
    q and of k and v. Kernels that several stages launch are listed once.
    """
    found: dict[str, Compiled] = {}
    with _compiling(capability, found) as stage, assume(capability, shared_memory):
        _step(stage, heads, head_dim, block_size, topk, dtype)
    return list(found.values())


def _step(
    stage: SimpleNamespace,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    topk: int,
    dtype: torch.dtype,
) -> None:
    docs = Documents.from_lengths([8 * block_size])
    layout, tokens = docs.layout, docs.num_queries

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    stage.name = "select_blocks"
    index_q, index_k = empty(tokens, heads[1], head_dim), empty(tokens, head_dim)
    indices, _ = selection.select_blocks(
        index_q, index_k, layout, SelectionConfig(topk, block_size, 0, 1, 0.1, True)
    )
    stage.name = "key_schedule"
    rows = schedule.key_schedule(indices.fill_(-1), layout, block_size)
    q, d_out = empty(tokens, heads[0], head_dim), empty(tokens, heads[0], head_dim)
    k, v = empty(tokens, heads[1], head_dim), empty(tokens, heads[1], head_dim)
    stage.name = "forward"
    config = AttentionConfig(block_size, 0.1, False)
    out, lse = forward.forward(q, k, v, indices, rows, layout, config)
    stage.name = "backward_preprocess"
    delta = backward.backward_preprocess(out, d_out, lse, lse)
    saved = Saved(q, k, v, out, lse, indices, rows)
    for deterministic in (False, True):
        stage.name = "backward, repeatable" if deterministic else "backward"
        config = AttentionConfig(block_size, 0.1, deterministic)
        backward.backward(d_out, delta, saved, None, layout, config, (True, True))


@contextmanager
def _compiling(
    capability: tuple[int, int], found: dict[str, Compiled]
) -> Iterator[SimpleNamespace]:
    """Launches compile for ``capability`` and put what comes of it in ``found``."""
    number = capability[0] * 10 + capability[1]
    stage = SimpleNamespace(name="")
    # Triton keeps compiled kernels by the number of the device.
    device = SimpleNamespace(
        get_current_device=lambda: number,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", number, 32),
    )
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        start = time.perf_counter()
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        seconds = time.perf_counter() - start
        if kernel.hash not in found:
            registers, stack = _resources(kernel.asm["cubin"])
            found[kernel.hash] = Compiled(
                stage.name, self.fn.__name__, kernel.metadata.num_warps, registers,
                kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", 0), stack, seconds,
            )  # fmt: skip
        return kernel

    with (
        mock.patch.object(driver, "_active", device),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        yield stage


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, by the ``cuobjdump`` in Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if usage is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text!r}")
    return int(usage[1]), int(usage[2])
