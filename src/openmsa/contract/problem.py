"""The records that cross from policy to kernels: what is asked, and what was saved for backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.contract.key_schedule import KeySchedule

__all__ = ["STAGES", "AttentionConfig", "Problem", "Saved", "SelectionConfig", "accumulate_dtype"]

STAGES: dict[str, tuple[str, ...]] = {
    "select": ("block_scores", "select_blocks"),
    "attention": (
        "key_schedule",
        "forward",
        "backward_preprocess",
        "task_build",
        "backward",
        "backward_postprocess",
    ),
}
"""The stages of each piece of work, in the order they run."""


@dataclass(frozen=True)
class Problem:
    """The static facts a gate decides on: nothing here depends on token or document counts.

    ``work`` is ``"select"`` or ``"attention"``; ``head_dim`` is the index dim for ``"select"``.
    """

    work: str
    device: torch.device
    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    topk: int
    deterministic: bool = False

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads


@dataclass(frozen=True)
class SelectionConfig:
    """How blocks are chosen: sizes, forced blocks, and the scale of the selected lse."""

    topk: int
    block_size: int
    init_blocks: int
    local_blocks: int
    scale: float
    return_lse: bool


@dataclass(frozen=True)
class AttentionConfig:
    """How attention runs: block size, softmax scale, and whether sums must be repeatable."""

    block_size: int
    scale: float
    deterministic: bool


@dataclass(frozen=True, eq=False)
class Saved:
    """What the forward leaves for the backward. Shapes as in :func:`openmsa.sparse_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    indices: Tensor
    schedule: KeySchedule


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for every input dtype but fp64, which keeps its own precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32
