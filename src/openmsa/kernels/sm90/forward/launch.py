"""The forward on the host: check, choose, compile once, launch.

Two ways. *Key-major*: a thread block keeps one key block's K and V and passes the queries that
chose it; what it finds for a query goes to the query's slot for that block as a normalised partial
output and its base-2 log-sum-exp, and a second kernel merges a query's slots. Slots exist for one
window of queries at a time, which bounds the memory for any token count. *Union*: a tile of
neighbouring queries walks the union of their blocks. `survey` decides for each window and KV head.
Nothing waits for its verdict: all kernels are launched, and leave at once where it is not theirs.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

import math  # noqa: E402
from dataclasses import dataclass  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from openmsa.contract.key_schedule import KeySchedule  # noqa: E402
from openmsa.contract.layout import Layout  # noqa: E402
from openmsa.contract.problem import AttentionConfig  # noqa: E402
from openmsa.kernels.build import Build  # noqa: E402
from openmsa.kernels.common.compile import function, prefetch  # noqa: E402
from openmsa.kernels.common.device import arch_of, sm_count_of  # noqa: E402
from openmsa.kernels.common.tensors import aligned  # noqa: E402
from openmsa.kernels.common.workers import Request  # noqa: E402
from openmsa.kernels.sm90.forward import key_major, merge, survey, union  # noqa: E402
from openmsa.kernels.sm90.forward.config import BLOCK, CHUNK, MOST_EDGES, Config  # noqa: E402
from openmsa.kernels.sm90.forward.context import KeyTensors, Numbers, UnionTensors  # noqa: E402
from openmsa.kernels.stages import tasks  # noqa: E402
from openmsa.kernels.stages.lookup import lookup  # noqa: E402

__all__ = ["builds", "forward"]

_TOPK = 16  # of MiniMax-M3
_SLOT_BYTES = 2**30
"""Partial outputs held at a time; see the Triton forward for what more or less of it costs."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    schedule: KeySchedule,
    layout: Layout,
    config: AttentionConfig,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``out [Tq, Hq, D]`` in q's dtype and fp32 ``lse [Tq, Hq]``; see :mod:`openmsa.pipeline`.

    ``window`` is the number of queries whose partial outputs are held at a time, by default as many
    as 1 GiB takes.
    """
    total, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((total, heads), dtype=torch.float32, device=q.device)
    if not layout.num_queries or not schedule.num_rows:
        return out.zero_(), lse.fill_(float("-inf"))
    facts = Config(str(q.dtype).removeprefix("torch."), heads // k.shape[1])
    prefetch(*_large(arch_of(q.device), facts))
    topk = indices.shape[2]
    if window is None:
        # Of no size of the problem: the window is a fact of the kernel that builds the tasks.
        window = max(1, _SLOT_BYTES // (topk * heads * dim * q.itemsize))
    window = -(-window // facts.union_queries) * facts.union_queries
    q, k, v = (aligned(x) for x in (q, k, v))
    run = _Run.of(q, k, v, indices.contiguous(), schedule, layout, facts, config, window)
    run.survey()
    run.union(out, lse)
    run.key_major(out, lse)
    out[layout.num_queries :] = 0
    lse[layout.num_queries :] = float("-inf")
    return out, lse


@dataclass(frozen=True, eq=False)
class _Run:
    """What the launches of a call share; see `survey.Tables` for the tensors of the verdict."""

    operands: tuple[Tensor, Tensor, Tensor]
    indices: Tensor
    schedule: KeySchedule
    layout: Layout
    facts: Config
    scale_log2: float
    window: int
    positions: Tensor
    blocks: Tensor
    unfit: Tensor
    tally: Tensor
    lists: Tensor
    counts: Tensor

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        schedule: KeySchedule,
        layout: Layout,
        facts: Config,
        config: AttentionConfig,
        window: int,
    ) -> _Run:
        """Allocate what the kernels pass on."""
        kv_heads, topk = k.shape[1], indices.shape[2]
        rows, edges = schedule.num_rows, facts.union_queries * survey.padded(topk)
        tiles = -(-layout.num_queries // facts.union_queries) if edges <= MOST_EDGES else 0
        windows = -(-layout.num_queries // window)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=q.device)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=q.device)

        return cls(
            (q, k, v), indices, schedule, layout, facts, config.scale * math.log2(math.e), window,
            *lookup(layout, rows, BLOCK),
            unfit=zeros(kv_heads, rows),
            tally=zeros(windows, kv_heads, 3),
            lists=empty(tiles, kv_heads, edges, 2),
            counts=empty(tiles, kv_heads, 2),
        )  # fmt: skip

    @property
    def arch(self) -> str:
        return arch_of(self.tally.device)

    def survey(self) -> None:
        """Find what V is fit for, the verdict of each window, and the unions where they win."""
        function(survey.fitness(self.arch, self.facts))(self.operands[2], self.blocks, self.unfit)
        if not self.lists.shape[0]:
            return
        tables = survey.Tables(
            self.indices, self.layout.cu_seqlens_q, self.layout.spans,
            self.layout.first_blocks(BLOCK).int(), self.positions, self.unfit, self.lists,
            self.counts, self.tally,
        )  # fmt: skip
        tiles = self.window // self.facts.union_queries
        for sample in (True, False):
            build = survey.build(self.arch, self.facts.group, self.indices.shape[2], sample)
            function(build)(self.indices, tables, self.layout.num_queries, tiles)

    def union(self, out: Tensor, lse: Tensor) -> None:
        """Fill out and lse of the windows where the union way has won."""
        if not self.lists.shape[0]:
            return
        counter = torch.zeros(1, dtype=torch.int32, device=out.device)
        tensors = UnionTensors(
            self.lists, self.counts, counter, self.tally, self.positions, self.blocks, out, lse
        )
        numbers = self._numbers(0, self.window // self.facts.union_queries, self.layout.num_queries)
        edges = self.lists.shape[2]
        function(union.build(self.arch, self.facts, edges))(*self.operands, tensors, numbers)

    def key_major(self, out: Tensor, lse: Tensor) -> None:
        """Fill out and lse of the others, window by window."""
        schedule, total = self.schedule, self.layout.num_queries
        kv_heads, topk = self.indices.shape[0], self.indices.shape[2]
        slot_of = schedule.slots
        if slot_of is None:
            slot_of = _slots(schedule.queries, total)
        work = tasks.tasks_of(schedule, CHUNK, total, self.window, even=True)
        held = min(self.window, total) * kv_heads * topk
        group, dim = self.facts.group, out.shape[2]
        slots = torch.empty((held, group * dim), dtype=out.dtype, device=out.device)
        slot_lse = torch.empty((held, group), dtype=torch.float32, device=out.device)
        counter = torch.zeros(self.tally.shape[0], dtype=torch.int32, device=out.device)
        tensors = KeyTensors(
            work.tasks, work.bounds, counter, schedule.queries, slot_of, self.positions,
            self.blocks, self.unfit, self.tally, self.operands[2], slots, slot_lse,
        )  # fmt: skip
        attend = function(key_major.build(self.arch, self.facts))
        combine = function(merge.build(self.arch, self.facts))
        for window in range(self.tally.shape[0]):
            first = window * self.window
            queries = min(self.window, total - first)
            attend(*self.operands, tensors, self._numbers(window, first, queries))
            combine(self.indices, self.tally, slots, slot_lse, out, lse, window, first, queries)

    def _numbers(self, window: int, first: int, queries: int) -> Numbers:
        windows, topk = self.tally.shape[0], self.indices.shape[2]
        grid = sm_count_of(self.tally.device)
        return Numbers(self.scale_log2, window, windows, first, queries, topk, grid)


def _slots(queries: Tensor, total: int) -> Tensor:
    """uint8 of ``queries [Hkv, edges]``'s shape: which of its query's blocks an edge is. Edges are
    ordered by block, so it is the number of the query's edges before it."""
    owner = torch.where(queries < 0, total, queries.long())
    ordered, order = owner.sort(dim=1, stable=True)
    before = torch.searchsorted(ordered, ordered, right=False)
    rank = torch.arange(queries.shape[1], device=queries.device) - before
    found = torch.zeros_like(queries, dtype=torch.uint8)
    return found.scatter_(1, order, rank.to(torch.uint8))


