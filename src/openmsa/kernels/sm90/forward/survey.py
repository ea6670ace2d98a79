"""Which way each window of queries goes, and the unions of the blocks of neighbouring queries.

A tile of neighbouring queries walks the union of their blocks once, with an online softmax and no
partial results. That costs a full tile of work for each block of the union, however few queries
chose it, so it pays where unions are small. A sample of every window's tiles decides; the lists of
a tile are made only where the union way has won. A window that reads a value of V that is not
finite goes the key-major way, since a tile's product would hand it, as zero times infinity, to
queries that did not choose it. The verdict stays on the device, where all kernels read it.
"""

from __future__ import annotations

from openmsa.kernels import require_cute_dsl

require_cute_dsl()

from typing import Any, NamedTuple  # noqa: E402

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import cutlass.utils as utils  # noqa: E402
import torch  # noqa: E402
from cutlass import Int32  # noqa: E402

from openmsa.kernels.common.compile import ANY, Build, fake  # noqa: E402
from openmsa.kernels.common.ptx import add_s32  # noqa: E402
from openmsa.kernels.common.scan import last_not_above, warp_scan  # noqa: E402
from openmsa.kernels.sm90.forward.config import BLOCK, HEAD_DIM, MOST_EDGES, Config  # noqa: E402
from openmsa.kernels.sm90.forward.setup import dtype_of  # noqa: E402
from openmsa.kernels.sm90.forward.walk import union_wins  # noqa: E402

__all__ = ["Fitness", "Survey", "Tables", "build", "fitness", "padded"]

SAMPLE = 8
"""One tile in this many is looked at before the verdict."""

_THREADS = 256
_VECTOR = 8  # elements of 16 bytes
_NOBODY = -2  # a block that no query has


class Tables(NamedTuple):
    """int32 tensors of a survey.

    Attributes:
        indices: ``[Hkv, Tq, topk]``, the selection.
        cu_seqlens_q, spans, first: where documents lie, and the schedule row of the first block of
            each key range; of `Layout`.
        positions: ``[Tq]``, key position of each query in its document.
        unfit: ``[Hkv, rows]``: not 0 where V has a value that is not finite.
        lists, counts: of `context.UnionTensors`.
        tally: ``[windows, Hkv, 3]``: blocks of the unions and edges of the sampled tiles, and not 0
            where a union has an unfit block.
    """

    indices: cute.Tensor
    cu_seqlens_q: cute.Tensor
    spans: cute.Tensor
    first: cute.Tensor
    positions: cute.Tensor
    unfit: cute.Tensor
    lists: cute.Tensor
    counts: cute.Tensor
    tally: cute.Tensor


def padded(topk: int) -> int:
    """The power of two from ``topk`` on."""
    return 1 << (topk - 1).bit_length()


