"""``openmsa info``: versions, devices, and which backend can run which stage here, or why not."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import torch

from openmsa import __version__
from openmsa.cli import text
from openmsa.cli.options import save_json
from openmsa.cli.text import write
from openmsa.contract import MINIMAX_M3, Problem
from openmsa.dispatch.choose import answers, choose
from openmsa.dispatch.probe import DeviceFacts, device_facts, toolchain
from openmsa.dispatch.table import ORDER, STAGES, TABLE, Cell
from openmsa.errors import UnsupportedProblem

__all__ = ["add_parser", "collect", "run"]

_INSTALL = {
    "triton": 'pip install "openmsa[triton]"',
    "cute_dsl": 'pip install "openmsa[cute]"',
}

_EXAMPLE = """\
example:
  openmsa info --json | python -m json.tool
"""


def add_parser(subparsers: Any) -> None:
    """Add ``info`` to the subparsers of the ``openmsa`` command."""
    parser = subparsers.add_parser(
        "info",
        help="versions, devices, and which backend can run which stage here",
        description="Print versions, devices, and which backend can run which stage here; where "
        "one cannot, the reason and what to install.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="JSON to stdout instead of the tables, or to FILE as well",
    )
    parser.set_defaults(run=run, error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Print what :func:`collect` finds; always 0."""
    found = collect()
    if args.json != "-":
        _show(found)
    try:
        save_json(args.json, found)
    except OSError as error:
        args.error(f"--json {args.json}: {error.strerror}")
    return 0


def collect() -> dict[str, Any]:
    """Everything ``openmsa info`` knows, as JSON values."""
    tools = toolchain()
    devices = {"cpu": torch.device("cpu")}
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices |= {f"cuda:{index}": torch.device("cuda", index) for index in range(cuda)}
    facts = {name: device_facts(device) for name, device in devices.items()}
    return {
        "openmsa": __version__,
        "python": tools.python,
        "torch": tools.torch,
        "triton": tools.triton,
        "cute_dsl": tools.cute_dsl,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": {"model": _cpu_model(), "threads": torch.get_num_threads()},
        "cuda": [_cuda(name, facts[name]) for name in devices if name != "cpu"],
        "no_cuda": "" if cuda else _why_no_cuda(),
        "order": list(ORDER),
        "auto": {
            name: {work: _auto(work, device) for work in STAGES} for name, device in devices.items()
        },
        "stages": [
            _stage(backend, work, stage, devices)
            for backend in ORDER
            for work, stages in STAGES.items()
            for stage in stages
        ],
    }


def _problem(work: str, device: torch.device) -> Problem:
    """What is asked of every backend: MiniMax-M3's layer in bf16."""
    t = MINIMAX_M3
    heads, width = (t.kv_heads, t.index_dim) if work == "select" else (t.q_heads, t.head_dim)
    return Problem(work, device, torch.bfloat16, heads, t.kv_heads, width, t.block_size, t.topk)


def _stage(backend: str, work: str, stage: str, devices: dict[str, torch.device]) -> dict[str, Any]:
    found = {
        name: answers(backend, _problem(work, device), device_facts(device), toolchain())[stage]
        for name, device in devices.items()
    }
    packages = dict.fromkeys(cell.offer.package for cell, _ in found.values())
    return {
        "backend": backend,
        "work": work,
        "stage": stage,
        "cells": [_cell(cell) for cell in TABLE[backend][stage].families],
        "runs_on": [name for name, (_, answer) in found.items() if answer.ok],
        "reasons": {name: list(answer.reasons) for name, (_, answer) in found.items()},
        "install": [
            _INSTALL[package]
            for package in packages
            if package is not None and toolchain().version(package) is None
        ],
    }


def _cell(cell: Cell) -> dict[str, str]:
    status = cell.evidence if cell.launcher is not None else "fused" if cell.fused else "none"
    return {"status": status, "where": cell.where, "inside": cell.fused}


def _auto(work: str, device: torch.device) -> str:
    try:
        return choose(_problem(work, device)).backend
    except UnsupportedProblem:
        return "none"


def _cuda(name: str, facts: DeviceFacts) -> dict[str, Any]:
    return {
        "device": name,
        "name": facts.name,
        "capability": list(facts.capability or ()),
        "sm_count": facts.sm_count,
        "shared_memory_per_block": facts.shared_memory,
        "memory": torch.cuda.get_device_properties(torch.device(name)).total_memory,
    }


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA; see https://pytorch.org/get-started"
    return f"torch is built for CUDA {torch.version.cuda} and finds no device"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _show(found: dict[str, Any]) -> None:
    cpu = found["cpu"]
    write(f"openmsa   {found['openmsa']}")
    write(f"python    {found['python']} on {found['system']}")
    write(f"torch     {found['torch']}")
    for label, key in (("triton", "triton"), ("CuTe DSL", "cute_dsl")):
        write(f"{label:<10}{found[key] or 'not installed: ' + _INSTALL[key]}")
    write(f"CPU       {cpu['model']}, {os.cpu_count()} cores, torch uses {cpu['threads']} threads")
    for device in found["cuda"]:
        capability = ".".join(map(str, device["capability"]))
        write(
            f"{device['device']:<10}{device['name']}, compute capability {capability}, "
            f"{device['sm_count']} SMs, {device['shared_memory_per_block'] // 1024} KiB shared "
            f"memory a block, {text.size(device['memory'])}"
        )
    if not found["cuda"]:
        write(f"CUDA      none: {found['no_cuda']}")
    write("\nWhat each stage of each backend rests on:\n")
    write(_matrix(found))
    write("\nOn this machine, for MiniMax-M3 (64/4 heads, head dim 128, blocks of 128) in bf16:\n")
    for device, chosen in found["auto"].items():
        for work, backend in chosen.items():
            write(f"{device}: auto takes {backend!r} for {work}")
        for backend in found["order"]:
            write(f"  {backend:<10} {_verdict(found, backend, device)}")


def _matrix(found: dict[str, Any]) -> str:
    cells = {(row["backend"], row["stage"]): row["cells"] for row in found["stages"]}
    rows = []
    for stage in sum(STAGES.values(), ()):
        line = [stage]
        for backend in found["order"]:
            words = dict.fromkeys(map(_in_words, cells[backend, stage]))
            line.append(", ".join(words))
        rows.append(line)
    return text.table(["stage", *found["order"]], rows)


def _in_words(cell: dict[str, str]) -> str:
    if cell["status"] == "fused":
        return f"in {cell['inside']}"
    return "-" if cell["status"] == "none" else f"{cell['status']} ({cell['where']})"


def _verdict(found: dict[str, Any], backend: str, device: str) -> str:
    """What runs; for what does not, each reason with its stages, and what to install."""
    rows = [row for row in found["stages"] if row["backend"] == backend]
    lacking = dict.fromkeys(row["work"] for row in rows if row["reasons"][device])
    running = [work for work in STAGES if work not in lacking]
    rows = [row for row in rows if row["work"] in lacking]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for reason in row["reasons"][device]:
            reasons.setdefault(reason, []).append(row["stage"])
    if not reasons:
        return "runs every stage"
    parts = [
        reason if len(stages) == len(rows) else f"{reason} [{', '.join(stages)}]"
        for reason, stages in reasons.items()
    ]
    installs = dict.fromkeys(command for row in rows for command in row["install"])
    lead = f"runs {', '.join(running)}, not {', '.join(lacking)}" if running else "does not run"
    return "; ".join([f"{lead}: {parts[0]}", *parts[1:], *installs])
