"""The seed's backward (nemo-automodel's msa_* SM100 kernels) on packed documents, against float64.

64 query heads, 4 key heads, width 128, every causal key block selected; with `--readers` by the
last so many queries of each document only.
"""

from __future__ import annotations

import importlib.util
import sys
import types

import torch
from common import Runner, attention, options, relative, report
from torch import Tensor

from ptxsim.launchers import cute

HEADS, KEY_HEADS, WIDTH, BLOCK = 64, 4, 128, 128
PACKAGE = "nemo_automodel.components.models.minimax_m3_vl"


def stand_in_for_packages() -> None:
    """The model package's own imports need transformers; the kernels below it do not."""
    spec = importlib.util.find_spec("nemo_automodel")
    assert spec is not None
    assert spec.submodule_search_locations
    base = spec.submodule_search_locations[0]
    parts = PACKAGE.split(".")
    for count in range(2, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:count]))
        module.__path__ = ["/".join([base, *parts[1:count]])]
        sys.modules[module.__name__] = module


def words(values: list[int] | list[tuple[int, ...]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def schedule(lengths: list[int], starts: list[int], rows: int, readers: int) -> dict[str, Tensor]:
    """The forward's key-block-to-query lists: block b of a document is seen by queries from its
    first key on.  Unused capacity holds numbers that would be out of bounds."""
    row_ptr, queries, work = words([0]).new_zeros(KEY_HEADS, rows + 1), [], []
    for head in range(KEY_HEADS):
        seen: list[int] = []
        row = 0
        for document, length in enumerate(lengths):
            for block in range(-(-length // BLOCK)):
                row_ptr[head, row] = len(seen)
                found = list(range(max(block * BLOCK, length - readers), length))
                seen += found
                work.append((head, row, 0, len(found), document, block))
                row += 1
        row_ptr[head, row:] = len(seen)
        queries.append(seen)
    edges = torch.full((KEY_HEADS, len(queries[0]) + 8), -7, dtype=torch.int32)
    edges[:, : len(queries[0])] = words([tuple(q) for q in queries])
    metadata = torch.full((len(work) + 3, 6), -9, dtype=torch.int32)
    metadata[: len(work)] = words(work)
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return {
        "row_ptr": row_ptr, "q_indices": edges, "scheduler_metadata": metadata,
        "work_count": words([len(work)]), "cu_seqlens": words(offsets),
        "document_workspace_starts": words(starts),
    }  # fmt: skip


def oracle(lengths: list[int], readers: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """out, lse, dq, dk, dv of all documents; out, lse, dq are zero where a query reads nothing."""
    parts, end = [], 0
    for length in lengths:
        end += length
        rows = slice(max(end - length, end - readers), end)
        q, k, v, grad = tensors
        keys = slice(end - length, end)
        found = attention(q[rows], k[keys], v[keys], grad[rows], causal=True)
        unread = (0,) * (2 * found[0].dim() - 2) + (length - (rows.stop - rows.start), 0)
        padded = [torch.nn.functional.pad(x, unread[2 * (3 - x.dim()) :]) for x in found[:3]]
        parts.append((*padded, *found[3:]))
    return [torch.cat(values) for values in zip(*parts, strict=True)]


def main() -> None:
    chosen = options(lengths="256", readers=0)
    lengths = [int(n) for n in chosen.lengths.split(",")]
    readers = chosen.readers or max(lengths)
    torch.manual_seed(0)
    tokens = sum(lengths)
    q, grad = (torch.randn(tokens, HEADS, WIDTH).bfloat16() for _ in range(2))
    k, v = (torch.randn(tokens, KEY_HEADS, WIDTH).bfloat16() for _ in range(2))
    blocks = [-(-length // BLOCK) for length in lengths]
    starts = [BLOCK * sum(blocks[:i]) for i in range(len(lengths))]
    rows = sum(blocks)
    places = torch.cat([torch.arange(n) + s for n, s in zip(lengths, starts, strict=True)])
    k_aligned, v_aligned = (torch.zeros(rows * BLOCK, KEY_HEADS, WIDTH).bfloat16() for _ in "kv")
    k_aligned[places], v_aligned[places] = k, v
    out, lse, dq, dk, dv = oracle(lengths, readers, (q, k, v, grad))
    runner = Runner(chosen)
    stand_in_for_packages()
    with cute.simulate("sm_100a", run=runner):
        kernels = importlib.import_module(PACKAGE + ".kernels.msa_backward_sm100")
        records = importlib.import_module(PACKAGE + ".kernels.msa_schedule")
        found = kernels.run_backward(
            q=q, k_aligned=k_aligned, v_aligned=v_aligned, grad_out=grad, lse=lse.float(),
            out=out.bfloat16(),
            schedule=records.MSABackwardSchedule(**schedule(lengths, starts, rows, readers)),
        )  # fmt: skip
    report(
        seconds=runner.seconds,
        launches=runner.launches,
        dq=relative(found[0], dq),
        dk=relative(found[1][places], dk),
        dv=relative(found[2][places], dv),
    )


if __name__ == "__main__":
    main()
