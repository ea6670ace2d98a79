"""``openmsa run``: one packed training step on real document shapes, measured and checked."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from openmsa import __version__
from openmsa.cli import options, text
from openmsa.cli.accuracy import check
from openmsa.cli.dense import LIMIT_SECONDS, dense_step, expected_seconds
from openmsa.cli.measure import CONVENTION, Cost, measure, useful_flops
from openmsa.cli.step import STAGES, Operands, Step, backends_of, draw, sparse_step
from openmsa.cli.text import Progress, write
from openmsa.dispatch.probe import device_facts, toolchain
from openmsa.dispatch.table import BACKENDS
from openmsa.testing.compare import Report
from openmsa.workloads import Case

__all__ = ["Outcome", "add_parser", "run"]

_CPU_TOKENS = 2560

_EXAMPLE = """\
example:
  openmsa run --case 20 --tokens 4096 --no-dense --json step.json

exit status: 0 done, 1 a result misses its bound or the work could not be done, 2 usage error
"""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run found; the plots draw it and the tables print it.

    Attributes:
        case: the documents, cut to the tokens asked for.
        number: of the case in its workload.
        x: the operands.
        step: results and costs of the sparse step.
        documents: what building the documents took.
        reports: the float64 check.
        dense: costs of dense attention, empty where it did not run.
        no_dense: why it did not.
        backends: what ran selection and attention.
    """

    case: Case
    number: int
    x: Operands
    step: Step
    documents: Cost
    reports: list[Report]
    dense: dict[str, Cost]
    no_dense: str
    backends: dict[str, str]

    def flops(self, stage: str, dense: bool = False) -> float:
        """Useful FLOPs of a stage."""
        pairs = self.case.causal_elements if dense else self.case.sparse_elements
        return useful_flops(stage, self.x.topology, self.case.causal_elements, pairs)

    def speedups(self) -> dict[str, float]:
        """Dense time over sparse time; the step counts documents and selection as sparse."""
        if not self.dense:
            return {}
        costs = {stage: cost.seconds for stage, cost in self.step.costs.items()}
        dense = {stage: cost.seconds for stage, cost in self.dense.items()}
        ours = self.documents.seconds + sum(costs.values())
        return {stage: dense[stage] / costs[stage] for stage in dense} | {
            "step": sum(dense.values()) / ours
        }


