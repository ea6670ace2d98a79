"""MiniMax-M3 of NeMo AutoModel through openmsa.

``enable()`` gives the layers of a model that is configured with ``sparse_attn="msa"`` openmsa's
selection and attention, so that they run on every device openmsa runs on: AutoModel's own kernels
need a Blackwell SM100. Weights, checkpoints, recipes and pack formats are untouched.

What no longer applies: the demand for SM100 and for its toolchain, for bf16, and the refusal of
deterministic algorithms. What AutoModel refuses and openmsa cannot do either stays refused, by
AutoModel's own texts: other topologies than MiniMax-M3's, FP8 projections, fused RoPE, context
parallelism, caches, sliding windows, graph capture.

**The seam.** Three functions are replaced, for the whole process: what a layer calls to attend, and
what it calls to select and to prepare for that. They are a level above the launchers of
``msa_bindings.kernels()``, which stays as it is; ``docs/automodel.md`` says why.
"""

from __future__ import annotations

from typing import Any

from openmsa.dispatch.choose import check_backend
from openmsa.integrations.automodel.framework import framework, seam
from openmsa.integrations.automodel.microbatch import hooks, replaying

__all__ = ["disable", "enable"]

_ORIGINALS: list[tuple[Any, str, Any]] = []
"""Owner, name and own object of everything that is replaced."""


def enable(*, backend: str = "auto", replay_selection: bool = True) -> None:
    """Run AutoModel's MSA layers through openmsa, those of models that exist already included.

    A second call replaces the first one's arguments.

    Args:
        backend: openmsa's backend, by default the fastest one that can do the problem.
        replay_selection: a checkpointed MSA block's recompute takes the selection of its forward
            (256 bytes a token and layer, freed with the graph) instead of selecting again. Read
            when activation checkpointing is applied, so enable first. AutoModel does this for its
            generic sparse layers only.

    Raises:
        UnavailableError: nemo-automodel is missing or has no MSA of MiniMax-M3.
        InvalidInput: an unknown backend.
    """
    check_backend(backend)
    names = framework()
    disable()
    own = [(owner, name, vars(owner)[name]) for owner, name in seam(names)]
    recording = replaying(own[-1][2]) if replay_selection else own[-1][2]
    prepare, select, attention = hooks(backend)
    for (owner, name, function), ours in zip(
        own, (prepare, select, attention, attention, recording), strict=True
    ):
        _ORIGINALS.append((owner, name, function))
        setattr(owner, name, ours)


def disable() -> None:
    """Undo :func:`enable`: AutoModel has its own functions again."""
    while _ORIGINALS:
        owner, name, own = _ORIGINALS.pop()
        setattr(owner, name, own)
