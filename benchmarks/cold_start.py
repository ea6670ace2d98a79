"""Seconds until the first training step is done: with an empty Triton cache, and with a full one.

    PYTHONPATH=src python3 benchmarks/cold_start.py

Each is a process of its own; the clock starts once PyTorch, CUDA and Triton are loaded: what it
holds is compilation, loading and the step itself, which is selection, forward and backward.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

STEP = """
import time, torch, triton, openmsa
from openmsa import Documents
docs = Documents.from_lengths([3000, 1096], device="cuda")
def normal(heads):
    return torch.randn(4096, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
q, k, v, index_q, index_k = map(normal, (64, 4, 4, 4, 1))
torch.cuda.synchronize()
start = time.perf_counter()
selection = openmsa.select_blocks(index_q, index_k, docs, backend="triton")
openmsa.sparse_attention(q, k, v, selection, docs, backend="triton").sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def main() -> int:
    """Run the step in two processes that share a cache."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            found = subprocess.run(
                [sys.executable, "-c", STEP],
                env={**os.environ, "TRITON_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=False,
            )
            if found.returncode:
                sys.stderr.write(found.stderr)
                return 1
            sys.stdout.write(f"{name} cache: {float(found.stdout):.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
