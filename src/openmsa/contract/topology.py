"""The shape of the model: head counts, widths and block geometry."""

from __future__ import annotations

from dataclasses import dataclass

from openmsa.errors import invalid_input

__all__ = ["MINIMAX_M3", "Topology"]

_MAX_GROUP = 64
_MAX_TOPK = 64


@dataclass(frozen=True)
class Topology:
    """Head counts and block geometry of one MSA layer.

    Attributes:
        q_heads: query heads, ``Hq``; a multiple of ``kv_heads``.
        kv_heads: key/value heads, ``Hkv``; also the number of index query heads.
        head_dim: channels of q, k and v, ``D``.
        index_dim: channels of the index query and the single shared index key, ``Di``.
        block_size: keys per block, counted from each document's first key.
        topk: blocks a query selects per KV head, forced ones included.
        init_blocks: leading blocks of a document that are always selected.
        local_blocks: trailing blocks that are always selected; 1 is the query's own block.

    Raises:
        InvalidInput: a size is not positive, the group is not 1..64, ``topk`` is not 1..64, or more
            blocks are forced than ``topk`` holds.
    """

    q_heads: int = 64
    kv_heads: int = 4
    head_dim: int = 128
    index_dim: int = 128
    block_size: int = 128
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1

    def __post_init__(self) -> None:
        for name in (
            "q_heads",
            "kv_heads",
            "head_dim",
            "index_dim",
            "block_size",
            "topk",
        ):
            if getattr(self, name) < 1:
                invalid_input(name, "a positive integer", getattr(self, name))
        if self.q_heads % self.kv_heads:
            invalid_input("q_heads", f"a multiple of kv_heads ({self.kv_heads})", self.q_heads)
        if self.group > _MAX_GROUP:
            invalid_input("q_heads / kv_heads", f"1..{_MAX_GROUP}", self.group)
        check_forced_blocks(self.topk, self.init_blocks, self.local_blocks)

    @property
    def group(self) -> int:
        """Query heads that share one KV head and so one selection."""
        return self.q_heads // self.kv_heads


def check_forced_blocks(topk: int, init_blocks: int, local_blocks: int) -> None:
    """Raise :class:`InvalidInput` unless the forced blocks fit into ``topk`` (1..64)."""
    if not 1 <= topk <= _MAX_TOPK:
        invalid_input("topk", f"1..{_MAX_TOPK}", topk)
    if init_blocks < 0:
        invalid_input("init_blocks", "0 or more", init_blocks)
    if local_blocks < 1:
        invalid_input("local_blocks", "1 or more (1 is the query's own block)", local_blocks)
    if init_blocks + local_blocks > topk:
        invalid_input(
            "init_blocks + local_blocks",
            f"at most topk ({topk})",
            init_blocks + local_blocks,
            "forced blocks count inside top-k",
        )


MINIMAX_M3 = Topology()
"""MiniMax-M3: 64 query heads, 4 KV heads, head dim 128, blocks of 128 keys, top-16."""
