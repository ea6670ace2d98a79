"""``openmsa compile``: the CuTe DSL kernels ahead of time, and what the compiler made of them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from openmsa import __version__
from openmsa.cli import text
from openmsa.cli.options import save_json
from openmsa.cli.text import Progress, write
from openmsa.errors import UnsupportedProblem
from openmsa.kernels.build import Build, Roofline
from openmsa.kernels.catalogue import MODULES, builds, roofline, titles
from openmsa.kernels.common.instructions import by_pipe, products, tensor_columns

__all__ = ["add_parser", "run"]

_EXAMPLE = """\
Needs no GPU. Compiled kernels are kept, and found by training on this machine, in
~/.cache/openmsa/kernels, or where OPENMSA_CACHE says: a folder, or "off" for none. What was kept is
not compiled again; the seconds are those of then.

example:
  openmsa compile --arch sm_100a --report --out out/sm_100a
"""


def add_parser(subparsers: Any) -> None:
    """Add ``compile`` to the subparsers of the ``openmsa`` command."""
    parser = subparsers.add_parser(
        "compile",
        help="compile the kernels ahead of time, and report what they take",
        description="Compile the CuTe DSL kernels ahead of time and print what they take of an SM.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", required=True, metavar="ARCH", help=f"of {', '.join(MODULES)}")
    parser.add_argument(
        "--kernel",
        metavar="NAME",
        action="append",
        help="only the kernels of this name; may be given several times",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="also print instructions by pipe, and a roofline where a kernel has one",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="everything as JSON to stdout instead of text, or to FILE as well",
    )
    parser.add_argument("--out", metavar="DIR", help="write NAME.ptx, .cubin and .json there")
    parser.set_defaults(run=run, error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Compile and report; 0 if everything did."""
    found = _chosen(args)
    folder = _folder(args)
    _check_json(args)
    kernels = []
    progress = Progress(len(found))
    try:
        for title, build in found.items():
            progress.start(title)
            kernels.append(_one(title, build, folder))
            progress.add(1)
    finally:
        progress.close()
    result = {"openmsa": __version__, "arch": args.arch, "kernels": kernels}
    if args.json != "-":
        _show(result, args.report)
    try:
        save_json(args.json, result)
    except OSError as error:
        args.error(f"--json {args.json}: {error.strerror}")
    return 0


def _chosen(args: argparse.Namespace) -> dict[str, Build]:
    """The builds that ``--arch`` and ``--kernel`` name, by their titles."""
    found = titles(builds(args.arch))
    if args.kernel is None:
        return found
    for name in args.kernel:
        if not any(name in (title, build.name) for title, build in found.items()):
            raise UnsupportedProblem(
                f"no kernel {name!r} for {args.arch}; there are {', '.join(found)}"
            )
    return {
        title: build
        for title, build in found.items()
        if title in args.kernel or build.name in args.kernel
    }


def _folder(args: argparse.Namespace) -> Path | None:
    """``--out``, made before the work starts."""
    if args.out is None:
        return None
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        args.error(f"--out {args.out}: {error.strerror}")
    if not os.access(folder, os.W_OK):
        args.error(f"--out {args.out}: not writable")
    return folder


def _check_json(args: argparse.Namespace) -> None:
    """``--json FILE`` can be written, as far as one can tell before the work."""
    if args.json in (None, "-"):
        return
    path = Path(args.json)
    if path.is_dir():
        args.error(f"--json {args.json}: is a folder")
    if not path.absolute().parent.is_dir():
        args.error(f"--json {args.json}: No such file or directory")


def _one(title: str, build: Build, folder: Path | None) -> dict[str, Any]:
    """Compile ``build``, write its files, and tell what is known of it."""
    from openmsa.kernels.common.compile import ahead

    entry, kept = ahead(build)
    ptx = entry.files["kernel.ptx"].decode()
    cost = roofline(build, products(ptx))
    about = {
        "title": title,
        **entry.about,
        "kept": kept,
        "ptx_lines": len(ptx.splitlines()),
        "cubin_bytes": len(entry.files["kernel.cubin"]),
        "dynamic_shared": dict(build.facts).get("shared_bytes", 0),
        "tensor_columns": tensor_columns(ptx),
        "instructions": by_pipe(ptx),
        "roofline": None if cost is None else _as_json(cost),
    }
    if folder is not None:
        (folder / f"{title}.ptx").write_text(ptx, encoding="utf-8")
        (folder / f"{title}.cubin").write_bytes(entry.files["kernel.cubin"])
        (folder / f"{title}.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return about


def _as_json(cost: Roofline) -> dict[str, Any]:
    return {
        "unit": cost.unit,
        "needed": cost.needed,
        "cycles": {pipe: dict(items) for pipe, items in cost.cycles.items()},
        "total": {pipe: cost.total(pipe) for pipe in cost.cycles},
        "bytes": dict(cost.bytes),
        "bound": cost.bound,
    }


def _show(result: dict[str, Any], report: bool) -> None:
    header = [
        "kernel", "seconds", "PTX lines", "registers", "stack", "static shared", "dynamic shared",
        "tensor columns",
    ]  # fmt: skip
    rows = []
    for kernel in result["kernels"]:
        entries = kernel["entries"]
        most = {
            name: max(entry[name] for entry in entries) for name in ("registers", "stack", "shared")
        }
        rows.append(
            [
                kernel["title"], f"{kernel['seconds']:.1f}{' (kept)' if kernel['kept'] else ''}",
                f"{kernel['ptx_lines']:,}", str(most["registers"]), f"{most['stack']:,}",
                f"{most['shared']:,}", f"{kernel['dynamic_shared']:,}",
                str(kernel["tensor_columns"] or "-"),
            ]
        )  # fmt: skip
    write(text.table(header, rows))
    write("\nIn bytes: a thread's stack, where spilled registers go, and a thread block's shared")
    write("memory, of which static and dynamic together may be 232,448.")
    if report:
        for kernel in result["kernels"]:
            _show_report(kernel, result["arch"])


def _show_report(kernel: dict[str, Any], arch: str) -> None:
    write(f"\n{kernel['title']} on {arch}\n")
    counts = [
        [pipe, f"{count:,}"] for pipe, count in kernel["instructions"].items() if count
    ]  # fmt: skip
    write(text.table(["instructions of the PTX", "count"], counts))
    cost = kernel["roofline"]
    if cost is None:
        return
    rows = []
    for pipe, items in cost["cycles"].items():
        parts = ", ".join(f"{name} {cycles:,}" for name, cycles in items.items())
        rows.append(f"  {pipe:<14} {cost['total'][pipe]:>6,}  {parts}")
    write(f"\nCycles of a {cost['unit']} on one SM, each pipe at its peak:\n")
    write("\n".join(rows))
    issued = cost["total"]["tensor"] / cost["needed"]
    write(f"\nTakes longest: {cost['bound']}. Tensor work: {issued:.2f} of what is needed.")
    moved = ", ".join(f"{count:,} {name}" for name, count in cost["bytes"].items())
    write(f"Bytes of L2: {moved}.")
