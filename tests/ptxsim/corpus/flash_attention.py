"""FlashAttention-4's forward and backward, for SM100 or SM90, against float64."""

from __future__ import annotations

import os

import torch
from common import Runner, attention, options, relative, report

from ptxsim.launchers import cute


def main() -> None:
    chosen = options(
        arch="sm_100a", queries=256, keys=256, width=128, heads=1, key_heads=1,
        full=False, backward=False,
    )  # fmt: skip
    os.environ["FLASH_ATTENTION_ARCH"] = chosen.arch.rstrip("a")
    os.environ["FLASH_ATTENTION_NUM_SMS"] = "148"
    torch.manual_seed(0)
    q, grad = (torch.randn(1, chosen.queries, chosen.heads, chosen.width).bfloat16() for _ in "qg")
    k, v = (torch.randn(1, chosen.keys, chosen.key_heads, chosen.width).bfloat16() for _ in "kv")
    causal = not chosen.full
    runner = Runner(chosen)
    results = {}
    with cute.simulate(chosen.arch, run=runner):
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
        truth = attention(q[0], k[0], v[0], grad[0], causal)
        results["out"] = relative(out[0], truth[0])
        results["lse"] = float((lse[0].T.double() - truth[1]).abs().max())
        if chosen.backward:
            found = _flash_attn_bwd(q, k, v, out, grad, lse, causal=causal)
            for name, x, y in zip(("dq", "dk", "dv"), found, truth[2:], strict=False):
                results[name] = relative(x[0], y)
    report(seconds=runner.seconds, launches=runner.launches, **results)


if __name__ == "__main__":
    main()
