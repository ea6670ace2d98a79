"""Document shapes of real training steps, built in or from a file of the same form.

The format, the source and its licence are in the README beside this file. There are no tensors in a
workload, only where documents begin and end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from openmsa.contract import MINIMAX_M3, Documents
from openmsa.errors import InvalidInput, invalid_input

__all__ = ["WORKLOADS", "Case", "count_pairs", "load"]

WORKLOADS = {"cp16_192k": "cp16_192k_rank_shapes.json"}
"""Built-in workloads: name to file."""


@dataclass(frozen=True)
class Case:
    """The documents of one step on one rank.

    Attributes:
        case_id: the recorded case.
        weight: recorded calls this case stands for.
        cu_seqlens_q: packed query offsets of the entries.
        cu_seqlens_k: packed key offsets of the entries.
        fragment_indices: first entry of each entry's document.
        causal_elements: visible (query, key) pairs.
        sparse_elements: visible pairs in the selected blocks, for ``topk`` blocks a query.
        block_size: keys per block that ``sparse_elements`` counts.
        topk: blocks per query that ``sparse_elements`` counts.
    """

    case_id: int
    weight: int
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    fragment_indices: tuple[int, ...]
    causal_elements: int
    sparse_elements: int
    block_size: int = MINIMAX_M3.block_size
    topk: int = MINIMAX_M3.topk

    @property
    def num_queries(self) -> int:
        return self.cu_seqlens_q[-1]

    def documents(self, device: torch.device | str = "cpu") -> Documents:
        """The packed documents on ``device``."""
        return Documents.from_cu_seqlens(
            torch.tensor(self.cu_seqlens_q),
            torch.tensor(self.cu_seqlens_k),
            fragment_indices=torch.tensor(self.fragment_indices, dtype=torch.int64),
            device=device,
        )

    def truncate(self, num_queries: int) -> Case:
        """The case's first queries, each of which still sees exactly the keys it saw.

        An entry that is cut keeps its first queries and loses as many of its last keys, since
        ``position = row + len_k - len_q`` must not change. Keys behind those are dropped.

        Raises:
            InvalidInput: ``num_queries`` is not positive, or the cut entry shares the keys to drop
                with earlier entries.
        """
        if num_queries < 1:
            invalid_input("num_queries", "1 or more", num_queries)
        if num_queries >= self.num_queries:
            return self
        kept = next(i for i, end in enumerate(self.cu_seqlens_q) if end >= num_queries)
        cut = self.cu_seqlens_q[kept] - num_queries
        last_key = self.cu_seqlens_k[kept] - cut
        if last_key < self.cu_seqlens_k[kept - 1]:
            invalid_input(
                "num_queries",
                f"a number that does not cut entry {kept - 1}, which shares its last keys",
                num_queries,
            )
        return _counted(
            replace(
                self,
                cu_seqlens_q=(*self.cu_seqlens_q[:kept], num_queries),
                cu_seqlens_k=(*self.cu_seqlens_k[:kept], last_key),
                fragment_indices=self.fragment_indices[:kept],
            )
        )


def count_pairs(docs: Documents, block_size: int, topk: int) -> tuple[int, int]:
    """Visible (query, key) pairs, and those of them in the blocks that a full top-k selects.

    A query at position p sees p + 1 keys. Where it sees more than ``topk`` blocks it reads the
    others whole and its own up to p: ``(topk - 1) * block_size + p % block_size + 1``.
    """
    position = docs.positions[docs.positions >= 0]
    dense = position + 1
    blocks = torch.div(position, block_size, rounding_mode="floor") + 1
    sparse = (topk - 1) * block_size + position % block_size + 1
    return int(dense.sum()), int(torch.where(blocks <= topk, dense, sparse).sum())


def load(name_or_path: str | Path) -> list[Case]:
    """The cases of a built-in workload (a key of :data:`WORKLOADS`) or of a JSON file.

    Raises:
        InvalidInput: no such workload, or a malformed one; names the field.
    """
    name = str(name_or_path)
    built_in = WORKLOADS.get(name)
    source = resources.files(__name__).joinpath(built_in) if built_in else Path(name_or_path)
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        expected = f"a built-in name ({', '.join(WORKLOADS)}) or a JSON file"
        invalid_input("workload", expected, repr(name), error.strerror or "")
    except ValueError as error:
        invalid_input("workload", "a JSON file", repr(name), str(error))
    try:
        return _cases(data)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from None


def _cases(data: Any) -> list[Case]:
    cases = data.get("cases") if isinstance(data, dict) else None
    if not isinstance(cases, list) or not cases:
        got = "none" if isinstance(data, dict) and not cases else "something else"
        invalid_input("cases", 'a list of cases, {"cases": [...]}', got)
    block_size = _int(data, "block_size", MINIMAX_M3.block_size, least=1)
    topk = _int(data, "topk", MINIMAX_M3.topk, least=1)
    found = []
    for index, fields in enumerate(cases):
        try:
            found.append(_case(fields, index, block_size, topk))
        except InvalidInput as error:
            raise InvalidInput(f"cases[{index}].{error}") from None
    return found


def _case(fields: Any, index: int, block_size: int, topk: int) -> Case:
    if not isinstance(fields, dict):
        invalid_input("cu_seqlens_q", "an object with that field", type(fields).__name__)
    queries = _ints(fields, "cu_seqlens_q")
    keys = _ints(fields, "cu_seqlens_kv") if "cu_seqlens_kv" in fields else queries
    fragments = tuple(range(len(queries) - 1))
    if "fragment_indices" in fields:
        fragments = _ints(fields, "fragment_indices")
    case = Case(
        _int(fields, "case_id", index),
        _int(fields, "representative_weight", 1),
        queries,
        keys,
        fragments,
        0,
        0,
        block_size,
        topk,
    )
    try:
        case = _counted(case)
    except InvalidInput as error:
        # The file's name for it, which is its source's.
        raise InvalidInput(str(error).replace("cu_seqlens_k:", "cu_seqlens_kv:")) from None
    for name in ("causal_elements", "sparse_elements"):
        counted = getattr(case, name)
        if _int(fields, name, counted) != counted:
            invalid_input(name, f"{counted}, as the offsets say", fields[name])
    return case


def _counted(case: Case) -> Case:
    causal, sparse = count_pairs(case.documents(), case.block_size, case.topk)
    return replace(case, causal_elements=causal, sparse_elements=sparse)


def _int(fields: dict[str, Any], name: str, default: int, least: int = 0) -> int:
    value = fields.get(name, default)
    if type(value) is not int or value < least:
        invalid_input(name, f"an integer, {least} or more", repr(value))
    return value


def _ints(fields: dict[str, Any], name: str) -> tuple[int, ...]:
    values = fields.get(name)
    expected = "a list of integers"
    if not isinstance(values, list) or not values:
        invalid_input(name, expected, "nothing" if not values else type(values).__name__)
    for value in values:
        if type(value) is not int or not abs(value) < 2**31:
            invalid_input(name, f"{expected} of 32 bits", repr(value))
    return tuple(values)
