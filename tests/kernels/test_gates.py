"""The gates in front of the CuTe kernels: what passes, what is refused, and in which words."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import pytest
import torch

from openmsa import InvalidInput, UnavailableError, UnsupportedProblem, kernels

SOURCE = Path(kernels.__file__)
INSTALL = 'pip install "openmsa[cute]"'


class FakeCuda:
    """A driver with the given capabilities, one per device, that counts what it is asked."""

    def __init__(self, *capabilities: tuple[int, int]) -> None:
        self.capabilities = capabilities
        self.current = 0
        self.asked: Counter[tuple[str, int]] = Counter()

    def is_available(self) -> bool:
        return bool(self.capabilities)

    def device_count(self) -> int:
        return len(self.capabilities)

    def current_device(self) -> int:
        self._need_device()
        return self.current

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return self.capabilities[self._ask("capability", device)]

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=100 + self._ask("properties", device))

    def _ask(self, what: str, device: object) -> int:
        self._need_device()
        index = device if isinstance(device, int) else torch.device(device).index
        index = self.current if index is None else index
        self.asked[what, index] += 1
        return index

    def _need_device(self) -> None:
        if not self.capabilities:
            raise AssertionError("Torch not compiled with CUDA enabled")


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeCuda]]:
    """``fake_cuda((9, 0), ...)`` replaces the driver; the memos start and end empty."""

    def install(*capabilities: tuple[int, int]) -> FakeCuda:
        driver = FakeCuda(*capabilities)
        for name in (
            "is_available",
            "device_count",
            "current_device",
            "get_device_capability",
            "get_device_properties",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(driver, name))
        return driver

    forget()
    yield install
    forget()


def forget() -> None:
    memos = [memo for memo in vars(kernels).values() if hasattr(memo, "cache_clear")]
    assert len(memos) == 2, "the two memoised driver queries"
    for memo in memos:
        memo.cache_clear()


def cuda(index: int | None = None) -> torch.device:
    return torch.device("cuda") if index is None else torch.device("cuda", index)


def assert_names_the_others(message: str) -> None:
    for name in ('"auto"', '"triton"', '"cpu"', '"reference"'):
        assert name in message, message


GATES = {
    kernels.require_sm90: (9, 0),
    kernels.require_sm100: (10, 0),
    kernels.require_sm103: (10, 3),
}
every_gate = pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)


@every_gate
def test_the_gates_own_capability_passes(fake_cuda, gate) -> None:
    fake_cuda(GATES[gate])
    assert gate(cuda(0)) is None
    assert gate(cuda()) is None


CAPABILITIES = ((8, 0), (8, 9), (9, 0), (9, 1), (10, 0), (10, 1), (10, 3), (12, 0))


@pytest.mark.parametrize(
    ("gate", "capability"),
    [(gate, other) for gate, own in GATES.items() for other in CAPABILITIES if other != own],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("index", [0, None])
def test_other_capabilities_are_refused(fake_cuda, gate, capability, index) -> None:
    wanted = ".".join(map(str, GATES[gate]))
    fake_cuda(capability)
    with pytest.raises(UnsupportedProblem) as error:
        gate(cuda(index))
    message = str(error.value)
    assert f"the {gate.__name__.removeprefix('require_').upper()} kernels need" in message
    assert f"need compute capability {wanted}" in message
    assert f"{cuda(index)} has compute capability {capability[0]}.{capability[1]}" in message
    assert_names_the_others(message)


@every_gate
def test_the_refusal_is_a_not_implemented_error(fake_cuda, gate) -> None:
    fake_cuda((8, 0))
    with pytest.raises(NotImplementedError):
        gate(cuda(0))


@every_gate
@pytest.mark.parametrize("kind", ["cpu", "meta"])
@pytest.mark.parametrize("there", [False, True], ids=["no-cuda", "cuda"])
def test_a_device_of_another_kind_is_refused(fake_cuda, gate, kind, there) -> None:
    fake_cuda(*[GATES[gate]] * there)
    with pytest.raises(UnsupportedProblem, match=f"{kind} has no CUDA capability") as error:
        gate(torch.device(kind))
    assert_names_the_others(str(error.value))


@pytest.mark.parametrize("index", [0, 1, None])
@pytest.mark.parametrize("gate", [*GATES, kernels.sm_capability, kernels.sm_count])
def test_without_cuda_the_refusal_is_ours_not_torchs(fake_cuda, gate, index) -> None:
    fake_cuda()
    with pytest.raises(UnsupportedProblem, match="no CUDA device here") as error:
        gate(cuda(index))
    assert str(cuda(index)) in str(error.value)
    assert_names_the_others(str(error.value))


def test_a_refusal_is_not_remembered(fake_cuda) -> None:
    fake_cuda()
    for query in (kernels.sm_capability, kernels.sm_count):
        with pytest.raises(UnsupportedProblem):
            query(cuda(0))
    fake_cuda((10, 0))
    assert kernels.sm_capability(cuda(0)) == (10, 0)
    assert kernels.sm_count(cuda(0)) == 100


@pytest.mark.parametrize("query", [kernels.sm_capability, kernels.sm_count])
@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_a_query_about_another_kind_of_device_is_invalid(fake_cuda, query, kind) -> None:
    fake_cuda((10, 0))
    with pytest.raises(InvalidInput, match=f"device: expected a CUDA device, got {kind}"):
        query(torch.device(kind))


def test_one_driver_query_per_device(fake_cuda) -> None:
    driver = fake_cuda((10, 0), (9, 0))
    for _ in range(50):
        kernels.require_sm100(cuda(0))
        kernels.require_sm100(cuda())
        for index, capability in enumerate(driver.capabilities):
            assert kernels.sm_capability(cuda(index)) == capability
            assert kernels.sm_count(cuda(index)) == 100 + index
            with pytest.raises(UnsupportedProblem):
                kernels.require_sm100(cuda(1))
    queries = [(what, index) for what in ("capability", "properties") for index in (0, 1)]
    assert driver.asked == Counter(queries)


def test_an_indexed_device_needs_no_driver_after_the_first_call(fake_cuda, monkeypatch) -> None:
    fake_cuda((10, 0))
    kernels.require_sm100(cuda(0))
    kernels.sm_count(cuda(0))

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the driver was asked again")

    for name in ("is_available", "current_device", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    kernels.require_sm100(cuda(0))
    assert kernels.sm_count(cuda(0)) == 100


def test_a_later_change_of_the_current_device_is_honoured(fake_cuda) -> None:
    driver = fake_cuda((10, 0), (9, 0))
    assert (kernels.sm_capability(cuda()), kernels.sm_count(cuda())) == ((10, 0), 100)
    driver.current = 1
    assert (kernels.sm_capability(cuda()), kernels.sm_count(cuda())) == ((9, 0), 101)
    with pytest.raises(UnsupportedProblem, match=r"9\.0"):
        kernels.require_sm100(cuda())
    driver.current = 0
    assert (kernels.sm_capability(cuda()), kernels.sm_count(cuda())) == ((10, 0), 100)
    assert set(driver.asked.values()) == {1}


def test_the_message_says_what_to_install() -> None:
    for word in ("nvidia-cutlass-dsl==4.6.2", "cuda-bindings", "Linux", INSTALL):
        assert word in kernels.MSA_KERNEL_IMPORT_ERROR


def test_the_message_and_the_package_metadata_pin_the_same_dsl() -> None:
    pyproject = SOURCE.parents[3] / "pyproject.toml"
    if not pyproject.is_file():
        pytest.skip("not a source checkout")
    pin = next(line for line in pyproject.read_text().splitlines() if "cutlass-dsl" in line)
    assert pin.strip(' ",').partition(";")[0].replace("[cu13]", "") == "nvidia-cutlass-dsl==4.6.2"


BLOCKED = """
import importlib.abc, json, sys, types

