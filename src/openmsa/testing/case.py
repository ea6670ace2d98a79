"""A named problem as data: shapes, documents, how its numbers are drawn, how blocks are selected.

Everything is drawn in float64 from a seeded CPU generator and only then cast and moved, so that
every dtype and device sees the same problem.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openmsa.contract import Documents, Selection, SelectionConfig, Topology
from openmsa.contract.problem import accumulate_dtype
from openmsa.contract.selection import own_blocks
from openmsa.reference.selection import select_blocks

__all__ = ["STRATEGIES", "Case", "Inputs", "Values"]


@dataclass(frozen=True)
class Values:
    """How the numbers are drawn; the defaults are standard normal.

    Attributes:
        logits: factors on q and k, one per entry and key range, repeated in turn: ``(30, 1)`` makes
            every other document loud.
        v: factor on v.
        d_out: factor on d_out.
        apart: added to q and subtracted from k, which drives every logit far below zero.
        ramp: values ascend over the tensor instead of being random.
        index: ``"normal"``; ``"integers"``, whose scores are exact in fp32 and often tie;
            ``"equal"``, where every key is the same; ``"nonfinite"``, integers with some NaN and
            infinite keys.
    """

    logits: tuple[float, ...] = (1.0,)
    v: float = 1.0
    d_out: float = 1.0
    apart: float = 0.0
    ramp: bool = False
    index: str = "normal"


@dataclass(frozen=True, eq=False)
class Inputs:
    """Operands of one problem; rows past the documents' tokens are NaN.

    Attributes:
        q: ``[Tq, Hq, D]``.
        k: ``[Tk, Hkv, D]``.
        v: ``[Tk, Hkv, D]``.
        index_q: ``[Tq, Hkv, Di]``.
        index_k: ``[Tk, 1, Di]``.
        d_out: ``[Tq, Hq, D]``.
        d_lse: ``[Tq, Hq]``, fp32 (fp64 for fp64 inputs).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor
    index_k: Tensor
    d_out: Tensor
    d_lse: Tensor


@dataclass(frozen=True)
class Case:
    """One named problem.

    Attributes:
        name: readable, unique.
        topology: heads, widths and block geometry.
        cu_seqlens_q: packed query offsets.
        cu_seqlens_k: packed key offsets where they differ from the query offsets.
        fragment_indices: first entry of each entry's document, where fragments share keys.
        select: a key of :data:`STRATEGIES`.
        values: how the numbers are drawn.
        slack: rows past the last token in every tensor.
        suite: ``"smoke"`` (also part of full) or ``"full"``.
        source: the public report or the property the problem stands for.
    """

    name: str
    topology: Topology
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...] | None = None
    fragment_indices: tuple[int, ...] | None = None
    select: str = "indexer"
    values: Values = field(default_factory=Values)
    slack: int = 0
    suite: str = "full"
    source: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def exact_scores(self) -> bool:
        """Are the index scores exact in fp32, so that a selection has only one right answer?"""
        return self.values.index != "normal"

    @property
    def selection_config(self) -> SelectionConfig:
        """How :func:`openmsa.select_blocks` is called, with the default scale and the lse."""
        t = self.topology
        scale = t.index_dim**-0.5
        return SelectionConfig(t.topk, t.block_size, t.init_blocks, t.local_blocks, scale, True)

    def documents(self, device: torch.device | str = "cpu") -> Documents:
        """The packed documents."""
        offsets_k, fragments = (
            None if x is None else torch.tensor(x)
            for x in (self.cu_seqlens_k, self.fragment_indices)
        )
        return Documents.from_cu_seqlens(
            torch.tensor(self.cu_seqlens_q), offsets_k, fragment_indices=fragments, device=device
        )

    def inputs(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> Inputs:
        """The operands in ``dtype`` on ``device``; the same numbers for the same seed."""
        docs, t, values = self.documents(), self.topology, self.values
        draw = _Draw(_generator(self.name, seed), self.slack, values.ramp)
        tq, tk = docs.num_queries, docs.num_keys
        loud_q = _factors(values.logits, docs.layout.entry_of_query())
        loud_k = _factors(values.logits, _range_of_key(docs))
        q = draw(tq, t.q_heads, t.head_dim) * loud_q + values.apart
        k = draw(tk, t.kv_heads, t.head_dim) * loud_k - values.apart
        v = draw(tk, t.kv_heads, t.head_dim) * values.v
        d_out = draw(tq, t.q_heads, t.head_dim) * values.d_out
        d_lse = draw(tq, t.q_heads)
        index_q, index_k = draw(tq, t.kv_heads, t.index_dim), draw(tk, 1, t.index_dim)
        if values.index != "normal":
            # Small whole numbers: every product and every sum of them is exact in fp32.
            index_q, index_k = (x.mul(1.5).round().clamp(-4, 4) for x in (index_q, index_k))
        if values.index == "equal":
            index_k = index_k[:1].expand_as(index_k).clone()
        if values.index == "nonfinite":
            # Some blocks of 64 keys hold NaN, some infinities, some both and some neither.
            index_k[130::128] = 0.0
            index_k[130::128, :, 0] = float("inf")
            index_k[70::230, :, 0] = float("nan")
        q, k, v, index_q, index_k, d_out = (
            draw.pad(x).to(device, dtype) for x in (q, k, v, index_q, index_k, d_out)
        )
        d_lse = draw.pad(d_lse).to(device, accumulate_dtype(dtype))
        return Inputs(q, k, v, index_q, index_k, d_out, d_lse)

    def selection(self, inputs: Inputs, docs: Documents, seed: int = 0) -> Selection:
        """The blocks that attention reads, by this case's strategy."""
        generator = _generator(self.name + "/selection", seed)
        return STRATEGIES[self.select](self, inputs, docs, generator)


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)


