"""Where each CuTe DSL launcher lives, by stage: read by the bindings and by the dispatch table."""

from __future__ import annotations

__all__ = ["LAUNCHERS"]

_SM100 = "openmsa.kernels.sm100"

LAUNCHERS: dict[str, str] = {
    "backward_preprocess": f"{_SM100}.backward_preprocess:backward_preprocess",
    "task_build": f"{_SM100}.task_build:task_build",
    "backward": f"{_SM100}.backward.launch:backward",
    "backward_postprocess": f"{_SM100}.backward_postprocess:backward_postprocess",
}
"""Stage -> ``"module:function"``; a new kernel adds its line here."""
