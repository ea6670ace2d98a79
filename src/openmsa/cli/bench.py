"""``openmsa bench``: stages timed against PyTorch, in turn within one run.

The baseline is dense attention; for the selection, which dense attention has none of, it is a
matrix product with block maxima and a top-k.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from openmsa import __version__
from openmsa.cli import options, text
from openmsa.cli.dense import LIMIT_SECONDS, baseline_step, why_not
from openmsa.cli.measure import CONVENTION, useful_flops
from openmsa.cli.selections import coherent_selection, random_selection
from openmsa.cli.step import STAGES, Operands, backends_of, draw, sparse_step
from openmsa.cli.text import Progress, write
from openmsa.contract import MINIMAX_M3, Documents, Selection, Topology
from openmsa.dispatch.probe import device_facts, toolchain
from openmsa.workloads import count_pairs

__all__ = ["add_parser", "run"]

_SELECTIONS = ("random", "coherent", "real")
_NEEDS = {
    "select": ("select",),
    "forward": ("forward",),
    "backward": ("forward", "backward"),
    "step": STAGES,
}
"""Stages that must run for the one that is timed; a step times all of them."""

_EXAMPLE = """\
example:
  openmsa bench --stage forward --tokens 2048,4096 --selection coherent

Runs alternate (A B A B ...), so that a change of the machine's speed meets all of them.
exit status: 0 done, 1 the work could not be done, 2 usage error
"""


@dataclass(frozen=True, eq=False)
class _Size:
    """One size of the benchmark: operands, the selection that attention reads, and the pairs."""

    x: Operands
    selection: Selection
    causal: int
    sparse: int

    def flops(self, stage: str, dense: bool) -> float:
        """Useful FLOPs of a stage or of the step; dense attention selects nothing."""
        pairs = self.causal if dense else self.sparse
        names = [name for name in _timed(stage) if not (dense and name == "select")]
        return sum(useful_flops(name, self.x.topology, self.causal, pairs) for name in names)


def add_parser(subparsers: Any) -> None:
    """Add ``bench`` to the subparsers of the ``openmsa`` command."""
    parser = subparsers.add_parser(
        "bench",
        help="time stages against dense attention",
        description="Time stages at MiniMax-M3's size (64/4 heads, head dim 128, blocks of 128, "
        "top-16) against dense attention in the same run.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stage", choices=_NEEDS, default="step", help="default: step")
    parser.add_argument(
        "--tokens",
        metavar="N,N",
        type=_sizes,
        help="queries (default: 4096 on a CPU, 8192,16384,32768 on CUDA)",
    )
    parser.add_argument(
        "--selection",
        choices=_SELECTIONS,
        default="random",
        help="random: one document, each query reads its own random blocks; coherent: one "
        "document, runs of 64 queries agree but for small churn; real: documents of a workload "
        "case, random blocks (default: random)",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME,NAME",
        type=options.backend_list,
        default=("auto",),
        help="backends to compare (default: auto)",
    )
    parser.add_argument(
        "--against",
        choices=("auto", "dense", "none"),
        default="auto",
        help=f"auto: the baseline where it should end within {LIMIT_SECONDS:.0f} s and fit; it is "
        "dense attention, for --stage select a matrix product, block maxima and a top-k in PyTorch "
        "(default: auto)",
    )
    parser.add_argument("--repeats", type=options.positive, default=3, help="default: 3")
    options.add_problem(parser)
    options.add_files(parser, "times and speedups")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the stage at every size and print the table; always 0."""
    options.check_files(args)
    device = options.device_of(args, args.backend)
    dtype = options.dtype_of(args, device)
    tokens = args.tokens or ((4096,) if device.type == "cpu" else (8192, 16384, 32768))
    topology = _topology(args)
    names = {
        name: "/".join(dict.fromkeys(backends_of(topology, device, dtype, name).values()))
        for name in args.backend
    }
    warmups = 1 if device.type == "cuda" else 0
    rows: list[dict[str, Any]] = []
    skipped: dict[int, str] = {}
    progress = Progress(len(tokens) * (args.repeats + warmups) * (len(names) + 1))
    for count in dict.fromkeys(tokens):
        size = _prepare(args, topology, count, device, dtype)
        reason = _why_no_baseline(args, size)
        if reason:
            skipped[size.x.docs.num_queries] = reason
        rows += _time(args, size, names, not reason, warmups, progress)
    progress.close()
    result = {
        "openmsa": __version__,
        "device": str(device_facts(device)),
        "toolchain": str(toolchain()),
        "dtype": str(dtype).removeprefix("torch."),
        "stage": args.stage,
        "selection": args.selection,
        "topology": asdict(topology),
        "repeats": args.repeats,
        "warmups": warmups,
        "flop_convention": CONVENTION,
        "rows": rows,
        "dense_skipped": {str(count): reason for count, reason in skipped.items()},
    }
    if args.json != "-":
        _show(result)
    if args.plot is not None:
        from openmsa.cli.plots import draw_bench

        draw_bench(result, args.plot)
        if args.json != "-":
            write(f"\nplot: {args.plot}")
    options.save_json(args.json, result)
    return 0


def _sizes(words: str) -> tuple[int, ...]:
    """An argparse type: positive integers, separated by commas."""
    return tuple(options.positive(word) for word in words.split(","))


def _timed(stage: str) -> tuple[str, ...]:
    return STAGES if stage == "step" else (stage,)


