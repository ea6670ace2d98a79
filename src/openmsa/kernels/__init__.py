"""CuTe DSL kernels, and the gates in front of them. Importing this package imports no DSL.

``require_cute_dsl`` gates the toolchain: every kernel module calls it before its first DSL import,
so that a host without the DSL meets :class:`~openmsa.errors.UnavailableError` rather than a bare
``ModuleNotFoundError``. ``require_sm90``, ``require_sm100`` and ``require_sm103`` gate the device:
ask before compiling or launching anything.
"""

from __future__ import annotations

import importlib
from functools import cache

import torch

from openmsa.errors import UnavailableError, UnsupportedProblem, invalid_input

__all__ = [
    "MSA_KERNEL_IMPORT_ERROR",
    "require_cute_dsl",
    "require_sm90",
    "require_sm100",
    "require_sm103",
    "sm_capability",
    "sm_count",
]

MSA_KERNEL_IMPORT_ERROR = (
    "openmsa's CuTe DSL kernels need nvidia-cutlass-dsl==4.6.2, cuda-bindings and apache-tvm-ffi, "
    'whose wheels exist for Linux only. Install them with: pip install "openmsa[cute]"'
)
"""What a host without the CuTe toolchain is told."""

_TOOLCHAIN = ("cutlass", "cuda.bindings.driver", "tvm_ffi")
_SM90, _SM100, _SM103 = (9, 0), (10, 0), (10, 3)
_INSTEAD = (
    'use backend="auto", or name "triton", "cpu" or "reference" (openmsa info lists what runs here)'
)


def require_cute_dsl() -> None:
    """Refuse to go on where the CuTe DSL cannot be imported.

    Kernel modules call this before their first DSL import: decorators, annotations and constants of
    a kernel need the DSL while its module loads.

    Raises:
        UnavailableError: ``cutlass`` or ``cuda.bindings.driver`` cannot be imported; the message
            says which, and how to install it.
    """
    for module in _TOOLCHAIN:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UnavailableError(
                f"{MSA_KERNEL_IMPORT_ERROR} (cannot import {module}: {error})"
            ) from error


def require_sm90(device: torch.device) -> None:
    """Refuse any device that the SM90 kernels are not built for.

    Args:
        device: the device the caller is about to run on.

    Raises:
        UnsupportedProblem: (a ``NotImplementedError``) the compute capability is not exactly 9.0,
            or there is none.
    """
    _require(device, _SM90)


def require_sm100(device: torch.device) -> None:
    """Refuse any device that the SM100 kernels are not built for.

    Call it before compiling or launching. For a device with an index, as every tensor's has, it
    costs a dictionary look-up after the first call.

    Args:
        device: the device the caller is about to run on.

    Raises:
        UnsupportedProblem: (a ``NotImplementedError``) the compute capability is not exactly 10.0,
            or there is none.
    """
    _require(device, _SM100)


def require_sm103(device: torch.device) -> None:
    """Refuse any device that the SM103 builds of the SM100 kernels do not run on.

    The same kernels, compiled for another target: code for ``sm_100a`` runs on 10.0 alone.

    Args:
        device: the device the caller is about to run on.

    Raises:
        UnsupportedProblem: (a ``NotImplementedError``) the compute capability is not exactly 10.3,
            or there is none.
    """
    _require(device, _SM103)


def _require(device: torch.device, wanted: tuple[int, int]) -> None:
    _check(device)
    has = "no CUDA capability"
    if device.type == "cuda":
        found = sm_capability(device)
        if found == wanted:
            return
        has = f"compute capability {found[0]}.{found[1]}"
    raise UnsupportedProblem(
        f"the SM{wanted[0]}{wanted[1]} kernels need compute capability {wanted[0]}.{wanted[1]}, "
        f"but {device} has {has}; {_INSTEAD}"
    )


def sm_capability(device: torch.device) -> tuple[int, int]:
    """The CUDA compute capability ``(major, minor)`` of ``device``, asked of the driver once.

    ``torch.cuda.get_device_capability`` costs microseconds and gates run on every forward, while a
    device's capability cannot change.

    Args:
        device: a CUDA device; without an index it means the current one, looked up at each call.

    Raises:
        InvalidInput: not a CUDA device.
        UnsupportedProblem: a CUDA device on a host that has none.
    """
    return _capability(_index(device))


def sm_count(device: torch.device) -> int:
    """The number of streaming multiprocessors of ``device``, asked of the driver once.

    It sizes the backward's CTA walk; see :func:`openmsa.kernels.schedule.cta_walk`.

    Args:
        device: a CUDA device; without an index it means the current one, looked up at each call.

    Raises:
        InvalidInput: not a CUDA device.
        UnsupportedProblem: a CUDA device on a host that has none.
    """
    return _count(_index(device))


def _check(device: torch.device) -> None:
    if not isinstance(device, torch.device):
        invalid_input("device", "a torch.device", repr(device))


def _index(device: torch.device) -> int:
    _check(device)
    if device.type != "cuda":
        invalid_input("device", "a CUDA device", device)
    if device.index is not None:
        return device.index
    _require_cuda(device)
    return torch.cuda.current_device()


# The memos are keyed by index, never by a device without one: what that means changes with
# torch.cuda.set_device. An answer that raised is not kept.
@cache
def _capability(index: int) -> tuple[int, int]:
    _require_cuda(torch.device("cuda", index))
    return torch.cuda.get_device_capability(index)


@cache
def _count(index: int) -> int:
    _require_cuda(torch.device("cuda", index))
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _require_cuda(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise UnsupportedProblem(f"{device}: there is no CUDA device here; {_INSTEAD}")
