"""MiniMax-M3 of NeMo AutoModel through openmsa, against AutoModel's own generic path.

The truth is the generic path in float64, norms and activation included; a result may be as far from
it as twice what the generic path in the same dtype is, and what the longest sum may round.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import types
import weakref

import pytest
import torch

import openmsa
from openmsa.testing import assert_exact, assert_within, rounding

pytest.importorskip("nemo_automodel", reason="nemo-automodel is not installed")
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.minimax_m3_vl import layers, msa
from nemo_automodel.components.models.minimax_m3_vl.config import (
    MiniMaxM3VLTextConfig,
)
from nemo_automodel.components.models.minimax_m3_vl.model import (
    MiniMaxM3SparseForCausalLM,
)
from nemo_automodel.components.moe.parallelizer import apply_ac

from openmsa.integrations import automodel as integration
from openmsa.integrations.automodel import microbatch
from openmsa.integrations.automodel.framework import framework, seam


@pytest.fixture(autouse=True)
def enabled():
    integration.enable()
    yield
    integration.disable()


def built(sparse_attn="msa", dtype=torch.float32, forced=(0, 1), **changes):
    """A model of MSA's one topology, and small elsewhere; every layer sparse, without experts."""
    torch.manual_seed(0)
    config = MiniMaxM3VLTextConfig(
        **{
            "vocab_size": 60,
            "hidden_size": 48,
            "intermediate_size": 32,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_layer_freq": [0, 0],
            "num_mtp_modules": 0,
            "max_position_embeddings": 4096,
            "dtype": "float32",
            "sparse_attention_config": {
                "sparse_num_index_heads": 4,
                "sparse_index_dim": 128,
                "sparse_block_size": 128,
                "sparse_topk_blocks": 16,
                "sparse_init_block": forced[0],
                "sparse_local_block": forced[1],
            },
            **changes,
        }
    )
    backend = BackendConfig(
        attn="sdpa",
        sparse_attn=sparse_attn,
        linear="torch",
        rope_fusion=False,
        experts="torch",
        dispatcher="torch",
    )
    model = MiniMaxM3SparseForCausalLM(config, backend=backend)
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=dtype)
    return model.train()


def pair(**options):
    """The same weights on openmsa and on the generic path."""
    ours, generic = built("msa", **options), built("generic", **options)
    ours.load_state_dict(generic.state_dict())
    return ours, generic


def tokens(batch, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 60, (batch, length), generator=generator)


def loss_weights(logits, real=None):
    weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)
    return weights if real is None else weights * real[..., None]


def run(model, ids, real=None, **inputs):
    """Logits of the real tokens and the parameters' gradients of their weighted sum."""
    model.zero_grad()
    logits = model(ids, **inputs)
    (logits.double() * loss_weights(logits, real)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach() if real is None else logits.detach()[real], grads


def exactly(generic, monkeypatch):
    """The generic path in float64: AutoModel's norms and activation would compute in fp32."""

    def norm(x, weight, eps, gemma):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + float(gemma))

    def activation(gate, up, alpha, limit):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    exact = copy.deepcopy(generic).double()
    for module in exact.modules():
        if isinstance(module, layers.MiniMaxM3RMSNorm):
            module._norm = norm
    monkeypatch.setattr(layers, "swiglu_oai", activation)
    return exact


def held(found, eager, exact, length, dtype=torch.float32):
    """Logits and every gradient within the yardstick; the longest sums run over the output
    projection's 8,192 inputs or over the tokens."""
    names = {"logits": (x[0] for x in (found, eager, exact))}
    assert found[1].keys() == eager[1].keys() == exact[1].keys()
    names |= {name: (x[1][name] for x in (found, eager, exact)) for name in exact[1]}
    for name, values in names.items():
        actual, plain, truth = values
        terms = truth.abs().max().expand_as(truth)
        assert_within(name, actual, plain, truth, rounding(truth, terms, max(8192, length), dtype))


def checked(ids, monkeypatch, real=None, dtype=torch.float32, inputs=None, **options):
    """One batch on both paths and in truth."""
    ours, generic = pair(**options)
    ours.to(dtype)
    inputs = inputs or {}
    found, eager = (run(each.to(dtype), ids, real, **inputs) for each in (ours, generic))
    with monkeypatch.context() as patch:
        exact = run(exactly(generic, patch), ids, real, **inputs)
    held(found, eager, exact, ids.numel(), dtype)


ONE_LAYER = {"num_hidden_layers": 1, "moe_layer_freq": [0]}


@pytest.mark.parametrize("length", [1, 128, 300])
def test_whole_rows(length, monkeypatch):
    checked(tokens(2, length), monkeypatch)


