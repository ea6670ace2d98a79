"""Compiled kernels on disk: what a key depends on, whose folder is used, and what survives."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from openmsa.kernels.build import Build
from openmsa.kernels.common import cache, env

KEY, OTHER = "a" * 64, "b" * 64


def entry(fill: bytes = b"x", size: int = 100) -> cache.Entry:
    return cache.Entry(dict.fromkeys(cache.FILES, fill * size), {"made of": fill.decode()})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and the folder that belongs to it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(env.CACHE, raising=False)
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_off", 0)
    (tmp_path / "home").mkdir()
    return tmp_path / "home" / ".cache" / "openmsa" / "kernels"


def test_an_entry_comes_back_as_it_was(home: Path) -> None:
    with cache.folder() as folder:
        assert folder.get(KEY) is None
        mine = entry()
        assert folder.put(KEY, mine) is mine
        assert folder.get(KEY) == mine
        assert folder.get(OTHER) is None
    assert [path.name for path in home.iterdir()] == [KEY], "nothing unfinished is left"


def test_only_the_user_may_look_into_what_is_made(home: Path) -> None:
    before = os.umask(0)
    try:
        with cache.folder() as folder:
            folder.put(KEY, entry())
    finally:
        os.umask(before)
    for path in (home, home.parent, home / KEY):
        assert path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (home / KEY).iterdir()} == {0o600}


def test_where_it_lies(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.cache_folder() == home
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert env.cache_folder() == home
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_folder() == tmp_path / "openmsa" / "kernels"
    monkeypatch.setenv(env.CACHE, str(tmp_path / "mine"))
    assert env.cache_folder() == tmp_path / "mine"
    monkeypatch.setenv(env.CACHE, "OFF")
    assert env.cache_folder() is None
    with cache.folder() as folder:
        assert folder is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused_once(home: Path, mode: int) -> None:
    home.mkdir(parents=True)
    home.chmod(mode)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            with cache.folder() as folder:
                assert folder is None
    assert len(told) == 1
    assert "others may write to it" in str(told[0].message)
    assert env.CACHE in str(told[0].message)
    assert str(home) in str(told[0].message)


def test_a_folder_of_somebody_else_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir(parents=True)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with (
        pytest.warns(RuntimeWarning, match=f"it belongs to user {owner}"),
        cache.folder() as folder,
    ):
        assert folder is None


@pytest.mark.parametrize("place", ["/proc/nobody", "/dev/null/under-a-file"])
def test_a_home_that_cannot_be_written_to_is_no_cache(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", place)
    with warnings.catch_warnings(), cache.folder() as folder:
        warnings.simplefilter("error")
        assert folder is None


def test_a_folder_that_was_asked_for_and_cannot_be_had_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(env.CACHE, str(tmp_path / "file"))
    with (
        pytest.warns(RuntimeWarning, match="file is not used for compiled kernels"),
        cache.folder() as folder,
    ):
        assert folder is None
    with warnings.catch_warnings(), cache.folder() as folder:
        warnings.simplefilter("error")  # once is enough
        assert folder is None


def test_no_home_at_all_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(Path, "home", nowhere)
    assert env.cache_folder() is None


@pytest.mark.parametrize("call", ["mkdir", "rename", "fsync"])
def test_a_disk_that_keeps_nothing_changes_nothing(
    home: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only, or full. (Modes of folders mean nothing to root, so the calls fail by hand.)"""
    with cache.folder() as folder:
        folder.put(KEY, entry())

        def fail(*args: object, **kwargs: object) -> None:
            raise OSError(30, "Read-only file system")

        for name in (call, "utime"):
            monkeypatch.setattr(os, name, fail)
        mine = entry(b"y")
        assert folder.put(OTHER, mine) is mine
        assert folder.get(KEY) == entry()
    monkeypatch.undo()
    assert {path.name for path in home.iterdir()} <= {KEY, OTHER}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to folders of any mode")
