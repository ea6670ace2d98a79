"""Repeat recorded launches on a Hopper GPU and compare with what the simulator computed.

    python replay.py DIR

Needs NumPy and the CUDA driver (libcuda.so.1) only.  For each record: allocate its buffers, patch
their addresses into the parameters (tensor maps included), launch, compare every byte.  Prints a
line per launch, with differing bytes and the distance of each buffer read as float32 and bfloat16.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np


class Driver:
    """The few calls of the CUDA driver that a launch needs."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.modules: dict[bytes, Any] = {}

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed: error {code}")

    def function(self, cubin: bytes, name: str) -> ctypes.c_void_p:
        if cubin not in self.modules:
            module = ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), cubin)
            self.modules[cubin] = module
        found = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(found), self.modules[cubin], name.encode())
        return found

    def upload(self, data: bytes) -> int:
        address = ctypes.c_uint64()
        # Room on both sides: a kernel that strays stays inside of the allocation.
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(256, len(data))))
        self.call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))
        return int(address.value)

    def download(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(address))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


def patched(params: list[bytes], moved: dict[int, tuple[int, int]]) -> list[bytes]:
    """Parameters with host addresses replaced by those on the device."""
    out = []
    for raw in params:
        data = bytearray(raw)
        for at in range(0, len(data) - 7, 8):
            (value,) = struct.unpack_from("<Q", data, at)
            for host, (size, device) in moved.items():
                if host <= value < host + max(size, 1):
                    struct.pack_into("<Q", data, at, device + value - host)
        out.append(bytes(data))
    return out


def launch(driver: Driver, record: dict[str, Any]) -> dict[int, bytes]:
    """The buffers after the launch, by their addresses on the recording host."""
    function = driver.function(record["cubin"], record["kernel"])
    moved = {host: (len(data), driver.upload(data)) for host, data in record["before"].items()}
    values = [
        (ctypes.c_char * (len(p) + 128)).from_buffer_copy(p + bytes(128))
        for p in patched(record["params"], moved)
    ]
    pointers = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(v) for v in values])
    if record["shared"] > 48 << 10:
        driver.call("cuFuncSetAttribute", function, 8, record["shared"])
    cluster = record["cluster"]
    # CUlaunchAttribute: id at 0 (4: cluster dimension), value at 8; 72 bytes.
    attribute = struct.pack("<iiIII", 4, 0, *cluster).ljust(72, b"\0")
    holder = ctypes.create_string_buffer(attribute, 72)
    config = LaunchConfig()
    config.grid[:], config.block[:] = record["grid"], record["block"]
    config.shared = record["shared"]
    config.attributes = ctypes.cast(holder, ctypes.c_void_p)
    config.count = int(tuple(cluster) != (1, 1, 1))
    driver.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
    driver.call("cuCtxSynchronize")
    found = {}
    for host, (size, device) in moved.items():
        found[host] = driver.download(device, size)
        driver.free(device)
    return found


def distance(chip: bytes, simulated: bytes, narrow: bool) -> float:
    """The relative L2 distance of two buffers read as bfloat16 or float32; NaNs left out."""
    values = []
    for data in (chip, simulated):
        if narrow:
            bits = np.frombuffer(data[: len(data) // 2 * 2], np.uint16).astype(np.uint32) << 16
            values.append(bits.view(np.float32).astype(np.float64))
        else:
            values.append(np.frombuffer(data[: len(data) // 4 * 4], np.float32).astype(np.float64))
    x, y = values
    good = np.isfinite(x) & np.isfinite(y) & (np.abs(y) < 1e30)
    norm = float(np.linalg.norm(y[good])) or 1.0
    return float(np.linalg.norm(x[good] - y[good])) / norm


def main() -> None:
    driver = Driver()
    launches = exact = 0
    for path in sorted(Path(sys.argv[1]).glob("*.pickle")):
        record = pickle.loads(path.read_bytes())
        found = launch(driver, record)
        launches += 1
        print(f"{record['name']}: {record['kernel'][:60]}")
        same = True
        for host, data in found.items():
            after = record["after"][host]
            count = sum(a != b for a, b in zip(data, after, strict=True))
            touched = after != record["before"][host]
            same = same and not count
            if touched or count:
                wide, narrow = (distance(data, after, n) for n in (False, True))
                print(
                    f"    {len(data)} bytes: {count} differ; L2 {wide:.3g} as float32, "
                    f"{narrow:.3g} as bfloat16"
                )
        exact += same
    print(f"{launches} launches, {exact} equal bit for bit")


if __name__ == "__main__":
    main()
