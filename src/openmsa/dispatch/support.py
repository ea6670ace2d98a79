"""Needed minus offered: may this kernel do this problem here, and if not, why."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from openmsa.contract.problem import Problem
from openmsa.dispatch.probe import DeviceFacts, Toolchain

__all__ = ["FLOATS", "Offer", "Support", "misfits", "support"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Support:
    """A gate's answer. ``reasons`` says what is missing; it is empty exactly when ``ok``."""

    ok: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Offer:
    """What a kernel can do; None means no restriction.

    Attributes:
        devices: device kinds.
        capabilities: inclusive range of CUDA compute capabilities.
        exact: the only CUDA compute capabilities, where code runs on no other.
        dtypes: input dtypes.
        head_dims: head dims.
        block_sizes: keys per block.
        groups: query heads per KV head.
        group_sizes: the only ones, where a range does not say it.
        topks: top-k values.
        deterministic: can it give bitwise repeatable results?
        package: toolchain it needs, ``"triton"`` or ``"cute_dsl"``.
        shared_memory: bytes of shared memory per thread block that it needs for a problem.
    """

    devices: tuple[str, ...] | None = None
    capabilities: tuple[tuple[int, int], tuple[int, int]] | None = None
    exact: tuple[tuple[int, int], ...] | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATS
    head_dims: Collection[int] | None = None
    block_sizes: Collection[int] | None = None
    groups: range = range(1, 65)
    group_sizes: Collection[int] | None = None
    topks: range = range(1, 65)
    deterministic: bool = True
    package: str | None = None
    shared_memory: Callable[[Problem], int] | None = None


def support(problem: Problem, offer: Offer, facts: DeviceFacts, tools: Toolchain) -> Support:
    """Compare what ``problem`` needs with what ``offer`` has. Never raises for a mismatch."""
    reasons = [
        *misfits(offer, facts),
        *_lacks(
            ("dtype", problem.dtype, offer.dtypes),
            ("head_dim", problem.head_dim, offer.head_dims),
            ("block_size", problem.block_size, offer.block_sizes),
            ("group", problem.group, offer.group_sizes or offer.groups),
            ("topk", problem.topk, offer.topks),
        ),
    ]
    if problem.deterministic and not offer.deterministic:
        reasons.append("deterministic: needs repeatable sums, offers none")
    if offer.package is not None and tools.version(offer.package) is None:
        reasons.append(f"toolchain: needs {offer.package}, which is not installed")
    needed = 0 if offer.shared_memory is None else offer.shared_memory(problem)
    if facts.kind == "cuda" and needed > facts.shared_memory:
        reasons.append(
            f"shared memory: needs {needed} bytes per thread block, "
            f"the device has {facts.shared_memory}"
        )
    return Support(not reasons, tuple(reasons))


def misfits(offer: Offer, facts: DeviceFacts) -> list[str]:
    """Why ``offer`` is not for such a device, whatever the problem; empty where it is."""
    reasons = _lacks(("device", facts.kind, offer.devices))
    if facts.kind != "cuda":
        return reasons
    if offer.capabilities is not None:
        low, high = offer.capabilities
        if facts.capability is None or not low <= facts.capability <= high:
            reasons.append(f"compute capability: needs {facts.capability}, offers {low} to {high}")
    return reasons + _lacks(("compute capability", facts.capability, offer.exact))


def _lacks(*rows: tuple[str, object, Any]) -> list[str]:
    """A reason for each row of name, what is needed, and what is offered (None: anything)."""
    return [
        f"{name}: needs {_show(needed)}, offers {_show_all(offered)}"
        for name, needed, offered in rows
        if offered is not None and needed not in offered
    ]


def _show(value: object) -> str:
    return str(value).removeprefix("torch.")


def _show_all(values: object) -> str:
    if isinstance(values, range):
        return f"{values.start}..{values.stop - 1}"
    return ", ".join(_show(value) for value in values)  # type: ignore[attr-defined]
