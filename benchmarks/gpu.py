"""Every stage on this machine's GPU, against the chip's own ceilings and dense attention.

    PYTHONPATH=src python3 benchmarks/gpu.py --json gpu.json --plot gpu.png
    PYTHONPATH=src python3 benchmarks/gpu.py --backends auto,triton

First ``openmsa verify --suite smoke`` must be green; a red one prints no speed. Then, in one run:
the ceilings (a bf16 matrix product and a device copy), dense causal attention (PyTorch's, and
FlashAttention-4 where its package is installed), and the stages for random and coherent selections
of one document, and for the recorded cases of the built-in workload with random selections,
weighted by how often they were seen. Several backends take turns on the same inputs.

A time is the median over single calls, each between two CUDA events. The GPU idles for a moment
before each call, so that all of its launches are queued by then, as they are behind the other work
of a training step: a time holds what the GPU did, and no gap that it waits for a launch. *backward,
repeatable* is the deterministic variant. Rates count useful work only: forward ``4 D Hq``, backward
``10 D Hq`` FLOPs for a visible pair of a selected block, selection ``2 Di Hi`` for a causal pair.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
from torch import Tensor

from openmsa import MINIMAX_M3, Documents
from openmsa.cli import options
from openmsa.cli.dense import attend
from openmsa.cli.main import main as openmsa_main
from openmsa.cli.measure import useful_flops
from openmsa.cli.plots import require
from openmsa.cli.selections import coherent_selection, random_selection
from openmsa.cli.step import draw
from openmsa.cli.text import table, write
from openmsa.contract.problem import AttentionConfig, Problem, Saved, SelectionConfig
from openmsa.dispatch.choose import choose
from openmsa.dispatch.probe import device_facts, toolchain
from openmsa.workloads import count_pairs, load

DTYPE = torch.bfloat16
STAGES = ("select", "schedule", "forward", "backward", "backward, repeatable")

IDLE_CYCLES = 2_000_000
"""About a millisecond, in which a call's launches are queued."""


@dataclass(frozen=True)
class Sample:
    """A stage's median in milliseconds and the bytes that it added at its peak."""

    milliseconds: float
    added_bytes: int


