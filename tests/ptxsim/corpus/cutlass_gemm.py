"""CUTLASS's public GEMM examples, unmodified, on small integers: the results must be exact."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from common import Runner, options, report
from torch import Tensor

from ptxsim.launchers import cute

# The tutorials that are given the number of clusters to launch.
EXTRA = {"fp16_gemm_3": (4,), "fp16_gemm_3_1": (4,), "fp16_gemm_4": (4, 4), "fp16_gemm_5": (4,)}


def load(path: Path) -> Any:
    """The example as a module."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tutorial(path: Path, shape: list[int]) -> tuple[Tensor, Tensor]:
    """A tcgen05 tutorial; the result and the expected one."""
    from cutlass.cute.runtime import from_dlpack

    m, n, k = shape[:3]
    a, b = torch.randint(-2, 3, (m, k)).half(), torch.randint(-2, 3, (n, k)).half()
    c = torch.zeros(m, n).half()
    tensors = [
        from_dlpack(x, assumed_align=32).mark_layout_dynamic(leading_dim=1) for x in (a, b, c)
    ]
    load(path).host_function(*tensors, *EXTRA.get(path.stem, ()), no_cache=True)
    return c.float(), a.float() @ b.float().T


def hopper(path: Path, shape: list[int], chosen: Any) -> tuple[Tensor, Tensor]:
    """A wgmma GEMM with batches; `majors` says which mode of A, B and C is contiguous."""
    import cutlass
    from cuda.bindings import driver
    from cutlass.cute.runtime import from_dlpack

    m, n, k, batches = shape
    tile = tuple(int(x) for x in chosen.tile.split("x"))
    cluster = tuple(int(x) for x in chosen.cluster.split("x"))

    def make(rows: int, columns: int, first: bool) -> tuple[Tensor, Any]:
        sizes = (batches, columns, rows) if first else (batches, rows, columns)
        x = torch.randint(-2, 3, sizes).half().permute((2, 1, 0) if first else (1, 2, 0))
        mode = 0 if first else 1
        return x, from_dlpack(x, assumed_align=16).mark_layout_dynamic(leading_dim=mode)

    a, a_cute = make(m, k, chosen.majors[0] == "m")
    b, b_cute = make(n, k, chosen.majors[1] == "n")
    c, c_cute = make(m, n, chosen.majors[2] == "m")
    module, stream = load(path), driver.CUstream(0)
    if path.stem.endswith("persistent"):
        kernel = module.HopperWgmmaGemmPersistentKernel(cutlass.Float32, tile, cluster, 1, True)
        kernel(a_cute, b_cute, c_cute, 4, stream)
    else:
        kernel = module.HopperWgmmaGemmKernel(cutlass.Float32, tile, cluster)
        kernel(a_cute, b_cute, c_cute, stream)
    return c.float(), torch.einsum("mkl,nkl->mnl", a.float(), b.float())


def main() -> None:
    chosen = options(example="", shape="512,512,256", tile="128x128", cluster="1x1", majors="kkn")
    path = Path(chosen.example)
    shape = [int(x) for x in chosen.shape.split(",")]
    runner = Runner(chosen)
    torch.manual_seed(0)
    is_hopper = "hopper" in path.parts
    with cute.simulate("sm_90a" if is_hopper else "sm_100a", run=runner):
        found, expected = hopper(path, shape, chosen) if is_hopper else tutorial(path, shape)
    report(
        seconds=runner.seconds,
        launches=runner.launches,
        largest=float(expected.abs().max()),
        difference=float((found - expected).abs().max()),
    )


if __name__ == "__main__":
    main()
