"""NVIDIA's assembler as a judge of what is PTX at all, where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PTXAS = shutil.which("ptxas")
PRELUDE = """
.reg .b16 %h<40>; .reg .b32 %r<300>; .reg .b64 %q<40>; .reg .b128 %x<4>; .reg .pred %p<8>;
.shared .align 16 .b8 buffer[1024]; .local .align 16 .b8 stack[64];
"""


def module(instructions: Sequence[str], arch: str = "sm_100a") -> str:
    """A kernel with one instruction a line; the first has line `FIRST`."""
    body = "\n".join(instructions)
    return (
        f".version 8.8\n.target {arch}\n.address_size 64\n"
        f".visible .entry k(.param .u64 a)\n{{{PRELUDE}TABLE: .branchtargets LABEL;\n"
        f"{body}\nLABEL:\nret;\n}}\n"
    )


FIRST = module(["here"]).split("\n").index("here") + 1


def complaints(instructions: Sequence[str], arch: str, folder: Path) -> dict[str, str]:
    """Instructions that the assembler refuses, with its words."""
    # One kernel may not use tcgen05 with both group sizes.
    pairs = [text for text in instructions if "cta_group::2" in text]
    others = [text for text in instructions if "cta_group::2" not in text]
    return _complaints(pairs, arch, folder) | _complaints(others, arch, folder)


def _complaints(instructions: Sequence[str], arch: str, folder: Path) -> dict[str, str]:
    assert PTXAS is not None
    path = folder / "forms.ptx"
    found: dict[str, str] = {}
    left = list(instructions)
    while left:
        path.write_text(module(left, arch))
        done = subprocess.run(
            [PTXAS, "-arch", arch, str(path), "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode < 0:  # it crashes on some of what is no PTX
            if len(left) == 1:
                return found | {left[0]: "the assembler crashed"}
            half = len(left) // 2
            first, second = (_complaints(part, arch, folder) for part in (left[:half], left[half:]))
            return found | first | second
        if done.returncode == 0:
            return found
        errors = re.findall(r"line '?(\d+)'?;?\s*(?:error\s*)?:?\s*(.*)", done.stderr)
        refused = {int(n) - FIRST: words for n, words in errors if 0 <= int(n) - FIRST < len(left)}
        if not refused:
            raise AssertionError(f"ptxas ended with {done.returncode}: {done.stderr}")
        found |= {left[n]: words for n, words in refused.items()}
        left = [text for n, text in enumerate(left) if n not in refused]
    return found
