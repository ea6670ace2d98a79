"""One training step of a MiniMax-M3 layer in NeMo AutoModel: its generic path and openmsa.

    PYTHONPATH=src python3 benchmarks/automodel_m3.py --tokens 4096,8192

A randomly initialised text model with real attention shapes (64/4 heads, head dim 128, blocks of
128, top-16), one sparse layer and an MLP; forward and backward of one row. openmsa runs the layers
of ``sparse_attn="msa"``, which need a Blackwell GPU otherwise; ``generic`` is the path that
AutoModel has for every other device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from steps import Setup, main

PATHS = ("openmsa", "generic")


def build(setup: Setup) -> Callable[[], None]:
    """The model's step on the path named."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.minimax_m3_vl import config as configuration
    from nemo_automodel.components.models.minimax_m3_vl import model as modeling

    from openmsa.integrations import automodel as integration

    config = configuration.MiniMaxM3VLTextConfig(
        vocab_size=256, hidden_size=setup.hidden, dense_intermediate_size=setup.intermediate,
        num_hidden_layers=1, moe_layer_freq=[0], num_mtp_modules=0,
        sparse_attention_config={
            "sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_block_size": 128,
            "sparse_topk_blocks": 16,
        },
        dtype=str(setup.dtype).removeprefix("torch."),
    )  # fmt: skip
    if setup.path == "openmsa":
        integration.enable()
    backend = BackendConfig(
        attn="sdpa", sparse_attn="msa" if setup.path == "openmsa" else "generic", linear="torch",
        rope_fusion=False, experts="torch", dispatcher="torch",
    )  # fmt: skip
    with torch.device(setup.device):
        model = modeling.MiniMaxM3SparseForCausalLM(config, backend=backend)
        model.initialize_weights(torch.device(setup.device), dtype=setup.dtype)
    ids = setup.ids()

    def step() -> None:
        logits = model(ids)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
        loss.backward()

    return step


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", PATHS, build))
