"""From a kernel and its static facts to a function on tensors, compiled once.

A :class:`Build` names what changes code and nothing else: sizes of a problem are symbols, so a new
token count never compiles anything.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from threading import RLock  # noqa: E402
from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor  # noqa: E402

__all__ = ["ANY", "Build", "cache_clear", "compiled", "fake", "function", "stream"]

ANY = -1
"""A size or stride that is known at launch only."""

TYPES = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.int32: cutlass.Int32,
}


@dataclass(frozen=True)
class Build:
    """One compilation.

    Attributes:
        name: of the kernel, for reports and files.
        arch: ``"sm_100a"``, say.
        facts: what its code depends on, in a fixed order.
        make: called without arguments when the compilation is due; gives the function to compile
            and its arguments but the stream: fake tensors, and numbers of the right type.
    """

    name: str
    arch: str
    facts: tuple[tuple[str, Any], ...]
    make: Callable[[], tuple[Any, tuple[Any, ...]]]

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells builds apart."""
        return (self.name, self.arch, self.facts)


_functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
_lock = RLock()


def function(build: Build) -> Callable[..., Any]:
    """The function of ``build``, compiled at most once per process. It takes tensors and numbers,
    launches on PyTorch's current stream, and allocates nothing."""
    found = _functions.get(build.key)
    if found is None:
        with _lock:
            found = _functions.get(build.key)
            if found is None:
                found = _functions[build.key] = compiled(build)
    return found


def compiled(build: Build) -> Callable[..., Any]:
    """``build``, compiled now. Needs no GPU and no driver."""
    kernel, arguments = build.make()
    options = f"--enable-tvm-ffi --gpu-arch {build.arch}"
    done: Callable[..., Any] = cute.compile(kernel, *arguments, stream(), options=options)
    return done


def cache_clear() -> None:
    """Forget every function; the next use compiles anew."""
    with _lock:
        _functions.clear()


def stream() -> Any:
    """The argument that stands for PyTorch's current stream; callers pass nothing for it."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


def fake(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    strides: tuple[int, ...] | None = None,
    align: int = 4,
) -> Any:
    """A tensor without memory, for compiling: ``ANY`` in ``shape`` and ``strides`` is open.

    Without ``strides`` it is contiguous, and a stride behind an open size is open too. ``align`` is
    what callers promise of its first byte.
    """
    sizes = tuple(cute.sym_int() if size == ANY else size for size in shape)
    if strides is None:
        steps: list[Any] = []
        step: Any = 1
        for size in reversed(shape):
            steps.insert(0, cute.sym_int64() if step == ANY else step)
            step = ANY if ANY in (step, size) else step * size
    else:
        vector = align * 8 // TYPES[dtype].width
        steps = [
            cute.sym_int64(divisibility=vector) if stride == ANY else stride for stride in strides
        ]
    return make_fake_tensor(TYPES[dtype], sizes, stride=tuple(steps), assumed_align=align)
