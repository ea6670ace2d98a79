"""Fine-tune a tiny MiniMax-M3 on packed documents with the Transformers Trainer.

    make example
    python3 examples/finetune_m3_tiny.py --steps 20 --plot out/example.png

A randomly initialised text model (one dense layer, two sparse ones) learns a dozen short texts as
bytes. Four documents make a step: packed into one row through openmsa, and, in a second run from
the same weights, padded into a batch through the model's own eager attention. The losses agree.
``--real-heads`` uses MiniMax-M3's attention shapes, for a GPU.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from openmsa.integrations import transformers as openmsa_transformers

TEXTS = Path(__file__).with_name("public_domain.txt")


def documents() -> list[dict[str, list[int]]]:
    """The texts as bytes, without their headings."""
    found = []
    for part in TEXTS.read_text(encoding="utf-8").split("\n\n"):
        text = part.split("\n", 1)[1].strip()
        found.append({"input_ids": list(text.encode())})
    return found


def build(real_heads: bool) -> MiniMaxM3VLForCausalLM:
    """The model, the same weights each time."""
    torch.manual_seed(0)
    heads = (
        {}
        if real_heads
        else {
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "rotary_dim": 16,
            "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 32,
            "index_topk_blocks": 4,
        }
    )  # fmt: skip
    config = MiniMaxM3VLTextConfig(
        vocab_size=256, hidden_size=128, dense_intermediate_size=256, intermediate_size=128,
        shared_intermediate_size=128, num_hidden_layers=3, num_local_experts=4,
        num_experts_per_tok=2, bos_token_id=1, eos_token_id=2,
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "dense", "sparse"], **heads,
    )  # fmt: skip
    return MiniMaxM3VLForCausalLM(config)


def pad(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A right-padded batch; the first token of a document is no target, as when packed."""
    length = max(len(f["input_ids"]) for f in features)
    ids = torch.zeros(len(features), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, feature in enumerate(features):
        found = feature["input_ids"]
        ids[row, : len(found)] = torch.tensor(found)
        mask[row, : len(found)] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(name: str, args: argparse.Namespace) -> tuple[list[float], float]:
    """Losses of the steps, and tokens per second."""
    model = build(args.real_heads)
    if name == "openmsa":
        openmsa_transformers.enable(model)
        # Leave position ids that restart; kernels' own offsets are not needed.
        collate = DataCollatorWithFlattening(return_position_ids=True)
    else:
        model.set_attn_implementation("eager")
        collate = pad
    texts = documents()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=args.steps, per_device_train_batch_size=4, learning_rate=3e-3,
            logging_steps=1, report_to=[], save_strategy="no", seed=0, data_seed=0,
            disable_tqdm=True, use_cpu=args.device == "cpu", lr_scheduler_type="constant",
            remove_unused_columns=False, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model, settings, data_collator=collate, train_dataset=texts)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tokens = args.steps * 4 * sum(len(t["input_ids"]) for t in texts) / len(texts)
    return losses, tokens / seconds


def peak_gib(device: str) -> float:
    """Memory in use at the peak, GiB: of the process so far on a CPU, allocated on a GPU."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> int:
    """Train twice, compare, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--real-heads", action="store_true")
    parser.add_argument("--plot", type=Path, help="loss curves, PNG")
    args = parser.parse_args()
    runs = {}
    for name in ("openmsa", "eager"):
        losses, rate = train(name, args)
        runs[name] = losses
        peak = peak_gib(args.device)
        sys.stdout.write(
            f"{name:8} loss {losses[0]:.4f} -> {losses[-1]:.4f}, {rate:,.0f} tokens/s, "
            f"peak memory so far {peak:.2f} GiB\n"
        )
    worst = max(abs(a - b) for a, b in zip(*runs.values(), strict=True))
    sys.stdout.write(f"largest difference of the two runs' losses: {worst:.1e}\n")
    if args.plot:
        from matplotlib import pyplot

        args.plot.parent.mkdir(parents=True, exist_ok=True)
        figure, ax = pyplot.subplots(figsize=(6, 4), layout="constrained")
        for (name, losses), style in zip(runs.items(), ("-", "o"), strict=True):
            ax.plot(range(1, len(losses) + 1), losses, style, label=name, markerfacecolor="none")
        ax.set(xlabel="step", ylabel="loss", title="A tiny MiniMax-M3, packed documents")
        ax.legend()
        figure.savefig(args.plot, dpi=120)
    return 0 if worst < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