class Fitness:
    """A thread block for each key block: is there a value of V that is not finite?"""

    @cute.jit
    def __call__(
        self, v: cute.Tensor, blocks: cute.Tensor, unfit: cute.Tensor, stream: Any
    ) -> None:
        """v ``[Tk, Hkv, D]``; blocks ``[rows, 3]``; unfit ``[Hkv, rows]``, zeros."""
        self.kernel(v, blocks, unfit).launch(
            grid=(unfit.shape[1], unfit.shape[0], 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, v: cute.Tensor, blocks: cute.Tensor, unfit: cute.Tensor) -> None:
        row, head, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        start, keys = blocks[row, 0], blocks[row, 1]
        lanes = HEAD_DIM // _VECTOR
        found = Int32(0)
        for turn in cutlass.range_constexpr(BLOCK * lanes // _THREADS):
            key = thread // lanes + turn * (_THREADS // lanes)
            if key < keys:
                values = cute.make_rmem_tensor(_VECTOR, v.element_type)
                line = v[start + key, head, None]
                cute.autovec_copy(cute.local_tile(line, (_VECTOR,), (thread % lanes,)), values)
                words = cute.recast_tensor(values, Int32)
                bits = 0x7F80 if cutlass.const_expr(v.element_type is cutlass.BFloat16) else 0x7C00
                for i in cutlass.range_constexpr(_VECTOR // 2):
                    if (words[i] & bits) == bits or (words[i] >> 16 & bits) == bits:
                        found = Int32(1)
        if found != 0:
            unfit[head, row] = 1


class Survey:
    """A thread block for each tile and KV head, a thread for each edge (query, block)."""

    def __init__(self, config: Config, topk: int, sample: bool) -> None:
        self.queries = config.union_queries
        self.cost = config.union_cost
        self.topk = topk
        self.sample = sample
        self.edges = self.queries * padded(topk)
        self.threads = max(32, self.edges)

    @cute.jit
    def __call__(
        self, first: cute.Tensor, tables: Tables, num_queries: Int32, tiles_per_window: Int32,
        stream: Any,
    ) -> None:  # fmt: skip
        """``first`` is ``tables.indices`` again: the stream is found by a tensor of its own."""
        tables = Tables(*tables)
        tiles = cute.ceil_div(num_queries, self.queries)
        if cutlass.const_expr(self.sample):
            tiles = cute.ceil_div(tiles, SAMPLE)
        self.kernel(tables, num_queries, tiles_per_window).launch(
            grid=(tiles, tables.indices.shape[0], 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, tables: Tables, num_queries: Int32, tiles_per_window: Int32) -> None:
        t = Tables(*tables)
        tile, head, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.sample):
            tile = tile * SAMPLE
        window = tile // tiles_per_window
        if cutlass.const_expr(self.sample):
            self.look(t, tile, head, window, num_queries)
        else:
            # Without the third word, which other thread blocks may be writing.
            if union_wins(t.tally, window, head, self.cost, fit=False):
                self.look(t, tile, head, window, num_queries)

    @cute.jit
    def look(self, t: Tables, tile: Int32, head: Int32, window: Int32, num_queries: Int32) -> None:
        shared = utils.SmemAllocator()
        width = padded(self.topk)
        rows = shared.allocate_tensor(
            Int32, cute.make_layout((self.queries, width), stride=(width, 1)), 16
        )
        places = shared.allocate_tensor(Int32, cute.make_layout(self.queries), 16)
        sums = shared.allocate_tensor(Int32, cute.make_layout((3, 32), stride=(32, 1)), 16)
        thread = cute.arch.thread_idx()[0]
        local, slot = thread // width, thread % width
        query = tile * self.queries + local
        block, row = Int32(-1), Int32(_NOBODY)
        if local < self.queries:
            place = Int32(2**30)  # sees everything: there is no such query
            if query < num_queries:
                place = t.positions[query]
                if slot < self.topk:
                    block = t.indices[head, query, slot]
                if block >= 0:
                    entry = last_not_above(t.cu_seqlens_q, t.spans.shape[0], query)
                    row = t.first[t.spans[entry, 2]] + block
            rows[local, slot] = row
            if slot == 0:
                places[local] = place
        cute.arch.sync_threads()
        bits, whole = Int32(0), Int32(1)
        if row >= 0:
            for other in cutlass.range(self.queries, unroll=1):
                chose = Int32(0)
                for i in cutlass.range_constexpr(width):
                    if rows[other, i] == row:
                        chose = Int32(1)
                bits |= chose << other
                there = tile * self.queries + other < num_queries
                if there and (chose == 0 or places[other] < (block + 1) * BLOCK - 1):
                    whole = Int32(0)
        fresh = row >= 0 and (bits & (1 << local) - 1) == 0
        edge = Int32(1) if row >= 0 else Int32(0)
        plain = Int32(1) if fresh and whole != 0 else Int32(0)
        other = Int32(1) if fresh and whole == 0 else Int32(0)
        before, after, unmasked, union, edges = _sums(sums, plain, other, edge, self.threads)
        tally = t.tally.iterator + (window * t.tally.shape[1] + head) * 3
        if cutlass.const_expr(self.sample):
            if thread == 0:
                add_s32(tally, union)
                add_s32(tally + 1, edges)
        else:
            lists, counts = t.lists, t.counts
            if fresh:
                at = before if whole != 0 else unmasked + after
                lists[tile, head, at, 0] = row
                lists[tile, head, at, 1] = bits
                if t.unfit[head, row] != 0:
                    add_s32(tally + 2, Int32(1))
            if thread == 0:
                counts[tile, head, 0] = unmasked
                counts[tile, head, 1] = union


@cute.jit
def _sums(
    words: cute.Tensor, plain: Int32, other: Int32, edge: Int32, threads: int
) -> tuple[Int32, Int32, Int32, Int32, Int32]:
    """``plain`` and ``other`` over the threads before this one; ``plain``, both, and ``edge`` over
    all of them."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    upto_plain, upto_other = warp_scan(plain, lane), warp_scan(other, lane)
    upto_edge = warp_scan(edge, lane)
    if lane == 31:
        words[0, warp] = upto_plain
        words[1, warp] = upto_other
        words[2, warp] = upto_edge
    cute.arch.sync_threads()
    before, after = upto_plain - plain, upto_other - other
    unmasked, masked, edges = Int32(0), Int32(0), Int32(0)
    for i in cutlass.range_constexpr(threads // 32):
        if i < warp:
            before += words[0, i]
            after += words[1, i]
        unmasked += words[0, i]
        masked += words[1, i]
        edges += words[2, i]
    return before, after, unmasked, unmasked + masked, edges


def fitness(arch: str, config: Config) -> Build:
    """`Fitness` for V of ``config``."""

    def make() -> tuple[Any, tuple[Any, ...]]:
        v = fake(dtype_of(config), (ANY, ANY, HEAD_DIM), strides=(ANY, ANY, 1), align=16)
        return Fitness(), (v, fake(torch.int32, (ANY, 3)), fake(torch.int32, (ANY, ANY)))

    return Build("forward_fitness", arch, (("dtype", config.dtype),), make)


def build(arch: str, group: int, topk: int, sample: bool) -> Build:
    """`Survey` where ``group`` query heads share a KV head; the ``sample`` or the lists.

    Raises:
        ValueError: a tile has more edges than threads.
    """
    config = Config("", group)  # of any type: only integers are looked at
    edges = config.union_queries * padded(topk)
    if edges > MOST_EDGES:
        raise ValueError(f"tiles of {edges} edges, at most {MOST_EDGES}")

    def make() -> tuple[Any, tuple[Any, ...]]:
        line, table, cube = (ANY,), (ANY, ANY), (ANY, ANY, ANY)
        tables = Tables(
            indices=fake(torch.int32, cube),
            cu_seqlens_q=fake(torch.int32, line),
            spans=fake(torch.int32, (ANY, 3)),
            first=fake(torch.int32, line),
            positions=fake(torch.int32, line),
            unfit=fake(torch.int32, table),
            lists=fake(torch.int32, (ANY, ANY, edges, 2), align=8),
            counts=fake(torch.int32, (ANY, ANY, 2)),
            tally=fake(torch.int32, (ANY, ANY, 3)),
        )
        return Survey(config, topk, sample), (fake(torch.int32, cube), tables, Int32(0), Int32(0))

    facts = (("group", group), ("topk", topk), ("sample", sample))
    return Build("forward_survey", arch, facts, make)
