"""MiniMax-M3 of Hugging Face Transformers through openmsa.

``enable(model)`` gives every sparse layer of a ``minimax_m3_vl`` text model openmsa's selection and
attention. Memory is linear in the sequence, where the model's own path scores every key for every
query and expands a mask of ``batch * heads * S * S``.

What runs through openmsa: training, evaluation and prefill of whole rows, unpadded, right-padded or
packed. Padding comes as the usual 2-D ``attention_mask``, packing as ``position_ids`` that restart,
without a mask. What the model's own path still does, exactly as before: decoding with a KV cache,
left padding, and masks that were prepared by hand (4-D). Dense layers use PyTorch's attention,
document by document where rows are packed.

**The block grid.** Transformers counts blocks of keys from the start of a row, MSA from the first
key of each document. The two agree on rows that hold one document. For packed rows the checkpoint
was trained with MSA's grid, which is the default here; Transformers' own path gives other results
for every document but the first of a packed row, since it compares the document's positions with
places in the row.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from openmsa.dispatch.choose import check_backend
from openmsa.errors import UnsupportedProblem, invalid_input
from openmsa.integrations.transformers.framework import framework
from openmsa.integrations.transformers.layers import attention, postpone
from openmsa.integrations.transformers.rows import row_facts

__all__ = ["NAME", "attention", "disable", "enable", "register"]

NAME = "openmsa"
"""Under which :func:`register` makes the attention known to Transformers."""

_GRIDS = ("document", "row")


def enable(model: Any, *, grid: str = "document", backend: str = "auto") -> None:
    """Run the sparse layers of a ``minimax_m3_vl`` model through openmsa, in place.

    Args:
        model: any module that holds ``MiniMaxM3VLTextModel``, such as ``MiniMaxM3VLForCausalLM``.
        grid: ``"document"`` counts blocks from the first key of each document, as MSA does and as
            the published checkpoint was trained; ``"row"`` insists on Transformers' own count and
            refuses packed rows, for which the two differ.
        backend: openmsa's backend, by default the fastest one that can do the problem.

    Raises:
        UnavailableError: Transformers is missing or has no ``minimax_m3_vl``.
        InvalidInput: no such model, an unknown grid or backend.
        UnsupportedProblem: a configuration that MSA does not have, with the reason.
    """
    if grid not in _GRIDS:
        invalid_input("grid", " or ".join(map(repr, _GRIDS)), repr(grid))
    check_backend(backend)
    register()
    for text_model in _text_models(model):
        _check_config(text_model.config)
        if not hasattr(text_model, "_openmsa_before"):
            text_model._openmsa_before = text_model.config._attn_implementation
        text_model.set_attn_implementation(NAME)
        for layer in text_model.layers:
            layer.self_attn._openmsa_options = (grid, backend)
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.forward = types.MethodType(
                    postpone, layer.self_attn.indexer
                )


def disable(model: Any) -> None:
    """Undo :func:`enable`: the model is as it was before."""
    for text_model in _text_models(model):
        if not hasattr(text_model, "_openmsa_before"):
            continue
        text_model.set_attn_implementation(text_model._openmsa_before)
        del text_model._openmsa_before
        for layer in text_model.layers:
            del layer.self_attn._openmsa_options
            if layer.self_attn.indexer is not None:
                del layer.self_attn.indexer.forward


def register() -> None:
    """Make ``"openmsa"`` an attention implementation that ``set_attn_implementation`` knows.

    A model that is only switched to it by name keeps its own indexer, whose scores take memory that
    is quadratic in the sequence, and whose selection is right for one document per row only;
    :func:`enable` replaces the indexer's scoring, too.
    """
    hub = framework()
    hub.AttentionInterface.register(NAME, attention)
    hub.AttentionMaskInterface.register(NAME, row_facts)


def _text_models(model: Any) -> list[Any]:
    text_model = framework().modeling.MiniMaxM3VLTextModel
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    found = [module for module in modules if isinstance(module, text_model)]
    if not found:
        invalid_input("model", "a module with a MiniMaxM3VLTextModel", type(model).__name__)
    return found


def _check_config(config: Any) -> None:
    sparse = "minimax_m3_sparse" in config.layer_types
    for wrong, needed in (
        (config.attention_dropout, "attention_dropout 0"),
        (sparse and config.index_local_blocks < 1, "index_local_blocks of 1 or more"),
        (
            sparse and config.index_n_heads != config.num_key_value_heads,
            "as many index heads as KV heads",
        ),
    ):
        if wrong:
            raise UnsupportedProblem(
                f"openmsa needs {needed}; got attention_dropout={config.attention_dropout}, "
                f"index_local_blocks={config.index_local_blocks}, index_n_heads="
                f"{config.index_n_heads}, num_key_value_heads={config.num_key_value_heads}"
            )
