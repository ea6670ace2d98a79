"""Compiled kernels on disk.

An entry is a folder named by its key, with ``kernel.o`` (the host function and the kernel in it),
``kernel.ptx``, ``kernel.cubin``, and ``entry.json``: what it is, and the SHA-256 of each file. An
entry that does not match its sums is as good as none. Nothing is ever unpickled.

An entry is written under another name beside its own, flushed, and renamed, so that no reader sees
half of one, and of two writers the second finds the first one's and uses that.

The objects are executed. So the folder has to be ours, and nobody else's to write to; the check is
made on the opened folder, through which everything is then reached, so that a folder put in its
place later is never looked at.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from openmsa.kernels.build import Build
from openmsa.kernels.common.env import CACHE, cache_folder

__all__ = ["FILES", "Entry", "Folder", "disabled", "enabled", "folder", "key_of", "sources"]

FILES = ("kernel.o", "kernel.ptx", "kernel.cubin")
ABOUT = "entry.json"
UNUSED_SECONDS = 90 * 86400
"""Entries that no process has used for so long are removed when another one is written."""

MOST_BYTES = 512 * 2**20
"""Beyond this the entries unused for longest are removed; an entry has about 0.5 MiB."""

_ABANDONED_SECONDS = 86400  # of an unfinished entry whose writer must be gone
_KEY = re.compile(r"[0-9a-f]{64}")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = _READ | os.O_DIRECTORY

_lock = Lock()
_off = 0
_warned: set[str] = set()


@dataclass(frozen=True)
class Entry:
    """A compiled kernel: the files by their names, and JSON values that describe it."""

    files: Mapping[str, bytes]
    about: Mapping[str, Any]


def enabled() -> bool:
    """Whether the disk is used at all; see :func:`disabled`."""
    return _off == 0


@contextmanager
def disabled() -> Iterator[None]:
    """Neither read nor write the disk, in any thread of this process: for the simulator, which
    needs the PTX of what it launches, and an object from the disk has none."""
    global _off
    with _lock:
        _off += 1
    try:
        yield
    finally:
        with _lock:
            _off -= 1


def sources() -> str:
    """A sum over the source files that a kernel's code may come from; "" where there are none."""
    root = Path(__file__).parents[2]
    paths = sorted([*root.glob("kernels/**/*.py"), *root.glob("contract/**/*.py")])
    total = hashlib.sha256()
    for path in paths:
        data = path.read_bytes()
        total.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode())
        total.update(data)
    return total.hexdigest() if paths else ""


