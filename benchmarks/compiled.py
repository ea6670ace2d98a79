"""The Triton kernels compiled for every architecture, on a machine without a GPU.

    PYTHONPATH=src python3 benchmarks/compiled.py
    PYTHONPATH=src python3 benchmarks/compiled.py --arch sm_120 --all

The first prints the table of docs/hardware/triton.md. Registers and bytes are those of the machine
code; a stack holds spilled registers.
"""

from __future__ import annotations

import argparse
import sys

from openmsa.backends.triton.ahead import ARCHITECTURES, Compiled, compile_ahead
from openmsa.cli.text import table, write

HEADER = ["arch", "stage", "kernel", "warps", "registers", "shared", "tensor columns", "stack"]


def row(arch: str, kernel: Compiled) -> list[str]:
    """One line of the table."""
    return [
        arch, kernel.stage, f"`{kernel.kernel}`", str(kernel.warps), str(kernel.registers),
        f"{kernel.shared:,}", str(kernel.tensor or "-"), str(kernel.stack),
    ]  # fmt: skip


def main() -> int:
    """Compile and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", choices=[*ARCHITECTURES], help="one architecture only")
    parser.add_argument("--head-dim", type=int, choices=(64, 96, 128), default=128)
    parser.add_argument("--group", type=int, default=16, help="query heads per KV head")
    parser.add_argument("--shared-memory", type=int, metavar="BYTES", help="of a thread block")
    parser.add_argument("--all", action="store_true", help="small kernels, too")
    args = parser.parse_args()
    lines = []
    for arch in [args.arch] if args.arch else ARCHITECTURES:
        capability, shared = ARCHITECTURES[arch]
        found = compile_ahead(
            capability,
            args.shared_memory or shared,
            heads=(4 * args.group, 4),
            head_dim=args.head_dim,
        )
        lines += [row(arch, kernel) for kernel in found if args.all or kernel.shared > 16384]
    write(table(HEADER, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
