"""What AutoModel's MSA layers call, without AutoModel: a microbatch is two facts to openmsa."""

from __future__ import annotations

import gc
import importlib
import sys
import types
import weakref

import pytest
import torch

import openmsa
from openmsa import Documents
from openmsa.integrations import automodel
from openmsa.integrations.automodel import microbatch
from openmsa.integrations.automodel.framework import framework
from openmsa.testing import Inputs, assert_ok, attention_truth

LENGTHS = (127, 129, 1, 2, 300)
NUMBERS = types.SimpleNamespace(
    BLOCK_SIZE=128, TOPK_BLOCKS=16, NUM_INDEX_HEADS=4, SOFTMAX_SCALE=128**-0.5
)


@pytest.fixture
def seam(monkeypatch):
    """The three functions, on AutoModel's constants and outside of any checkpoint."""
    selections = types.SimpleNamespace(current=lambda: None)
    names = types.SimpleNamespace(schedule=NUMBERS, selections=selections)
    monkeypatch.setattr(microbatch, "framework", lambda: names)
    return types.SimpleNamespace(
        **dict(zip(("prepare", "select", "attend"), microbatch.hooks("auto"), strict=True))
    )


def packed(lengths=LENGTHS, forced_blocks=(0, 1)):
    offsets = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return types.SimpleNamespace(cu_seqlens=offsets, forced_blocks=forced_blocks)


def operands(tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 128), (4, 128), (4, 128), (4, 128), (1, 128), (64, 128))
    made = [torch.randn(tokens, *shape, generator=generator).to(dtype) for shape in shapes]
    return Inputs(*made, torch.zeros(tokens, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_attention_within_the_yardstick(seam, dtype):
    msa, x = packed(), operands(sum(LENGTHS), dtype)
    q2k = seam.select(msa, x.index_q, x.index_k)
    q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.v))
    out = seam.attend(q, k, v, q2k, msa)
    out.backward(x.d_out)
    truth = attention_truth(x, q2k, Documents.from_lengths(LENGTHS), 128, with_d_lse=False)
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    for name, value in found.items():
        assert_ok(truth.quantities[name].compare(value))


def test_a_selection_is_what_a_layer_expects(seam):
    """int32 [4, tokens, 16], contiguous, document-local, own block in, and the best of the rest."""
    length = 19 * 128 + 5
    msa, x = packed((length, 40)), operands(length + 40)
    q2k = seam.select(msa, x.index_q, x.index_k)
    assert q2k.dtype == torch.int32
    assert q2k.shape == (4, length + 40, 16)
    assert q2k.is_contiguous()
    assert not q2k.requires_grad
    assert bool((q2k[:, length:, 0] == 0).all())
    assert bool((q2k[:, length:, 1:] == -1).all())
    last = (x.index_q[length - 1] @ x.index_k[:length, 0].T).double()
    best = torch.nn.functional.pad(last, (0, 20 * 128 - length), value=-torch.inf)
    best = best.view(4, 20, 128).amax(-1)
    best[:, 19] = torch.inf
    assert torch.equal(q2k[:, length - 1].long(), best.topk(16).indices.sort(-1).values)


def test_leading_blocks_are_forced(seam):
    length = 20 * 128
    x = operands(length)
    q2k = seam.select(packed((length,), forced_blocks=(3, 1)), x.index_q, x.index_k)
    assert bool((q2k[:, -1, :3] == torch.arange(3)).all())


def test_any_number_of_local_blocks_forces_the_own_block_alone(seam):
    length = 20 * 128
    x = operands(length)
    one, four = (
        seam.select(packed((length,), forced_blocks=(0, n)), x.index_q, x.index_k) for n in (1, 4)
    )
    assert torch.equal(one, four)


def test_a_selection_in_another_order_is_read_by_value(seam):
    msa, x = packed(), operands(sum(LENGTHS))
    q2k = seam.select(msa, x.index_q, x.index_k)
    wanted = seam.attend(x.q, x.k, x.v, q2k, msa)
    assert torch.equal(seam.attend(x.q, x.k, x.v, q2k.flip(-1), msa), wanted)
    # Changed in place it no longer counts as canonical.
    q2k.copy_(q2k.flip(-1))
    assert torch.equal(seam.attend(x.q, x.k, x.v, q2k, msa), wanted)


def test_what_is_refused(seam):
    msa, x = packed(), operands(sum(LENGTHS))
    q2k = seam.select(msa, x.index_q, x.index_k)
    with pytest.raises(openmsa.InvalidInput, match=r"q2k: expected shape \(4, 60, 16\)"):
        seam.attend(x.q[:60], x.k[:60], x.v[:60], q2k, packed((60,)))
    for call in (seam.prepare, lambda m: seam.select(m, x.index_q, x.index_k)):
        with pytest.raises(openmsa.UnsupportedProblem, match="sparse_local_block must be 1"):
            call(packed(forced_blocks=(1, 0)))
    with pytest.raises(openmsa.InvalidInput, match="dtype"):
        seam.attend(x.q.bfloat16(), x.k, x.v, q2k, msa)


def test_documents_are_read_once_and_live_as_long_as_their_microbatch(seam, monkeypatch):
    made = []
    read = Documents.from_cu_seqlens

    def watched(offsets):
        docs = read(offsets)
        made.append(weakref.ref(docs))
        return docs

    monkeypatch.setattr(microbatch.Documents, "from_cu_seqlens", watched)
    msa, x = packed(), operands(sum(LENGTHS))
    seam.prepare(msa)
    copy = types.SimpleNamespace(**vars(msa))
    for each in (msa, copy, msa):
        q2k = seam.select(each, x.index_q, x.index_k)
        seam.attend(x.q, x.k, x.v, q2k, each)
    assert len(made) == 1
    other = packed()
    seam.prepare(other)
    assert len(made) == 2
    del msa, copy, each, q2k, other
    gc.collect()
    assert [docs() for docs in made] == [None, None]


def test_without_automodel_the_message_says_what_to_install(monkeypatch):
    framework.cache_clear()
    monkeypatch.setitem(sys.modules, "nemo_automodel", None)
    for name in [name for name in sys.modules if name.startswith("nemo_automodel.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(openmsa.UnavailableError, match=r'pip install "openmsa\[automodel\]"'):
        automodel.enable()
    with pytest.raises(openmsa.InvalidInput, match="backend"):
        automodel.enable(backend="fastest")
    automodel.disable()


def test_another_version_of_automodel_is_told_apart(monkeypatch):
    """One whose microbatches do not prepare their selection."""
    framework.cache_clear()
    root = "nemo_automodel.components"
    layers = types.ModuleType("layers")
    layers.Block = type("Block", (), {"nemo_checkpoint_context_fn": None})
    layers.MiniMaxM3MSAAttention = type("MiniMaxM3MSAAttention", (), {})
    layers.sparse_attention = None
    msa = types.ModuleType("msa")
    msa.MSAMicrobatch = type("MSAMicrobatch", (), {"select_blocks": None})
    msa.sparse_attention = None
    replay = types.ModuleType("recompute_replay")
    replay.RecomputeReplay = lambda name: None
    fakes = {
        f"{root}.models.minimax_m3_vl.layers": layers,
        f"{root}.models.minimax_m3_vl.msa": msa,
        f"{root}.models.minimax_m3_vl.kernels.msa_schedule": types.ModuleType("msa_schedule"),
        f"{root}.distributed.recompute_replay": replay,
    }
    monkeypatch.setattr(importlib, "import_module", fakes.__getitem__)
    with pytest.raises(openmsa.UnavailableError, match="MSAMicrobatch has no prepare_selection"):
        automodel.enable()
