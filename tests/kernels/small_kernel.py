"""A kernel that compiles within a second, and processes that use the disk for it.

``python small_kernel.py twice|loaded|off|prefetched`` prints a JSON object; the cache is the
environment's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Float32

from openmsa.kernels.build import Build
from openmsa.kernels.common import cache, workers
from openmsa.kernels.common.compile import (
    ANY,
    ahead,
    cache_clear,
    compiled,
    fake,
    function,
    prefetch,
)
from openmsa.kernels.common.workers import Request

KINDS = ("whole", "broken")


class Scale:
    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, factor: Float32) -> None:
        at = cute.arch.thread_idx()[0]
        if at < x.shape[0]:
            y[at] = x[at] * factor

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, factor: Float32, stream: Any) -> None:
        self.kernel(x, y, factor).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


def builds(arch: str, dtype: str = "", group: int = 1) -> tuple[Build, ...]:
    """``dtype`` "broken" does not compile in a worker."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        if dtype == "broken" and os.environ.get("OPENMSA_WORKERS") == "0":
            raise ValueError(dtype)
        x, y = (fake(torch.float32, (ANY,)) for _ in range(2))
        return Scale(), (x, y, Float32(0))

    facts: tuple[tuple[str, Any], ...] = (("block", 128),)
    if dtype:
        facts += (("dtype", dtype), ("group", group))
    return (Build("scale", arch, facts, make),)


def twice(build: Build) -> dict[str, Any]:
    """Compile and keep, beside another process that does the same; then look again."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    first, _ = ahead(build)
    again, kept = ahead(build)
    return {"same": first == again, "kept": kept, "about": dict(again.about)}


def loaded(build: Build) -> dict[str, Any]:
    """Run what lies on the disk, in the simulator, without making it."""
    from ptxsim.launchers import cute as simulator
    from ptxsim.launchers.tensors import as_cuda_dlpack

    unmade = Build(build.name, build.arch, build.facts, lambda: 1 / 0)
    x, y = torch.arange(100.0), torch.zeros(100)
    with simulator.simulate(arch=build.arch) as session:
        ahead(build)
        entry, kept = ahead(unmade)
        session.register(entry.files["kernel.cubin"], entry.files["kernel.ptx"].decode())
        session.tensors.add(x)
        session.tensors.add(y)
        compiled(unmade)(as_cuda_dlpack(x), as_cuda_dlpack(y), 3.0)
        assert function(unmade) is function(unmade)
    return {"kept": kept, "right": bool((y == 3 * x).all())}


def off(build: Build) -> dict[str, Any]:
    """In the simulator with the disk off: made anew, whatever lies there or was loaded before."""
    from ptxsim.launchers import cute as simulator

    x, y = torch.arange(100.0), torch.zeros(100)
    with simulator.simulate(arch=build.arch):
        ahead(build)
        before = function(build)
        with cache.disabled():
            inside = function(build)
            inside(x, y, 3.0)
            assert inside is function(build)
        apart = inside is not before and function(build) is before
    cache_clear()
    return {"apart": apart, "right": bool((y == 3 * x).all())}


def early(_: Build) -> dict[str, Any]:
    """A helper that starts before anybody asks it, where the disk is empty; one that nobody needs
    goes at once, and one that hangs is not waited for."""
    request = Request("small_kernel", "sm_100a", "whole", 2, ("scale",))
    workers.get_ready("small_kernel")
    used = workers._ready is not None
    prefetch(request)
    used = used and workers._ready is None
    kept = ahead(builds("sm_100a", "whole", 2)[0])[1]
    workers.get_ready("small_kernel")
    again = workers._ready is not None
    idle = workers._ready = workers._Helper.spawn(("json",))
    assert idle is not None
    workers._asked["key"] = idle, time.monotonic() + 60
    waited = workers.pending("key")
    workers._asked["key"] = idle, time.monotonic()
    waited = waited and not workers.pending("key")
    prefetch(request, request)
    idle.process.wait(timeout=60)
    return {"used": used, "kept": kept, "again": again, "waited": waited}


def prefetched(_: Build) -> dict[str, Any]:
    """Another process compiles; where it cannot, this one does."""
    requests = [Request("small_kernel", "sm_100a", dtype, 2, ("scale",)) for dtype in KINDS]
    prefetch(*requests)
    prefetch(*requests)
    return {dtype: ahead(builds("sm_100a", dtype, 2)[0])[1] for dtype in KINDS}


if __name__ == "__main__":
    whats = {"twice": twice, "loaded": loaded, "off": off, "prefetched": prefetched, "early": early}
    what = whats[sys.argv[1]]
    sys.stdout.write(json.dumps(what(builds("sm_100a")[0])) + "\n")