def sample(function: Callable[[], Any], repeats: int) -> Sample:
    """Time single calls; results are dropped at once."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in marks:
        torch.cuda._sleep(IDLE_CYCLES)
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in marks]
    return Sample(statistics.median(times), torch.cuda.max_memory_allocated() - before)


def ceilings(repeats: int) -> dict[str, float]:
    """TFLOP/s of a matrix product of 8,192 and TB/s (read plus write) of a 2 GiB copy."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=DTYPE) for _ in range(2))
    source = torch.empty(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    gemm = sample(lambda: a @ b, repeats).milliseconds
    copy = sample(lambda: target.copy_(source), repeats).milliseconds
    return {
        "gemm_tflops": 2 * n**3 / gemm / 1e9,
        "copy_tbps": 2 * source.numel() * source.itemsize / copy / 1e9,
    }


def flash_attention() -> Callable[..., Tensor] | None:
    """FlashAttention-4's causal attention of one document, where it is installed."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None

    def attend_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(q[None], k[None], v[None], causal=True)
        return (found[0] if isinstance(found, tuple) else found)[0]

    return attend_flash


def dense(tokens: int, repeats: int, attend: Callable[..., Tensor]) -> dict[str, Sample]:
    """Causal attention of one document, forward and backward."""
    t = MINIMAX_M3
    x = draw(Documents.from_lengths([tokens], device="cuda"), t, DTYPE, seed=0)
    leaves = [tensor.requires_grad_() for tensor in (x.q, x.k, x.v)]
    out = attend(*leaves)
    return {
        "forward": sample(lambda: attend(*leaves), repeats),
        "backward": sample(
            lambda: torch.autograd.grad(out, leaves, x.d_out, retain_graph=True), repeats
        ),
    }


def sparse(docs: Documents, indices: Tensor, repeats: int, backend: str) -> dict[str, Sample]:
    """Every stage, one at a time: attention by ``backend``, the selection by what ``auto`` chooses,
    since not every backend has one."""
    t = MINIMAX_M3
    x = draw(docs, t, DTYPE, seed=0)
    layout, scale = docs.layout, t.head_dim**-0.5
    config = AttentionConfig(t.block_size, scale, False)
    repeatable = AttentionConfig(t.block_size, scale, True)
    selection = SelectionConfig(
        t.topk, t.block_size, t.init_blocks, t.local_blocks, t.index_dim**-0.5, False
    )

    def plan(work: str, heads: int, dim: int, backend: str) -> Any:
        problem = Problem(work, x.q.device, DTYPE, heads, t.kv_heads, dim, t.block_size, t.topk)
        return choose(problem, backend)

    scores = plan("select", t.kv_heads, t.index_dim, "auto")
    attention = plan("attention", t.q_heads, t.head_dim, backend)
    schedule = attention.run("key_schedule", indices, layout, t.block_size)
    out, lse = attention.run("forward", x.q, x.k, x.v, indices, schedule, layout, config)
    saved = Saved(x.q, x.k, x.v, out, lse, indices, schedule)

    def differentiate(config: AttentionConfig) -> Any:
        delta = attention.run("backward_preprocess", out, x.d_out, lse, None)
        build = attention.stage("task_build")
        tasks = build and build(schedule, t.q_heads // t.kv_heads, layout.num_queries)
        grads = attention.run(
            "backward", x.d_out, delta, saved, tasks, layout, config, (True, True)
        )
        post = attention.stage("backward_postprocess")
        return post(*grads, DTYPE) if post else grads

    calls = {
        "select": lambda: scores.run(
            "select_blocks", x.index_q, x.index_k[:, 0], layout, selection
        ),
        "schedule": lambda: attention.run("key_schedule", indices, layout, t.block_size),
        "forward": lambda: attention.run(
            "forward", x.q, x.k, x.v, indices, schedule, layout, config
        ),
        "backward": lambda: differentiate(config),
        "backward, repeatable": lambda: differentiate(repeatable),
    }
    return {stage: sample(calls[stage], repeats) for stage in STAGES}


def rows_of(
    name: str, docs: Documents, found: dict[str, Sample], gemm: float
) -> list[dict[str, Any]]:
    """Samples as table rows, with rates and shares of the matrix product's."""
    causal, selected = count_pairs(docs, MINIMAX_M3.block_size, MINIMAX_M3.topk)
    pairs = causal if name.startswith("dense") else selected
    rows = []
    for stage, measured in found.items():
        rate = None
        if stage != "schedule":
            rate = (
                useful_flops(stage.split(",")[0], MINIMAX_M3, causal, pairs)
                / measured.milliseconds
                / 1e9
            )
        rows.append(
            {
                "tokens": docs.num_queries,
                "name": name,
                "stage": stage,
                "milliseconds": measured.milliseconds,
                "tflops": rate,
                "share_of_gemm": rate and rate / gemm,
                "added_bytes": measured.added_bytes,
            }
        )
    return rows


def named(name: str, backend: str) -> str:
    """A row's name: ``auto`` goes without saying."""
    return name if backend == "auto" else f"{name}, {backend}"


def recorded(repeats: int, gemm: float, backends: list[str]) -> list[dict[str, Any]]:
    """The built-in workload's cases; the last rows are the mean call, weighted."""
    rows: list[dict[str, Any]] = []
    totals: dict[tuple[str, str], float] = {}
    weight = 0
    for case in load("cp16_192k"):
        docs = case.documents("cuda")
        indices = random_selection(docs, MINIMAX_M3, seed=0).indices
        weight += case.weight
        for backend in backends:
            found = sparse(docs, indices, repeats, backend)
            rows += rows_of(named(f"case {case.case_id}", backend), docs, found, gemm)
            for stage, measured in found.items():
                key = (named("recorded, weighted", backend), stage)
                totals[key] = totals.get(key, 0.0) + case.weight * measured.milliseconds
    rows += [
        {
            "tokens": None, "name": name, "stage": stage, "milliseconds": total / weight,
            "tflops": None, "share_of_gemm": None, "added_bytes": None,
        }
        for (name, stage), total in totals.items()
    ]  # fmt: skip
    return rows


def show(result: dict[str, Any]) -> None:
    """The table, and what it was measured on."""
    write(f"{result['device']}; {result['toolchain']}; {result['date']}")
    if not result["verified"]:
        write("not verified in this run")
    limits = result["ceilings"]
    write(
        f"ceilings: matrix product {limits['gemm_tflops']:.0f} TFLOP/s, "
        f"copy {limits['copy_tbps']:.2f} TB/s\n"
    )
    lines = [
        [
            row["name"],
            row["stage"],
            "-" if row["tokens"] is None else f"{row['tokens']:,}",
            f"{row['milliseconds']:.3f}",
            "-" if row["tflops"] is None else f"{row['tflops']:.0f}",
            "-" if row["tflops"] is None else f"{row['share_of_gemm']:.0%}",
            "-" if row["added_bytes"] is None else f"{row['added_bytes'] / 2**30:.2f}",
        ]
        for row in result["rows"]
    ]
    write(table(["", "stage", "queries", "ms", "TFLOP/s", "of the product", "GiB added"], lines))


def draw_plot(result: dict[str, Any], path: str) -> None:
    """Time against tokens for each stage: random, coherent, dense."""
    pyplot = require()
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    figure.suptitle(f"openmsa on {result['device']}, bf16, {result['date']}")
    for stage, ax in zip(("select", "forward", "backward"), axes, strict=True):
        for name in ("random", "coherent", "dense"):
            own = [r for r in result["rows"] if (r["name"], r["stage"]) == (name, stage)]
            if own:
                style = "--" if name == "dense" else "-"
                x, y = [r["tokens"] for r in own], [r["milliseconds"] for r in own]
                ax.plot(x, y, style, marker="o", label=name)
        ax.set(title=stage, xlabel="queries", ylabel="ms", xscale="log", yscale="log")
        sizes = sorted({r["tokens"] for r in result["rows"] if r["name"] == "random"})
        ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
        ax.xaxis.set_minor_locator(pyplot.NullLocator())
        ax.grid(alpha=0.3, which="both")
        ax.legend()
    figure.savefig(path, dpi=120)


def verified(backends: list[str]) -> bool:
    """Whether the smoke suite is green; a red one is printed."""
    report = io.StringIO()
    with contextlib.redirect_stdout(report), contextlib.redirect_stderr(report):
        red = any(
            openmsa_main(["verify", "--suite", "smoke", "--backend", backend, "--dtype", "bf16"])
            for backend in backends
        )
    if red:
        write(report.getvalue())
    return not red


def sizes(words: str) -> list[int]:
    """An argparse type: positive integers, separated by commas."""
    return [options.positive(word) for word in words.split(",")]


def main() -> int:
    """Verify, measure, print; 1 where the kernels are wrong or there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=sizes, default="8192,16384,32768,65536", metavar="N,N", help="queries"
    )
    parser.add_argument("--repeats", type=options.positive, default=20)
    parser.add_argument(
        "--backends", type=lambda words: words.split(","), default=["auto"], metavar="NAME,NAME",
        help="who computes attention (default: auto)",
    )  # fmt: skip
    parser.add_argument("--no-cases", action="store_true", help="leave out the recorded cases")
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="measure at once, and say so",
    )
    options.add_files(parser, "times and rates")
    args = parser.parse_args()
    options.check_files(args)
    if not torch.cuda.is_available():
        write("no CUDA device: PyTorch sees none, or this build of it has no CUDA")
        return 1
    if not args.no_verify and not verified(args.backends):
        write("verify failed, so there is no speed to speak of")
        return 1
    limits = ceilings(args.repeats)
    gemm = limits["gemm_tflops"]
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        docs = Documents.from_lengths([tokens], device="cuda")
        for name, pick in (("random", random_selection), ("coherent", coherent_selection)):
            indices = pick(docs, MINIMAX_M3, seed=0).indices
            for backend in args.backends:
                found = sparse(docs, indices, args.repeats, backend)
                rows += rows_of(named(name, backend), docs, found, gemm)
        rows += rows_of("dense", docs, dense(tokens, args.repeats, attend), gemm)
        flash = flash_attention()
        if flash is not None:
            found = dense(tokens, args.repeats, flash)
            rows += rows_of("dense, FlashAttention-4", docs, found, gemm)
    if not args.no_cases:
        rows += recorded(max(3, args.repeats // 4), gemm, args.backends)
    result = {
        "device": str(device_facts(torch.device("cuda"))),
        "toolchain": str(toolchain()),
        "date": date.today().isoformat(),
        "dtype": "bfloat16",
        "repeats": args.repeats,
        "verified": not args.no_verify,
        "ceilings": limits,
        "rows": rows,
    }
    if args.json != "-":
        show(result)
    if args.plot is not None:
        draw_plot(result, args.plot)
    options.save_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
