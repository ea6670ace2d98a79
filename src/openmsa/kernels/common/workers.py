"""Processes that compile what this one is about to need.

A first training step needs a dozen kernels and the DSL compiles one at a time, most of it in
Python. So, where :data:`openmsa.kernels.common.env.WORKERS` allows, the first launch asks for the
large ones of the whole step: other processes compile them into the cache on disk, and whoever needs
one waits for its process. A worker that fails costs
nothing but its time, as what is not on disk then is compiled here.

``python -m openmsa.kernels.common.workers MODULE ARCH DTYPE GROUP NAME...`` is a worker: it
compiles those of ``MODULE.builds(ARCH, DTYPE, GROUP)`` that have the names.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

import atexit  # noqa: E402
import importlib  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from contextlib import suppress  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from threading import Lock  # noqa: E402

from openmsa.kernels.build import Build  # noqa: E402
from openmsa.kernels.common import cache, env  # noqa: E402

__all__ = ["Request", "start", "wait_for"]

_ROOT = str(Path(__file__).parents[3])
_lock = Lock()
_running: dict[str, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class Request:
    """The kernels ``names`` of ``builds(arch, dtype, group)`` of a module."""

    module: str
    arch: str
    dtype: str
    group: int
    names: tuple[str, ...]

    def builds(self) -> tuple[Build, ...]:
        """Those builds."""
        found = importlib.import_module(self.module).builds(self.arch, self.dtype, self.group)
        return tuple(build for build in found if build.name in self.names)


def start(requests: tuple[Request, ...], key_of: Callable[[Build], str | None]) -> None:
    """A worker for each request with a build that is not on disk, as far as
    :data:`openmsa.kernels.common.env.WORKERS` allows; none without a disk. ``key_of`` names the
    entry of a build."""
    left = env.workers()
    for request in requests:
        if left <= 0:
            return
        with cache.folder() as folder:
            if folder is None:
                return
            keys = [key_of(build) for build in request.builds()]
            missing = [key for key in keys if key is not None and folder.get(key) is None]
        if missing:
            left -= 1
            _launch(request, missing)


def _launch(request: Request, keys: list[str]) -> None:
    path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    command = [
        sys.executable, "-m", __name__, request.module, request.arch, request.dtype,
        str(request.group), *request.names,
    ]  # fmt: skip
    with suppress(OSError), _lock:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, env.WORKERS: "0"},
        )
        _running.update(dict.fromkeys(keys, process))


def wait_for(key: str) -> bool:
    """Until the worker that has the entry ``key`` to make is done; False if none has."""
    with _lock:
        process = _running.get(key)
    if process is None:
        return False
    process.wait()
    with _lock:
        _running.pop(key, None)
    return True


@atexit.register
def _stop() -> None:
    """Nobody needs them any more."""
    for process in set(_running.values()):
        if process.poll() is None:
            process.kill()


def _main() -> None:
    from openmsa.kernels.common.compile import ahead

    module, arch, dtype, group, *names = sys.argv[1:]
    for build in Request(module, arch, dtype, int(group), tuple(names)).builds():
        ahead(build)


if __name__ == "__main__":
    _main()
