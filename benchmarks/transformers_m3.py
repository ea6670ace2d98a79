"""One training step of a MiniMax-M3 layer in Transformers: its own paths and openmsa's.

    PYTHONPATH=src python3 benchmarks/transformers_m3.py --tokens 2048,4096

A randomly initialised text model with real attention shapes (64/4 heads, head dim 128, blocks of
128, top-16), one sparse layer and a small MLP; forward and backward of one row. Each variant is a
process of its own, so that its peak memory is its own: resident memory above what it had before the
step on a CPU, allocated memory on a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from openmsa.cli.text import table, write

VARIANTS = ("openmsa", "sdpa", "eager")


def build(variant: str, device: str, dtype: torch.dtype) -> Any:
    """The model, on the path named."""
    from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as configuration
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

    from openmsa.integrations import transformers as integration

    torch.manual_seed(0)
    config = configuration.MiniMaxM3VLTextConfig(
        vocab_size=256, hidden_size=512, dense_intermediate_size=512, num_hidden_layers=1,
        layer_types=["minimax_m3_sparse"], mlp_layer_types=["dense"], bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = modeling.MiniMaxM3VLForCausalLM(config).to(device, dtype)
    if variant == "openmsa":
        integration.enable(model)
    else:
        model.set_attn_implementation(variant)
    return model


def peak(device: str) -> int:
    """Bytes in use at the peak so far."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(variant: str, tokens: int, device: str, dtype: torch.dtype, repeats: int) -> None:
    """Print seconds of the fastest step and bytes added at the peak, as JSON."""
    model = build(variant, device, dtype)
    ids = torch.randint(0, 256, (1, tokens), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if device != "cpu":
            torch.cuda.synchronize()

    before = peak(device)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    added = peak(device) - before
    write(json.dumps({"seconds": min(times[1:]), "bytes": added}))


def main() -> int:
    """Run every variant at every size and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="2048,4096", help="of the row, separated by commas")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        dtype = getattr(torch, args.dtype)
        measure(args.one, int(args.tokens), args.device, dtype, args.repeats)
        return 0
    lines = []
    for tokens in args.tokens.split(","):
        for variant in args.variants.split(","):
            command = [
                sys.executable, __file__, "--one", variant, "--tokens", tokens,
                "--dtype", args.dtype, "--device", args.device, "--repeats", str(args.repeats),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or [f"signal {-done.returncode}"])[-1]
                lines.append([tokens, variant, "-", "-", why[:60]])
                continue
            found = json.loads(done.stdout.strip().splitlines()[-1])
            gib = f"{found['bytes'] / 2**30:.2f}"
            lines.append([tokens, variant, f"{found['seconds']:.2f}", gib, ""])
    write(
        f"torch {torch.__version__}, {args.dtype}, {args.device}, {torch.get_num_threads()} threads"
    )
    write(table(["tokens", "path", "seconds", "GiB added", ""], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
