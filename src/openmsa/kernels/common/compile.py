"""From a kernel and its static facts to a function on tensors, compiled once.

A :class:`Build` names what changes code and nothing else: sizes of a problem are symbols, so a new
token count never compiles anything.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

import functools  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import shlex  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from importlib import metadata  # noqa: E402
from pathlib import Path  # noqa: E402
from threading import RLock  # noqa: E402
from typing import Any  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import torch  # noqa: E402
from cutlass.cute.runtime import load_module, make_fake_stream, make_fake_tensor  # noqa: E402

from openmsa import __version__  # noqa: E402
from openmsa.kernels.build import Build  # noqa: E402
from openmsa.kernels.common import cache, workers  # noqa: E402
from openmsa.kernels.common.cubin import resources  # noqa: E402

__all__ = [
    "ANY", "Build", "ahead", "cache_clear", "compiled", "fake", "function", "prefetch", "stream",
    "versions",
]  # fmt: skip

ANY = -1
"""A size or stride that is known at launch only."""

TYPES = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.int32: cutlass.Int32,
    torch.uint8: cutlass.Uint8,
}


_NOT_CODE = tuple(
    f"CUTE_DSL_{name}" for name in ("LIBS", "DUMP_DIR", "KEEP", "LOG", "DISABLE_FILE_CACHING")
)
"""Variables of the DSL that change no code, by how they begin."""

_GLANCE_SECONDS = 0.02

_SOURCES = cache.sources()
"""As they were when this module was loaded, or later for some; see `_key`."""

_functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
_lock = RLock()
_prefetched: set[tuple[workers.Request, ...]] = set()


def function(build: Build) -> Callable[..., Any]:
    """The function of ``build``, compiled at most once per process. It takes tensors and numbers,
    launches on PyTorch's current stream, and allocates nothing.

    What is compiled while the disk is off (:func:`openmsa.kernels.common.cache.disabled`) and what
    is not are kept apart, since only the latter may have come from the disk.
    """
    key = (cache.enabled(), *build.key)
    found = _functions.get(key)
    if found is None:
        with _lock:
            found = _functions.get(key)
            if found is None:
                found = _functions[key] = compiled(build)
    return found


def compiled(build: Build) -> Callable[..., Any]:
    """``build``, from the disk or compiled now. Needs no GPU and no driver."""
    key = _key(build)
    with cache.folder() as folder:
        if folder is None or key is None:
            done: Callable[..., Any] = _compile(build)
            return done
        entry = _kept(folder, key)
        if entry is None:
            entry = _export(build, key)
            if _key(build) == key:  # else the sources have changed: what was compiled has no name
                entry = folder.put(key, entry)
        return _load(key, entry)


def prefetch(*requests: workers.Request) -> None:
    """Let other processes compile what will be needed soon; the same requests again do nothing."""
    if cache.enabled() and requests not in _prefetched:
        _prefetched.add(requests)
        workers.start(requests, _key)


def ahead(build: Build) -> tuple[cache.Entry, bool]:
    """``build`` as it lies on disk, compiled if it does not, and whether it did. Where there is no
    disk to be had it is compiled and given all the same."""
    key = _key(build)
    with cache.folder() as folder:
        entry = None if folder is None or key is None else _kept(folder, key)
        if entry is not None:
            return entry, True
        entry = _export(build, key or "0" * 64)
        if folder is not None and key is not None and _key(build) == key:
            entry = folder.put(key, entry)
    return entry, False


def _kept(folder: cache.Folder, key: str) -> cache.Entry | None:
    """The entry ``key``, if it is there or a worker has it to make."""
    while (entry := folder.get(key)) is None and workers.pending(key):
        time.sleep(_GLANCE_SECONDS)
    # A helper may have put it there and gone between the two.
    return entry or folder.get(key)


def _compile(build: Build, options: str = "", **how: Any) -> Any:
    kernel, arguments = build.make()
    options = f"--enable-tvm-ffi --gpu-arch {build.arch} {options}".strip()
    return cute.compile(kernel, *arguments, stream(), options=options, **how)


def _export(build: Build, key: str) -> cache.Entry:
    """What an entry keeps of ``build``, compiled now. Nothing is made to be called from where it
    is, which would generate the host's code a second time, a quarter of the whole."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="openmsa-") as scratch:
        # Without a folder of its own the DSL leaves PTX and cubin in the working directory.
        done = _compile(
            build,
            f"--keep-ptx --keep-cubin --dump-dir {shlex.quote(scratch)}",
            no_jit_engine=True,
        )
        target = Path(scratch) / "kernel.o"
        done.export_to_c(str(target), function_name=_symbol(key))
        contents = (target.read_bytes(), done.__ptx__.encode(), done.__cubin__)
    about = {
        "name": build.name,
        "arch": build.arch,
        "facts": {fact: str(value) for fact, value in build.facts},
        "versions": versions(),
        "seconds": round(time.perf_counter() - start, 3),
        "entries": [used.as_json() for used in resources(done.__cubin__)],
    }
    return cache.Entry(dict(zip(cache.FILES, contents, strict=True)), about)


def _load(key: str, entry: cache.Entry) -> Callable[..., Any]:
    """The function of an entry. What is loaded is a copy of the bytes that were checked."""
    with tempfile.NamedTemporaryFile(prefix="openmsa-", suffix=".o") as file:
        file.write(entry.files["kernel.o"])
        file.flush()
        module = load_module(file.name, enable_tvm_ffi=True)
    loaded: Callable[..., Any] = module[_symbol(key)]
    return loaded


def _symbol(key: str) -> str:
    """The name of an entry's host function: no two entries share one in a process."""
    return f"openmsa_{key[:32]}"


def _key(build: Build) -> str | None:
    """The name of the entry of ``build``; None where the sources are unknown, or not those that
    this process may have loaded, as in a notebook whose kernels are being edited."""
    if not _SOURCES or cache.sources() != _SOURCES:
        return None
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("CUTE_DSL_") and not name.startswith(_NOT_CODE)
    }
    return cache.key_of(build, _SOURCES, {**versions(), **_host(), **variables})


@functools.cache
def versions() -> dict[str, str]:
    """What the code of every kernel depends on besides its sources."""
    return {
        "openmsa": __version__,
        "nvidia-cutlass-dsl": metadata.version("nvidia-cutlass-dsl"),
        "apache-tvm-ffi": metadata.version("apache-tvm-ffi"),
        # Wheels for several CUDA versions lie side by side; which is used depends on the driver.
        "cuda": f"{cutlass.CUDA_VERSION.major}.{cutlass.CUDA_VERSION.minor}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


@functools.cache
def _host() -> dict[str, str]:
    """The CPU: the host function is made for exactly it, while a home may belong to many machines.
    Version 4.6.2 of the DSL uses AVX where there is AVX."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("model name", "flags", "CPU part", "Features")
    first = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    found = [first[kind].partition(":")[2].strip() for kind in kinds if kind in first]
    return {"machine": platform.machine(), "cpu": "; ".join(found) or platform.processor()}


def cache_clear() -> None:
    """Forget every function; the next use looks on the disk, or compiles anew."""
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
