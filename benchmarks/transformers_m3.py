"""One training step of a MiniMax-M3 layer in Transformers: its own paths and openmsa's.

    PYTHONPATH=src python3 benchmarks/transformers_m3.py --tokens 2048,4096
    PYTHONPATH=src python3 benchmarks/transformers_m3.py --shape m3 --tokens 16384,65536

A randomly initialised text model with real attention shapes (64/4 heads, head dim 128, blocks of
128, top-16), one sparse layer and an MLP; forward and backward of one row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from steps import Setup, main

PATHS = ("openmsa", "sdpa", "eager")


def build(setup: Setup) -> Callable[[], None]:
    """The model's step on the path named."""
    from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as configuration
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

    from openmsa.integrations import transformers as integration

    config = configuration.MiniMaxM3VLTextConfig(
        vocab_size=256, hidden_size=setup.hidden, dense_intermediate_size=setup.intermediate,
        num_hidden_layers=1, layer_types=["minimax_m3_sparse"], mlp_layer_types=["dense"],
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device(setup.device):
        model = modeling.MiniMaxM3VLForCausalLM(config)
    model.to(setup.device, setup.dtype)
    if setup.path == "openmsa":
        integration.enable(model)
    else:
        model.set_attn_implementation(setup.path)
    ids = setup.ids()
    return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", PATHS, build))
