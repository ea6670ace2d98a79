"""Small random problems for hypothesis: documents, operands and a selection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from openmsa import Documents, Selection, select_blocks

from .oracle import Entry, entries, offsets, rand


def stable(examples: int) -> settings:
    """The same examples on every machine, and no clock: a failure must be a failure everywhere."""
    return settings(max_examples=examples, deadline=None, derandomize=True)


@dataclass(frozen=True, eq=False)
class Problem:
    """Packed documents with operands for both public functions, in float64."""

    lengths: tuple[int, ...]
    block_size: int
    topk: int
    kv_heads: int
    group: int
    seed: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def docs(self) -> Documents:
        return Documents.from_lengths(self.lengths)

    @property
    def entries(self) -> list[Entry]:
        return entries(offsets(self.lengths))

    def rows(self, document: int) -> slice:
        """Packed rows of one document."""
        begin = sum(self.lengths[:document])
        return slice(begin, begin + self.lengths[document])

    def index_operands(self) -> tuple[Tensor, Tensor]:
        """index_q ``[T, Hkv, 4]`` and index_k ``[T, 4]``."""
        return (
            rand(self.tokens, self.kv_heads, 4, seed=self.seed),
            rand(self.tokens, 4, seed=self.seed + 1),
        )

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, d_out and d_lse, head dim 8."""
        heads = self.kv_heads * self.group
        shapes = [(heads, 8), (self.kv_heads, 8), (self.kv_heads, 8), (heads, 8), (heads,)]
        return tuple(
            rand(self.tokens, *shape, seed=self.seed + 2 + i) for i, shape in enumerate(shapes)
        )

    def select(self, index_q: Tensor, index_k: Tensor, docs: Documents, backend: str) -> Selection:
        return select_blocks(
            index_q,
            index_k,
            docs,
            topk=self.topk,
            block_size=self.block_size,
            return_lse=True,
            backend=backend,
        )

    def selection(self, backend: str = "reference") -> Selection:
        """The selection of this problem's own index operands."""
        return self.select(*self.index_operands(), self.docs, backend)


@st.composite
def problems(draw: st.DrawFn, min_documents: int = 1, min_length: int = 0) -> Problem:
    """Documents of up to 40 tokens, shorter and longer than their blocks."""
    lengths = draw(st.lists(st.integers(min_length, 40), min_size=min_documents, max_size=4))
    return Problem(
        tuple(lengths),
        block_size=draw(st.sampled_from([1, 4, 16])),
        topk=draw(st.integers(1, 4)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3])),
        seed=draw(st.integers(0, 1000)) * 10,
    )


def raw_selection(problem: Problem) -> Selection:
    """Any blocks, the own one not always among them: some queries see little, some nothing."""
    generator = torch.Generator().manual_seed(problem.seed)
    shape = (problem.kv_heads, problem.tokens, problem.topk)
    ids = torch.randint(-1, 6, shape, generator=generator)
    return Selection.from_indices(ids, problem.docs, block_size=problem.block_size)
