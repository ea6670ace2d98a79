"""Errors of the SM100 backward on the inputs of `tests/ptxsim/corpus/seed_backward.py`.

    PYTHONPATH=src:tests python -m sm100.beside

Prints the L2 errors of dq, dk and dv in bf16, relative to float64. That script prints the same for
NeMo AutoModel's kernel, with `--lengths 2048 --readers 8` and `--lengths 256`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from openmsa.kernels.common import cache, device
from openmsa.testing import attention_truth
from ptxsim.launchers import cute

from .problems import BLOCK, problem, with_inputs
from .test_backward import gradients


def inputs(tokens: int, readers: int) -> dict[str, Tensor]:
    """The other script's tensors, drawn in its order; of rows only those that read anything."""
    torch.manual_seed(0)
    q, grad = (torch.randn(tokens, 64, 128).bfloat16() for _ in range(2))
    k, v = (torch.randn(tokens, 4, 128).bfloat16() for _ in range(2))
    d_lse = torch.zeros(readers, 64)
    rows = slice(tokens - readers, tokens)
    return {"q": q[rows], "k": k, "v": v, "d_out": grad[rows], "d_lse": d_lse}


def main() -> None:
    for tokens, readers in ((2048, 8), (256, 256)):
        found = with_inputs(
            problem([readers], keys=[tokens], kv_heads=4), **inputs(tokens, readers)
        )
        truth = attention_truth(found.inputs, found.indices, found.docs, BLOCK)
        found = dataclasses.replace(found, truth=truth)
        result = gradients(found)
        errors = {}
        for name in ("dq", "dk", "dv"):
            exact = truth.quantities[name].exact
            errors[name] = float((getattr(result, name).double() - exact).norm() / exact.norm())
        print(f"the last {readers} of {tokens} tokens: {errors}")


if __name__ == "__main__":
    with (
        cute.simulate("sm_100a", processes=2),
        device.assume("sm_100a", num_sms=4),
        cache.disabled(),
    ):
        main()
