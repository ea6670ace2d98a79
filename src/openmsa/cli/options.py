"""Arguments that several subcommands share, and what they mean."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from openmsa.cli.text import write
from openmsa.contract import MINIMAX_M3, Topology
from openmsa.dispatch.table import BACKENDS
from openmsa.errors import invalid_input
from openmsa.workloads import WORKLOADS, Case, load

__all__ = [
    "DTYPES",
    "add_files",
    "add_problem",
    "backend_list",
    "case_of",
    "check_files",
    "device_of",
    "dtype_of",
    "natural",
    "positive",
    "save_json",
    "topology_of",
]

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

DEFAULT_WORKLOAD = "cp16_192k"
DEFAULT_CASE = 14
"""Of the built-in cases the one whose first queries show most at once: three documents, two
fragments that share keys, shallow and deep queries."""

_PLOT_SUFFIXES = (".png", ".pdf", ".svg")


def positive(text: str) -> int:
    """An argparse type: an integer, 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def natural(text: str) -> int:
    """An argparse type: an integer, 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is not 0 or more")
    return value


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Arguments that say what is computed, and where."""
    parser.add_argument(
        "--workload",
        metavar="NAME|FILE",
        default=DEFAULT_WORKLOAD,
        help=f"document shapes: {', '.join(WORKLOADS)} or a JSON file of that form "
        f"(default: {DEFAULT_WORKLOAD})",
    )
    parser.add_argument(
        "--case",
        metavar="N",
        type=natural,
        help=f"case of the workload, from 0 (default: {DEFAULT_CASE} of {DEFAULT_WORKLOAD}, "
        "0 of a file)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp32 on a CPU, bf16 on CUDA")
    parser.add_argument("--device", help="torch device (default: cuda where there is one)")
    parser.add_argument(
        "--seed", type=natural, default=0, help="of the random tensors (default: 0)"
    )


def add_files(parser: argparse.ArgumentParser, plot: str) -> None:
    """``--json`` and ``--plot``; also lets the subcommand report a usage error."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the numbers; - for stdout, and nothing else there",
    )
    parser.add_argument("--plot", metavar="FILE.png", help=f"also draw {plot}")
    parser.set_defaults(error=parser.error)


def check_files(args: argparse.Namespace) -> None:
    """Before the work starts: can every output be written, and the plot be drawn?"""
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is None or (option == "--json" and path == "-"):
            continue
        target = Path(path)
        if target.is_dir():
            args.error(f"{option} {path}: is a directory")
        if not target.parent.is_dir():
            args.error(f"{option} {path}: there is no directory {target.parent}")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            args.error(f"{option} {path}: not writable")
    if args.plot is not None:
        if Path(args.plot).suffix.lower() not in _PLOT_SUFFIXES:
            args.error(f"--plot {args.plot}: expected a name that ends in .png, .pdf or .svg")
        from openmsa.cli.plots import require

        require()


def device_of(args: argparse.Namespace, backends: tuple[str, ...]) -> torch.device:
    """``--device``, or CUDA where there is one and no backend is one that runs on the CPU."""
    name = args.device
    if name is None:
        host = {"cpu", "reference"} & {*backends} or not torch.cuda.is_available()
        name = "cpu" if host else "cuda"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        args.error(f"--device {name}: {str(error).splitlines()[0]}")
    return device


def dtype_of(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    """``--dtype``, or what is natural on the device."""
    return DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "fp32")]


def case_of(args: argparse.Namespace, tokens: int | None) -> tuple[int, Case]:
    """Number and case that ``--workload`` and ``--case`` name, cut to its first ``tokens``.

    Raises:
        InvalidInput: no such workload or case, or one in which no query sees a key.
    """
    cases = load(args.workload)
    number = args.case
    if number is None:
        number = DEFAULT_CASE if args.workload == DEFAULT_WORKLOAD else 0
    if number >= len(cases):
        invalid_input("--case", f"0..{len(cases) - 1} in {args.workload}", number)
    case = cases[number] if tokens is None else cases[number].truncate(tokens)
    if not case.sparse_elements:
        invalid_input(f"case {number} of {args.workload}", "a query that sees a key", "none")
    return number, case


def topology_of(case: Case) -> Topology:
    """MiniMax-M3's heads and widths, with the blocks that the workload counts in."""
    return replace(MINIMAX_M3, block_size=case.block_size, topk=case.topk)


def backend_list(text: str) -> tuple[str, ...]:
    """An argparse type: backends, separated by commas, each once."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in BACKENDS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(BACKENDS)}")
    return names


def save_json(path: str | None, result: dict[str, Any]) -> None:
    """Write ``result`` to a file, or to stdout for ``-``."""
    if path == "-":
        write(json.dumps(result, indent=1))
    elif path is not None:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
