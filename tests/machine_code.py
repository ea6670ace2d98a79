"""What the assembler made of a kernel, by the disassembler in Triton's wheel."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

COPY = re.compile(r"\bUTMALDG\b")
OVER_LANES = re.compile(r"\bBRA\.U\.ANY\b")


def check_copies(cubin: Path) -> None:
    """A kernel asks the copy engine for tiles, and for none in a loop over the lanes of a warp:
    that is how the assembler issues each copy where it cannot see that lanes run together."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("needs the tools of pip install triton")
    tool = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    code = subprocess.run([tool, "-c", cubin], check=True, capture_output=True, text=True).stdout
    assert COPY.search(code), f"{cubin.name} asks for nothing"
    assert not OVER_LANES.search(code), cubin.name
