"""Devices, toolchains and tables that this machine does not have."""

from __future__ import annotations

import dataclasses

import torch

from openmsa.contract.problem import Problem
from openmsa.dispatch.probe import DeviceFacts, Toolchain
from openmsa.dispatch.support import Offer
from openmsa.dispatch.table import STAGES, Cell

CPU = DeviceFacts("cpu", "an x86 CPU")
A100 = DeviceFacts("cuda", "NVIDIA A100", (8, 0), 108, 166_912)
A40 = DeviceFacts("cuda", "NVIDIA A40", (8, 6), 84, 101_376)
H200 = DeviceFacts("cuda", "NVIDIA H200", (9, 0), 132, 232_448)
B200 = DeviceFacts("cuda", "NVIDIA B200", (10, 0), 148, 232_448)
B300 = DeviceFacts("cuda", "NVIDIA B300", (10, 3), 160, 232_448)
RTX5090 = DeviceFacts("cuda", "NVIDIA RTX 5090", (12, 0), 170, 101_376)
UNKNOWN_GPU = DeviceFacts("cuda", "a GPU that does not tell")
OTHER = DeviceFacts("xpu", "another vendor's GPU")

DEVICES = {
    "cpu": CPU,
    "sm80": A100,
    "sm86": A40,
    "sm90": H200,
    "sm100": B200,
    "sm103": B300,
    "sm120": RTX5090,
    "no_capability": UNKNOWN_GPU,
    "xpu": OTHER,
}

BARE = Toolchain("3.11.7", "2.13.0")
TRITON = Toolchain("3.11.7", "2.13.0", triton="3.6.0")
CUTE = Toolchain("3.11.7", "2.13.0", cute_dsl="4.6.2")
BOTH = Toolchain("3.11.7", "2.13.0", triton="3.6.0", cute_dsl="4.6.2")

TOOLS = {"bare": BARE, "triton": TRITON, "cute": CUTE, "both": BOTH}

SELECT = Problem(
    "select", torch.device("cuda", 0), torch.bfloat16, 4, 4, head_dim=128, block_size=128, topk=16
)
ATTENTION = dataclasses.replace(SELECT, work="attention", q_heads=64)
PROBLEMS = {"select": SELECT, "attention": ATTENTION}


def row(offer: Offer, evidence: str = "ran", **odd: Cell) -> dict[str, Cell]:
    """A table row whose stages all make the same offer, but for those named in ``odd``.

    The launchers are real functions of no meaning; choosing never calls them.
    """
    stages = sum(STAGES.values(), ())
    cells = {stage: Cell("math:sqrt", offer, evidence, f"{evidence} somewhere") for stage in stages}
    return cells | odd


HOPPER = Offer(devices=("cuda",), capabilities=((9, 0), (9, 0)), package="cute_dsl")
BLACKWELL = Offer(devices=("cuda",), capabilities=((10, 0), (10, 3)), package="cute_dsl")
PORTABLE = Offer(
    devices=("cuda",),
    capabilities=((8, 0), (12, 1)),
    dtypes=(torch.bfloat16,),
    package="triton",
    deterministic=False,
)
