"""CUTLASS's C++ tcgen05 tutorials, compiled to PTX by nvcc, on small integers: exact results.

The sources come with the package nvidia-cutlass.  Their host part needs a GPU, so parameters are
packed here: tensors as {rows, columns, row stride, -, address}, TMA atoms by their maps.
"""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import numpy as np
from common import cpu_seconds, options, report
from kernels.tcgen05_gemm import aligned

import ptxsim
from ptxsim import tensor_maps

FOLDER = Path("cutlass_library/source")
TUTORIALS = FOLDER / "examples/cute/tutorial/blackwell"


def compiled(root: Path, name: str) -> str:
    """PTX of a tutorial without its prints on the device, made once."""
    out = root / f"{name}.ptx"
    if not out.exists():
        source = (root / TUTORIALS / f"{name}.cu").read_text()
        plain = root / f"{name}.cu"
        plain.write_text(re.sub(r"if \(thread0\(\)\) \{.*?\n  \}", "", source, flags=re.S))
        includes = ["include", "tools/util/include", "examples/cute/tutorial/blackwell"]
        command = ["nvcc", "-std=c++17", "-arch=sm_100a", "-ptx", "--expt-relaxed-constexpr"]
        command += ["-DNDEBUG", "-DCUTLASS_ARCH_MMA_SM100_SUPPORTED"]
        command += [f"-I{root / FOLDER / i}" for i in includes]
        scratch = out.with_suffix(".part")
        subprocess.run([*command, str(plain), "-o", str(scratch)], check=True)
        scratch.rename(out)
    return out.read_text()


def tensor(x: np.ndarray) -> bytes:
    return struct.pack("<4iQ", *x.shape, x.shape[1], 0, x.ctypes.data)


def tiled_mma(m: int, n: int) -> bytes:
    """Instruction descriptor of f16 operands and float32 sums, and the accumulate flag."""
    return struct.pack("<2I", 1 << 4 | (n >> 3) << 17 | (m >> 4) << 24, 1)


def atom(x: np.ndarray, rows: int) -> bytes:
    """A TMA atom: the map of 64 columns and `rows` rows, and its unused rest."""
    found = tensor_maps.encode(
        x.ctypes.data, "f16", x.shape[::-1], (2 * x.shape[1],), (64, rows), 128
    )
    return found.ljust(256, b"\0")


def add_fence(ptx: str) -> str:
    """`fence.proxy.async` before the barrier between the stores of a tile and the product."""
    lines = ptx.split("\n")
    product = next(i for i, line in enumerate(lines) if "tcgen05.mma" in line)
    barrier = max(i for i in range(product) if "bar.sync" in lines[i])
    lines.insert(barrier, "fence.proxy.async.shared::cta;")
    return "\n".join(lines)


def main() -> None:
    chosen = options(root="", name="01_mma_sm100", fence=False)
    ptx = compiled(Path(chosen.root), chosen.name)
    if chosen.fence:
        ptx = add_fence(ptx)
    generator = np.random.default_rng(0)

    def integers(rows: int, columns: int, kind: type) -> np.ndarray:
        return aligned(generator.integers(-2, 3, (rows, columns)).astype(kind))

    a, b = integers(512, 256, np.float16), integers(1024, 256, np.float16)
    c, d = integers(512, 1024, np.float32), aligned(np.zeros((512, 1024), np.float32))
    static = b"\0"  # an empty struct: a shape known at compile time
    if chosen.name.startswith("01"):
        middle = [static, tiled_mma(128, 256), static]
        args = [tensor(a), tensor(b), tensor(c), tensor(d), *middle, 2.0, 1.0]
        cluster, shared = (1, 1), 49152 + 256
    else:  # 04: sixteen CTAs; tiles of A go to four of them, tiles of B to two
        coordinates = [struct.pack("<3i", *x.shape, 0) for x in (a, b)]
        middle = [static, tiled_mma(256, 256), static, atom(a, 32), atom(b, 64)]
        args = [*coordinates, tensor(c), tensor(d), *middle, 2.0, 1.0]
        cluster, shared = (4, 4), 98304
    module = ptxsim.load(ptx)
    kernel = next(k for k in module.kernels if "gemm_device" in k)
    start = cpu_seconds()
    error = ""
    try:
        module.launch(
            (4, 4), 128, args, kernel=kernel, cluster=cluster, shared=shared,
            memory=[a, b, c, d], seed=chosen.seed, races=chosen.races, processes=chosen.processes,
        )  # fmt: skip
    except ptxsim.SimulationError as caught:
        error = f"{type(caught).__name__}: {caught}"
    expected = 2 * a.astype(np.float32) @ b.astype(np.float32).T + c
    report(
        seconds=cpu_seconds() - start,
        error=error,
        largest=float(np.abs(expected).max()),
        difference=float(np.abs(d - expected).max()),
    )


if __name__ == "__main__":
    main()
