"""What the integration uses of Transformers, imported on first use."""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

from openmsa.errors import UnavailableError

__all__ = ["framework"]


@functools.cache
def framework() -> Any:
    """Its registries, and the module of MiniMax-M3."""
    try:
        package = importlib.import_module("transformers")
        masks = importlib.import_module("transformers.masking_utils")
        utilities = importlib.import_module("transformers.modeling_utils")
        modeling = importlib.import_module(
            "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl"
        )
    except ImportError as error:
        raise UnavailableError(
            "the Transformers integration needs transformers with minimax_m3_vl; install it with: "
            f'pip install "openmsa[transformers]" ({error})'
        ) from error
    return types.SimpleNamespace(
        AttentionInterface=package.AttentionInterface,
        AttentionMaskInterface=package.AttentionMaskInterface,
        attention=utilities.ALL_ATTENTION_FUNCTIONS,
        masks=masks.ALL_MASK_ATTENTION_FUNCTIONS,
        modeling=modeling,
    )
