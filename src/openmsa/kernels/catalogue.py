"""Every kernel that can be compiled ahead of time, by architecture."""

from __future__ import annotations

import importlib
from typing import Any

from openmsa.errors import UnsupportedProblem
from openmsa.kernels import require_cute_dsl
from openmsa.kernels.build import Build, Roofline

__all__ = ["MODULES", "ROOFLINES", "builds", "roofline", "titles"]

_SM90 = "openmsa.kernels.sm90"
_SM100 = "openmsa.kernels.sm100"
_BACKWARD = (
    "openmsa.kernels.stages.lookup",
    *(
        f"{_SM100}.{name}"
        for name in ("backward_preprocess", "task_build", "backward.launch", "backward_postprocess")
    ),
)

MODULES: dict[str, tuple[str, ...]] = {
    "sm_90a": (
        "openmsa.kernels.stages.lookup",
        f"{_SM90}.forward.launch",
        f"{_SM100}.backward_preprocess",
        f"{_SM90}.task_build",
        f"{_SM90}.backward.launch",
        f"{_SM90}.backward_postprocess",
    ),
    "sm_100a": _BACKWARD,
    "sm_103a": _BACKWARD,
}
"""Architecture -> modules with ``builds(arch)``, in the order of a backward pass. They need the
DSL, and so are imported by name when they are asked for."""

ROOFLINES: dict[tuple[str, str], str] = {
    (arch, kernel): f"{_SM100}.backward.roofline"
    for arch in ("sm_100a", "sm_103a")
    for kernel in ("backward", "backward_in_order")
}
"""Architecture and kernel -> a module with ``roofline(build, products)``."""


def builds(arch: str) -> tuple[Build, ...]:
    """The builds of ``arch``, as the launchers make them for MiniMax-M3's heads.

    Raises:
        UnsupportedProblem: there is no kernel for ``arch``; the message says for which there are.
        UnavailableError: there are kernels, but no DSL here.
    """
    if arch not in MODULES:
        raise UnsupportedProblem(
            f"no kernel is written in the CuTe DSL for {arch}; "
            f"architectures that have some: {', '.join(MODULES)}"
        )
    require_cute_dsl()
    return tuple(
        build for module in MODULES[arch] for build in importlib.import_module(module).builds(arch)
    )


def roofline(build: Build, products: tuple[Any, ...] = ()) -> Roofline | None:
    """What a unit of the kernel's work costs, by the matrix products that its code has (see
    :func:`openmsa.kernels.common.instructions.products`); None for a kernel without a roofline."""
    module = ROOFLINES.get((build.arch, build.name))
    if module is None:
        return None
    found: Roofline = importlib.import_module(module).roofline(build, products)
    return found


def titles(found: tuple[Build, ...]) -> dict[str, Build]:
    """A name for each build that is unique and may name a file: the kernel's, and the facts that
    tell it from other builds of the same kernel. A flag is named where it is set."""
    named: dict[str, Build] = {}
    for build in found:
        title = build.name
        for fact, value in build.facts:
            if len({repr(dict(b.facts).get(fact)) for b in found if b.name == build.name}) > 1:
                if isinstance(value, bool):
                    title += f"-{fact}" if value else ""
                else:
                    title += f"-{fact}-{value}"
        if title in named:
            raise ValueError(f"two builds of {title} do not differ in their facts")
        named[title] = build
    return named
