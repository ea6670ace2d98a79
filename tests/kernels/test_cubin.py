"""Registers, stack and shared memory read from cubins, against NVIDIA's own tools in Triton."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from openmsa.kernels.common.cubin import resources

TRITON = importlib.util.find_spec("triton")
TOOLS = Path(TRITON.origin).parent / "backends" / "nvidia" / "bin" if TRITON else Path("/none")

PTX = """
.version 8.7
.target {arch}
.address_size 64
.visible .entry plain(.param .u64 p) {{ ret; }}
.visible .entry shares(.param .u64 p)
{{
  .shared .align 16 .b8 mine[320];
  .reg .b32 %r<4>; .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [p];
  mov.u32 %r1, mine;
  st.shared.u32 [%r1+4], %r1;
  bar.sync 0;
  ld.shared.u32 %r2, [%r1+8];
  st.global.u32 [%rd1], %r2;
  ret;
}}
.visible .entry spills(.param .u64 p)
{{
  .local .align 4 .b8 array[96];
  .reg .b32 %r<4>; .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [p];
  ld.global.u32 %r1, [%rd1];
  mul.wide.u32 %rd2, %r1, 4;
  mov.u64 %rd3, array;
  add.s64 %rd4, %rd3, %rd2;
  st.local.u32 [%rd4], %r1;
  ld.local.u32 %r2, [array+8];
  st.global.u32 [%rd1], %r2;
  ret;
}}
"""


@pytest.mark.skipif(
    not (TOOLS / "cuobjdump").exists(), reason="needs the tools of pip install triton"
)
@pytest.mark.parametrize(("tool", "arch"), [("ptxas", "sm_90a"), ("ptxas-blackwell", "sm_100a")])
def test_they_are_what_the_tools_say(tool: str, arch: str, tmp_path: Path) -> None:
    source, cubin = tmp_path / "k.ptx", tmp_path / "k.cubin"
    source.write_text(PTX.format(arch=arch))
    said = subprocess.run(
        [TOOLS / tool, "-v", "-arch", arch, source, "-o", cubin],
        check=True, capture_output=True, text=True,
    ).stderr  # fmt: skip
    found = {used.entry: used for used in resources(cubin.read_bytes())}
    assert set(found) == {"plain", "shares", "spills"}
    for name, used in found.items():
        # "Function properties for NAME", its stack, then what it uses.
        part = said[said.index(f"'{name}'") :].partition("Compiling entry")[0]
        assert used.registers == int(re.search(r"Used (\d+) registers", part)[1])
        assert used.stack == int(re.search(r"(\d+) bytes stack frame", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        assert used.shared == (int(shared[1]) if shared else 0)
    assert found["shares"].shared == 320
    assert found["spills"].stack >= 96
    assert found["plain"].stack == found["plain"].shared == 0


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(200), b"PK" * 100])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a cubin"):
        resources(data)
