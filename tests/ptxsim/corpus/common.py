"""What the corpus scripts share: options, oracles, the report."""

from __future__ import annotations

import argparse
import json
import math
import resource
from typing import Any

import torch
from recorded import record
from torch import Tensor

from ptxsim.launchers import cute


def options(**extra: Any) -> argparse.Namespace:
    """`--seed`, `--processes`, `--races` and the options of one script, given as name=default."""
    parser = argparse.ArgumentParser()
    for name, default in {"seed": 0, "processes": 2, "races": False, **extra}.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def cpu_seconds() -> float:
    """Processor time of this process and of the children it has waited for."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


class Runner:
    """Executes launches and adds up the processor seconds they take.

    Not wall time: the bounds of the tests shall not depend on what else the machine does.
    """

    def __init__(self, chosen: argparse.Namespace) -> None:
        names = ("seed", "processes", "races")
        self.options = {name: getattr(chosen, name) for name in names}
        record.from_environment()
        self.seconds = 0.0
        self.launches = 0

    def __call__(self, launch: cute.Launch, tensors: Any) -> None:
        start = cpu_seconds()
        cute.run_launch(launch, tensors, **self.options)
        self.seconds += cpu_seconds() - start
        self.launches += 1


def relative(found: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference, relative to the expected one."""
    return float((found.double() - expected).norm() / expected.norm())


def attention(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """float64 attention of one document: out, lse, dq, dk, dv.

    q, grad [Lq, Hq, D]; k, v [Lk, Hkv, D]; the last query sees the last key if causal.
    """
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    length, heads, width = q.shape
    keys, key_heads, _ = k.shape
    group = heads // key_heads
    k_wide, v_wide = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = width**-0.5
    scores = torch.einsum("ihd,jhd->hij", q, k_wide) * scale
    if causal:
        hidden = torch.ones(length, keys, dtype=torch.bool).triu(1 + keys - length)
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    out = torch.einsum("hij,jhd->ihd", weights, v_wide)
    d_weights = torch.einsum("ihd,jhd->hij", grad, v_wide)
    delta = (out * grad).sum(-1).T
    d_scores = weights * (d_weights - delta[..., None]) * scale

    def per_key_head(x: Tensor) -> Tensor:
        return x.reshape(keys, key_heads, group, width).sum(2)

    dq = torch.einsum("hij,jhd->ihd", d_scores, k_wide)
    dk = per_key_head(torch.einsum("hij,ihd->jhd", d_scores, q))
    dv = per_key_head(torch.einsum("hij,ihd->jhd", weights, grad))
    return out, lse.T, dq, dk, dv


def report(**values: Any) -> None:
    """The last line of a script: its results as JSON."""
    print(json.dumps(values))
