"""Results of the SM90 kernels on small problems, on a chip or in the simulator.

``python -m sm90.results FILE`` writes those of the simulator, in a process of its own: within a
session of the simulator PyTorch believes in a GPU that is none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sm100.problems import Backward, problem, with_inputs

BLOCK = 128
NAMES = ("ragged", "seventeen_blocks", "apart")


def named(name: str) -> Backward:
    """Small packed problems: ragged documents; more blocks than top-16; neighbours that agree so
    little that the forward goes the key-major way."""
    if name == "ragged":
        return problem([127, 129, 1, 2, 3], seed=1)
    if name == "seventeen_blocks":
        return problem([20, 5], keys=[BLOCK * 17 + 1, 5])
    return problem([40, 5], keys=[BLOCK * 17 + 1, 5], topk=2)


def results(found: Backward) -> dict[str, Tensor]:
    """Forward and backward on the device of ``found``'s inputs; deterministic sums as ``det_*``."""
    from openmsa.kernels.sm90 import backward_postprocess, task_build
    from openmsa.kernels.sm90.backward import launch as backward
    from openmsa.kernels.sm90.forward import launch as forward
    from openmsa.kernels.sm100 import backward_preprocess

    inputs, layout, saved = found.inputs, found.docs.layout, found.saved()
    saved = replace(saved, out=saved.out.to(inputs.q.device), lse=saved.lse.to(inputs.q.device))
    made = {}
    config = found.config()
    made["out"], made["lse"] = forward.forward(
        inputs.q, inputs.k, inputs.v, found.indices, saved.schedule, layout, config
    )
    delta = backward_preprocess.backward_preprocess(saved.out, inputs.d_out, saved.lse, None)
    tasks = task_build.task_build(saved.schedule, found.group, layout.num_queries)
    for prefix, deterministic in (("", False), ("det_", True)):
        config = found.config(deterministic)
        sums = backward.backward(inputs.d_out, delta, saved, tasks, layout, config, (True, True))
        sums = backward_postprocess.backward_postprocess(*sums, torch.float32)
        made.update({prefix + name: x for name, x in zip(("dq", "dk", "dv"), sums, strict=True)})
    return {name: x.cpu() for name, x in made.items()}


def on(device: str, found: Backward) -> Backward:
    """The problem with its tensors on another device, and its truth where it was."""
    inputs = {name: x.to(device) for name, x in vars(found.inputs).items()}
    docs = type(found.docs).from_cu_seqlens(
        found.docs.cu_seqlens_q.to(device), found.docs.cu_seqlens_k.to(device)
    )
    moved = replace(with_inputs(found, **inputs), docs=docs, indices=found.indices.to(device))
    return moved


def simulated() -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The results of every problem in the simulator."""
    from simulation import launches_on, session_of

    with session_of("sm_90a") as session, launches_on(session, "sm_90a", num_sms=4):
        for name in NAMES:
            yield name, results(named(name))


if __name__ == "__main__":
    torch.save(dict(simulated()), sys.argv[1])
