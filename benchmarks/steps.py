"""One training step of a framework's MiniMax-M3 layer on several paths: how it is measured.

For the scripts beside this one, not to be run. Each path and size is a process of its own, so that
its peak memory is its own: resident memory on a CPU, allocated memory on a GPU. Running out of
memory is a result. On a CPU the process is held to what was free at its start, so that it fails
instead of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openmsa.cli.text import table, write

WIDTHS = {"tiny": (512, 512), "m3": (6144, 12288)}
"""Hidden and MLP width; attention has MiniMax-M3's 64/4 heads of 128 in either."""


@dataclass(frozen=True)
class Setup:
    """What one process measures."""

    path: str
    tokens: int
    device: str
    dtype: torch.dtype
    hidden: int
    intermediate: int

    def ids(self) -> torch.Tensor:
        """One row of tokens of a vocabulary of 256."""
        return torch.randint(0, 256, (1, self.tokens), device=self.device)


def main(text: str, paths: Sequence[str], build: Callable[[Setup], Callable[[], None]]) -> int:
    """Run every path at every size and print a table last.

    Args:
        text: the script's description.
        paths: their names, openmsa first.
        build: makes the model and returns its step, forward and backward.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="2048,4096", help="of the row, separated by commas")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--shape", choices=tuple(WIDTHS), default="tiny", help="m3: real widths")
    parser.add_argument(
        "--repeats", type=int, default=1, help="timed steps after a first one; 0 takes the first"
    )
    parser.add_argument("--variants", default=",".join(paths))
    parser.add_argument("--seconds", type=float, help="most that one path and size may take")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    if args.one:
        dtype = getattr(torch, args.dtype)
        setup = Setup(args.one, int(args.tokens), args.device, dtype, *WIDTHS[args.shape])
        write(json.dumps(measure(setup, build, args.repeats)))
        return 0
    lines: list[list[str]] = []
    for tokens in args.tokens.split(","):
        base: dict[str, Any] = {}
        for path in args.variants.split(","):
            found = in_a_process(args, path, tokens)
            base = base or found
            lines.append(row(tokens, path, found, base))
            write("  ".join(lines[-1]))
    write()
    write(f"{place(args.device)}, torch {torch.__version__}, {args.dtype}, {args.shape} widths")
    write(table(["tokens", "path", "seconds", "GiB added", "GiB at peak", "against"], lines))
    return 0


def row(tokens: str, path: str, found: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """One line of the table; ``base`` is the first path's result at the same size."""
    if "error" in found:
        return [tokens, path, "-", "-", "-", found["error"]]
    gib = [f"{found[name] / 2**30:.2f}" for name in ("added", "peak")]
    ratio = ""
    if found is not base and "error" not in base:
        slower, larger = (found[name] / base[name] for name in ("seconds", "added"))
        ratio = f"{slower:.1f}x the time, {larger:.1f}x the memory"
    return [tokens, path, f"{found['seconds']:.3g}", *gib, ratio]


def in_a_process(args: argparse.Namespace, path: str, tokens: str) -> dict[str, Any]:
    """:func:`measure` of one path and size, or ``{"error": why}``."""
    command = [
        sys.executable, sys.argv[0], "--one", path, "--tokens", tokens, "--dtype", args.dtype,
        "--device", args.device, "--shape", args.shape, "--repeats", str(args.repeats),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=args.seconds
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {args.seconds:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"signal {-done.returncode}"])[-1]
        return {"error": last[:90]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(
    setup: Setup, build: Callable[[Setup], Callable[[], None]], repeats: int
) -> dict[str, Any]:
    """Seconds of the fastest step after a first one, bytes at its peak and bytes it added."""
    torch.manual_seed(0)
    if setup.device == "cpu":
        free = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
        limit = int(free) * 1024 - 2**29
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        step = build(setup)
        before = from_here(setup.device)
        times = [timed(step, setup.device) for _ in range(repeats + 1)]
    except (RuntimeError, MemoryError) as error:
        told = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not (told or "can't allocate memory" in str(error)):
            raise
        wanted = next((x for x in str(error).split(". ") if "allocate" in x), "")
        return {"error": f"out of memory. {wanted.split(':')[-1].strip()[:80]}"}
    peak = peak_of(setup.device)
    return {"seconds": min(times[1:] or times), "added": peak - before, "peak": peak}


def timed(step: Callable[[], None], device: str) -> float:
    """Seconds of one step; on a GPU between two events."""
    if device == "cpu":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def from_here(device: str) -> int:
    """Bytes in use now; peaks count from here."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak_of(device: str) -> int:
    """Bytes in use at the peak since :func:`from_here`."""
    return torch.cuda.max_memory_allocated() if device != "cpu" else status("VmHWM")


def status(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def place(device: str) -> str:
    """What it ran on, and how busy that was."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return f"{platform.machine()}, {torch.get_num_threads()} threads (load {load})"
