"""The same kernels on a real GPU, through the CUDA driver: PTXSIM_CHIP=1 compares each of them.

Only the driver's library is needed.  A kernel that the GPU's architecture does not have is counted,
not compared; results are compared bit for bit, but for NaN payloads and, in float outputs, for the
last bits of approximations.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

WANTED = os.environ.get("PTXSIM_CHIP") == "1"
COUNTS: Counter[str] = Counter()
_NOT_HERE = (209, 218, 222)  # no binary for the GPU, invalid PTX, unsupported PTX version
# %warpid is what the simulator knows to be one value a warp; on a GPU it is any free slot's number.
_WARP_NUMBER = ("mov.u32 %x, %warpid;", "mov.u32 %x, %tid.x;\nshr.u32 %x, %x, 5;")
_MAJOR, _MINOR = 75, 76  # device attributes: compute capability
# Relative error allowed between two approximations, each within its own bound of the exact value.
_APPROXIMATE = 2.0**-10


class Driver:
    """One device and its primary context."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        numbers = []
        for attribute in (_MAJOR, _MINOR):
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
            numbers.append(value.value)
        major, minor = numbers
        self.target = f"sm_{10 * major + minor}" + ("a" if major >= 9 else "")

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.lib, name)(*args)
        if code:
            raise DriverError(name, code)


class DriverError(Exception):
    """A driver call failed."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} failed with {code}")
        self.code = code


@lru_cache(maxsize=1)
def driver() -> Driver:
    return Driver()


def run(
    text: str, grid: int, block: int, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
) -> list[np.ndarray] | None:
    """What the kernel `k` leaves in `outputs`; None if the GPU does not have its instructions."""
    gpu = driver()
    text = text.replace(".target sm_100a", f".target {gpu.target}").replace(*_WARP_NUMBER)
    image = text.encode() + b"\0"
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        gpu.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
    except DriverError as error:
        if error.code in _NOT_HERE:
            return None
        raise
    gpu.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"k"))
    pointers = [_to_device(gpu, array) for array in (*inputs, *outputs)]
    slots = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(p) for p in pointers))
    shape = [ctypes.c_uint(n) for n in (grid, 1, 1, block, 1, 1, 0)]
    gpu.call("cuLaunchKernel", function, *shape, ctypes.c_void_p(0), slots, ctypes.c_void_p(0))
    gpu.call("cuCtxSynchronize")
    found = []
    for pointer, array in zip(pointers[len(inputs) :], outputs, strict=True):
        back = np.empty_like(array)
        gpu.call("cuMemcpyDtoH_v2", _host(back), pointer, ctypes.c_size_t(array.nbytes))
        found.append(back)
    for pointer in pointers:
        gpu.call("cuMemFree_v2", pointer)
    gpu.call("cuModuleUnload", module)
    return found


def _host(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _to_device(gpu: Driver, array: np.ndarray) -> ctypes.c_uint64:
    pointer = ctypes.c_uint64()
    gpu.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(array.nbytes, 16)))
    gpu.call("cuMemcpyHtoD_v2", pointer, _host(array), ctypes.c_size_t(array.nbytes))
    return pointer


def differences(
    simulated: np.ndarray, real: np.ndarray, slack: np.ndarray | None = None
) -> np.ndarray:
    """Where the two differ by more than NaN payloads and approximations may; `slack` is how far
    apart float32 results, given as bits, may lie (a tensor core's sums have no order)."""
    if slack is not None:
        distance = simulated.view(np.float32).astype(np.float64) - real.view(np.float32)
        return np.flatnonzero(~(np.abs(distance) <= slack))
    if simulated.dtype.kind == "f":
        finite = np.isfinite(simulated) & np.isfinite(real)
        with np.errstate(all="ignore"):
            near = np.abs(simulated - real) <= _APPROXIMATE * (np.abs(real) + 2.0**-11)
        near &= finite
        same = (simulated == real) | (np.isnan(simulated) & np.isnan(real)) | near
        return np.flatnonzero(~same)
    same = simulated == real
    kind = {2: np.float16, 4: np.float32, 8: np.float64}.get(simulated.dtype.itemsize)
    if kind is not None and simulated.dtype.kind == "u":
        same |= np.isnan(simulated.view(kind)) & np.isnan(real.view(kind))
    return np.flatnonzero(~same)


def compare(
    text: str,
    grid: int,
    block: int,
    inputs: Sequence[np.ndarray],
    before: Sequence[np.ndarray],
    simulated: Sequence[np.ndarray],
    slack: Sequence[np.ndarray] = (),
) -> None:
    """Run on the GPU what the simulator has run, and hold the results together."""
    real = run(text, grid, block, inputs, before)
    COUNTS["not on this GPU" if real is None else "compared"] += 1
    for number, (mine, chip) in enumerate(zip(simulated, real or simulated, strict=True)):
        wrong = differences(mine, chip, slack[number] if len(slack) else None)
        assert not wrong.size, (
            f"output {number}: {wrong.size} of {mine.size} differ from the GPU, the first at "
            f"{wrong[0]}: simulated {mine[wrong[0]]!r}, GPU {chip[wrong[0]]!r}, operands "
            f"{[i[wrong[0] % len(i)] for i in inputs]}\n{text}"
        )
