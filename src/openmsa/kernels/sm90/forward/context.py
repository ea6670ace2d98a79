"""What the roles of the forward's attention kernels share."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from dataclasses import dataclass  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402

from openmsa.kernels.common.tiles import Barriers  # noqa: E402
from openmsa.kernels.sm90.forward.config import Config  # noqa: E402

__all__ = ["Context", "KeyTensors", "Maps", "Numbers", "UnionTensors"]


class KeyTensors(NamedTuple):
    """Global tensors that the key-major kernel's threads read or write themselves.

    Attributes:
        tasks, bounds: int32, of `BackwardTasks`.
        counter: int32 ``[windows]``: tasks taken of each window.
        queries: int32 ``[Hkv, edges]``, and slot_of uint8, of `KeySchedule`.
        positions: int32 ``[Tq]``, key position of each query in its document.
        blocks: int32 ``[rows, 3]``: first key row, keys, and position of each key block.
        unfit: int32 ``[Hkv, rows]``: not 0 where V has a value that is not finite.
        tally: int32 ``[windows, Hkv, 3]``; see `survey`.
        v: ``[Tk, Hkv, D]``, for such values.
        slots: ``[window * Hkv * topk, group * D]``: partial outputs, each ``[head / 8, half,
            head % 8, 64]`` with the eight 16-byte pieces of a half row in the order of the shared
            memory they come from.
        slot_lse: fp32 ``[window * Hkv * topk, group]``, base 2.
    """

    tasks: cute.Tensor
    bounds: cute.Tensor
    counter: cute.Tensor
    queries: cute.Tensor
    slot_of: cute.Tensor
    positions: cute.Tensor
    blocks: cute.Tensor
    unfit: cute.Tensor
    tally: cute.Tensor
    v: cute.Tensor
    slots: cute.Tensor
    slot_lse: cute.Tensor


class UnionTensors(NamedTuple):
    """Global tensors that the union kernel's threads read or write themselves.

    Attributes:
        lists: int32 ``[tiles, Hkv, edges, 2]``: schedule row, and bit i where the tile's query i
            chose it.
        counts: int32 ``[tiles, Hkv, 2]``: rows that need no mask, and all.
        counter: int32 ``[1]``: tiles taken.
        tally, positions, blocks: as of `KeyTensors`.
        out: ``[Tq, Hq, D]``; lse: fp32 ``[Tq, Hq]``, natural.
    """

    lists: cute.Tensor
    counts: cute.Tensor
    counter: cute.Tensor
    tally: cute.Tensor
    positions: cute.Tensor
    blocks: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor


class Numbers(NamedTuple):
    """Numbers of a launch: the softmax scale times log2(e), the window and how many there are, its
    first query, queries and thread blocks; for the union kernel, tiles of a window instead of the
    first query."""

    scale_log2: Float32
    window: Int32
    windows: Int32
    first: Int32
    queries: Int32
    topk: Int32
    grid: Int32


@dataclass(frozen=True)
class Maps:
    """A tensor map's copy atom and its coordinates, for rows of q and for blocks of k and v."""

    q: cute.CopyAtom
    q_at: cute.Tensor
    k: cute.CopyAtom
    k_at: cute.Tensor
    v: cute.CopyAtom
    v_at: cute.Tensor


@dataclass(frozen=True)
class Context(Barriers):
    """One thread block, as its roles see it. Frozen, and never stored through: the DSL carries what
    a loop stores to from turn to turn, and this holds what it cannot carry.

    Attributes:
        tensors: `KeyTensors` or `UnionTensors`.
        barriers: the mbarriers, by `config.KeyMajor` or `config.Union`.
        rows, k, v: the tiles in shared memory.
        words: int32 ``[stage or buffer, word]`` of shared memory, by `config.Meta` or `UnionMeta`.
    """

    config: Config
    dtype: Any
    tensors: Any
    numbers: Numbers
    barriers: cute.Pointer
    rows: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    words: cute.Tensor

    def arrive(self, which: Any, stage: Any = 0, count: Any = 1) -> None:
        """``count`` arrivals of this thread."""
        cute.arch.mbarrier_arrive(self.barrier(which, stage), arrive_count=count)
