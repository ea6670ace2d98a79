"""Small packed problems for the backward, with their float64 truth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openmsa import Documents
from openmsa.contract.problem import AttentionConfig, Saved
from openmsa.reference.schedule import key_schedule
from openmsa.testing import Inputs, assert_ok, attention_truth
from openmsa.testing.oracle import AttentionTruth

BLOCK, DIM = 128, 128


@dataclass(frozen=True)
class Backward:
    """What the backward's stages take, and what they must give."""

    docs: Documents
    inputs: Inputs
    indices: Tensor
    truth: AttentionTruth

    @property
    def group(self) -> int:
        return self.inputs.q.shape[1] // self.inputs.k.shape[1]

    def saved(self) -> Saved:
        """The forward's results: the truth, rounded as a forward would."""
        found, inputs = self.truth.quantities, self.inputs
        out = found["out"].exact.to(inputs.q.dtype)
        lse = found["lse"].exact.float()
        schedule = key_schedule(self.indices, self.docs.layout, BLOCK)
        return Saved(inputs.q, inputs.k, inputs.v, out, lse, self.indices, schedule)

    def config(self, deterministic: bool = False) -> AttentionConfig:
        return AttentionConfig(BLOCK, DIM**-0.5, deterministic)


def problem(
    lengths: list[int],
    *,
    keys: list[int] | None = None,
    kv_heads: int = 1,
    group: int = 16,
    topk: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Backward:
    """Random documents, of which every query reads its own block and others at random before it.
    With ``keys`` the queries are the last of so many keys."""
    docs = Documents.from_lengths(lengths)
    if keys is not None:
        offsets = [torch.tensor([0, *counts]).cumsum(0) for counts in (lengths, keys)]
        docs = Documents.from_cu_seqlens(*offsets)
    generator = torch.Generator().manual_seed(seed)
    total, total_k, q_heads = docs.num_queries, docs.num_keys, kv_heads * group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    inputs = Inputs(
        normal(total, q_heads, DIM),
        normal(total_k, kv_heads, DIM),
        normal(total_k, kv_heads, DIM),
        normal(total, kv_heads, 16),
        normal(total_k, 1, 16),
        normal(total, q_heads, DIM),
        normal(total, q_heads, 1)[..., 0].float(),
    )
    indices = torch.full((kv_heads, total, topk), -1, dtype=torch.int32)
    for row, position in enumerate(docs.positions.tolist()):
        if position < 0:  # more queries than keys: the first see none
            continue
        own = position // BLOCK
        for head in range(kv_heads):
            before = torch.randperm(own, generator=generator)[: topk - 1]
            chosen = torch.cat([before, torch.tensor([own])]).sort().values
            indices[head, row, : len(chosen)] = chosen.int()
    return Backward(docs, inputs, indices, attention_truth(inputs, indices, docs, BLOCK))


def with_inputs(found: Backward, **changed: Tensor) -> Backward:
    """The same problem with other tensors of the same values."""
    return replace(found, inputs=replace(found.inputs, **changed))


def check(found: Backward, result: Any) -> None:
    """dq, dk and dv of ``result`` within the yardstick, and zero where nothing is read."""
    for name in ("dq", "dk", "dv"):
        assert_ok(found.truth.quantities[name].compare(getattr(result, name)))
    for name, zero in found.truth.must_be_zero().items():
        if hasattr(result, name):
            assert not bool(getattr(result, name)[zero].any()), name


def relative(found: Backward, result: Any) -> dict[str, float]:
    """L2 error of dq, dk and dv, relative to the truth's norm, of the fp32 sums."""
    errors = {}
    for name, value in zip(("dq", "dk", "dv"), result.sums, strict=True):
        exact = found.truth.quantities[name].exact
        errors[name] = float((value.double() - exact).norm() / exact.norm())
    return errors


def with_slack(found: Backward, rows: int = 2) -> tuple[Saved, Tensor, Tensor]:
    """The forward's results, d_out and d_lse with rows past the layout's queries: NaN in what is
    given, nothing selected."""

    def longer(x: Tensor, value: float) -> Tensor:
        return torch.cat([x, torch.full_like(x[:rows], value)])

    inputs, saved, nan = found.inputs, found.saved(), float("nan")
    indices = torch.cat([found.indices, torch.full_like(found.indices[:, :rows], -1)], 1)
    saved = replace(
        saved,
        q=longer(inputs.q, nan),
        out=longer(saved.out, 0.0),
        lse=longer(saved.lse, float("-inf")),
        indices=indices,
        schedule=key_schedule(indices, found.docs.layout, BLOCK),
    )
    return saved, longer(inputs.d_out, nan), longer(inputs.d_lse, nan)
