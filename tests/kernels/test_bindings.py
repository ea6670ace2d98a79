"""The launcher bundle: bound once on first use, never half, and plain about what is not shipped."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from openmsa import InvalidInput, UnavailableError, bindings
from openmsa.bindings import FAMILIES, LAUNCHERS, KernelLaunchers, kernels
from openmsa.contract.problem import STAGES
from openmsa.kernels import MSA_KERNEL_IMPORT_ERROR

SHIPPED = {family: dict(launchers) for family, launchers in FAMILIES.items()}


@pytest.fixture(autouse=True)
def unbound(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing bound, and nothing shipped but what a test registers: toolchains are faked here."""
    for family, launchers in SHIPPED.items():
        for stage in launchers:
            monkeypatch.delitem(FAMILIES[family], stage)
    kernels.cache_clear()
    yield
    kernels.cache_clear()


@pytest.fixture
def dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with the CuTe DSL."""
    for name in ("cutlass", "cuda", "cuda.bindings", "cuda.bindings.driver", "tvm_ffi"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.fixture
def no_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without it."""
    monkeypatch.setitem(sys.modules, "cutlass", None)


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A kernel module with one launcher, registered as the stage ``forward``."""
    module = ModuleType("shipped_kernels")
    module.run_forward = lambda: "ran"
    monkeypatch.setitem(sys.modules, "shipped_kernels", module)
    monkeypatch.setitem(LAUNCHERS, "forward", "shipped_kernels:run_forward")
    return module


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Another module with two launchers, registered for Hopper."""
    module = ModuleType("hopper_kernels")
    module.run_forward = lambda: "ran on Hopper"
    module.build = lambda: "built"
    monkeypatch.setitem(sys.modules, "hopper_kernels", module)
    monkeypatch.setitem(FAMILIES["sm90"], "forward", "hopper_kernels:run_forward")
    monkeypatch.setitem(FAMILIES["sm90"], "task_build", "hopper_kernels:build")
    return module


