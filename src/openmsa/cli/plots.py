"""Pictures of a run and of a benchmark. Matplotlib is imported when one is asked for."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openmsa.contract.tasks import TILE_ROWS
from openmsa.errors import UnavailableError
from openmsa.reference.schedule import key_schedule, task_build

if TYPE_CHECKING:
    from openmsa.cli.run import Outcome

__all__ = ["draw_bench", "draw_run", "require", "selection_shares"]

_QUERY_BINS = 80
_COLORS = {
    "documents": "#9aa5b1",
    "select": "#e9a23b",
    "forward": "#2f6f9f",
    "backward": "#7fb2d6",
}
_EDGE = "#c0392b"


def require() -> Any:
    """``matplotlib.pyplot``, drawing to files.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UnavailableError(
            f'--plot needs matplotlib: pip install "openmsa[plot]" ({error})'
        ) from error


def draw_run(outcome: Outcome, path: str) -> None:
    """The selection, how full the work tiles are, how often keys are read, and the times."""
    pyplot = require()
    docs, case = outcome.x.docs, outcome.case
    figure = pyplot.figure(figsize=(13, 9.4), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(1.25, 1))
    figure.suptitle(
        f"openmsa run: case {outcome.number}, {docs.num_queries:,} queries over "
        f"{docs.num_keys:,} keys of {docs.layout.num_ranges} documents, "
        f"{case.sparse_elements / case.causal_elements:.0%} of the causal pairs read",
        fontsize=14,
    )
    _draw_selection(figure, figure.add_subplot(grid[0, :]), outcome)
    schedule = key_schedule(
        outcome.step.selection.indices, docs.layout, outcome.step.selection.block_size
    )
    _draw_tiles(figure.add_subplot(grid[1, 0]), schedule, outcome)
    _draw_readers(figure.add_subplot(grid[1, 1]), schedule, outcome)
    _draw_times(figure.add_subplot(grid[1, 2]), outcome)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def selection_shares(outcome: Outcome) -> tuple[Tensor, int]:
    """``[query bins, key block rows]``: the share of a bin's (query, KV head) pairs that read the
    block, NaN where no query of the bin sees it; and the queries of a bin."""
    docs, indices = outcome.x.docs, outcome.step.selection.indices.cpu()
    layout, size = docs.layout.to("cpu"), outcome.step.selection.block_size
    queries, positions = docs.num_queries, docs.positions.cpu()
    width = max(1, -(-queries // _QUERY_BINS))
    bins = torch.arange(queries) // width
    first = layout.first_blocks(size)
    lengths = layout.ranges[:, 1].long()
    rows = int((-(-lengths // size)).sum())
    base = first[layout.spans[:, 2].long()[layout.entry_of_query()]]
    count = int(bins[-1]) + 1
    cell = bins[None, :, None] * rows + base[None, :, None] + indices[:, :queries].long()
    read = torch.bincount(cell[indices[:, :queries] >= 0], minlength=count * rows)
    # Every block up to a query's own is in its sight: +1 where that run starts, -1 behind its end.
    sight = torch.zeros((count, rows + 1))
    sees = positions >= 0
    last = base + torch.div(positions, size, rounding_mode="floor") + 1
    ones = torch.ones(int(sees.sum()))
    sight.index_put_((bins[sees], base[sees]), ones, accumulate=True)
    sight.index_put_((bins[sees], last[sees]), -ones, accumulate=True)
    seen = sight.cumsum(1)[:, :rows] * indices.shape[0]
    shares = read.view(count, rows) / seen
    return torch.where(seen > 0, shares, float("nan")), width


def _draw_selection(figure: Any, axes: Any, outcome: Outcome) -> None:
    shares, width = selection_shares(outcome)
    layout, size = outcome.x.docs.layout.to("cpu"), outcome.step.selection.block_size
    queries = outcome.x.docs.num_queries
    bins, rows = shares.shape
    colors = importlib.import_module("matplotlib.colors")
    image = axes.imshow(
        shares.numpy(),
        aspect="auto",
        cmap="viridis",
        interpolation="nearest",
        # Bin b covers queries b * width up to (b + 1) * width, block r the columns r to r + 1.
        extent=(0, rows, bins * width, 0),
        # The root spreads the small shares that deep queries have.
        norm=colors.PowerNorm(0.5, vmin=0, vmax=1),
    )
    axes.set_ylim(queries, 0)
    axes.set_facecolor("#eeeeee")
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_label("share of the queries in sight that read it")
    bar.set_ticks([0, 0.02, 0.1, 0.25, 0.5, 1], labels=["0", "2%", "10%", "25%", "50%", "100%"])
    edges = layout.first_blocks(size).tolist()
    for document, edge in enumerate(edges):
        end = edges[document + 1] if document + 1 < len(edges) else rows
        if document:
            axes.axvline(edge, color=_EDGE, linewidth=1.6)
        if end - edge >= rows / 30:
            axes.text(
                (edge + end) / 2,
                1.02,
                f"document {document}",
                color=_EDGE,
                fontsize=10,
                ha="center",
                transform=axes.get_xaxis_transform(),
            )
    for edge in layout.cu_seqlens_q[1:-1].tolist():
        axes.axhline(edge, color=_EDGE, linewidth=0.8, linestyle=":")
    axes.set_title("Which key blocks the queries read (mean over KV heads)", pad=22)
    axes.set_xlabel(f"key block ({size} keys each, counted from each document's first key)")
    axes.set_ylabel(f"packed query ({width} a row; dotted: a new fragment)")


def _draw_tiles(axes: Any, schedule: Any, outcome: Outcome) -> None:
    group = outcome.x.topology.group
    tasks = task_build(schedule, group, outcome.x.docs.num_queries)
    rows = tasks.tasks[: int(tasks.count), 3].cpu() * group
    steps = torch.arange(1, tasks.queries_per_task + 1) * group
    share = torch.tensor([float((rows == step).float().mean()) for step in steps])
    axes.bar(steps.tolist(), (share * 100).tolist(), width=group * 0.8, color=_COLORS["forward"])
    axes.set_xticks(steps.tolist())
    filled = float(rows.float().mean()) / TILE_ROWS if rows.numel() else 0.0
    axes.set_title(f"Backward work tiles: {rows.numel():,}, {filled:.0%} full", fontsize=11)
    axes.set_xlabel(f"rows of {TILE_ROWS} in use ({group} query heads a query)")
    axes.set_ylabel("share of the tiles (%)")


def _draw_readers(axes: Any, schedule: Any, outcome: Outcome) -> None:
    readers = (schedule.row_ptr[:, 1:] - schedule.row_ptr[:, :-1]).cpu()
    lengths = outcome.x.docs.layout.ranges[:, 1].long().cpu()
    real = int((-(-lengths // schedule.block_size)).sum())
    readers = readers[:, :real].flatten()
    longest = max(int(readers.max()), 1)
    edges = torch.logspace(0, math.log2(longest + 1), 33, base=2.0) - 1
    axes.hist(readers.numpy(), bins=edges.tolist(), color=_COLORS["forward"])
    axes.set_xscale("symlog", linthresh=1)
    ticks = [tick for tick in (0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000) if tick <= longest]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    median = int(readers.median())
    axes.axvline(median, color=_EDGE, linewidth=1.4)
    axes.set_title(f"Queries per key block: median {median:,}, at most {longest:,}", fontsize=11)
    axes.set_xlabel("queries that read the block (one KV head)")
    axes.set_ylabel("key blocks, all KV heads")


def _draw_times(axes: Any, outcome: Outcome) -> None:
    ours = {"documents": outcome.documents, **outcome.step.costs}
    bars = {"sparse": {name: cost.seconds for name, cost in ours.items()}}
    if outcome.dense:
        bars["dense"] = {name: cost.seconds for name, cost in outcome.dense.items()}
    unit, label = (1e3, "ms") if max(sum(b.values()) for b in bars.values()) < 1 else (1, "s")
    longest = max(sum(parts.values()) for parts in bars.values()) * unit
    for place, parts in enumerate(bars.values()):
        left = 0.0
        for name, taken in parts.items():
            width = taken * unit
            axes.barh(place, width, left=left, color=_COLORS[name], height=0.6, label=name)
            if width > 0.09 * longest:
                axes.text(
                    left + width / 2,
                    place,
                    f"{width:.3g}",
                    ha="center",
                    va="center",
                    color="black" if name == "backward" else "white",
                    fontsize=10,
                )
            left += width
        axes.text(left + 0.01 * longest, place, f"{left:.3g} {label}", va="center", fontsize=10)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_ylim(len(bars) - 0.5, -0.9)
    axes.set_xlim(0, longest * 1.2)
    axes.set_xlabel(f"time ({label})")
    names = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        names.values(),
        names.keys(),
        loc="upper right",
        ncols=4,
        fontsize=8.5,
        handlelength=1,
        columnspacing=1,
        frameon=False,
    )
    title = "Time of one step"
    if outcome.dense:
        title += f": {outcome.speedups()['step']:.1f}x the speed of dense"
    axes.set_title(title, fontsize=11)


def draw_bench(result: dict[str, Any], path: str) -> None:
    """Time against tokens, and the speedup against the ratio of the pairs."""
    pyplot = require()
    figure, (times, ratios) = pyplot.subplots(1, 2, figsize=(11.5, 4.6), layout="constrained")
    figure.suptitle(
        f"openmsa bench: {result['stage']}, {result['selection']} selection, {result['dtype']} on "
        f"{result['device']}",
        fontsize=13,
    )
    rows = result["rows"]
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        tokens = [row["tokens"] for row in own]
        baseline = name in ("dense", "torch")
        style = {"color": _EDGE, "linestyle": "--"} if baseline else {}
        middle = [row["median_seconds"] * 1e3 for row in own]
        spread = [
            [(row["median_seconds"] - row["fastest_seconds"]) * 1e3 for row in own],
            [(row["slowest_seconds"] - row["median_seconds"]) * 1e3 for row in own],
        ]
        times.errorbar(tokens, middle, yerr=spread, marker="o", capsize=3, label=name, **style)
        pairs = [(row["tokens"], row["speedup"]) for row in own if row["speedup"] is not None]
        if pairs and not baseline:
            ratios.plot(*zip(*pairs, strict=True), marker="o", label=f"{name} over the baseline")
    sizes = {row["tokens"]: row["pair_ratio"] for row in rows}
    ratios.plot(
        list(sizes),
        list(sizes.values()),
        color=_EDGE,
        linestyle="--",
        marker="o",
        label="causal pairs / selected pairs",
    )
    for axes, label in ((times, "time (ms, median with fastest and slowest)"), (ratios, "ratio")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(sizes), [f"{tokens:,}" for tokens in sizes])
        axes.minorticks_off()
        axes.set_xlabel("queries")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend()
    ticker = importlib.import_module("matplotlib.ticker")
    times.set_yscale("log")
    times.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    times.yaxis.set_major_formatter("{x:,g}")
    times.yaxis.set_minor_locator(ticker.NullLocator())
    times.set_title("Time")
    ratios.set_title("Speedup, and what the pairs alone would give")
    ratios.set_ylim(bottom=0)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
