"""Basic blocks, immediate post-dominators and liveness of a kernel's instructions.

A branch that splits a warp reconverges at the start of its block's immediate post-dominator.
Liveness tells which registers of the lanes that wait elsewhere a divergent write must preserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flow:
    """What the analysis needs to know of one instruction."""

    uses: tuple[int, ...]
    defs: tuple[int, ...]
    targets: tuple[int, ...] = ()
    falls_through: bool = True
    guarded: bool = False


@dataclass(slots=True)
class _Block:
    start: int
    end: int
    successors: list[int]


def _blocks(flows: Sequence[Flow]) -> tuple[list[_Block], dict[int, int]]:
    count = len(flows)
    starts = {0}
    for pc, flow in enumerate(flows):
        starts.update(flow.targets)
        if flow.targets or not flow.falls_through:
            starts.add(pc + 1)
    order = sorted(s for s in starts if s < count)
    index = {start: number for number, start in enumerate(order)}
    blocks = []
    for number, start in enumerate(order):
        end = order[number + 1] if number + 1 < len(order) else count
        last = flows[end - 1]
        following = set(last.targets)
        if last.falls_through:
            following.add(end)
        # The exit of the kernel is one virtual block behind the last.
        blocks.append(_Block(start, end, sorted(index.get(s, len(order)) for s in following)))
        if not last.falls_through and not last.targets:
            blocks[-1].successors = sorted({*blocks[-1].successors, len(order)})
    return blocks, index


def reconvergence(flows: Sequence[Flow]) -> dict[int, int]:
    """For each conditional branch's index, the index where its lanes meet (len(flows): at exit)."""
    blocks, _ = _blocks(flows)
    exit_block = len(blocks)
    immediate = _post_dominators([b.successors for b in blocks], exit_block)
    found = {}
    for number, block in enumerate(blocks):
        if flows[block.end - 1].targets:
            meet = immediate[number]
            found[block.end - 1] = len(flows) if meet in (None, exit_block) else blocks[meet].start
    return found


def _post_dominators(successors: list[list[int]], exit_block: int) -> list[int | None]:
    """Immediate post-dominators by the usual fixed point over reverse post-order."""
    order, rank = _reverse_order(successors, exit_block)
    immediate: list[int | None] = [None] * (exit_block + 1)
    immediate[exit_block] = exit_block
    changed = True
    while changed:
        changed = False
        for node in order:
            if node == exit_block:
                continue
            known = [s for s in successors[node] if immediate[s] is not None]
            if not known:
                continue
            meet = known[0]
            for other in known[1:]:
                meet = _intersect(meet, other, immediate, rank)
            if immediate[node] != meet:
                immediate[node], changed = meet, True
    return immediate


def _intersect(a: int, b: int, immediate: list[int | None], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] > rank[b]:
            a = immediate[a]  # type: ignore[assignment]
        while rank[b] > rank[a]:
            b = immediate[b]  # type: ignore[assignment]
    return a


def _reverse_order(
    successors: list[list[int]], exit_block: int
) -> tuple[list[int], dict[int, int]]:
    """Nodes by reverse post-order of a walk from the exit against the edges."""
    predecessors: list[list[int]] = [[] for _ in range(exit_block + 1)]
    for node, following in enumerate(successors):
        for successor in following:
            predecessors[successor].append(node)
    seen, post = {exit_block}, []
    stack: list[tuple[int, Iterable[int]]] = [(exit_block, iter(predecessors[exit_block]))]
    while stack:
        node, pending = stack[-1]
        for previous in pending:
            if previous not in seen:
                seen.add(previous)
                stack.append((previous, iter(predecessors[previous])))
                break
        else:
            stack.pop()
            post.append(node)
    order = post[::-1]
    return order, {node: number for number, node in enumerate(order)}


def live_at(flows: Sequence[Flow]) -> list[int]:
    """Bit set of the registers live before each instruction (one extra entry, 0, for the exit)."""
    blocks, _ = _blocks(flows)
    entry = [0] * (len(blocks) + 1)
    kills, gens = [], []
    for block in blocks:
        kill = gen = 0
        for pc in range(block.end - 1, block.start - 1, -1):
            gen, kill = _step(flows[pc], gen, kill)
        kills.append(kill)
        gens.append(gen)
    changed = True
    while changed:
        changed = False
        for number in range(len(blocks) - 1, -1, -1):
            out = 0
            for successor in blocks[number].successors:
                out |= entry[successor]
            value = gens[number] | (out & ~kills[number])
            if value != entry[number]:
                entry[number], changed = value, True
    live = [0] * (len(flows) + 1)
    for block in blocks:
        value = 0
        for successor in block.successors:
            value |= entry[successor]
        for pc in range(block.end - 1, block.start - 1, -1):
            value, _ = _step(flows[pc], value, 0)
            live[pc] = value
    return live


def _step(flow: Flow, live: int, kill: int) -> tuple[int, int]:
    if not flow.guarded:  # a guarded write keeps the old value of the other lanes
        for slot in flow.defs:
            live &= ~(1 << slot)
            kill |= 1 << slot
    for slot in flow.uses:
        live |= 1 << slot
    return live, kill