def _range_of_key(docs: Documents) -> Tensor:
    lengths = docs.layout.ranges[:, 1].long()
    return torch.repeat_interleave(torch.arange(lengths.numel()), lengths)


def _factors(factors: tuple[float, ...], owner: Tensor) -> Tensor:
    table = torch.tensor(factors, dtype=torch.float64)
    return table[owner % len(factors)][:, None, None]


class _Draw:
    """Float64 tensors from one generator, with NaN slack rows on request."""

    def __init__(self, generator: torch.Generator, slack: int, ramp: bool) -> None:
        self.generator, self.slack, self.ramp = generator, slack, ramp

    def __call__(self, *shape: int) -> Tensor:
        if self.ramp:
            count = torch.Size(shape).numel()
            return torch.linspace(-2.0, 2.0, count, dtype=torch.float64).reshape(shape)
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def pad(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.new_full((self.slack, *x.shape[1:]), float("nan"))])


def _indexer(case: Case, inputs: Inputs, docs: Documents, _: torch.Generator) -> Selection:
    indices, lse = select_blocks(
        inputs.index_q, inputs.index_k.squeeze(1), docs.layout, case.selection_config
    )
    return Selection(indices, case.topology.block_size, lse)


def _preferred(case: Case, docs: Documents, preference: Tensor, keep: Tensor | int) -> Selection:
    """The ``keep`` most preferred visible blocks; preference is ``[H, Tq, blocks]``."""
    size, topk = case.topology.block_size, case.topology.topk
    own = own_blocks(docs, size).cpu()
    blocks = torch.arange(preference.shape[2])
    preference = preference.masked_fill(blocks > own[:, None], float("-inf"))
    best = preference.topk(min(topk, preference.shape[2]), dim=-1)
    rank = torch.arange(best.indices.shape[2])
    ids = torch.where((best.values > float("-inf")) & (rank < keep), best.indices, -1)
    ids = torch.nn.functional.pad(ids, (0, topk - ids.shape[2], 0, case.slack), value=-1)
    return Selection.from_indices(ids.to(docs.device), docs, block_size=size)


def _noise(case: Case, docs: Documents, generator: torch.Generator) -> Tensor:
    blocks = max(1, -(-docs.max_seqlen_k // case.topology.block_size))
    shape = (case.topology.kv_heads, docs.num_queries, blocks)
    return torch.rand(shape, dtype=torch.float64, generator=generator)


def _random(case: Case, inputs: Inputs, docs: Documents, generator: torch.Generator) -> Selection:
    return _preferred(case, docs, _noise(case, docs, generator), case.topology.topk)


def _recent(case: Case, inputs: Inputs, docs: Documents, generator: torch.Generator) -> Selection:
    noise = _noise(case, docs, generator)
    later = torch.arange(noise.shape[2], dtype=torch.float64).expand_as(noise)
    return _preferred(case, docs, later, case.topology.topk)


def _hot(case: Case, inputs: Inputs, docs: Documents, generator: torch.Generator) -> Selection:
    noise = _noise(case, docs, generator)
    noise[..., 0] += torch.where(_noise(case, docs, generator)[..., 0] < 0.99, 2.0, 0.0)
    return _preferred(case, docs, noise, max(1, case.topology.topk // 2))


def _few(case: Case, inputs: Inputs, docs: Documents, generator: torch.Generator) -> Selection:
    noise = _noise(case, docs, generator)
    keep = 1 + (_noise(case, docs, generator)[..., :1] < 0.3).long()
    return _preferred(case, docs, noise, keep)


def _gaps(case: Case, inputs: Inputs, docs: Documents, generator: torch.Generator) -> Selection:
    noise = _noise(case, docs, generator)
    empty = torch.arange(docs.num_queries)[:, None] % 3 == 1
    return _preferred(case, docs, noise, torch.where(empty, 0, case.topology.topk))


def _raw(case: Case, inputs: Inputs, docs: Documents, generator: torch.Generator) -> Selection:
    return Selection.from_indices(
        raw_ids(case, docs, generator), docs, block_size=case.topology.block_size
    )


def raw_ids(case: Case, docs: Documents, generator: torch.Generator) -> Tensor:
    """int64 ids as no producer should send them: unsorted, repeated, out of range, in the future.

    A strided ``[Hkv, Tq + slack, topk]`` view.
    """
    noise = _noise(case, docs, generator)
    t = case.topology
    shape = (t.kv_heads, docs.num_queries + case.slack, 2 * t.topk)
    ids = torch.randint(-2, noise.shape[2] + 2, shape, generator=generator)
    odd = torch.tensor([-1, 999, -7, torch.iinfo(torch.int32).max, torch.iinfo(torch.int64).min])
    pick = torch.randint(0, 4 * odd.numel(), shape, generator=generator)
    ids = torch.where(pick < odd.numel(), odd[pick.clamp(max=odd.numel() - 1)], ids)
    return ids.to(docs.device)[..., ::2]


STRATEGIES: dict[str, Callable[[Case, Inputs, Documents, torch.Generator], Selection]] = {
    "indexer": _indexer,
    "random": _random,
    "recent": _recent,
    "hot": _hot,
    "few": _few,
    "gaps": _gaps,
    "raw": _raw,
}
"""How attention's blocks come about: the indexer; random blocks; the latest ones; block 0 for 99 %
of the queries; one or two blocks; no block at all for every third query; raw ids of any kind."""