def test_a_read_only_folder_is_read(home: Path) -> None:
    with cache.folder() as folder:
        folder.put(KEY, entry())
    home.chmod(0o500)
    try:
        with cache.folder() as folder:
            assert folder.get(KEY) == entry()
            folder.put(OTHER, entry(b"y"))
            assert folder.get(OTHER) is None
    finally:
        home.chmod(0o700)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _link(file: Path) -> None:
    shutil.copy(file, file.parent.parent / "elsewhere")
    file.unlink()
    file.symlink_to(file.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name in (*cache.FILES, cache.ABOUT)
        for damage in (_truncate, _flip, _link, Path.unlink)
        # A letter of the description may be another one; the files have sums.
        if (name, damage) != (cache.ABOUT, _flip)
    ],
)
def test_a_damaged_entry_is_none_and_is_replaced(
    home: Path, name: str, damage: Callable[[Path], None]
) -> None:
    with cache.folder() as folder:
        folder.put(KEY, entry())
        damage(home / KEY / name)
        assert folder.get(KEY) is None
        mine = entry(b"y")
        assert folder.put(KEY, mine) is mine
        assert folder.get(KEY) == mine


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"key": 1, "files": 2}', "\xff"])
def test_a_foreign_description_is_none(home: Path, text: str) -> None:
    with cache.folder() as folder:
        folder.put(KEY, entry())
        (home / KEY / cache.ABOUT).write_text(text, encoding="latin-1")
        assert folder.get(KEY) is None


def test_an_entry_under_another_name_is_none(home: Path) -> None:
    with cache.folder() as folder:
        folder.put(KEY, entry())
        shutil.copytree(home / KEY, home / OTHER)
        (home / ("c" * 64)).symlink_to(home / KEY)
        assert folder.get(OTHER) is None
        assert folder.get("c" * 64) is None


def test_who_comes_second_gets_what_the_first_one_kept(home: Path) -> None:
    with cache.folder() as folder, cache.folder() as rival:
        folder.put(KEY, entry(b"1"))
        assert rival.put(KEY, entry(b"2")) == entry(b"1")
        assert folder.get(KEY) == entry(b"1")
    assert [path.name for path in home.iterdir()] == [KEY]


RACE = """
import os, sys, time
from openmsa.kernels.common import cache
mine = cache.Entry({name: sys.argv[1].encode() * 100_000 for name in cache.FILES}, {})
print("ready", flush=True)
sys.stdin.readline()
seen = set()
for turn in range(40):
    key = f"{turn:064x}"
    with cache.folder() as folder:
        kept = folder.put(key, mine)
        again = folder.get(key)
    assert again == kept, (turn, again is None)
    seen.add(kept.files["kernel.o"][:1])
print(sorted(seen))
"""


def test_two_processes_at_once_agree_on_every_entry(home: Path) -> None:
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(cache.__file__).parents[3])},
        )
        for name in "12"
    ]  # fmt: skip
    for rival in rivals:
        assert rival.stdout.readline() == "ready\n", rival.stderr.read()
    for rival in rivals:
        rival.stdin.write("go\n")
        rival.stdin.flush()
    for rival in rivals:
        _, errors = rival.communicate(timeout=120)
        assert rival.returncode == 0, errors
    assert sorted(path.name for path in home.iterdir()) == [f"{turn:064x}" for turn in range(40)]


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_what_nobody_uses_goes_when_something_comes(home: Path) -> None:
    with cache.folder() as folder:
        for name in "123":
            folder.put(name * 64, entry())
        for name in "12":
            age(home / (name * 64), cache.UNUSED_SECONDS + 60)
        assert folder.get("2" * 64) is not None, "a use, which counts"
        (home / "notes").write_text("not ours")
        (home / f".{KEY}.1.0").mkdir()
        (home / f".{OTHER}.1.0").mkdir()
        age(home / f".{KEY}.1.0", 2 * 86400)
        folder.put("4" * 64, entry())
    left = {path.name for path in home.iterdir()}
    assert left == {"2" * 64, "3" * 64, "4" * 64, f".{OTHER}.1.0", "notes"}


