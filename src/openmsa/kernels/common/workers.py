"""Processes that compile what this one is about to need.

A first training step needs a dozen kernels and the DSL compiles one at a time, holding Python's
lock. So the first launch asks a helper for the large ones of the whole step. The helper is a
process that has imported what compiling needs, which takes longer than compiling a kernel; then it
forks as often as :data:`openmsa.kernels.common.env.WORKERS` allows, and each of those compiles into
the cache on disk. Whoever needs a kernel waits until it is there. What a helper fails to make is
compiled here, so that it costs nothing but its time.

Who knows that kernels will soon be needed, as a selection does, may have the helper started early.

``python -m openmsa.kernels.common.workers MODULE...`` is a helper: it imports the modules and reads
one line of JSON, requests and how many processes may compile at a time.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from openmsa.kernels.build import Build
from openmsa.kernels.common import cache, env

__all__ = ["Request", "get_ready", "pending", "start"]

_ROOT = str(Path(__file__).parents[3])
_PATIENCE_SECONDS = 120
"""After this a helper that was asked is taken for stuck, and one that was not asked goes."""


@dataclass(frozen=True)
class Request:
    """The kernels ``names`` of ``builds(arch, dtype, group)`` of a module, for one process."""

    module: str
    arch: str
    dtype: str
    group: int
    names: tuple[str, ...]

    def builds(self) -> tuple[Build, ...]:
        """Those builds."""
        found = importlib.import_module(self.module).builds(self.arch, self.dtype, self.group)
        return tuple(build for build in found if build.name in self.names)


@dataclass(frozen=True)
class _Helper:
    process: subprocess.Popen[str]
    owner: int

    @classmethod
    def spawn(cls, modules: Iterable[str]) -> _Helper | None:
        path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
        with suppress(OSError):
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # a group of its own, which `_stop` ends
                env={**os.environ, "PYTHONPATH": path, env.WORKERS: "0"},
            )
            return cls(process, os.getpid())
        return None

    def runs(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def send(self, requests: list[Request], at_a_time: int) -> None:
        line = json.dumps([at_a_time, [asdict(request) for request in requests]])
        if pipe := self.process.stdin:
            with suppress(OSError):  # it is gone
                pipe.write(line + "\n")
                pipe.close()


_lock = Lock()
_ready: _Helper | None = None
_asked: dict[str, tuple[_Helper, float]] = {}
"""Entries that are being made: by whom, and until when that is believed."""


def get_ready(*modules: str) -> None:
    """Start a helper that imports ``modules`` and waits for requests, unless there is one, or the
    disk already has kernels, or :data:`openmsa.kernels.common.env.WORKERS` forbids it."""
    global _ready
    if env.workers() > 0:
        with cache.folder() as folder:
            wanted = folder is not None and folder.empty()
        with _lock:
            if wanted and (_ready is None or not _ready.runs()):
                _ready = _Helper.spawn(modules)


def start(requests: tuple[Request, ...], key_of: Callable[[Build], str | None]) -> None:
    """Have a helper make what is not on disk, if :data:`openmsa.kernels.common.env.WORKERS` and the
    disk allow; where nothing is missing, one that was ready goes. ``key_of`` names the entry of a
    build."""
    global _ready
    most = env.workers()
    missing: dict[Request, list[str]] = {}
    with cache.folder() as folder:
        if folder is not None and most > 0:
            for request in requests:
                keys = [key_of(build) for build in request.builds()]
                missing[request] = [k for k in keys if k is not None and folder.get(k) is None]
    asked = [request for request in requests if missing.get(request)]
    with _lock:
        helper, _ready = _ready, None
        if helper is not None and not helper.runs():
            helper = None
        if helper is None and asked:
            helper = _Helper.spawn(dict.fromkeys(request.module for request in asked))
        if helper is not None:
            until = time.monotonic() + _PATIENCE_SECONDS
            for request in asked:
                _asked.update(dict.fromkeys(missing[request], (helper, until)))
            helper.send(asked, most)


def pending(key: str) -> bool:
    """Whether a helper that was asked for the entry ``key`` is still at work."""
    with _lock:
        helper, until = _asked.get(key, (None, 0.0))
        if helper is not None and helper.runs() and time.monotonic() < until:
            return True
        _asked.pop(key, None)
    return False


@atexit.register
def _stop() -> None:
    """Nobody needs them any more."""
    helpers = [helper for helper, _ in _asked.values()]
    for helper in {id(x): x for x in [_ready, *helpers] if x is not None}.values():
        if helper.runs():
            with suppress(OSError):
                os.killpg(helper.process.pid, signal.SIGKILL)


def _compile(request: Request) -> None:
    from openmsa.kernels.common.compile import ahead

    for build in request.builds():
        ahead(build)


def _main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    # A process forked by the one that asks may hold the pipe open when that one has gone.
    heard, _, _ = select.select([sys.stdin], [], [], _PATIENCE_SECONDS)
    line = sys.stdin.readline() if heard else ""
    at_a_time, requests = json.loads(line or "[0, []]")
    running = 0
    for request in requests:
        if running == at_a_time:
            os.wait()
            running -= 1
        if os.fork() == 0:
            try:
                _compile(Request(**{**request, "names": tuple(request["names"])}))
            finally:  # whatever it was: the process that forked goes on elsewhere
                os._exit(0)
        running += 1
    for _ in range(running):
        os.wait()


if __name__ == "__main__":
    _main()