def key_of(build: Build, sources: str, versions: Mapping[str, str]) -> str:
    """The name of the entry of ``build``: everything that its code depends on."""
    whole = [sources, sorted(versions.items()), build.name, build.arch, build.facts]
    text = json.dumps(whole, default=_plain, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """A fact as JSON. What has no stable form is refused: its key would be a new one each time."""
    if isinstance(value, torch.dtype):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {type(value).__qualname__: asdict(value)}
    raise TypeError(f"a fact of a build cannot be a {type(value).__name__}: {value!r}")


@contextmanager
def folder() -> Iterator[Folder | None]:
    """The folder of compiled kernels, open; None where there is none to be had."""
    path = cache_folder() if enabled() else None
    opened = None if path is None else _opened(path)
    if opened is None:
        yield None
        return
    try:
        yield Folder(opened)
    finally:
        os.close(opened)


def _opened(path: Path) -> int | None:
    """A descriptor of ``path``, made if need be; None if it cannot be made or may not be used."""
    try:
        for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
            with suppress(FileExistsError):
                missing.mkdir(mode=0o700)
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:  # no home, or one that cannot be written to
        if os.environ.get(CACHE):
            _warn(path, error.strerror or str(error))
        return None
    found = os.fstat(opened)
    if found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"others may write to it (mode {stat.S_IMODE(found.st_mode):03o})"
    else:
        return opened
    os.close(opened)
    _warn(path, f"they are executed, and {reason}")
    return None


def _warn(path: Path, reason: str) -> None:
    """Say once why ``path`` is not used."""
    if str(path) not in _warned:
        _warned.add(str(path))
        warnings.warn(
            f"{path} is not used for compiled kernels: {reason}. Kernels are compiled anew in "
            f"every process; set {CACHE} to a folder of your own, or to off",
            RuntimeWarning,
        )


class Folder:
    """A checked folder of entries, reached through its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._at = descriptor

    def get(self, key: str) -> Entry | None:
        """The entry of ``key``, whole and unchanged, or None. Counts as a use of it."""
        try:
            inside = os.open(key, _FOLDER, dir_fd=self._at)
        except OSError:
            return None
        try:
            about = json.loads(_read(inside, ABOUT))
            sums = about["files"]
            files = {name: _read(inside, name) for name in FILES}
            if about["key"] != key or sums != {name: _sum(data) for name, data in files.items()}:
                return None
            entry = Entry(files, about["about"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        finally:
            with suppress(OSError):  # a use; on a folder that is read-only nobody counts
                os.utime(inside)
            os.close(inside)
        return entry

    def empty(self) -> bool:
        """Whether there is no entry."""
        return not any(_KEY.fullmatch(name) for name in os.listdir(self._at))

    def put(self, key: str, entry: Entry) -> Entry:
        """Keep ``entry``, and give what is kept: another process's where that one was first. A disk
        that is full or read-only keeps nothing."""
        name = f".{key}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            self._write(name, key, entry)
            for _ in range(2):
                try:
                    os.rename(name, key, src_dir_fd=self._at, dst_dir_fd=self._at)
                    os.fsync(self._at)
                    break
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                        raise
                    first = self.get(key)
                    if first is not None:
                        entry = first
                        break
                    self._remove(key)
        except OSError:
            pass
        self._remove(name)
        self.prune(keep=key)
        return entry

    def prune(self, keep: str = "") -> None:
        """Remove what is unfinished and old, what is unused, and what is too much, but not
        ``keep``. Names that are none of ours are left alone."""
        now = time.time()
        left: list[tuple[float, int, str]] = []
        with suppress(OSError):
            for name in os.listdir(self._at):
                # Another process may remove it at the same time.
                with suppress(OSError):
                    unused = now - os.stat(name, dir_fd=self._at, follow_symlinks=False).st_mtime
                    if _KEY.fullmatch(name) and name != keep:
                        if unused > UNUSED_SECONDS:
                            self._remove(name)
                        else:
                            left.append((unused, self._size(name), name))
                    elif _KEY.fullmatch(name[1:65]) and unused > _ABANDONED_SECONDS:
                        self._remove(name)
        total = sum(size for _, size, _ in left)
        for _, size, name in sorted(left, reverse=True):
            if total <= MOST_BYTES:
                break
            self._remove(name)
            total -= size

    def _write(self, name: str, key: str, entry: Entry) -> None:
        about = {
            "key": key,
            "files": {file: _sum(data) for file, data in entry.files.items()},
            "about": dict(entry.about),
        }
        files = {**entry.files, ABOUT: json.dumps(about, indent=1).encode()}
        os.mkdir(name, 0o700, dir_fd=self._at)
        inside = os.open(name, _FOLDER, dir_fd=self._at)
        try:
            for file, data in files.items():
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with open(os.open(file, flags, 0o600, dir_fd=inside), "wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
            os.fsync(inside)
        finally:
            os.close(inside)

    def _size(self, name: str) -> int:
        inside = os.open(name, _FOLDER, dir_fd=self._at)
        try:
            return sum(os.stat(file, dir_fd=inside).st_size for file in os.listdir(inside))
        finally:
            os.close(inside)

    def _remove(self, name: str) -> None:
        """Remove an entry, if it is there; folders inside it, which we never make, stop that."""
        with suppress(OSError):
            inside = os.open(name, _FOLDER, dir_fd=self._at)
            try:
                for file in os.listdir(inside):
                    os.unlink(file, dir_fd=inside)
            finally:
                os.close(inside)
            os.rmdir(name, dir_fd=self._at)


def _read(inside: int, name: str) -> bytes:
    with open(os.open(name, _READ, dir_fd=inside), "rb") as stream:
        return stream.read()


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
