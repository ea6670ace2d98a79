"""The truth about one selection problem, from the definition: scores, an explicit sort, the lse.

Host code without any of the library's selection stages, so that it can judge all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.contract import Documents
from openmsa.contract.problem import SelectionConfig, accumulate_dtype
from openmsa.testing.compare import Report, compare_selection, unit_roundoff
from openmsa.testing.oracle import Truth, entry_slices

__all__ = ["EntryLogits", "SelectionTruth", "selection_truth"]


@dataclass(frozen=True, eq=False)
class EntryLogits:
    """Index logits of one entry's queries over its keys, float64.

    Attributes:
        rows: packed query rows.
        logits: ``[H, n, m]``, scaled; -inf in the future.
        slip: ``[H, n, m]``, what rounding may do to each logit.
        block: int64 ``[m]``, document-local block of each key.
    """

    rows: slice
    logits: Tensor
    slip: Tensor
    block: Tensor


@dataclass(frozen=True, eq=False)
class SelectionTruth:
    """Which blocks are right, and how sure rounding leaves us. On the CPU.

    Attributes:
        indices: int32 ``[H, Tq, topk]``, canonical.
        scores: float64 ``[H, Tq, blocks]``; +inf forced, -inf out of sight or NaN.
        tolerance: float64 of the same shape, 0 where scores are exact.
        entries: logits per entry.
        accumulate: dtype of the sums.
    """

    indices: Tensor
    scores: Tensor
    tolerance: Tensor
    entries: tuple[EntryLogits, ...]
    accumulate: torch.dtype

    def compare(self, actual: Tensor) -> Report:
        """Hold indices (slack rows allowed, and not judged) to the truth; ties may be broken
        otherwise only within rounding."""
        rows = actual[:, : self.indices.shape[1]].cpu()
        return compare_selection("indices", rows, self.indices, self.scores, self.tolerance)

    def selected_lse(self, indices: Tensor) -> Truth:
        """The selected lse ``[Tq, H]`` of any canonical selection of these queries."""
        heads, rows = self.indices.shape[:2]
        lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
        bound = torch.zeros_like(lse)
        u = unit_roundoff(self.accumulate)
        for entry in self.entries:
            chosen = indices[:, entry.rows].cpu()
            member = (chosen[..., None] == entry.block).any(2) & (entry.logits != -math.inf)
            logits = entry.logits.masked_fill(~member, -math.inf)
            total = logits.logsumexp(-1)
            weight = torch.where(member, (logits - total[..., None]).exp(), 0.0)
            slip = torch.where(weight > 0, weight * entry.slip, 0.0).sum(-1)
            # Log of a sum of n exponentials: their slips, the sum's roundings, the stored result's.
            size = torch.where(total.isfinite(), total.abs(), 0.0)
            lse[entry.rows] = total.t()
            bound[entry.rows] = (slip + u * (member.sum(-1).sqrt() + 1 + size)).t()
        return Truth("index_lse", lse, None, bound, tuple(entry.rows for entry in self.entries))


def selection_truth(
    index_q: Tensor,
    index_k: Tensor,
    docs: Documents,
    config: SelectionConfig,
    exact_scores: bool = False,
) -> SelectionTruth:
    """Score and sort row by row.

    Args:
        index_q: ``[Tq, H, Di]`` in the dtype under test.
        index_k: ``[Tk, 1, Di]``.
        docs: the documents.
        config: sizes, forced blocks and scale.
        exact_scores: grant no tolerance, since every score is exact in the accumulation dtype.
    """
    acc = accumulate_dtype(index_q.dtype)
    u = unit_roundoff(acc)
    q, k = index_q.double().cpu().transpose(0, 1), index_k[:, 0].double().cpu()
    size = config.block_size
    shape = (q.shape[0], docs.num_queries, max(1, -(-docs.max_seqlen_k // size)))
    scores, tolerance = q.new_full(shape, -math.inf), q.new_zeros(shape)
    indices = torch.full((*shape[:2], config.topk), -1, dtype=torch.int32)
    entries = []
    for rows, keys in entry_slices(docs):
        length = keys.stop - keys.start
        position = torch.arange(rows.start, rows.stop) + length - rows.stop
        future = torch.arange(length) > position[:, None]
        dots = (q[:, rows] @ k[keys].mT).masked_fill(future, -math.inf)
        # The dot product's sum, and two foldings of a scale.
        slip = u * (math.sqrt(k.shape[1]) + 2) * (q[:, rows].abs() @ k[keys].abs().mT)
        for block in range(-(-length // size)):
            part = slice(block * size, (block + 1) * size)
            scores[:, rows, block] = dots[:, :, part].amax(-1)
            if not exact_scores:
                seen = slip[:, :, part].masked_fill(future[:, part], 0.0)
                tolerance[:, rows, block] = seen.amax(-1)
        _choose(scores[:, rows], position, config, indices[:, rows])
        logits = dots * config.scale
        slip = slip * config.scale + 2 * u * (logits.abs() + 1)
        entries.append(EntryLogits(rows, logits, slip, torch.arange(length) // size))
    return SelectionTruth(indices, scores, tolerance, tuple(entries), acc)


def _choose(scores: Tensor, positions: Tensor, config: SelectionConfig, into: Tensor) -> None:
    """Fill ``into [H, n, topk]``; rewrites NaN (to -inf) and forced blocks (to +inf) in scores."""
    scores[scores.isnan()] = -math.inf
    for at, position in enumerate(positions.tolist()):
        own = position // config.block_size if position >= 0 else -1
        forced = [
            block
            for block in range(own + 1)
            if block < config.init_blocks or block > own - config.local_blocks
        ]
        for head in range(scores.shape[0]):
            rank = scores[head, at].tolist()
            order = sorted(range(own + 1), key=lambda b: (b not in forced, -rank[b], b))
            chosen = sorted(order[: config.topk])
            into[head, at, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        scores[:, at, forced] = math.inf
