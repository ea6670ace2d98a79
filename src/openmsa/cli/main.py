"""``openmsa`` and ``python -m openmsa``: the subcommands, and how an error becomes a message.

A subcommand's module is imported when it is asked for, so that ``--help`` and ``--version`` answer
without importing torch. Each module has ``add_parser(subparsers)``, which sets ``run`` on the
arguments.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from openmsa import __version__
from openmsa.errors import OpenMSAError

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "info": "versions, devices, and which backend can run which stage here",
    "run": "one packed training step on real document shapes, checked against float64",
    "verify": "check a backend's results and gradients against the float64 oracle",
    "bench": "time stages against dense attention",
    "compile": "compile the kernels ahead of time, and report what they take",
}
"""Subcommands in the order of the help; each is the module of that name."""

_EXAMPLE = """\
example:
  openmsa run --plot step.png

exit status: 0 ok, 1 a check failed or the work could not be done, 2 usage error
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (by default the process's) and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # OpenMP reads this once, when torch loads. Threads that spin at a barrier starve where others
    # use the machine too: 30 times slower with 5 runnable threads on 2 cores (EPYC 7003, 2026-12).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        args = _parser(argv).parse_args(argv)
        return int(args.run(args))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except OpenMSAError as error:
        return _fail(argv, error)
    except KeyboardInterrupt:
        sys.stderr.write("\nopenmsa: interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader has gone (``| head``); the interpreter must not flush into it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openmsa",
        description="MiniMax Sparse Attention for training, over packed documents.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"openmsa {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name == asked:
            importlib.import_module(f"openmsa.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _fail(argv: Sequence[str], error: OpenMSAError) -> int:
    """Say on one line what went wrong, whatever lines the message has."""
    command = next((word for word in argv if word in COMMANDS), "")
    lines = [line.strip() for line in str(error).splitlines()]
    sys.stderr.write(f"openmsa {command}: {'; '.join(lines)}\n")
    return 1
