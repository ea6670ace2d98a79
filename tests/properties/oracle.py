"""Right values from the definitions, in float64, without any code of the library.

Selection is brute force in plain Python; attention is a dense mask and autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa import Documents, Selection, sparse_attention

BACKENDS = ("reference", "cpu")

# Operands are of size 1, sums have at most a few thousand terms, and one float64 rounding is 1e-16.
TIGHT = {"rtol": 1e-10, "atol": 1e-11}


@dataclass(frozen=True)
class Entry:
    """A run of queries that is the causal suffix of its keys, in packed rows."""

    queries: range
    keys: range

    def position(self, query: int) -> int:
        """Key position of a packed query row; negative where it sees nothing."""
        return query - self.queries.stop + len(self.keys)


def entries(
    cu_q: Sequence[int], cu_k: Sequence[int] | None = None, fragments: Sequence[int] | None = None
) -> list[Entry]:
    """The entries of packed offsets, as the contract reads them."""
    cu_k = cu_q if cu_k is None else cu_k
    heads = range(len(cu_q) - 1) if fragments is None else fragments
    return [
        Entry(range(cu_q[i], cu_q[i + 1]), range(cu_k[heads[i]], cu_k[i + 1]))
        for i in range(len(cu_q) - 1)
    ]


def offsets(lengths: Sequence[int]) -> list[int]:
    """Packed offsets of lengths."""
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal values from a seed of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def scores_of(index_q: Tensor, index_k: Tensor, entry: Entry, query: int, head: int) -> list[float]:
    """float64 logits of one query against the keys it sees, in position order."""
    visible = entry.position(query) + 1
    q = index_q[query, head].double().tolist()
    keys = index_k[entry.keys.start : entry.keys.start + max(visible, 0)].double().tolist()
    return [sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]


def chosen_blocks(
    scores: Sequence[float],
    *,
    topk: int,
    block_size: int,
    init_blocks: int = 0,
    local_blocks: int = 1,
) -> list[int]:
    """The canonical top-k of one query, rule by rule; ``scores`` are those of its visible keys."""
    blocks = []
    for first in range(0, len(scores), block_size):
        part = scores[first : first + block_size]
        blocks.append(-math.inf if any(math.isnan(s) for s in part) else max(part))
    own = len(blocks) - 1
    forced = {b for b in range(own + 1) if b < init_blocks or b > own - local_blocks}
    # Python compares -0.0 and 0.0 as equal, so the tuple falls through to the lower id.
    order = sorted(range(own + 1), key=lambda b: (b not in forced, -blocks[b], b))
    kept = sorted(order[:topk])
    return kept + [-1] * (topk - len(kept))


def brute_selection(
    index_q: Tensor, index_k: Tensor, entries: Sequence[Entry], **rules: int
) -> list[list[list[int]]]:
    """``[H][Tq][topk]`` over all queries; rows past the entries select nothing."""
    found = [
        [[-1] * rules["topk"] for _ in range(index_q.shape[0])] for _ in range(index_q.shape[1])
    ]
    for entry in entries:
        for query in entry.queries:
            for head in range(index_q.shape[1]):
                scores = scores_of(index_q, index_k, entry, query, head)
                found[head][query] = chosen_blocks(scores, **rules)
    return found


def brute_selected_lse(
    index_q: Tensor,
    index_k: Tensor,
    entries: Sequence[Entry],
    indices: Tensor,
    block_size: int,
    scale: float,
) -> Tensor:
    """float64 ``[H, Tq]``: log of the sum of exp of scaled logits over the selected keys seen."""
    lse = torch.full(indices.shape[:2], -math.inf, dtype=torch.float64)
    for entry in entries:
        for query in entry.queries:
            for head in range(indices.shape[0]):
                blocks = set(indices[head, query].tolist())
                scores = scores_of(index_q, index_k, entry, query, head)
                kept = [scale * s for j, s in enumerate(scores) if j // block_size in blocks]
                if kept:
                    high = max(kept)
                    total = math.fsum(math.exp(s - high) for s in kept)
                    lse[head, query] = high + math.log(total)
    return lse


def readable(indices: Tensor, entries: Sequence[Entry], keys: int, block_size: int) -> Tensor:
    """bool ``[H, Tq, Tk]``: key in a selected block of the query's document and not ahead of it."""
    mask = torch.zeros((indices.shape[0], indices.shape[1], keys), dtype=torch.bool)
    for entry in entries:
        position = torch.arange(len(entry.keys))
        columns = slice(entry.keys.start, entry.keys.stop)
        for query in entry.queries:
            chosen = (indices[:, query, :, None] == position // block_size).any(1)
            mask[:, query, columns] = chosen & (position <= entry.position(query))
    return mask


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Masked softmax attention in float64, differentiable; out ``[Tq, Hq, D]`` and its lse."""
    group = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = mask.repeat_interleave(group, 0)
    logits = scale * torch.einsum("qhd,khd->hqk", q, k)
    seen = mask.any(-1, keepdim=True)
    # Rows that see nothing get finite logits first, so that no gradient is NaN.
    logits = torch.where(mask | ~seen, logits, -math.inf)
    p = torch.where(seen, logits.softmax(-1), 0.0)
    lse = torch.where(seen[..., 0], logits.logsumexp(-1), -math.inf)
    return torch.einsum("hqk,khd->qhd", p, v), lse.t()


@dataclass(frozen=True, eq=False)
class Result:
    """out, lse, dq, dk and dv of one call."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def items(self) -> list[tuple[str, Tensor]]:
        return list(vars(self).items())


def differentiate(
    call: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None = None,
) -> Result:
    """Run ``call`` and its gradients; ``d_lse`` is dropped where a row sees nothing."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out, lse = call(q, k, v)
    outputs, grads = [out], [d_out.to(out.dtype)]
    if d_lse is not None:
        outputs.append(lse)
        grads.append(torch.where(lse.isfinite(), d_lse.to(lse.dtype), 0.0))
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
    return Result(out.detach(), lse.detach(), dq, dk, dv)


def ours(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sel: Selection,
    docs: Documents,
    d_out: Tensor,
    d_lse: Tensor | None = None,
    *,
    backend: str,
    scale: float | None = None,
) -> Result:
    """The public function under test, forward and backward."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return sparse_attention(q, k, v, sel, docs, scale=scale, return_lse=True, backend=backend)

    return differentiate(call, q, k, v, d_out, d_lse)


def truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None = None,
    scale: float | None = None,
) -> Result:
    """The dense definition, forward and backward, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    return differentiate(lambda q, k, v: attention(q, k, v, mask, scale), q, k, v, d_out, d_lse)


def truth_by_entry(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sel: Selection,
    entries: Sequence[Entry],
    d_out: Tensor,
    scale: float | None = None,
) -> Result:
    """:func:`truth` entry by entry, for problems whose whole mask would be large."""
    full = Result(*(torch.zeros(x.shape, dtype=torch.float64) for x in (q, q[..., 0], q, k, v)))
    full.lse.fill_(-math.inf)
    for entry in entries:
        rows = slice(entry.queries.start, entry.queries.stop)
        keys = slice(entry.keys.start, entry.keys.stop)
        local = [Entry(range(len(entry.queries)), range(len(entry.keys)))]
        mask = readable(sel.indices[:, rows], local, len(entry.keys), sel.block_size)
        part = truth(q[rows], k[keys], v[keys], mask, d_out[rows], scale=scale)
        for x, y in ((full.out, part.out), (full.lse, part.lse), (full.dq, part.dq)):
            x[rows] = y
        full.dk[keys] += part.dk
        full.dv[keys] += part.dv
    return full


def assert_close(actual: Result, expected: Result) -> None:
    """All five quantities agree, infinities by position."""
    for name, value in actual.items():
        torch.testing.assert_close(
            value.double(),
            getattr(expected, name).double(),
            **TIGHT,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_same_bits(name: str, actual: Tensor, expected: Tensor) -> None:
    """Equal to the bit, NaN included."""
    assert actual.shape == expected.shape, name
    assert actual.dtype == expected.dtype, name
    if actual.is_floating_point():
        width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
        actual, expected = (x.contiguous().view(width) for x in (actual, expected))
    differing = (actual != expected).nonzero()
    assert not len(differing), f"{name} differs first at {differing[0].tolist()}"