@pytest.mark.parametrize("forced", [(0, 1), (1, 2)], ids=["as published", "first block forced"])
def test_more_blocks_than_the_top_16(forced, monkeypatch):
    checked(tokens(1, 17 * 128 + 69), monkeypatch, forced=forced, **ONE_LAYER)


def test_right_padding(monkeypatch):
    ids = tokens(3, 200)
    real = torch.arange(200) < torch.tensor([200, 133, 1])[:, None]
    checked(ids, monkeypatch, real, inputs={"attention_mask": real.long()})


def test_experts():
    """Routing computes in fp32 whatever the dtype, so that the generic path itself is the truth."""
    ours, generic = pair(moe_layer_freq=[0, 1])
    ids = tokens(2, 200)
    eager = run(generic, ids)
    held(run(ours, ids), eager, eager, ids.numel())


LENGTHS = [[170, 33, 1], [20, 129]]
WIDTH = 210


def packed_batch():
    """Rows of several documents with padding behind; ids are not ordered, and repeat over rows."""
    names, position_ids = torch.zeros(2, WIDTH, dtype=torch.long), torch.zeros(2, WIDTH).long()
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for name, length in zip((7, 42, 3), lengths, strict=False):
            names[row, begin : begin + length] = name
            position_ids[row, begin : begin + length] = torch.arange(length)
            begin += length
    return tokens(2, WIDTH), names, position_ids


def documents_alone(model, ids, weights):
    """Each document as a row of its own: logits in the packed order, gradients summed."""
    model.zero_grad()
    found = []
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for length in lengths:
            piece = slice(begin, begin + length)
            logits = model(ids[row : row + 1, piece])[0]
            (logits.double() * weights[row, piece]).sum().backward()
            found.append(logits.detach())
            begin += length
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat(found), grads


def test_packed_rows_equal_their_documents(monkeypatch):
    """Never compared with a packed generic run, whose blocks count from the start of the row."""
    ours, generic = pair()
    ids, names, position_ids = packed_batch()
    real = names > 0
    found = run(ours, ids, real, _packed_seq_ids=names, position_ids=position_ids)
    weights = loss_weights(torch.empty(2, WIDTH, 60), real)
    eager = documents_alone(generic, ids, weights)
    exact = documents_alone(exactly(generic, monkeypatch), ids, weights)
    held(found, eager, exact, ids.numel())