def add_parser(subparsers: Any) -> None:
    """Add ``run`` to the subparsers of the ``openmsa`` command."""
    parser = subparsers.add_parser(
        "run",
        help="one packed training step on real document shapes, checked against float64",
        description="Build the documents of a real training step, select blocks, attend and go "
        "backward at MiniMax-M3's size (64/4 heads, head dim 128, blocks of 128, top-16); measure "
        "every stage, check samples against float64, and compare with dense attention.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_problem(parser)
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=options.positive,
        help=f"keep the case's first N queries (default: {_CPU_TOKENS} on a CPU, all on CUDA)",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="default: auto")
    dense = parser.add_mutually_exclusive_group()
    dense.add_argument(
        "--dense",
        action="store_true",
        help=f"compare with dense attention even where that takes over {LIMIT_SECONDS:.0f} s",
    )
    dense.add_argument(
        "--no-dense", action="store_true", help="do not compare with dense attention"
    )
    options.add_files(parser, "the selection, the work tiles and the times")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the step and print what it took.

    Returns:
        0, or 1 if a sampled result misses its bound.
    """
    options.check_files(args)
    device = options.device_of(args, (args.backend,))
    dtype = options.dtype_of(args, device)
    tokens = args.tokens or (_CPU_TOKENS if device.type == "cpu" else None)
    number, case = options.case_of(args, tokens)
    backends = backends_of(options.topology_of(case), device, dtype, args.backend)
    outcome = _compute(args, case, number, device, dtype, backends)
    if args.json != "-":
        _show(outcome)
    if args.plot is not None:
        from openmsa.cli.plots import draw_run

        draw_run(outcome, args.plot)
        if args.json != "-":
            write(f"\nplot: {args.plot}")
    options.save_json(args.json, _plain(outcome))
    return 0 if all(report.ok for report in outcome.reports) else 1


def _compute(
    args: argparse.Namespace,
    case: Case,
    number: int,
    device: torch.device,
    dtype: torch.dtype,
    backends: dict[str, str],
) -> Outcome:
    case.documents(device)  # The first call also pays for waking the device up.
    docs, documents = measure(device, lambda: case.documents(device))
    x = draw(docs, options.topology_of(case), dtype, args.seed)
    no_dense = _why_no_dense(args, x, case)
    causal, sparse = case.causal_elements, case.sparse_elements
    work = {stage: useful_flops(stage, x.topology, causal, sparse) for stage in STAGES}
    dense_work = sum(useful_flops(stage, x.topology, causal, causal) for stage in STAGES[1:])
    progress = Progress(sum(work.values()) + (0.0 if no_dense else dense_work))

    def before(stage: str) -> None:
        """Stages run in order, so what came before this one is done."""
        progress.add(sum(work[s] for s in STAGES[: STAGES.index(stage)]) - progress.done)
        progress.start(stage)

    if device.type == "cuda":
        progress.start("warm-up")
        sparse_step(x, args.backend)
        if not no_dense:
            dense_step(x)
    step = sparse_step(x, args.backend, before=before)
    progress.add(sum(work.values()) - progress.done)
    progress.start("float64 check of sampled rows")
    reports = check(x, step, args.seed)
    dense: dict[str, Cost] = {}
    if not no_dense:
        progress.start("dense attention, to compare with")
        dense = dense_step(x, after=lambda pairs: progress.add(dense_work * pairs / causal))
    progress.close()
    return Outcome(case, number, x, step, documents, reports, dense, no_dense, backends)


def _why_no_dense(args: argparse.Namespace, x: Operands, case: Case) -> str:
    if args.no_dense:
        return "--no-dense"
    if args.dense:
        return ""
    expected = expected_seconds(x, case.causal_elements)
    if expected <= LIMIT_SECONDS:
        return ""
    return f"it would take about {expected:.0f} s; --dense runs it all the same"


def _show(outcome: Outcome) -> None:
    case, docs, t = outcome.case, outcome.x.docs, outcome.x.topology
    write(
        f"case {outcome.number} (recorded as {case.case_id}): {docs.num_queries:,} queries in "
        f"{docs.num_documents} fragments of {docs.layout.num_ranges} documents, {docs.num_keys:,} "
        f"keys, deepest query sees {docs.max_seqlen_k:,}"
    )
    dtype = str(outcome.x.q.dtype).removeprefix("torch.")
    write(
        f"{t.q_heads}/{t.kv_heads} heads, head dim {t.head_dim}, blocks of {t.block_size}, "
        f"top-{t.topk}, {dtype} on {device_facts(docs.device)}; selection by "
        f"{outcome.backends['select']!r}, attention by {outcome.backends['attention']!r}"
    )
    write(
        f"(query, key) pairs a head: {case.causal_elements:,} causal, {case.sparse_elements:,} "
        f"selected, ratio {case.causal_elements / case.sparse_elements:.2f}\n"
    )
    rows = [
        [row["stage"], text.seconds(row["seconds"]), *_worth(row), text.size(row["peak_bytes"])]
        for row in _rows(outcome)
    ]
    write(text.table(["stage", "time", "useful work", "rate", "peak memory"], rows))
    write(f"\nuseful work: {CONVENTION}; a top-k counts as nothing")
    write("\nsampled results against float64\n")
    write(text.table(["", "norm", "error", "eager error", "bound", "ok"], _judged(outcome.reports)))
    if outcome.no_dense:
        write(f"\ndense attention was not run: {outcome.no_dense}")
    else:
        ratios = ", ".join(f"{name} {value:.2f}x" for name, value in outcome.speedups().items())
        write(f"\nspeed over dense attention in the same run: {ratios} (selection counted)")


def _worth(row: dict[str, Any]) -> tuple[str, str]:
    if not row["flops"]:
        return "-", "-"
    return text.flops(row["flops"]), text.flops_per_second(row["flops"] / row["seconds"])


def _judged(reports: list[Report]) -> list[list[str]]:
    return [
        [
            report.name,
            report.norm,
            *(f"{value:.2e}" for value in (report.error, report.eager_error, report.bound)),
            "yes" if report.ok else f"NO: {report.detail}",
        ]
        for report in reports
    ]


def _rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Every line of the table: the stages, their sum, and dense attention's."""
    stages = {"documents": outcome.documents, **outcome.step.costs}
    lines = [
        (name, cost, outcome.flops(name) if name in STAGES else 0.0)
        for name, cost in stages.items()
    ]
    lines.append(_sum("step", lines))
    if outcome.dense:
        dense = [
            (f"dense {name}", cost, outcome.flops(name, dense=True))
            for name, cost in outcome.dense.items()
        ]
        lines += [*dense, _sum("dense step", dense)]
    return [
        {"stage": name, "seconds": cost.seconds, "flops": flops, "peak_bytes": cost.peak_bytes}
        for name, cost, flops in lines
    ]


def _sum(name: str, lines: list[tuple[str, Cost, float]]) -> tuple[str, Cost, float]:
    total = lines[0][1]
    for _, cost, _ in lines[1:]:
        total = total.plus(cost)
    return name, total, sum(flops for _, _, flops in lines)


def _plain(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON values."""
    case, docs = outcome.case, outcome.x.docs
    return {
        "openmsa": __version__,
        "device": str(device_facts(docs.device)),
        "toolchain": str(toolchain()),
        "dtype": str(outcome.x.q.dtype).removeprefix("torch."),
        "backends": outcome.backends,
        "case": outcome.number,
        "case_id": case.case_id,
        "queries": docs.num_queries,
        "keys": docs.num_keys,
        "documents": docs.layout.num_ranges,
        "fragments": docs.num_documents,
        "block_size": case.block_size,
        "topk": case.topk,
        "causal_pairs": case.causal_elements,
        "sparse_pairs": case.sparse_elements,
        "flop_convention": CONVENTION,
        "stages": _rows(outcome),
        "accuracy": [_plain_report(report) for report in outcome.reports],
        "dense_skipped": outcome.no_dense,
        "speedup": outcome.speedups(),
        "ok": all(report.ok for report in outcome.reports),
    }


def _plain_report(report: Report) -> dict[str, Any]:
    """JSON knows no infinity, so that becomes a word."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(report).items()
        if name not in ("problem", "dtype")
    }