@pytest.fixture
def triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    """Triton on the path, unimported and failing if imported; or none."""
    if request.param:
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton" / "__init__.py").write_text("raise RuntimeError('imported')\n")
        monkeypatch.delitem(sys.modules, "triton", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
    return request.param


def test_launchers_are_reached_by_name_and_by_attribute(dsl, shipped) -> None:
    bundle = kernels()
    assert isinstance(bundle, KernelLaunchers)
    assert bundle.forward is bundle.by_stage["forward"] is shipped.run_forward
    assert set(bundle.by_stage) == set(LAUNCHERS)


def test_the_bundle_is_frozen(dsl, shipped) -> None:
    bundle = kernels()
    with pytest.raises(TypeError):
        bundle.by_stage["forward"] = print
    with pytest.raises(dataclasses.FrozenInstanceError):
        bundle.by_stage = {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        bundle.forward = print


def test_the_bundle_is_bound_once_and_kept(dsl, shipped, monkeypatch) -> None:
    bundle = kernels()
    monkeypatch.setattr(shipped, "run_forward", print)
    assert kernels() is bundle
    assert bundle.forward() == "ran"
    kernels.cache_clear()
    assert kernels() is not bundle
    assert kernels().forward is print


@pytest.mark.parametrize("triton", [False, True], indirect=True)
def test_a_stage_that_is_not_shipped_is_refused_with_the_others_named(dsl, shipped, triton) -> None:
    with pytest.raises(UnavailableError) as error:
        kernels().backward  # noqa: B018
    message = str(error.value)
    assert "ships no CuTe DSL kernel for 'backward' in family 'sm100'" in message
    assert "(shipped: forward)" in message
    assert '"reference", "cpu"' in message
    assert ('"triton"' in message) is triton
    assert error.value.__cause__ is None


@pytest.mark.parametrize("triton", [False], indirect=True)
def test_a_finder_that_refuses_triton_counts_as_none(dsl, triton, monkeypatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise ModuleNotFoundError("blocked")

    monkeypatch.setattr(importlib.util, "find_spec", refuse)
    with pytest.raises(UnavailableError, match=r'"reference", "cpu"$'):
        kernels().forward  # noqa: B018


def test_what_is_no_stage_fails_as_an_attribute(dsl) -> None:
    assert not hasattr(kernels(), "__wrapped__")
    assert not hasattr(kernels(), "_private")
    assert not hasattr(kernels(), "typo")
    with pytest.raises(AttributeError, match=r"'bakward' is no stage; stages: .*, backward, "):
        kernels().bakward  # noqa: B018


def test_a_stage_that_is_not_shipped_is_no_plain_lack(dsl) -> None:
    """``hasattr`` would hide what to use instead; what is shipped is in ``by_stage``."""
    for stage in sum(STAGES.values(), ()):
        with pytest.raises(UnavailableError, match=f"no CuTe DSL kernel for '{stage}'"):
            hasattr(kernels(), stage)
        assert stage not in kernels().by_stage


def test_a_bundle_can_be_copied(dsl, shipped) -> None:
    """A copy has no fields while it is made, and looks for them."""
    assert copy.copy(kernels()).forward is shipped.run_forward


def test_a_missing_toolchain_is_said_before_any_kernel_is_imported(no_dsl, monkeypatch) -> None:
    monkeypatch.setitem(LAUNCHERS, "forward", "module_that_does_not_exist:run")
    with pytest.raises(UnavailableError) as error:
        kernels()
    assert str(error.value).startswith(MSA_KERNEL_IMPORT_ERROR)


def test_a_bind_without_toolchain_is_not_cached(dsl, shipped, monkeypatch) -> None:
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "cutlass", None)
        for _ in range(2):
            with pytest.raises(UnavailableError):
                kernels()
    assert kernels().forward() == "ran"


def test_a_bind_with_a_broken_kernel_is_not_cached_in_part(dsl, shipped, monkeypatch) -> None:
    with monkeypatch.context() as broken:
        broken.setitem(LAUNCHERS, "backward", "shipped_kernels:run_backward")
        with pytest.raises(AttributeError, match="run_backward"):
            kernels()
    assert set(kernels().by_stage) == {"forward"}


def together(*families: str) -> list[KernelLaunchers]:
    """The bundles that threads get, one for each of ``families``, which all ask at once."""
    start, found = threading.Barrier(len(families)), []

    def ask(family: str) -> None:
        start.wait()
        found.append(kernels(family))

    threads = [threading.Thread(target=ask, args=(family,)) for family in families]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def binds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that bind, slowly."""
    found: list[int] = []

    def slow_gate() -> None:
        found.append(threading.get_ident())
        time.sleep(0.05)

    monkeypatch.setattr(bindings, "require_cute_dsl", slow_gate)
    return found


def test_threads_that_race_to_the_first_call_bind_once(dsl, shipped, binds) -> None:
    found = together(*["sm100"] * 8)
    assert len(binds) == 1
    assert len(found) == 8
    assert all(bundle is found[0] for bundle in found)


def test_threads_that_race_to_two_families_bind_each_once(dsl, shipped, hopper, binds) -> None:
    found = together(*["sm100", "sm90"] * 4)
    assert len(binds) == 2
    for family in FAMILIES:
        (bundle,) = {id(bundle): bundle for bundle in found if bundle.family == family}.values()
        assert bundle is kernels(family)


def test_each_family_is_bound_on_its_own(dsl, shipped, hopper) -> None:
    bundle = kernels(family="sm90")
    assert bundle.family == "sm90"
    assert bundle.forward is hopper.run_forward
    assert set(bundle.by_stage) == {"forward", "task_build"}
    assert kernels().family == "sm100"
    assert kernels().forward is shipped.run_forward
    assert kernels("sm100") is kernels()
    assert kernels("sm90") is kernels(family="sm90") is bundle
    with pytest.raises(
        UnavailableError, match=r"'backward' in family 'sm90' \(shipped: forward, t"
    ):
        bundle.backward  # noqa: B018


def test_a_family_is_not_imported_for_another(dsl, shipped, monkeypatch) -> None:
    monkeypatch.setitem(FAMILIES["sm90"], "forward", "module_that_does_not_exist:run")
    assert kernels().forward() == "ran"
    with pytest.raises(ModuleNotFoundError, match="module_that_does_not_exist"):
        kernels("sm90")
    assert kernels().forward() == "ran"


def test_a_family_that_fails_to_bind_is_not_kept(dsl, hopper, monkeypatch) -> None:
    with monkeypatch.context() as broken:
        broken.setitem(FAMILIES["sm90"], "task_build", "hopper_kernels:nothing")
        with pytest.raises(AttributeError, match="nothing"):
            kernels("sm90")
    assert kernels("sm90").task_build() == "built"


def test_every_family_is_forgotten_at_once(dsl, shipped, hopper) -> None:
    before = [kernels(family) for family in FAMILIES]
    kernels.cache_clear()
    assert not any(
        kernels(family) is bundle for family, bundle in zip(FAMILIES, before, strict=True)
    )


@pytest.mark.parametrize("family", ["sm80", "SM90", "", None, ["sm90"]])
def test_an_unknown_family_is_invalid_and_the_known_are_named(dsl, family) -> None:
    with pytest.raises(InvalidInput, match="family: expected one of sm100, sm90, got"):
        kernels(family)


def test_an_unknown_family_is_said_before_a_missing_toolchain(no_dsl) -> None:
    with pytest.raises(InvalidInput, match="family"):
        kernels("sm80")


def test_the_function_still_says_what_it_is() -> None:
    assert kernels.__name__ == "kernels"
    assert "UnavailableError" in kernels.__doc__
    assert kernels.__module__ == "openmsa.bindings"


def test_every_registered_launcher_has_the_written_form() -> None:
    assert FAMILIES["sm100"] is LAUNCHERS
    for family, launchers in SHIPPED.items():
        assert launchers, family
        for stage, path in launchers.items():
            module, colon, function = path.partition(":")
            assert stage in sum(STAGES.values(), ())
            assert colon
            assert module.startswith("openmsa.kernels.")
            assert function.isidentifier()


@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("sm100", {"backward_preprocess", "task_build", "backward", "backward_postprocess"}),
        (
            "sm90",
            {"forward", "backward_preprocess", "task_build", "backward", "backward_postprocess"},
        ),
    ],
)
def test_what_ships_binds_where_the_toolchain_is(
    family: str, stages: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    for stage, path in SHIPPED[family].items():
        monkeypatch.setitem(FAMILIES[family], stage, path)
    bound = kernels(family)
    assert set(bound.by_stage) == stages
    assert all(callable(launcher) for launcher in bound.by_stage.values())
