"""Seconds until the first training step is done: with empty caches of kernels, and with full ones.

    PYTHONPATH=src python3 benchmarks/cold_start.py [--backend cute]

Each is a process of its own; the clock starts once PyTorch, CUDA and Triton are loaded: what it
holds is compilation, loading and the step itself, which is selection, forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEP = """
import sys, time, torch, triton, openmsa
from openmsa import Documents
docs = Documents.from_lengths([3000, 1096], device="cuda")
def normal(heads):
    return torch.randn(4096, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
q, k, v, index_q, index_k = map(normal, (64, 4, 4, 4, 1))
torch.cuda.synchronize()
marks = [time.perf_counter()]
def mark():
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
selection = openmsa.select_blocks(index_q, index_k, docs)
mark()
out = openmsa.sparse_attention(q, k, v, selection, docs, backend=sys.argv[1])
mark()
out.sum().backward()
mark()
print(*(end - begin for begin, end in zip(marks, marks[1:])))
"""


def compiled(folder: Path) -> str:
    """What the CuTe DSL took for each kernel, in this process or another, longest first."""
    about = [json.loads(path.read_text())["about"] for path in folder.glob("*/entry.json")]
    about.sort(key=lambda entry: -entry["seconds"])
    return ", ".join(f"{entry['name']} {entry['seconds']:.1f}" for entry in about)


def main() -> int:
    """Run the step in two processes that share a cache."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="auto", help="who computes attention (default: auto)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            found = subprocess.run(
                [sys.executable, "-c", STEP, args.backend],
                env={
                    **os.environ,
                    "TRITON_CACHE_DIR": f"{cache}/triton",
                    "OPENMSA_CACHE": f"{cache}/openmsa",
                },
                capture_output=True,
                text=True,
                check=False,
            )
            if found.returncode:
                sys.stderr.write(found.stderr)
                return 1
            parts = [float(part) for part in found.stdout.split()]
            shown = ", ".join(
                f"{stage} {part:.1f}"
                for stage, part in zip(("select", "forward", "backward"), parts, strict=True)
            )
            sys.stdout.write(f"{name} cache: {sum(parts):.1f} s ({shown})\n")
            made = compiled(Path(cache) / "openmsa")
            if name == "cold" and made:
                sys.stdout.write(f"  compiled: {made}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
