"""The clusters of one launch spread over forked processes.

Global memory lives in shared mappings during the launch and is copied back at its end; a lock
makes atomics atomic across processes.  Clusters are drawn from one counter, so that no process
waits idle.
"""

from __future__ import annotations

import mmap
import multiprocessing
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxsim.errors import SimulationError
from ptxsim.machine import Machine, Shape
from ptxsim.memory import GlobalMemory, views_of
from ptxsim.scheduler import Scheduler

_WORDS = struct.Struct("<2q")  # clusters drawn, processes at work


@dataclass(slots=True)
class _Board:
    """Counters that all processes see."""

    words: mmap.mmap
    lock: Any
    clusters: Sequence[Shape]

    def next_cluster(self) -> Shape | None:
        with self.lock:
            drawn, working = _WORDS.unpack_from(self.words)
            if drawn >= len(self.clusters):
                return None
            _WORDS.pack_into(self.words, 0, drawn + 1, working)
        first: Shape = self.clusters[drawn]
        return first

    def stop(self) -> None:
        """Nobody draws another cluster."""
        with self.lock:
            _WORDS.pack_into(self.words, 0, len(self.clusters), _WORDS.unpack_from(self.words)[1])

    def leave(self) -> None:
        with self.lock:
            drawn, working = _WORDS.unpack_from(self.words)
            _WORDS.pack_into(self.words, 0, drawn, working - 1)

    def others_work(self) -> bool:
        return bool(_WORDS.unpack_from(self.words)[1] > 1)


def share(memory: GlobalMemory) -> Callable[[], None]:
    """Move every buffer into a mapping that forked processes share; gives the way back."""
    moved = []
    for region in memory.regions:
        host = region.views[1]
        mapping = mmap.mmap(-1, len(host))
        data = np.frombuffer(mapping, np.uint8)
        data[:] = host
        region.views = views_of(data)
        moved.append((region, host, data))

    def copy_back() -> None:
        for region, host, data in moved:
            inside = slice(region.base - region.start, region.end - region.start)
            host[inside] = data[inside]

    return copy_back


def run(machine: Machine, clusters: Sequence[Shape], processes: int) -> None:
    """Run all clusters; adds the children's steps and warnings to `machine`.

    Raises the first error that a process met.
    """
    context = multiprocessing.get_context("fork")
    board = _Board(mmap.mmap(-1, _WORDS.size), context.Lock(), clusters)
    _WORDS.pack_into(board.words, 0, 0, processes)
    copy_back = share(machine.memory)
    machine.next_cluster = board.next_cluster
    machine.others_work = board.others_work
    machine.atomic = context.Lock()
    pipes = [context.Pipe(duplex=False) for _ in range(processes)]
    children = [
        context.Process(target=_child, args=(machine, board, sender), daemon=True)
        for _, sender in pipes
    ]
    for child in children:
        child.start()
    error: SimulationError | None = None
    for (receiver, sender), child in zip(pipes, children, strict=True):
        sender.close()  # ours: without it a child that dies would not end the pipe
        try:
            failure, steps, warnings = receiver.recv()
        except EOFError:
            failure, steps, warnings = SimulationError("a process of the simulator died"), 0, []
        child.join()
        error = error or failure
        machine.steps += steps
        machine.warnings += [w for w in warnings if w not in machine.warnings]
    copy_back()
    if error is not None:
        raise error


def _child(machine: Machine, board: _Board, sender: Any) -> None:
    error: SimulationError | None = None
    try:
        Scheduler(machine).run()
    except SimulationError as caught:
        board.stop()
        error = caught
    finally:
        board.leave()
    sender.send((error, machine.steps, machine.warnings))
