"""Is the step right? A sample of its results against float64, held to the yardstick.

For some (query, KV head) pairs the whole row is recomputed from q, k, v and d_out over the selected
blocks; for one (KV head, key block) every query that selected it, found by looking through the
whole selection. Once in float64 and once in the operands' own dtype, as eager PyTorch would write
it: the error may be twice the eager one plus the rounding of the sum (:mod:`openmsa.testing`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.cli.step import Operands, Step
from openmsa.contract.problem import accumulate_dtype
from openmsa.testing.compare import Report, compare, rounding

__all__ = ["check"]

_PAIRS = 16
_CANDIDATES = 9
_READERS = 128
"""Readers of the sampled key block, where one of the candidates has so few: about a second."""

_CHUNK = 32


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some queries of one KV head with the keys of their selected blocks, gathered.

    ``q`` and ``d_out`` are ``[n, group, D]``, ``k`` and ``v`` ``[n, topk * block, D]``, ``visible``
    ``[n, topk * block]`` and ``blocks`` ``[n, topk]``.
    """

    q: Tensor
    d_out: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    blocks: Tensor

    def attend(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """out ``[n, group, D]`` and P, dS ``[n, group, keys]``, all in ``dtype``."""
        q, d_out, k, v = (x.to(dtype) for x in (self.q, self.d_out, self.k, self.v))
        wide, scale = accumulate_dtype(dtype), q.shape[2] ** -0.5
        logits = (q @ k.mT).to(wide) * scale
        p = logits.masked_fill(~self.visible[:, None], float("-inf")).softmax(-1)
        out = p.to(dtype) @ v
        delta = (out.to(wide) * d_out.to(wide)).sum(-1, keepdim=True)
        ds = (p * ((d_out @ v.mT).to(wide) - delta) * scale).to(dtype)
        return out, p.to(dtype), ds


def check(x: Operands, step: Step, seed: int) -> list[Report]:
    """Reports for out and dq of sampled rows and for dk and dv of a sampled key block."""
    generator = torch.Generator().manual_seed(seed)
    return [*_check_rows(x, step, generator), *_check_block(x, step, generator)]


def _check_rows(x: Operands, step: Step, generator: torch.Generator) -> list[Report]:
    dtype, group = x.q.dtype, x.topology.group
    found: dict[str, list[tuple[Tensor, ...]]] = {"out": [], "dq": []}
    for query in _sample(x, _PAIRS, generator):
        head = int(torch.randint(x.topology.kv_heads, (1,), generator=generator))
        rows = _gather(x, step, head, torch.tensor([query], device=x.q.device))
        out, p, ds = rows.attend(torch.float64)
        eager_out, _, eager_ds = rows.attend(dtype)
        at = (slice(query, query + 1), slice(head * group, (head + 1) * group))
        v, k = rows.v.double(), rows.k.double()
        found["out"].append((_of(step.out)[at], eager_out, out, p @ v.abs()))
        found["dq"].append((step.grads[0][at], eager_ds @ rows.k, ds @ k, ds.abs() @ k.abs()))
    keys = x.topology.topk * x.topology.block_size
    return [
        _report(name, [torch.cat(part) for part in zip(*parts, strict=True)], keys)
        for name, parts in found.items()
    ]


def _check_block(x: Operands, step: Step, generator: torch.Generator) -> list[Report]:
    head, block, key_range, readers = _sample_block(x, step, generator)
    parts: dict[torch.dtype, list[tuple[Tensor, ...]]] = {}
    for first in range(0, readers.numel(), _CHUNK):
        rows = _gather(x, step, head, readers[first : first + _CHUNK])
        slot = (rows.blocks == block).int().argmax(1)
        for dtype in {torch.float64, x.q.dtype}:
            _, p, ds = rows.attend(dtype)
            columns = (_column(p, slot, rows.blocks), _column(ds, slot, rows.blocks))
            operands = (rows.q.to(dtype).flatten(0, 1), rows.d_out.to(dtype).flatten(0, 1))
            parts.setdefault(dtype, []).append((*columns, *operands))
    start, length = x.docs.layout.ranges[key_range].tolist()
    first, size = block * x.topology.block_size, x.topology.block_size
    keys = min(size, length - first)
    at = (slice(start + first, start + first + keys), head)
    p, ds, q, d_out = (torch.cat(part) for part in zip(*parts[torch.float64], strict=True))
    plain = [torch.cat(part) for part in zip(*parts[x.q.dtype], strict=True)]
    dk = [plain[1].mT @ plain[2], ds.mT @ q, ds.abs().mT @ q.abs()]
    dv = [plain[0].mT @ plain[3], p.mT @ d_out, p.mT @ d_out.abs()]
    return [
        _report(name, [actual[at], *(value[:keys] for value in values)], q.shape[0])
        for name, actual, values in (("dk", step.grads[1], dk), ("dv", step.grads[2], dv))
    ]


def _sample(x: Operands, count: int, generator: torch.Generator) -> list[int]:
    """Queries that see a key, in random order."""
    seeing = (x.docs.positions >= 0).nonzero().flatten().cpu()
    picked: list[int] = seeing[torch.randperm(seeing.numel(), generator=generator)[:count]].tolist()
    return picked


def _sample_block(
    x: Operands, step: Step, generator: torch.Generator
) -> tuple[int, int, int, Tensor]:
    """KV head, block, key range and readers: of a few drawn blocks the most read one that is still
    cheap to check."""
    indices = step.selection.indices
    range_of_query = x.docs.layout.spans[:, 2].long()[x.docs.layout.entry_of_query()]
    found = []
    for query in _sample(x, _CANDIDATES, generator):
        head = int(torch.randint(indices.shape[0], (1,), generator=generator))
        chosen = [block for block in indices[head, query].tolist() if block >= 0]
        block = chosen[int(torch.randint(len(chosen), (1,), generator=generator))]
        key_range = int(range_of_query[query])
        reads = (indices[head, : x.docs.num_queries] == block).any(-1)
        readers = (reads & (range_of_query == key_range)).nonzero().flatten()
        found.append((head, block, key_range, readers))
    found.sort(key=lambda candidate: candidate[3].numel())
    cheap = [candidate for candidate in found if candidate[3].numel() <= _READERS]
    return cheap[-1] if cheap else found[0]


def _gather(x: Operands, step: Step, head: int, queries: Tensor) -> _Rows:
    group, size = x.topology.group, x.topology.block_size
    blocks = step.selection.indices[head, queries].long()
    inside = torch.arange(size, device=queries.device)
    position = (blocks[:, :, None] * size + inside).flatten(1)
    visible = (blocks >= 0).repeat_interleave(size, 1)
    visible &= position <= x.docs.positions[queries, None]
    start = x.docs.layout.spans[:, 0].long()[x.docs.layout.entry_of_query()[queries]]
    keys = torch.where(visible, start[:, None] + position, 0)
    heads = slice(head * group, (head + 1) * group)
    return _Rows(
        x.q[queries, heads],
        x.d_out[queries, heads],
        x.k[keys, head],
        x.v[keys, head],
        visible,
        blocks,
    )


def _column(x: Tensor, slot: Tensor, blocks: Tensor) -> Tensor:
    """``[n * group, block]``: of ``[n, group, topk * block]`` each query's own slot."""
    parts = torch.unflatten(x, 2, (blocks.shape[1], -1))
    return parts[torch.arange(slot.numel(), device=slot.device), :, slot].flatten(0, 1)


def _report(name: str, parts: list[Tensor], reduction: int) -> Report:
    """Compare; ``parts`` are actual, eager, exact, and the sum of the terms' magnitudes."""
    actual, eager, exact, terms = parts
    bound = rounding(exact, terms, reduction, actual.dtype, accumulate_dtype(actual.dtype))
    return compare(name, actual, eager, exact, bound)


def _of(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("the step has no forward result")
    return tensor