class Block(importlib.abc.MetaPathFinder):
    names = ()

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

block = Block()
sys.meta_path.insert(0, block)
from openmsa import kernels
from openmsa.errors import UnavailableError

def answer(present, *names):
    block.names = names
    for name in ("cutlass", "cuda", "cuda.bindings", "cuda.bindings.driver"):
        sys.modules.pop(name, None)
    for name in present:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    try:
        kernels.require_cute_dsl()
    except UnavailableError as error:
        return [str(error), type(error.__cause__).__name__, str(error.__cause__)]

print(json.dumps({
    "cutlass": answer(["cuda", "cuda.bindings", "cuda.bindings.driver"], "cutlass"),
    "cuda.bindings.driver": answer(["cutlass", "cuda", "cuda.bindings"], "cuda.bindings.driver"),
    "both": answer([], "cutlass", "cuda"),
}))
"""


def test_a_missing_toolchain_is_named_with_its_remedy() -> None:
    path = os.pathsep.join([str(SOURCE.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for missing in ("cutlass", "cuda.bindings.driver"):
        message, cause, said = answers[missing]
        assert message.startswith(kernels.MSA_KERNEL_IMPORT_ERROR)
        assert f"cannot import {missing}:" in message
        assert (cause, said) == ("ModuleNotFoundError", f"{missing} is blocked")
    assert "cannot import cutlass:" in answers["both"][0], "cutlass is tried first"


@pytest.fixture
def fake_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cutlass", "cuda", "cuda.bindings", "cuda.bindings.driver", "tvm_ffi"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def test_the_toolchain_gate_lets_a_present_dsl_pass(fake_dsl) -> None:
    assert kernels.require_cute_dsl() is None


def test_a_dsl_that_fails_in_its_own_way_is_not_called_missing(fake_dsl, monkeypatch) -> None:
    """Only an ImportError means absence; a broken installation must show its own traceback."""

    def broken(name: str) -> NoReturn:
        raise RuntimeError(f"{name} met an old driver")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match="old driver"):
        kernels.require_cute_dsl()


def test_unavailable_is_an_import_error() -> None:
    assert issubclass(UnavailableError, ImportError)


def test_the_gates_import_only_what_every_host_has() -> None:
    nodes = list(ast.walk(ast.parse(SOURCE.read_text())))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert found == {"__future__", "functools", "importlib", "torch", "openmsa.errors"}


@pytest.mark.parametrize("gate", [*GATES, kernels.sm_count])
@pytest.mark.parametrize("device", ["cuda:0", 0, None])
def test_a_gate_takes_a_device_and_says_so(gate: Callable[..., object], device: object) -> None:
    with pytest.raises(InvalidInput, match=r"device: expected a torch\.device, got"):
        gate(device)
