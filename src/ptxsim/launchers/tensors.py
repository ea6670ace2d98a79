"""CPU tensors dressed as device tensors, and the list of memory that kernels may touch."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from typing import Any

_DL_CUDA = 2


def is_cpu_tensor(value: Any) -> bool:
    """True for a torch tensor; torch is looked up, never imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@dataclass
class KnownTensors:
    """Storages seen so far, by address: what a kernel may read and write."""

    storages: dict[int, tuple[int, Any]] = field(default_factory=dict)

    def add(self, tensor: Any) -> None:
        """Remember the whole storage of a torch tensor."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.storages[storage.data_ptr()] = (storage.nbytes(), storage)

    def buffers(self) -> list[tuple[int, int]]:
        """(address, bytes) of each storage."""
        return [(address, size) for address, (size, _) in self.storages.items()]


class _CudaDlpack:
    """A DLPack exporter whose capsule says "device 0 of type CUDA" about CPU memory."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_DL_CUDA, 0)

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._tensor.detach().__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = pointer(capsule, b"dltensor")
        device = ctypes.cast(address + 8, ctypes.POINTER(ctypes.c_int32))
        device[0], device[1] = _DL_CUDA, 0
        return capsule


def as_cuda_dlpack(tensor: Any) -> _CudaDlpack:
    """Wrap a CPU tensor for callers that insist on a CUDA device."""
    return _CudaDlpack(tensor)
