"""Where each CuTe DSL launcher lives, by stage: read by the bindings and by the dispatch table."""

from __future__ import annotations

__all__ = ["FAMILIES", "LAUNCHERS"]

_SM90, _SM100 = "openmsa.kernels.sm90", "openmsa.kernels.sm100"

LAUNCHERS: dict[str, str] = {
    "backward_preprocess": f"{_SM100}.backward_preprocess:backward_preprocess",
    "task_build": f"{_SM100}.task_build:task_build",
    "backward": f"{_SM100}.backward.launch:backward",
    "backward_postprocess": f"{_SM100}.backward_postprocess:backward_postprocess",
}
"""Stage -> ``"module:function"`` for B200 and B300; a new kernel adds its line here."""

FAMILIES: dict[str, dict[str, str]] = {
    "sm100": LAUNCHERS,
    "sm90": {
        "forward": f"{_SM90}.forward.launch:forward",
        "backward_preprocess": LAUNCHERS["backward_preprocess"],
        "task_build": f"{_SM90}.task_build:task_build",
        "backward": f"{_SM90}.backward.launch:backward",
        "backward_postprocess": f"{_SM90}.backward_postprocess:backward_postprocess",
    },
}
"""Family of devices -> its launchers, some of which serve both."""