def _large(arch: str, facts: Config) -> tuple[Request, ...]:
    """The kernels of a training step that take longest to compile, in the order of their use: a
    process each, but for those that this process compiles until it needs the first of them."""
    backward = "openmsa.kernels.sm90.backward.launch"
    return tuple(
        Request(module, arch, facts.dtype, facts.group, (name,))
        for module, name in (
            (__name__, "forward_union"),
            (__name__, "forward_key_major"),
            (__name__, "forward_merge"),
            (__name__, "task_build"),
            (backward, "backward"),
        )
    )


def builds(arch: str, dtype: str = "bfloat16", group: int = 16) -> tuple[Build, ...]:
    """What :func:`forward` compiles for MiniMax-M3's head counts and top-16, but for the lookup:
    task windows are those of :data:`_SLOT_BYTES`."""
    window = _SLOT_BYTES // (_TOPK * 64 * 128 * 2)
    facts = Config(dtype, group)
    return (
        survey.fitness(arch, facts),
        *(survey.build(arch, group, _TOPK, sample) for sample in (True, False)),
        union.build(arch, facts, facts.union_queries * survey.padded(_TOPK)),
        tasks.build(arch, CHUNK, window, even=True),
        key_major.build(arch, facts),
        merge.build(arch, facts),
    )
