"""Facts of the Hopper kernels that only their machine code shows. No GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from machine_code import check_copies

for package in ("cutlass", "tvm_ffi"):
    pytest.importorskip(package, reason="needs the CuTe DSL: pip install 'openmsa[cute]'")


def test_no_copy_is_issued_in_a_loop_over_lanes(tmp_path: Path) -> None:
    """The key-major forward's loader was busy all of the time with that, while its consumers waited
    for rows. (Blackwell's backward: tests/cli/test_compile.py, which compiles it anyway.)"""
    kernels = ("forward_key_major", "forward_union", "backward")
    named = [word for name in kernels for word in ("--kernel", name)]
    outside = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    subprocess.run(
        [sys.executable, "-m", "openmsa", "compile", "--arch", "sm_90a", *named, "--out", tmp_path],
        check=True, capture_output=True, env={**outside, "OPENMSA_CACHE": "off"},
    )  # fmt: skip
    for name in kernels:
        check_copies(tmp_path / f"{name}.cubin")