def test_too_much_is_cut_from_what_is_unused_for_longest(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache.folder() as folder:
        for at, name in enumerate("1234"):
            folder.put(name * 64, entry(size=1000))
            age(home / (name * 64), 1000 - at)
        monkeypatch.setattr(cache, "MOST_BYTES", 8000)
        folder.put("5" * 64, entry(size=1000))
    assert {path.name[0] for path in home.iterdir()} == {"3", "4", "5"}


def test_the_disk_can_be_switched_off_for_a_while(home: Path) -> None:
    seen = []

    def look() -> None:
        with cache.folder() as folder:
            seen.append(folder)

    with cache.disabled():
        with cache.disabled():
            pass
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
        assert not cache.enabled()
    assert seen == [None, None]
    assert not home.exists()
    look()
    assert seen[2] is not None


@dataclass(frozen=True)
class Facts:
    width: int
    dtype: torch.dtype = torch.bfloat16


def build(name: str = "k", arch: str = "sm_100a", **facts: object) -> Build:
    return Build(name, arch, tuple(facts.items()), lambda: (None, ()))


def test_a_key_depends_on_everything_that_code_depends_on() -> None:
    versions = {"python": "3.12.0", "torch": "2.8"}
    keys = [
        cache.key_of(build(), "s", versions),
        cache.key_of(build(), "t", versions),
        cache.key_of(build(), "s", {**versions, "torch": "2.9"}),
        cache.key_of(build("l"), "s", versions),
        cache.key_of(build(arch="sm_103a"), "s", versions),
        cache.key_of(build(config=Facts(1)), "s", versions),
        cache.key_of(build(config=Facts(2)), "s", versions),
        cache.key_of(build(config=Facts(1, torch.float16)), "s", versions),
        cache.key_of(build(flag=True), "s", versions),
        cache.key_of(build(flag=1), "s", versions),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in keys)
    assert cache.key_of(build(config=Facts(1)), "s", versions) == keys[5]


def test_a_fact_without_a_stable_form_is_refused() -> None:
    with pytest.raises(TypeError, match="a fact of a build cannot be a object"):
        cache.key_of(build(thing=object()), "s", {})


def test_a_changed_source_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(cache.__file__).parents[2]
    copy = tmp_path / "openmsa"
    for part in ("kernels", "contract"):
        shutil.copytree(package / part, copy / part)
    before = cache.sources()
    monkeypatch.setattr(cache, "__file__", str(copy / "kernels" / "common" / "cache.py"))
    assert cache.sources() == before, "where the package lies is no part of it"
    for name in ("kernels/schedule.py", "kernels/common/ptx.py", "contract/tasks.py"):
        text = (copy / name).read_text()
        (copy / name).write_text(text + "\n")
        assert cache.sources() != before, name
        (copy / name).write_text(text)
    (copy / "kernels" / "new.py").touch()
    assert cache.sources() != before
    shutil.rmtree(copy)
    assert cache.sources() == "", "no sources, no key"


def test_nothing_is_ever_unpickled() -> None:
    """No module between the disk and a function imports anything that runs what it reads."""
    for name in ("cache", "compile", "env", "cubin"):
        tree = ast.parse((Path(cache.__file__).parent / f"{name}.py").read_text())
        nodes = list(ast.walk(tree))
        found = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        found |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not found & {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "joblib"}
        calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        assert not calls & {"eval", "exec", "torch.load", "numpy.load"}


def test_a_description_is_readable(home: Path) -> None:
    with cache.folder() as folder:
        folder.put(KEY, entry())
    described = json.loads((home / KEY / cache.ABOUT).read_text())
    assert described["about"] == {"made of": "x"}
    assert set(described["files"]) == set(cache.FILES)