def test_a_block_causal_mask_is_a_document_map(monkeypatch):
    ours, _ = pair()
    ids, names, position_ids = packed_batch()
    real = names > 0
    same = (names[:, :, None] == names[:, None, :]) & real[:, :, None]
    mask = (same & torch.ones(WIDTH, WIDTH).tril().bool())[:, None]
    wanted = run(ours, ids, real, _packed_seq_ids=names, position_ids=position_ids)
    found = run(ours, ids, real, attention_mask=mask, position_ids=position_ids)
    same_to_the_bit(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_model_that_moves_between_dtypes(dtype, monkeypatch):
    """AutoModel's own kernels know bf16 alone. fp64 is held to fp32, in which the norms compute."""
    if dtype != torch.float64:
        checked(tokens(2, 200), monkeypatch, dtype=dtype)
        return
    ours, generic = pair()
    ids = tokens(2, 200)
    with monkeypatch.context() as patch:
        exact = run(exactly(generic, patch), ids)
    held(run(ours.double(), ids), run(generic.double(), ids), exact, ids.numel())
    wanted = run(pair()[0], ids)
    same_to_the_bit(run(ours.float(), ids), wanted)


def same_to_the_bit(found, wanted):
    assert_exact("logits", found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        assert_exact(name, found[1][name], grad)


@pytest.fixture
def selections(monkeypatch):
    """Weak references to the selections made."""
    made, select = [], microbatch.select_blocks

    def watched(*args, **kwargs):
        found = select(*args, **kwargs)
        made.append(weakref.ref(found.indices))
        return found

    monkeypatch.setattr(microbatch, "select_blocks", watched)
    return made


@pytest.mark.parametrize("replay", [True, False], ids=["replayed", "selected again"])
@pytest.mark.parametrize(
    "mode",
    [{}, {"ignore_router": False}, {"selective": True}],
    ids=["routing saved", "whole block", "selective"],
)
def test_checkpointed_equals_not_checkpointed(mode, replay, selections):
    integration.enable(replay_selection=replay)
    model, ids = built(moe_layer_freq=[0, 1]), tokens(2, 200)
    wanted = run(model, ids)
    assert len(selections) == 2
    apply_ac(model, **mode)
    found = run(model, ids)
    found[1].update(
        {k.replace("_checkpoint_wrapped_module.", ""): found[1].pop(k) for k in [*found[1]]}
    )
    same_to_the_bit(found, wanted)
    assert len(selections) == (4 if replay else 6)


def test_microbatches_that_interleave_keep_their_own_selections(selections):
    model = built()
    parts = [tokens(1, 150, seed=2), tokens(2, 200, seed=3), tokens(1, 129, seed=4)]
    model.zero_grad()
    for ids in parts:
        logits = model(ids)
        (logits * loss_weights(logits).float()).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    apply_ac(model, ignore_router=False)
    selections.clear()
    model.zero_grad()
    losses = []
    for ids in parts:
        logits = model(ids)
        losses.append((logits * loss_weights(logits).float()).sum())
    for loss in losses:
        loss.backward()
    assert len(selections) == 2 * len(parts)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for index, (grad, before) in enumerate(zip(found, wanted, strict=True)):
        assert_exact(f"gradient {index}", grad, before)


def test_recorded_selections_are_freed_with_the_graph(selections):
    model = built()
    apply_ac(model, ignore_router=False)
    loss = model(tokens(1, 150)).sum()
    assert all(each() is not None for each in selections)
    loss.backward()
    del loss
    gc.collect()
    assert [each() for each in selections] == [None, None]


def test_documents_are_read_before_the_blocks_and_once(monkeypatch):
    """For all layers, for every stage of a pipeline, and not inside a checkpointed block."""
    read, made = openmsa.Documents.from_cu_seqlens, []

    def watched(offsets):
        made.append(not torch.is_grad_enabled() or framework().selections.current() is not None)
        return read(offsets)

    monkeypatch.setattr(microbatch.Documents, "from_cu_seqlens", watched)
    model = built()
    apply_ac(model, ignore_router=False)
    ids, names, position_ids = packed_batch()
    for stage in (model, copy.deepcopy(model)):
        stage(ids, _packed_seq_ids=names, position_ids=position_ids).sum().backward()
    assert made == [False]


def test_copies_of_a_microbatch_share_its_documents():
    """FSDP2 rebuilds the record for every block."""
    one = msa.MSAMicrobatch.from_document_map(torch.ones(1, 9).long(), forced_blocks=(0, 1))
    one.prepare_selection()
    assert microbatch.documents(dataclasses.replace(one)) is microbatch.documents(one)


def test_both_read_the_same_documents():
    _, names, _ = packed_batch()
    theirs = msa.MSAMicrobatch.from_document_map(names, forced_blocks=(0, 1))
    ours = openmsa.Documents.from_ids(names)
    assert torch.equal(theirs.cu_seqlens, ours.cu_seqlens_q)
    assert torch.equal(theirs.token_rows, ours.token_rows)
    assert torch.equal(theirs.document_positions, microbatch.documents(theirs).positions)
    assert theirs.max_seqlen == ours.max_seqlen_q


def test_deterministic_algorithms():
    """AutoModel's kernels refuse them."""
    model, ids = built(), tokens(1, 150)
    torch.use_deterministic_algorithms(True)
    try:
        same_to_the_bit(run(model, ids), run(model, ids))
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast(monkeypatch):
    ours, generic = pair()
    ids = tokens(1, 150)
    with torch.autocast("cpu", torch.bfloat16):
        found, eager = (run(each, ids) for each in (ours, generic))
    exact = run(exactly(generic, monkeypatch), ids)
    held(found, eager, exact, ids.numel(), torch.bfloat16)


def test_undo_puts_every_object_back():
    integration.disable()
    before = [vars(owner)[name] for owner, name in seam(framework())]
    integration.enable()
    integration.enable(backend="reference")
    inside = [vars(owner)[name] for owner, name in seam(framework())]
    assert not any(one is other for one, other in zip(inside, before, strict=True))
    integration.enable(replay_selection=False)
    assert vars(layers.Block)["nemo_checkpoint_context_fn"] is before[-1]
    integration.disable()
    integration.disable()
    after = [vars(owner)[name] for owner, name in seam(framework())]
    assert all(one is other for one, other in zip(after, before, strict=True))
    assert layers.sparse_attention is msa.sparse_attention


def test_what_openmsa_cannot_do_either_stays_refused():
    ids = tokens(1, 20)
    model = built()
    for extra, text in (
        ({"use_cache": True}, "cache-free"),
        ({"window_size": (128, 0)}, "full causal attention only"),
        ({"qkv_format": "sbhd"}, "BSHD"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            model(ids, **extra)
    with pytest.raises(NotImplementedError, match="cp_size=1"):
        model.model.layers["0"].self_attn.setup_cp_attention(types.SimpleNamespace())
    with pytest.raises(ValueError, match="MSA requires"):
        built(num_attention_heads=32)
    with pytest.raises(openmsa.UnsupportedProblem, match="sparse_local_block"):
        built(forced=(0, 0))(ids)
