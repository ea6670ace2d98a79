"""The Triton stages' compiled PTX, run in the simulator for GPUs that are not at hand.

Beside the interpreter, which runs the kernels' Python, this runs what ships: matrix instructions,
barriers, asynchronous copies, with the tile sizes of the device. bfloat16, since float32 products
are rounded to tf32 on these units.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace

import pytest
import torch

from openmsa import Documents
from openmsa.contract.problem import AttentionConfig, Saved, SelectionConfig
from openmsa.reference import schedule as reference_schedule
from openmsa.reference import selection as reference_selection
from openmsa.testing import Inputs, assert_ok, attention_truth

pytest.importorskip("triton", reason="Triton is not installed, so its kernels cannot be compiled")

from openmsa.backends.triton import ahead
from openmsa.backends.triton.sizes import assume
from ptxsim.launchers.triton import simulate

FULL = os.environ.get("PTXSIM_FULL") == "1"
full = pytest.mark.skipif(not FULL, reason="slow: PTXSIM_FULL=1 runs it (make sim)")
TOPK, BLOCK, HEADS, KEY_HEADS, DIM, INDEX_DIM = 3, 16, 4, 2, 64, 16
UNITS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@pytest.fixture(scope="module")
def stages():
    package = "openmsa.backends.triton"
    names = ("selection", "union", "forward", "backward")
    return SimpleNamespace(**{n: importlib.import_module(f"{package}.{n}") for n in names})


@pytest.fixture(autouse=True, scope="module")
def _environment(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        yield


@pytest.fixture(scope="module")
def problem():
    """Ragged, empty and one-token documents; the longest has more blocks than top-k."""
    docs = Documents.from_lengths([70, 1, 0, 20])
    generator = torch.Generator().manual_seed(0)

    def normal(rows, heads, dim, dtype=torch.bfloat16):
        return torch.randn((rows, heads, dim), generator=generator).to(dtype)

    tq, tk = docs.num_queries, docs.num_keys
    inputs = Inputs(
        normal(tq, HEADS, DIM),
        normal(tk, KEY_HEADS, DIM),
        normal(tk, KEY_HEADS, DIM),
        normal(tq, KEY_HEADS, INDEX_DIM),
        normal(tk, 1, INDEX_DIM),
        normal(tq, HEADS, DIM),
        normal(tq, HEADS, 1, torch.float32)[..., 0],
    )
    config = SelectionConfig(TOPK, BLOCK, 0, 1, INDEX_DIM**-0.5, True)
    indices, lse = reference_selection.select_blocks(
        inputs.index_q, inputs.index_k[:, 0], docs.layout, config
    )
    return SimpleNamespace(docs=docs, inputs=inputs, config=config, indices=indices, lse=lse)


@pytest.mark.parametrize(
    ("arch", "cost", "options"),
    [
        pytest.param(90, 1, {}, id="sm90-unions"),
        pytest.param(100, 10**6, {}, id="sm100-key-major"),
        pytest.param(80, 1, {}, id="sm80-unions", marks=full),
        pytest.param(80, 10**6, {"seed": 1}, id="sm80-key-major-seed1", marks=full),
        pytest.param(90, 10**6, {"seed": 2, "races": True}, id="sm90-key-major-races", marks=full),
        pytest.param(100, 1, {"seed": 3, "races": True}, id="sm100-unions-races", marks=full),
    ],
)
def test_forward_and_backward(stages, problem, arch, cost, options, monkeypatch):
    monkeypatch.setattr(stages.union, "EDGES_PER_UNION_BLOCK", cost)
    inputs, docs, layout = problem.inputs, problem.docs, problem.docs.layout
    truth = attention_truth(inputs, problem.indices, docs, BLOCK)
    schedule = reference_schedule.key_schedule(problem.indices, layout, BLOCK)
    config = AttentionConfig(BLOCK, DIM**-0.5, False)
    with assume(*ahead.ARCHITECTURES[f"sm_{arch}"]), simulate(arch, **options) as session:
        out, lse = stages.forward.forward(
            inputs.q, inputs.k, inputs.v, problem.indices, schedule, layout, config
        )
        delta = stages.backward.backward_preprocess(out, inputs.d_out, lse, inputs.d_lse)
        saved = Saved(inputs.q, inputs.k, inputs.v, out, lse, problem.indices, schedule)
        grads = stages.backward.backward(
            inputs.d_out, delta, saved, None, layout, config, (True, True)
        )
        grads = stages.backward.backward_postprocess(*grads, torch.bfloat16)
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    for name, value in found.items():
        assert_ok(truth.quantities[name].compare(value))
    for name, zero in truth.must_be_zero().items():
        assert not bool(found[name][zero].any()), name
    assert any(UNITS[arch] in launch.ptx for launch in session.launches)
    assert not [w for launch in session.launches for w in launch.result.warnings]


@pytest.mark.parametrize("arch", [pytest.param(a, marks=full, id=f"sm{a}") for a in (80, 90, 100)])
def test_selection(stages, problem, arch):
    with assume(*ahead.ARCHITECTURES[f"sm_{arch}"]), simulate(arch):
        indices, lse = stages.selection.select_blocks(
            problem.inputs.index_q,
            problem.inputs.index_k[:, 0],
            problem.docs.layout,
            problem.config,
        )
    assert torch.equal(indices, problem.indices)
    # The scores' products are exact and their sums short: what differs is the order of the sums.
    torch.testing.assert_close(lse, problem.lse, rtol=0, atol=16 * 2**-24 * 8)
