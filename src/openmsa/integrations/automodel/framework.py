"""What the integration uses of NeMo AutoModel, imported on first use."""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

from openmsa.errors import UnavailableError

__all__ = ["framework", "seam"]

_MINIMAX_M3 = "nemo_automodel.components.models.minimax_m3_vl"


@functools.cache
def framework() -> Any:
    """Its layers and MSA module of MiniMax-M3, their constants, and a channel of recorded
    selections."""
    try:
        layers = importlib.import_module(f"{_MINIMAX_M3}.layers")
        msa = importlib.import_module(f"{_MINIMAX_M3}.msa")
        schedule = importlib.import_module(f"{_MINIMAX_M3}.kernels.msa_schedule")
        replay = importlib.import_module("nemo_automodel.components.distributed.recompute_replay")
        found = types.SimpleNamespace(
            Block=layers.Block,
            MSAAttention=layers.MiniMaxM3MSAAttention,
            Microbatch=msa.MSAMicrobatch,
            layers=layers,
            msa=msa,
            schedule=schedule,
            selections=replay.RecomputeReplay("openmsa selections"),
        )
        for owner, name in seam(found):
            if name not in vars(owner):
                raise AttributeError(f"{owner.__name__} has no {name}")
    except (ImportError, AttributeError) as error:
        raise UnavailableError(
            "the AutoModel integration needs nemo-automodel 0.7 with MiniMax-M3's MSA; install it "
            f'with: pip install "openmsa[automodel]" ({error})'
        ) from error
    return found


def seam(names: Any) -> tuple[tuple[Any, str], ...]:
    """Owner and name of each function that :func:`~openmsa.integrations.automodel.enable` replaces.

    ``sparse_attention`` is there twice, since the layers hold it by a name of their own.
    """
    return (
        (names.Microbatch, "prepare_selection"),
        (names.Microbatch, "select_blocks"),
        (names.msa, "sparse_attention"),
        (names.layers, "sparse_attention"),
        (names.Block, "nemo_checkpoint_context_fn"),
    )
