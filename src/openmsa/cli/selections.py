"""Selections for benchmarks: drawn directly, so that any backend meets the same blocks.

Every query takes its own block and fills up its ``topk`` with visible blocks:

* random: each query draws its blocks on its own, the worst case for kernels that hope for overlap;
* coherent: runs of 64 queries share one draw, and each query redraws a block in 128, which adds
  about half a block to the union of 8 queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.contract import Documents, Selection, Topology
from openmsa.contract.selection import own_blocks

__all__ = ["coherent_selection", "random_selection"]

_RUN = 64
_CHURN = 1 / 128
_CHUNK_ELEMENTS = 2**24


def random_selection(docs: Documents, topology: Topology, seed: int) -> Selection:
    """Own block and random visible ones, each query for itself."""
    return _draw(docs, topology, _generator(docs, seed), None)


def coherent_selection(docs: Documents, topology: Topology, seed: int) -> Selection:
    """Runs of 64 neighbouring positions agree but for small churn."""
    generator = _generator(docs, seed)
    entry = docs.layout.entry_of_query()
    runs = torch.div(docs.positions, _RUN, rounding_mode="floor")
    changes = (runs[1:] != runs[:-1]) | (entry[1:] != entry[:-1])
    run = torch.nn.functional.pad(changes.long().cumsum(0), (1, 0))
    count = int(run[-1]) + 1
    shape = (topology.kv_heads, count, _blocks(docs, topology))
    shared = torch.rand(shape, generator=generator, device=docs.device)
    return _draw(docs, topology, generator, (shared, run))


def _draw(
    docs: Documents,
    topology: Topology,
    generator: torch.Generator,
    shared: tuple[Tensor, Tensor] | None,
) -> Selection:
    """Rank the blocks by noise, the own one first and those out of sight last; keep ``topk``."""
    heads, topk, blocks = topology.kv_heads, topology.topk, _blocks(docs, topology)
    own = own_blocks(docs, topology.block_size)[:, None]
    block = torch.arange(blocks, device=docs.device)
    indices = torch.full((heads, docs.num_queries, topk), -1, dtype=torch.int32, device=docs.device)
    keep = min(topk, blocks)
    step = max(1, _CHUNK_ELEMENTS // (heads * blocks))
    for first in range(0, docs.num_queries, step):
        rows = slice(first, min(first + step, docs.num_queries))
        shape = (heads, rows.stop - rows.start, blocks)
        noise = torch.rand(shape, generator=generator, device=docs.device)
        if shared is not None:
            again = torch.rand(shape, generator=generator, device=docs.device) < _CHURN
            noise = torch.where(again, noise, shared[0][:, shared[1][rows]])
        noise = noise.masked_fill(block == own[rows], 2.0).masked_fill(block > own[rows], -1.0)
        best = noise.topk(keep, dim=-1)
        indices[:, rows, :keep] = torch.where(best.values >= 0, best.indices, -1).int()
    return Selection.from_indices(indices, docs, block_size=topology.block_size)


def _blocks(docs: Documents, topology: Topology) -> int:
    return max(1, -(-docs.max_seqlen_k // topology.block_size))


def _generator(docs: Documents, seed: int) -> torch.Generator:
    return torch.Generator(device=docs.device).manual_seed(seed)
