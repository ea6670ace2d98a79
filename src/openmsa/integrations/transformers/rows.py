"""The rows of one forward: what Transformers makes instead of a mask, and every layer gets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openmsa.contract import Documents
from openmsa.errors import invalid_input
from openmsa.integrations.transformers.framework import framework

__all__ = ["Rows", "row_facts"]


@dataclass(eq=False)
class Rows:
    """The rows of one forward, which every layer gets in place of a mask.

    Attributes:
        batch: rows.
        padding: bool ``[B, S]``, True at real tokens, or None where all are.
        own_mask: makes the mask of the model's own path.
    """

    batch: int
    padding: Tensor | None
    own_mask: Callable[[], Tensor | None]
    _found: dict[torch.device, tuple[Documents | None, list[tuple[int, int, int]]]] = field(
        default_factory=dict
    )

    def documents(
        self, position_ids: Tensor
    ) -> tuple[Documents | None, list[tuple[int, int, int]]]:
        """The documents, and (row, begin, end) of each on the host; None with left padding.

        Read once per forward and device, with one device-to-host copy.
        """
        device = position_ids.device
        if device not in self._found:
            self._found[device] = self._read(position_ids)
        return self._found[device]

    def _read(self, position_ids: Tensor) -> tuple[Documents | None, list[tuple[int, int, int]]]:
        position_ids = position_ids.reshape(-1, position_ids.shape[-1]).expand(self.batch, -1)
        ids = torch.ones_like(position_ids)
        ids[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
        ids = ids.cumsum(1)
        if self.padding is not None:
            ids = ids * self.padding.to(ids.device)
        ids = ids.cpu()
        if self.padding is not None:
            if bool(((ids[:, :1] == 0) & (ids != 0)).any()):
                return None, []
            if bool(((ids > 1) & (ids != 0)).any()):
                invalid_input(
                    "attention_mask",
                    "None where position_ids restart inside a row",
                    f"shape {tuple(self.padding.shape)}",
                    "Transformers reads a row with a mask as one document; leave it out to pack",
                )
        docs = Documents.from_ids(ids)
        starts = docs.token_rows[docs.cu_seqlens_q[:-1].long()].tolist()
        lengths = docs.cu_seqlens_q.diff().tolist()
        width = ids.shape[1]
        spans = [
            (start // width, start % width, start % width + length)
            for start, length in zip(starts, lengths, strict=True)
        ]
        return docs.to(position_ids.device), spans


def row_facts(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Any:
    """What Transformers calls to make a mask: facts of the rows, or the model's own mask."""
    own = functools.partial(
        framework().masks["sdpa"],
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        **kwargs,
    )
    if q_length != kv_length or use_vmap:
        return own()
    return Rows(batch_size, attention_mask, own)
