"""Every kernel that can be compiled ahead of time, by architecture."""

from __future__ import annotations

import importlib
from typing import Any

from openmsa.errors import UnsupportedProblem
from openmsa.kernels import require_cute_dsl
from openmsa.kernels.build import Build, Roofline

__all__ = ["MODULES", "ROOFLINES", "builds", "roofline", "titles"]

_SM100 = "openmsa.kernels.sm100"
_BACKWARD = (
    "openmsa.kernels.stages.lookup",
    *(
        f"{_SM100}.{name}"
        for name in ("backward_preprocess", "task_build", "backward.launch", "backward_postprocess")
    ),
)

MODULES: dict[str, tuple[str, ...]] = {"sm_100a": _BACKWARD, "sm_103a": _BACKWARD, "sm_90a": ()}
"""Architecture -> modules with ``builds(arch)``, in the order of a backward pass. They need the
DSL, and so are imported by name when they are asked for."""

ROOFLINES = {
    "backward": f"{_SM100}.backward.roofline",
    "backward_in_order": f"{_SM100}.backward.roofline",
}
"""Kernel -> a module with ``roofline(build, products)``."""


def builds(arch: str) -> tuple[Build, ...]:
    """The builds of ``arch``, as the launchers make them for MiniMax-M3's heads.

    Raises:
        UnsupportedProblem: there is no kernel for ``arch``; the message says for which there are.
        UnavailableError: there are kernels, but no DSL here.
    """
    modules = MODULES.get(arch, ())
    if not modules:
        have = ", ".join(name for name, found in MODULES.items() if found) or "none yet"
        raise UnsupportedProblem(
            f"no kernel is written in the CuTe DSL for {arch}; architectures that have some: {have}"
        )
    require_cute_dsl()
    return tuple(
        build for module in modules for build in importlib.import_module(module).builds(arch)
    )


def roofline(build: Build, products: tuple[Any, ...] = ()) -> Roofline | None:
    """What a unit of the kernel's work costs, by the matrix products that its code has (see
    :func:`openmsa.kernels.common.instructions.products`); None for a kernel without a roofline."""
    if build.name not in ROOFLINES:
        return None
    found: Roofline = importlib.import_module(ROOFLINES[build.name]).roofline(build, products)
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
