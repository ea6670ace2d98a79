"""Documents the slow way: plain Python loops over plain lists, written from the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openmsa import Documents


def tensor(rows, dtype: torch.dtype = torch.int64) -> Tensor:
    """``torch.tensor``, whole numbers by default even where the list is empty."""
    return torch.tensor(rows, dtype=dtype)


def summary(docs: Documents) -> tuple:
    """All that is promised about documents, for equality."""
    tensors = (docs.cu_seqlens_q, docs.cu_seqlens_k, docs.positions, docs.token_rows)
    sizes = (docs.num_documents, docs.num_queries, docs.num_keys)
    return (*(x.tolist() for x in tensors), *sizes, docs.max_seqlen_q, docs.max_seqlen_k)


def block_causal(ids: list[list[int]]) -> Tensor:
    """bool ``[B, 1, S, S]``, True where ids agree, are not padding, and the key is not ahead."""
    ids = tensor(ids)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] > 0)
    return (same & torch.ones_like(same).tril())[:, None]


@dataclass
class Loop:
    """What the loops found; the names are those of :class:`openmsa.Documents`."""

    cu_seqlens_q: list[int] = field(default_factory=lambda: [0])
    cu_seqlens_k: list[int] = field(default_factory=lambda: [0])
    positions: list[int] = field(default_factory=list)
    token_rows: list[int] = field(default_factory=list)
    num_keys: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    def check(self, docs: Documents) -> None:
        """Hold ``docs`` to the loops, values and dtypes."""
        for name, dtype in (
            ("cu_seqlens_q", torch.int32),
            ("cu_seqlens_k", torch.int32),
            ("positions", torch.int64),
            ("token_rows", torch.int64),
        ):
            tensor = getattr(docs, name)
            assert tensor.dtype == dtype, name
            assert tensor.tolist() == getattr(self, name), name
        counts = {
            "num_documents": len(self.cu_seqlens_q) - 1,
            "num_queries": len(self.positions),
            "num_keys": self.num_keys,
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_k,
        }
        for name, expected in counts.items():
            value = getattr(docs, name)
            # A 0-dim tensor here would be a hidden device read in every layer.
            assert type(value) is int, name
            assert value == expected, name


def from_runs(runs: Sequence[tuple[int, int]]) -> Loop:
    """Whole documents, each a run ``(first flat row, length)``."""
    loop = Loop()
    for first, length in runs:
        for position in range(length):
            loop.positions.append(position)
            loop.token_rows.append(first + position)
        loop.cu_seqlens_q.append(len(loop.positions))
        loop.max_seqlen_q = max(loop.max_seqlen_q, length)
    loop.cu_seqlens_k = list(loop.cu_seqlens_q)
    loop.num_keys = len(loop.positions)
    loop.max_seqlen_k = loop.max_seqlen_q
    return loop


def from_offsets(
    cu_q: Sequence[int], cu_k: Sequence[int] | None = None, fragments: Sequence[int] | None = None
) -> Loop:
    """Entries whose queries are the causal suffix of their keys."""
    cu_k = cu_q if cu_k is None else cu_k
    loop = Loop(cu_seqlens_q=list(cu_q), cu_seqlens_k=list(cu_k))
    for entry in range(len(cu_q) - 1):
        len_q = cu_q[entry + 1] - cu_q[entry]
        first_key = cu_k[entry if fragments is None else fragments[entry]]
        len_k = cu_k[entry + 1] - first_key
        for row in range(len_q):
            loop.token_rows.append(len(loop.positions))
            loop.positions.append(row + len_k - len_q)
        loop.max_seqlen_q = max(loop.max_seqlen_q, len_q)
        loop.max_seqlen_k = max(loop.max_seqlen_k, len_k)
    loop.num_keys = cu_k[-1]
    return loop


def runs_of_ids(ids: Sequence[Sequence[int]]) -> list[tuple[int, int]] | None:
    """Runs of a ``[B, S]`` id map, or None where a document is interrupted."""
    runs: list[tuple[int, int]] = []
    for row, line in enumerate(ids):
        seen: set[int] = set()
        before = 0
        for column, current in enumerate(line):
            if current != 0 and current != before:
                if current in seen:
                    return None
                seen.add(current)
                runs.append((row * len(line) + column, 0))
            if current != 0:
                first, length = runs[-1]
                runs[-1] = (first, length + 1)
            before = current
    return runs


def runs_of_mask(mask: Sequence[Sequence[Sequence[bool]]]) -> list[tuple[int, int]] | None:
    """Runs of a ``[B, S, S]`` block-causal mask, or None where it is anything else."""
    runs: list[tuple[int, int]] = []
    for row, square in enumerate(mask):
        before: int | None = None
        for query, line in enumerate(square):
            seen = [key for key, allowed in enumerate(line) if allowed]
            if not seen:
                before = None
                continue
            start = seen[0]
            if seen != list(range(start, query + 1)) or start not in (query, before):
                return None
            if start == query:
                runs.append((row * len(square) + query, 0))
            first, length = runs[-1]
            runs[-1] = (first, length + 1)
            before = start
    return runs
