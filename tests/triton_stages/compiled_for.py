"""``compiled_for.py ARCH``: compile all kernels, exit 1 where one does not fit or spills too much.

Run by test_ahead.py in a process of its own.
"""

from __future__ import annotations

import os
import sys

import torch

from openmsa.backends.triton.ahead import ARCHITECTURES, compile_ahead
from openmsa.contract.problem import Problem
from openmsa.dispatch.table import TABLE

STACK = {
    # What the fp32 accumulators of 255 registers leave no room for; outside the inner products.
    ("sm_90", "backward"): 128,
    ("sm_90", "backward, repeatable"): 192,
    ("sm_100", "forward"): 160,
    # Ranks are pairs of 64-bit numbers; the sort of 16 warps needs more than their 128 registers.
    ("sm_100", "select_blocks"): 512,
}
"""Most bytes of stack of a thread; elsewhere 64."""


def faults(arch: str) -> list[str]:
    """What is wrong with the kernels for ``arch``, in words."""
    capability, shared = ARCHITECTURES[arch]
    problems = [(shared, 128, (64, 4))]
    if shared < 128 * 1024 and (arch == "sm_89" or os.environ.get("PTXSIM_FULL") == "1"):
        # As little as the gates let through; a group of 64 fills more than one tile. The memory is
        # the same on both such architectures, so that `make test` looks at one.
        problems += [(gate("backward", 64), 64, (64, 4)), (gate("backward", 128), 128, (64, 1))]
    found = []
    for memory, dim, heads in problems:
        for kernel in compile_ahead(capability, memory, head_dim=dim, heads=heads):
            name = f"{arch}, head dim {dim}, {kernel.stage}: {kernel.kernel}"
            asked = max(gate(kernel.stage.removesuffix(", repeatable"), dim), 1024)
            if kernel.registers < 16:
                found.append(f"{name} is a lone trap: {kernel}")
            if kernel.shared > memory:
                found.append(f"{name} needs {kernel.shared} bytes of {memory}")
            if memory < shared and kernel.shared > asked:
                found.append(f"{name} needs {kernel.shared} bytes, its gate says {asked}")
            if kernel.tensor > 512:
                found.append(f"{name} needs {kernel.tensor} columns of tensor memory")
            # A group that takes turns keeps more in flight than it is worth a bound.
            if heads == (64, 4) and kernel.stack > STACK.get((arch, kernel.stage), 64):
                found.append(f"{name} spills to {kernel.stack} bytes of stack")
    return found


def gate(stage: str, dim: int) -> int:
    """The shared memory that the dispatch table asks of a device for a stage."""
    problem = Problem("attention", torch.device("cuda"), torch.bfloat16, 64, 4, dim, 128, 16)
    needed = TABLE["triton"][stage].offer.shared_memory
    return 0 if needed is None else needed(problem)


if __name__ == "__main__":
    wrong = faults(sys.argv[1])
    sys.stdout.write("\n".join(wrong) or "all kernels fit")
    sys.exit(bool(wrong))
