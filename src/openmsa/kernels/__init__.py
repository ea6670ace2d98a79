"""CuTe DSL kernels, and the two gates in front of them. Importing this package imports no DSL.

``require_cute_dsl`` gates the toolchain: every kernel module calls it before its first DSL import,
so that a host without the DSL meets :class:`~openmsa.errors.UnavailableError` rather than a bare
``ModuleNotFoundError``. ``require_sm100`` gates the device: a launcher calls it before it compiles
or launches anything.
"""

from __future__ import annotations

import importlib
from functools import cache

import torch

from openmsa.errors import UnavailableError, UnsupportedProblem, invalid_input

__all__ = [
    "MSA_KERNEL_IMPORT_ERROR",
    "require_cute_dsl",
    "require_sm100",
    "sm_capability",
    "sm_count",
]

MSA_KERNEL_IMPORT_ERROR = (
    "openmsa's CuTe DSL kernels need nvidia-cutlass-dsl==4.6.2 and cuda-bindings, whose wheels "
    'exist for Linux only. Install them with: pip install "openmsa[cute]"'
)
"""What a host without the CuTe toolchain is told."""

_TOOLCHAIN = ("cutlass", "cuda.bindings.driver")
_SM100 = (10, 0)


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
            raise UnavailableError(f"{MSA_KERNEL_IMPORT_ERROR} ({module}: {error})") from error


def require_sm100(device: torch.device) -> None:
    """Refuse any device that the SM100 kernels are not built for.

    Call it before compiling or launching. It costs a dictionary look-up after the first call.

    Args:
        device: the device the caller is about to run on.

    Raises:
        UnsupportedProblem: (a ``NotImplementedError``) the compute capability is not exactly 10.0.
    """
    found = _capability_or_none(device)
    if found != _SM100:
        has = "no CUDA capability" if found is None else f"compute capability {found[0]}.{found[1]}"
        raise UnsupportedProblem(
            f"the SM100 kernels need compute capability 10.0, but {device} has {has}; use "
            "backend='auto', or name 'triton', 'cpu' or 'reference' (openmsa info lists what "
            "runs here)"
        )


def sm_capability(device: torch.device) -> tuple[int, int]:
    """The CUDA compute capability ``(major, minor)`` of ``device``, asked of the driver once.

    ``torch.cuda.get_device_capability`` costs microseconds and gates run on every forward, while a
    device's capability cannot change.

    Args:
        device: a CUDA device; without an index it means the current one, looked up at each call.

    Raises:
        InvalidInput: not a CUDA device.
    """
    return _capability(_index(device))


def sm_count(device: torch.device) -> int:
    """The number of streaming multiprocessors of ``device``, asked of the driver once.

    It sizes the backward's CTA walk; see :func:`openmsa.kernels.schedule.cta_walk`.

    Args:
        device: a CUDA device; without an index it means the current one, looked up at each call.

    Raises:
        InvalidInput: not a CUDA device.
    """
    return _count(_index(device))


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        invalid_input("device", "a CUDA device", device)
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def _count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _capability_or_none(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return sm_capability(device)
