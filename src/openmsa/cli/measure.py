"""Time, memory and useful FLOPs of a stage.

The FLOP convention counts what the mathematics needs for visible (query, key) pairs of selected
blocks, and nothing that an implementation adds::

    forward 4 D Hq pairs      backward 10 D Hq pairs      selection 2 Di Hi causal pairs

Forward is two products per pair and head (Q K, P V), backward five (Q K again, dO V, and the three
gradients); selection scores every causal pair once per index head, its top-k counts as nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from openmsa.contract import Topology

__all__ = ["CONVENTION", "Cost", "gemm_rate", "measure", "useful_flops"]

CONVENTION = "forward 4*D*Hq*pairs, backward 10*D*Hq*pairs, selection 2*Di*Hi*causal pairs"

_SELF = Path("/proc/self")
_SAMPLE_SECONDS = 0.002

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """What a stage took.

    Attributes:
        seconds: wall time, with the device's queue drained before and after.
        peak_bytes: most memory in use during the stage: the process's resident set, or what torch
            allocated on a CUDA device. None where the system does not say.
        added_bytes: how far that is above what was in use before: results and workspace.
    """

    seconds: float
    peak_bytes: int | None
    added_bytes: int | None = None

    def plus(self, other: Cost) -> Cost:
        """The two one after the other."""
        peaks = [peak for peak in (self.peak_bytes, other.peak_bytes) if peak is not None]
        added = [more for more in (self.added_bytes, other.added_bytes) if more is not None]
        return Cost(
            self.seconds + other.seconds, max(peaks, default=None), max(added, default=None)
        )


def measure(device: torch.device, function: Callable[[], T]) -> tuple[T, Cost]:
    """Call ``function`` and say what it took."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        begin = time.perf_counter()
        result = function()
        torch.cuda.synchronize(device)
        took = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated(device)
        return result, Cost(took, peak, peak - before)
    resident = _status("VmRSS")
    with _PeakMemory() as memory:
        begin = time.perf_counter()
        result = function()
        took = time.perf_counter() - begin
    if memory.peak is None or resident is None:
        return result, Cost(took, memory.peak)
    return result, Cost(took, memory.peak, max(0, memory.peak - resident))


def useful_flops(stage: str, topology: Topology, causal: int, sparse: int) -> float:
    """FLOPs of ``"select"``, ``"forward"`` or ``"backward"`` by the convention above."""
    if stage == "select":
        return 2.0 * topology.index_dim * topology.kv_heads * causal
    products = {"forward": 4.0, "backward": 10.0}[stage]
    return products * topology.head_dim * topology.q_heads * sparse


def gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product: the machine's speed, for estimates."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.ones((n, n), device=device, dtype=dtype)
    taken = []
    for _ in range(3):
        _, cost = measure(device, lambda: a @ a)
        taken.append(cost.seconds)
    return 2.0 * n**3 / min(taken)


class _PeakMemory:
    """Peak resident memory inside a ``with``, in bytes.

    Linux keeps the high-water mark itself and lets a process reset it. Where it may not, a thread
    samples, which can miss a short peak. Elsewhere the answer is None.
    """

    def __init__(self) -> None:
        self.peak: int | None = None

    def __enter__(self) -> _PeakMemory:
        self._sampler: threading.Thread | None = None
        self._reset = _reset_high_water()
        if not self._reset and (_SELF / "status").exists():
            self._stop = threading.Event()
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._reset:
            self.peak = _status("VmHWM")
        elif self._sampler is not None:
            self._stop.set()
            self._sampler.join()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak or 0, _status("VmRSS") or 0)
            if self._stop.wait(_SAMPLE_SECONDS):
                return


def _reset_high_water() -> bool:
    try:
        # 5 resets the peak resident set size; see proc_pid_clear_refs(5).
        (_SELF / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int | None:
    for line in (_SELF / "status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None
