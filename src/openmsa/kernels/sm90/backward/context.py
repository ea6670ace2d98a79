"""What the roles of the backward share: arguments, memory, and the ring of tiles."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from dataclasses import dataclass  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import cutlass.cute as cute  # noqa: E402
from cutlass import Float32  # noqa: E402

from openmsa.kernels.common.tiles import Barriers  # noqa: E402
from openmsa.kernels.sm90.backward.config import STAGES, Config, Meta  # noqa: E402

__all__ = ["Context", "Maps", "Numbers", "Sums", "Tensors", "Tiles"]


class Tensors(NamedTuple):
    """Global tensors that threads read or write themselves.

    Attributes:
        lse, delta: fp32 ``[Tq, Hq]``.
        tasks: int32 ``[capacity, 4]``: KV head, schedule row, first edge, queries.
        count: int32 ``[1]`` tasks.
        ticket: int32 ``[1]``, zero: the next task that nobody has taken.
        queries: int32 ``[Hkv, edges]``, of `KeySchedule`.
        positions: int32 ``[Tq]``, key position of each query in its document.
        blocks: int32 ``[rows, 3]``: first key row, keys, and position of each key block.
        row_ptr: int32 ``[Hkv, rows + 1]``, of `KeySchedule`.
        factors: fp32 ``[Tq, Hq]``: what makes a row of dq integers, where sums are ordered.
        turns: int32 ``[Hkv, rows, 8]``, zero: edges of a key block that dk and dv hold, for each
            consumer warp's 16 keys, where sums are ordered.
    """

    lse: cute.Tensor
    delta: cute.Tensor
    tasks: cute.Tensor
    count: cute.Tensor
    ticket: cute.Tensor
    queries: cute.Tensor
    positions: cute.Tensor
    blocks: cute.Tensor
    row_ptr: cute.Tensor
    factors: cute.Tensor
    turns: cute.Tensor


class Sums(NamedTuple):
    """What the kernel adds to: dq ``[Tq, Hq, D]``, fp32 or int32 where sums are ordered; dk and dv
    fp32 ``[Tk, Hkv, D]``."""

    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor


class Numbers(NamedTuple):
    """Numbers of a launch."""

    scale: Float32
    scale_log2: Float32


@dataclass(frozen=True)
class Maps:
    """A tensor map's copy atom and its coordinates."""

    q: cute.CopyAtom
    q_at: cute.Tensor
    d_out: cute.CopyAtom
    d_out_at: cute.Tensor
    k: cute.CopyAtom
    k_at: cute.Tensor
    v: cute.CopyAtom
    v_at: cute.Tensor
    dq: cute.CopyAtom
    dq_at: cute.Tensor
    dk: cute.CopyAtom
    dk_at: cute.Tensor
    dv: cute.CopyAtom
    dv_at: cute.Tensor


@dataclass(frozen=True)
class Tiles:
    """Pointers to the tiles of shared memory: k, v ``[half, key, channel]``, q, d_out ``[stage,
    half, row, channel]``, ds ``[buffer, key, row]``, dq fp32 ``[quarter, row, channel]``."""

    k: cute.Pointer
    v: cute.Pointer
    q: cute.Pointer
    d_out: cute.Pointer
    ds: cute.Pointer
    dq: cute.Pointer


@dataclass(frozen=True)
class Context(Barriers):
    """One thread block's memory, as its roles see it.

    Frozen, and never stored through: the DSL carries what a loop calls methods on, or stores to,
    from turn to turn, and this holds what it cannot carry.

    Attributes:
        barriers: the mbarriers, by `Barrier`.
        floats: fp32 ``[STAGES, 2 or 3, 64]`` in shared memory: -lse * log2(e), -scale * delta, and
            the factor of dq.
        ints: int32 ``[STAGES, words]``: `Meta`, then each query, and the keys that it sees.
    """

    config: Config
    dtype: Any
    tensors: Tensors
    numbers: Numbers
    barriers: cute.Pointer
    floats: cute.Tensor
    ints: cute.Tensor

    def stage(self, tile: Any) -> tuple[Any, Any]:
        """Buffer of the thread block's tile ``tile``, and how often it was used before."""
        return tile % STAGES, tile // STAGES

    def meta(self, stage: Any, which: Meta) -> Any:
        return self.ints[stage, int(which)]

    def query_at(self, slot: Any) -> Any:
        return int(Meta.COUNT) + slot

    def visible_at(self, slot: Any) -> Any:
        return int(Meta.COUNT) + self.config.queries + slot
