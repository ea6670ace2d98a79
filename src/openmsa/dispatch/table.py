"""The table: backend x stage, on one page.

A cell is a launcher, or a reason why there is none. A stage that another stage of the same backend
already does is *fused*. Borrowing another backend's stage is a cell that names its launcher. A
backend with kernels for several families of devices has a cell for each: ``this | that``. This
table is also where the README's support table and ``openmsa info`` come from.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from openmsa.contract.problem import STAGES, Problem
from openmsa.dispatch.support import Offer
from openmsa.kernels.launchers import FAMILIES

__all__ = ["BACKENDS", "HOPPER", "ORDER", "STAGES", "TABLE", "Cell", "launcher"]

RAN, SIMULATED, COMPILED = "ran", "simulated", "compiled only"

_ANYTHING = Offer()


@dataclass(frozen=True)
class Cell:
    """One backend's answer for one stage.

    Attributes:
        launcher: ``"module:function"``, or None.
        offer: what the launcher can do.
        evidence: ``"ran"``, ``"simulated"`` or ``"compiled only"``, and where.
        fused: the stage of the same backend that already does this one.
        reason: why there is neither.
        others: the cells of other families of devices, asked in this order after this one.
    """

    launcher: str | None = None
    offer: Offer = _ANYTHING
    evidence: str = ""
    where: str = ""
    fused: str = ""
    reason: str = ""
    others: tuple[Cell, ...] = ()

    def __or__(self, other: Cell) -> Cell:
        """This cell and, for the devices that it does not take, ``other``."""
        return replace(self, others=(*self.others, *other.families))

    @property
    def families(self) -> tuple[Cell, ...]:
        """The cells one by one, in the order they are asked."""
        return (replace(self, others=()), *self.others) if self.others else (self,)


def _reference(function: str) -> Cell:
    return Cell(f"openmsa.reference.{function}", Offer(), RAN, "x86 CPU")


def _cpu(function: str) -> Cell:
    return Cell(f"openmsa.backends.cpu.{function}", Offer(devices=("cpu",)), RAN, "x86 CPU")


def _triton(function: str, shared_memory: tuple[int, int] = (0, 0)) -> Cell:
    """``shared_memory``: bytes of the smallest tiles for head dims up to 64 and for larger ones
    (docs/hardware/triton.md). Devices that have more get larger tiles."""

    def needed(problem: Problem) -> int:
        return shared_memory[problem.head_dim > 64]

    offer = Offer(
        devices=("cuda",),
        capabilities=((8, 0), (12, 9)),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(64, 96, 128),
        block_sizes=(64, 128),
        package="triton",
        shared_memory=needed,
    )
    return Cell(f"openmsa.backends.triton.{function}", offer, RAN, "H200")


def _cute(*capabilities: tuple[int, int]) -> Offer:
    """What the CuTe DSL kernels for these devices take."""
    return Offer(
        devices=("cuda",),
        exact=capabilities,
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(128,),
        block_sizes=(128,),
        group_sizes=(8, 16, 32, 64),
        package="cute_dsl",
        shared_memory=lambda problem: 232_448,
    )


HOPPER = (9, 0)
"""The capability whose forward and backward are both written in the CuTe DSL."""

_SM90, _SM100 = _cute(HOPPER), _cute((10, 0), (10, 3))


def _sm90(stage: str) -> Cell:
    return Cell(FAMILIES["sm90"][stage], _SM90, RAN, "H200")


def _sm100(stage: str) -> Cell:
    return Cell(FAMILIES["sm100"][stage], _SM100, SIMULATED, "10.0, 10.3")


def _by_triton(cell: Cell, family: Offer, evidence: str, where: str) -> Cell:
    """A stage of Triton's, where a family's own kernels run."""
    offer = replace(cell.offer, exact=family.exact)
    return replace(cell, offer=offer, evidence=evidence, where=f"{where}, by Triton")


_KEY_SCHEDULE = _triton("schedule:key_schedule")
_FORWARD = _triton("forward:forward", (40_960, 81_928))
_NO_CUTE = Cell(reason="this version ships no CuTe DSL kernel for it")

TABLE: dict[str, dict[str, Cell]] = {
    "cute": {
        "block_scores": _NO_CUTE,
        "select_blocks": _NO_CUTE,
        "key_schedule": _by_triton(_KEY_SCHEDULE, _SM90, RAN, "H200")
        | _by_triton(_KEY_SCHEDULE, _SM100, COMPILED, "10.0"),
        "forward": _sm90("forward") | _by_triton(_FORWARD, _SM100, SIMULATED, "10.0"),
        "backward_preprocess": _sm90("backward_preprocess") | _sm100("backward_preprocess"),
        "task_build": _sm90("task_build") | _sm100("task_build"),
        "backward": _sm90("backward") | _sm100("backward"),
        "backward_postprocess": _sm90("backward_postprocess") | _sm100("backward_postprocess"),
    },
    "triton": {
        "block_scores": Cell(fused="select_blocks"),
        "select_blocks": _triton("selection:select_blocks", (33_792, 67_584)),
        "key_schedule": _KEY_SCHEDULE,
        "forward": _FORWARD,
        "backward_preprocess": _triton("backward:backward_preprocess"),
        "task_build": Cell(fused="backward"),
        "backward": _triton("backward:backward", (57_608, 98_600)),
        "backward_postprocess": _triton("backward:backward_postprocess"),
    },
    "cpu": {
        "block_scores": Cell(fused="select_blocks"),
        "select_blocks": _cpu("selection:select_blocks"),
        "key_schedule": Cell(
            "openmsa.reference.schedule:key_schedule", Offer(devices=("cpu",)), RAN, "x86 CPU"
        ),
        "forward": _cpu("forward:forward"),
        "backward_preprocess": _cpu("backward:backward_preprocess"),
        "task_build": Cell(fused="backward"),
        "backward": _cpu("backward:backward"),
        "backward_postprocess": Cell(fused="backward"),
    },
    "reference": {
        "block_scores": Cell(fused="select_blocks"),
        "select_blocks": _reference("selection:select_blocks"),
        "key_schedule": _reference("schedule:key_schedule"),
        "forward": _reference("attention:forward"),
        "backward_preprocess": _reference("attention:backward_preprocess"),
        "task_build": _reference("schedule:task_build"),
        "backward": _reference("attention:backward"),
        "backward_postprocess": _reference("attention:backward_postprocess"),
    },
}

ORDER = ("cute", "triton", "cpu", "reference")
"""The order in which ``backend="auto"`` asks."""

BACKENDS = ("auto", *sorted(ORDER))


@cache
def launcher(path: str) -> Callable[..., Any]:
    """The function a cell names, imported on first use."""
    module, function = path.split(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded
