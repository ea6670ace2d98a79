"""Facts about the devices and toolchains of this process. Nothing here decides anything."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata

import torch

from openmsa.kernels import sm_capability, sm_count

__all__ = ["DeviceFacts", "Toolchain", "device_facts", "toolchain"]


@dataclass(frozen=True)
class DeviceFacts:
    """What a gate may ask about a device.

    Attributes:
        kind: ``"cpu"``, ``"cuda"``, ...
        name: the device's own name.
        capability: CUDA compute capability, or None.
        sm_count: streaming multiprocessors, or 0.
        shared_memory: bytes of shared memory one thread block may use, or 0.
    """

    kind: str
    name: str = ""
    capability: tuple[int, int] | None = None
    sm_count: int = 0
    shared_memory: int = 0

    def __str__(self) -> str:
        if self.capability is None:
            return self.name or self.kind
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True)
class Toolchain:
    """Installed versions; None where a package is absent."""

    python: str
    torch: str
    triton: str | None = None
    cute_dsl: str | None = None

    def version(self, package: str) -> str | None:
        """The version of ``package`` (``"triton"`` or ``"cute_dsl"``), or None."""
        return {"triton": self.triton, "cute_dsl": self.cute_dsl}[package]

    def __str__(self) -> str:
        parts = [f"python {self.python}", f"torch {self.torch}"]
        parts.append(f"triton {self.triton or 'not installed'}")
        parts.append(f"CuTe DSL {self.cute_dsl or 'not installed'}")
        return ", ".join(parts)


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts about ``device``, looked up once per device."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _device_facts(device)


@cache
def _device_facts(device: torch.device) -> DeviceFacts:
    if device.type != "cuda":
        return DeviceFacts(device.type, platform.processor() or device.type)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        "cuda",
        properties.name,
        sm_capability(device),
        sm_count(device),
        getattr(properties, "shared_memory_per_block_optin", 0),
    )


@lru_cache(maxsize=1)
def toolchain() -> Toolchain:
    """Versions read from package metadata: nothing is imported to learn them."""
    return Toolchain(
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        cute_dsl=_version("nvidia-cutlass-dsl"),
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