def _topology(args: argparse.Namespace) -> Topology:
    if args.selection == "real":
        return options.topology_of(options.case_of(args, None)[1])
    return MINIMAX_M3


def _prepare(
    args: argparse.Namespace, t: Topology, tokens: int, device: torch.device, dtype: torch.dtype
) -> _Size:
    if args.selection == "real":
        docs = options.case_of(args, tokens)[1].documents(device)
    else:
        docs = Documents.from_lengths([tokens], device=device)
    pick = coherent_selection if args.selection == "coherent" else random_selection
    causal, sparse = count_pairs(docs, t.block_size, t.topk)
    return _Size(draw(docs, t, dtype, args.seed), pick(docs, t, args.seed), causal, sparse)


def _why_no_baseline(args: argparse.Namespace, size: _Size) -> str:
    if args.against == "none":
        return "--against none"
    if args.against == "dense":
        return ""
    return why_not(size.x, args.stage, size.causal)


def _time(
    args: argparse.Namespace,
    size: _Size,
    names: dict[str, str],
    dense: bool,
    warmups: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Alternate the backends and the baseline; one row each."""
    baseline = "torch" if args.stage == "select" else "dense"
    entries = [*names, *([baseline] if dense else [])]
    taken: dict[str, list[float]] = {entry: [] for entry in entries}
    added: dict[str, int | None] = {}
    tokens = size.x.docs.num_queries
    for repeat in range(-warmups, args.repeats):
        for entry in entries:
            label = "warm-up" if repeat < 0 else f"run {repeat + 1} of {args.repeats}"
            progress.start(f"{tokens:,} queries, {label}: {entry}")
            if entry == baseline:
                costs = baseline_step(size.x, args.stage)
            else:
                costs = sparse_step(size.x, entry, size.selection, _NEEDS[args.stage]).costs
            progress.add(1 if dense else (len(names) + 1) / len(names))
            if repeat >= 0:
                wanted = [stage for stage in _timed(args.stage) if stage in costs]
                taken[entry].append(sum(costs[stage].seconds for stage in wanted))
                more = [costs[stage].added_bytes for stage in wanted]
                known = [m for m in (*more, added.get(entry)) if m is not None]
                added[entry] = max(known, default=None)
    medians = {entry: statistics.median(times) for entry, times in taken.items()}
    # Both ways of selecting score every causal pair.
    pair_ratio = 1.0 if args.stage == "select" else size.causal / size.sparse
    rows = []
    for entry, times in taken.items():
        speedup = medians[baseline] / medians[entry] if dense else None
        flops = size.flops(args.stage, entry == "dense")
        rows.append(
            {
                "tokens": tokens,
                "name": entry,
                "ran": names.get(entry, "torch"),
                "median_seconds": medians[entry],
                "fastest_seconds": min(times),
                "slowest_seconds": max(times),
                "added_bytes": added[entry],
                "flops": flops,
                "flops_per_second": flops / medians[entry],
                "speedup": speedup,
                "pair_ratio": pair_ratio,
                "share_of_pair_ratio": None if speedup is None else speedup / pair_ratio,
            }
        )
    return rows


def _show(result: dict[str, Any]) -> None:
    t = Topology(**result["topology"])
    write(
        f"{result['stage']}, {result['selection']} selection, {t.q_heads}/{t.kv_heads} heads, head "
        f"dim {t.head_dim}, blocks of {t.block_size}, top-{t.topk}, {result['dtype']} on "
        f"{result['device']}; {result['toolchain']}"
    )
    warm = f"{result['warmups']} warm-up" if result["warmups"] else "no warm-up"
    write(f"median of {result['repeats']} alternating runs, {warm}\n")
    header = ["", "queries", "median", "fastest", "slowest", "memory", "useful work", "rate"]
    rows = [
        [
            row["name"]
            if row["name"] in ("dense", "torch", row["ran"])
            else f"{row['name']}: {row['ran']}",
            f"{row['tokens']:,}",
            *(text.seconds(row[f"{key}_seconds"]) for key in ("median", "fastest", "slowest")),
            "-" if row["added_bytes"] is None else text.size(row["added_bytes"]),
            text.flops(row["flops"]),
            text.flops_per_second(row["flops_per_second"]),
            *_ratios(row),
        ]
        for row in result["rows"]
    ]
    over = "over torch" if result["stage"] == "select" else "over dense"
    write(text.table([*header, over, "pair ratio", "share of it"], rows))
    write(
        "\nmemory: most in use during a stage, above what was in use before: results and workspace"
    )
    write(f"useful work: {result['flop_convention']}; a top-k counts as nothing")
    write("pair ratio: causal pairs / selected pairs, the speedup at equal rates")
    if result["stage"] == "step":
        write(
            "step: selection on random index tensors, forward and backward on the selection named"
        )
    for tokens, reason in result["dense_skipped"].items():
        write(f"{int(tokens):,} queries: no baseline, {reason}")


def _plain(row: dict[str, Any]) -> bool:
    return row["name"] in ("dense", "torch", row["ran"])


def _ratios(row: dict[str, Any]) -> tuple[str, str, str]:
    if row["name"] in ("dense", "torch") or row["speedup"] is None:
        return "-", f"{row['pair_ratio']:.2f}", "-"
    return (
        f"{row['speedup']:.2f}x",
        f"{row['pair_ratio']:.2f}",
        f"{row['share_of_pair_ratio']:.0%}",
    )
