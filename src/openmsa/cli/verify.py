"""``openmsa verify``: hold a backend to the float64 oracle on the named problems."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from openmsa.dispatch.probe import device_facts, toolchain
from openmsa.dispatch.table import BACKENDS
from openmsa.testing.compare import Report
from openmsa.testing.problems import SUITES
from openmsa.testing.verify import default_device, verify

__all__ = ["add_parser", "run"]

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

_EXAMPLE = """\
example:
  openmsa verify --backend cpu --suite smoke --json verify.json

exit status: 0 all checks passed, 1 a check failed or nothing could be checked, 2 usage error
"""


def add_parser(subparsers: Any) -> None:
    """Add ``verify`` to the subparsers of the ``openmsa`` command."""
    parser = subparsers.add_parser(
        "verify",
        help="check a backend's results and gradients against the float64 oracle",
        description="Check every stage and gradient of a backend against the float64 oracle.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="default: auto")
    parser.add_argument("--suite", choices=SUITES, default="smoke", help="default: smoke")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        action="append",
        help="may be given several times; default: all four",
    )
    parser.add_argument("--device", help="torch device; default: cuda where there is one")
    parser.add_argument("--json", metavar="FILE", help="also write the results; - for stdout alone")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the checks and print them.

    Returns:
        0 if every check passed; 1 if one failed, or none could run; 2 for a device or output file
        that cannot be used.
    """
    try:
        device = torch.device(args.device or default_device(args.backend))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        return _usage(f"--device {args.device}: {error}")
    quiet = args.json == "-"
    if args.json and not quiet:
        try:
            Path(args.json).touch()
        except OSError as error:
            return _usage(f"--json {args.json}: {error.strerror}")
    dtypes = [_DTYPES[name] for name in args.dtype or _DTYPES]
    begin = time.perf_counter()
    found = verify(args.suite, args.backend, dtypes, device)
    reports = list(found if quiet else _table(found))
    counts = {
        status: sum(report.status == status for report in reports)
        for status in ("ok", "failed", "skipped")
    }
    where = f"backend {args.backend}, suite {args.suite}, on {device_facts(device)}; {toolchain()}"
    result = {
        "backend": args.backend,
        "suite": args.suite,
        "device": str(device_facts(device)),
        "toolchain": str(toolchain()),
        "seconds": round(time.perf_counter() - begin, 3),
        **counts,
        "reports": [_plain(report) for report in reports],
    }
    if quiet:
        _write(json.dumps(result, indent=1))
    else:
        numbers = ", ".join(f"{count} {status}" for status, count in counts.items())
        _write(f"\n{numbers} in {result['seconds']} s: {where}")
        if not counts["ok"]:
            _write("nothing could be checked")
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if counts["failed"] or not counts["ok"] else 0


def _table(reports: Iterable[Report]) -> Iterator[Report]:
    """Print each report as a row as it comes; a failed one gets a second line."""
    form = "{:<28} {:<9} {:<18} {:>10} {:>10} {:>10}  {}"
    _write(form.format("problem", "dtype", "quantity", "error", "eager", "bound", "ok").rstrip())
    for report in reports:
        numbers = [f"{value:.3g}" for value in (report.error, report.eager_error, report.bound)]
        status = "yes" if report.ok else "NO"
        if report.status == "skipped":
            numbers, status = ["-"] * 3, f"skipped: {report.detail}"
        _write(form.format(report.problem, report.dtype, report.name, *numbers, status))
        if report.status == "failed":
            _write(f"  {report.norm} {report.detail}")
        yield report


def _plain(report: Report) -> dict[str, Any]:
    """The report as JSON values; JSON knows no infinity, so those become words."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(report).items()
    }


def _usage(message: str) -> int:
    sys.stderr.write(f"openmsa verify: {message}\n")
    return 2


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
