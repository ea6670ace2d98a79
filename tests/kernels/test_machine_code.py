"""What the assembler made of the kernels that ask the copy engine for tiles. No GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs the CuTe DSL: pip install 'openmsa[cute]'")

COPY = re.compile(r"\bUTMALDG\b")
OVER_LANES = re.compile(r"\bBRA\.U\.ANY\b")


def disassembler() -> Path:
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        pytest.skip("needs the tools of pip install triton")
    return Path(found.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


@pytest.mark.parametrize(
    ("arch", "kernels"),
    [
        ("sm_90a", ("forward_key_major", "forward_union", "backward")),
        ("sm_100a", ("backward",)),
    ],
    ids=["sm90", "sm100"],
)
def test_no_copy_is_issued_in_a_loop_over_lanes(
    arch: str, kernels: tuple[str, ...], tmp_path: Path
) -> None:
    """Where the assembler cannot see that a warp's threads run together, it issues every copy in a
    loop over the lanes. The key-major forward's loader was busy all of the time with that, while
    its consumers waited for rows."""
    tool = disassembler()
    named = [word for name in kernels for word in ("--kernel", name)]
    outside = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    subprocess.run(
        [sys.executable, "-m", "openmsa", "compile", "--arch", arch, *named, "--out", tmp_path],
        check=True, capture_output=True, env={**outside, "OPENMSA_CACHE": "off"},
    )  # fmt: skip
    for name in kernels:
        code = subprocess.run(
            [tool, "-c", tmp_path / f"{name}.cubin"], check=True, capture_output=True, text=True
        ).stdout
        assert COPY.search(code), f"{name} asks for nothing"
        assert not OVER_LANES.search(code), name
