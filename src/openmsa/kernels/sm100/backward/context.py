"""What the roles of the backward kernel share: arguments, memory, and a thread block's tiles."""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from dataclasses import dataclass  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int32  # noqa: E402

from openmsa.kernels.common.tiles import Barriers  # noqa: E402
from openmsa.kernels.sm100.backward.config import STAGES, Config, Meta  # noqa: E402

__all__ = ["Context", "Maps", "Numbers", "Operands", "Tensors"]


class Tensors(NamedTuple):
    """Global tensors that threads read or write themselves.

    Attributes:
        lse, delta: fp32 ``[Tq, Hq]``.
        tasks: int32 ``[tasks, 4]``, of `BackwardTasks`.
        bounds: int32: the number of tasks, or the first task of each (KV head, window) and the end.
        queries: int32 ``[Hkv, edges]``, of `KeySchedule`.
        positions: int32 ``[Tq]``, key position of each query in its document.
        blocks: int32 ``[rows, 3]``: first key row, keys, and position of each key block.
        indices: int32 ``[Hkv, Tq, topk]``, the selection.
        dq: fp32 ``[Tq, Hq, D]``, or slots ``[window, topk, Hq, D]`` where sums are ordered.
        dk, dv: fp32 ``[Tk, Hkv, D]``.
        parts: fp32 ``[CTAs, 2, block, D]``: dv and dk of a run that an earlier CTA began.
        part_rows: int32 ``[CTAs, 4]``: -1, or KV head, first key row and keys of that run.
    """

    lse: cute.Tensor
    delta: cute.Tensor
    tasks: cute.Tensor
    bounds: cute.Tensor
    queries: cute.Tensor
    positions: cute.Tensor
    blocks: cute.Tensor
    indices: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    parts: cute.Tensor
    part_rows: cute.Tensor


class Numbers(NamedTuple):
    """Numbers of a launch: the softmax scale, the window of ordered sums, the grid."""

    scale: Float32
    scale_log2: Float32
    window: Int32
    num_windows: Int32
    first_query: Int32
    num_sms: Int32
    grid: Int32


@dataclass(frozen=True)
class Maps:
    """A tensor map's copy atom and its coordinates, for rows (q, d_out) and blocks (k, v)."""

    q: cute.CopyAtom
    q_at: cute.Tensor
    d_out: cute.CopyAtom
    d_out_at: cute.Tensor
    k: cute.CopyAtom
    k_at: cute.Tensor
    v: cute.CopyAtom
    v_at: cute.Tensor


@dataclass(frozen=True)
class Operands:
    """The tiles of shared memory as products read them, and the form of P and dS in tensor memory;
    ``rows`` have channels as the inner dimension, ``columns`` as the outer one."""

    halves: Any
    k_rows: cute.Tensor
    k_columns: cute.Tensor
    v_rows: cute.Tensor
    q_rows: cute.Tensor
    q_columns: cute.Tensor
    d_out_rows: cute.Tensor
    d_out_columns: cute.Tensor
    ds: cute.Tensor


@dataclass(frozen=True)
class Context(Barriers):
    """One thread block's share of the work, as its roles see it.

    Frozen, and never stored through: the DSL carries what a loop calls methods on, or stores to,
    from turn to turn, and this holds what it cannot carry.

    Attributes:
        barriers: the mbarriers, by `Barrier`.
        floats: fp32 ``[STAGES, 2, 128]`` in shared memory: -lse * log2(e), and -scale * delta.
        ints: int32 ``[STAGES, Meta.COUNT + 3 * queries]``: `Meta`, then each query, the last key of
            the block that it sees, and its slot.
        tensor_memory: its first column.
        begin, end: the tiles; see `Context.task` for their tasks.
    """

    config: Config
    dtype: Any
    tensors: Tensors
    numbers: Numbers
    barriers: cute.Pointer
    floats: cute.Tensor
    ints: cute.Tensor
    tensor_memory: cute.Pointer
    begin: Int32
    end: Int32

    def stage(self, tile: Any) -> tuple[Any, Any]:
        """Buffer of the CTA's tile ``tile``, and how often it was used before."""
        return tile % STAGES, tile // STAGES

    def meta(self, stage: Any, which: Meta) -> Any:
        return self.ints[stage, int(which)]

    def query_at(self, slot: Any) -> Any:
        return int(Meta.COUNT) + slot

    def limit_at(self, slot: Any) -> Any:
        return int(Meta.COUNT) + self.config.queries + slot

    def slot_at(self, slot: Any) -> Any:
        return int(Meta.COUNT) + 2 * self.config.queries + slot

    @cute.jit
    def task(self, tile: Int32) -> Int32:
        """The task of a tile. Where sums are ordered a launch takes one window of every KV head;
        their tasks are one run a head."""
        task = tile
        if cutlass.const_expr(self.config.deterministic):
            heads = self.tensors.dk.shape[1]
            left, found = tile, Int32(0)
            at = self.numbers.window
            for _ in range(heads):
                first = self.tensors.bounds[at]
                size = self.tensors.bounds[at + 1] - first
                if left >= 0 and left < size:
                    found = first + left
                left -= size
                at += self.numbers.num_windows
            task = found
        return task
