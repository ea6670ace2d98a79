"""MiniMax-M3 of Transformers through openmsa, against the model's own eager path."""

from __future__ import annotations

import copy

import pytest
import torch

import openmsa

m3 = pytest.importorskip(
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl",
    reason="Transformers with minimax_m3_vl is not installed",
)
from transformers import DynamicCache  # noqa: E402
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (  # noqa: E402
    MiniMaxM3VLTextConfig,
)

from openmsa.integrations import transformers as integration  # noqa: E402

BLOCK, TOPK = 16, 3
# Sums of a few hundred fp32 terms in another order, through four layers and a loss.
RTOL, ATOL = 2e-4, 2e-5


def tiny(**changes):
    torch.manual_seed(0)
    config = MiniMaxM3VLTextConfig(
        **{
            "vocab_size": 60,
            "hidden_size": 48,
            "intermediate_size": 32,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": BLOCK,
            "index_topk_blocks": TOPK,
            "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attn_implementation": "eager",
            **changes,
        }
    )
    model = m3.MiniMaxM3VLForCausalLM(config)
    model.config._attn_implementation = "eager"
    return model.train()


def tokens(batch, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 60, (batch, length), generator=generator)


def run(model, ids, **inputs):
    """Logits, and the parameters' gradients of a weighted sum of the real tokens' logits."""
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    if inputs.get("attention_mask") is not None:
        weights = weights * inputs["attention_mask"][..., None]
    (logits * weights).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def enabled(model, **options):
    ours = copy.deepcopy(model)
    integration.enable(ours, **options)
    return ours


def same(found, wanted, real=slice(None)):
    torch.testing.assert_close(found[0][real], wanted[0][real], rtol=RTOL, atol=ATOL)
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        bound = ATOL + RTOL * float(grad.abs().max())
        torch.testing.assert_close(
            found[1][name], grad, rtol=RTOL, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("length", [1, 16, 61, 130])
def test_whole_rows(length):
    """More blocks than the top-3, lengths that are no multiple of a block, one token."""
    model, ids = tiny(), tokens(2, length)
    same(run(enabled(model), ids), run(model, ids))


def test_right_padding():
    model, ids = tiny(), tokens(3, 90)
    mask = (torch.arange(90) < torch.tensor([90, 41, 1])[:, None]).long()
    real = mask.bool()
    same(run(enabled(model), ids, attention_mask=mask), run(model, ids, attention_mask=mask), real)


def test_packed_rows_equal_their_documents():
    """Never compared with the packed eager run, which is wrong for every document but the first."""
    model = tiny()
    lengths = [[70, 33, 1], [20, 84]]
    rows = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    position_ids = torch.stack(rows)
    ids = tokens(2, 104)
    ours = enabled(model)
    found = ours(input_ids=ids, position_ids=position_ids).logits
    for row, parts in enumerate(lengths):
        begin = 0
        for length in parts:
            piece = slice(begin, begin + length)
            alone = model(input_ids=ids[row : row + 1, piece]).logits[0]
            torch.testing.assert_close(found[row, piece], alone, rtol=RTOL, atol=ATOL)
            begin += length
    # With use_cache on, as it is by default, Transformers itself no longer sees the packing.
    cached = ours(input_ids=ids, position_ids=position_ids, use_cache=True).logits
    torch.testing.assert_close(cached, found)


def test_gradients_of_packed_rows():
    """Those of its documents, one by one."""
    model, lengths = tiny(), [70, 34]
    ids = tokens(1, 104)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    found = run(enabled(model), ids, position_ids=position_ids)
    model.zero_grad()
    logits = torch.cat([model(input_ids=x).logits for x in ids.split(lengths, 1)], 1)
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    same(found, (logits, grads))


def test_row_anchored_blocks_refuse_packed_rows():
    ours = enabled(tiny(), grid="row")
    ids = tokens(1, 60)
    ours(input_ids=ids)
    position_ids = torch.cat([torch.arange(32), torch.arange(28)])[None]
    with pytest.raises(openmsa.UnsupportedProblem, match='grid="document"'):
        ours(input_ids=ids, position_ids=position_ids)


def test_a_mask_with_packed_positions_is_refused():
    ours = enabled(tiny())
    position_ids = torch.cat([torch.arange(32), torch.arange(28)])[None]
    with pytest.raises(openmsa.InvalidInput, match="position_ids restart"):
        ours(
            input_ids=tokens(1, 60),
            position_ids=position_ids,
            attention_mask=torch.ones(1, 60),
        )


def test_left_padding_and_prepared_masks_take_the_models_own_path():
    """To the bit. (Its own eager and sdpa paths differ in rows whose blocks hold padding alone.)"""
    model, ids = tiny().eval(), tokens(2, 50)
    ours = enabled(model)
    model.set_attn_implementation("sdpa")
    mask = (torch.arange(50) >= torch.tensor([0, 13])[:, None]).long()
    real = mask.bool()
    found = ours(input_ids=ids, attention_mask=mask).logits
    wanted = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(found[real], wanted[real])
    prepared = torch.ones(50, 50).tril().bool()[None, None].expand(2, 1, 50, 50)
    found = ours(input_ids=ids, attention_mask=prepared).logits
    assert torch.equal(found, model(input_ids=ids, attention_mask=prepared).logits)


def test_prefill_then_decode():
    """Prefill through openmsa fills the cache, index keys included; decoding is the model's own."""
    model, ids = tiny().eval(), tokens(2, 70)
    ours = enabled(model)
    results = []
    for each in (ours, model):
        cache = DynamicCache(config=each.config)
        logits = [each(input_ids=ids[:, :66], past_key_values=cache, use_cache=True).logits]
        for step in range(66, 70):
            out = each(input_ids=ids[:, step : step + 1], past_key_values=cache, use_cache=True)
            logits.append(out.logits)
        results.append(torch.cat(logits, 1))
    torch.testing.assert_close(*results, rtol=RTOL, atol=ATOL)
    generated = [
        each.generate(ids[:1, :40], max_new_tokens=8, do_sample=False) for each in (ours, model)
    ]
    assert torch.equal(*generated)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    model, ids = enabled(tiny()), tokens(2, 90)
    wanted = run(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = run(model, ids)
    for name, grad in wanted[1].items():
        torch.testing.assert_close(found[1][name], grad)


def test_disable_gives_the_model_back():
    model, ids = tiny(), tokens(1, 60)
    wanted = model(input_ids=ids).logits
    integration.enable(model)
    integration.enable(model, backend="reference")
    integration.disable(model)
    integration.disable(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(input_ids=ids).logits, wanted)
    assert not [name for m in model.modules() for name in vars(m) if name.startswith("_openmsa")]


def test_by_name_alone_the_models_own_selection_is_used():
    model, ids = tiny(), tokens(2, 61)
    wanted = run(model, ids)
    integration.register()
    model.set_attn_implementation("openmsa")
    same(run(model, ids), wanted)


def test_a_model_that_moves_between_dtypes():
    model, ids = tiny(mlp_layer_types=["dense"] * 4), tokens(2, 61)
    exact = model(input_ids=ids).logits.detach()
    ours = enabled(model)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        ours.to(dtype)
        model.to(dtype)
        found, wanted = (each(input_ids=ids).logits.detach().float() for each in (ours, model))
        error, bound = (found - exact).abs().mean(), (wanted - exact).abs().mean()
        # The model's norms compute in fp32 whatever the dtype, so that float64 is no truth here.
        assert float(error) <= 2 * float(bound) + ATOL


def test_autocast():
    model, ids = tiny(), tokens(1, 61)
    with torch.autocast("cpu", torch.bfloat16):
        found = enabled(model)(input_ids=ids).logits
        wanted = model(input_ids=ids).logits
    exact = model(input_ids=ids).logits.detach()
    error, bound = (found.float() - exact).abs().mean(), (wanted.float() - exact).abs().mean()
    assert float(error) <= 2 * float(bound)


def test_what_openmsa_does_not_have_is_refused_at_once():
    with pytest.raises(openmsa.UnsupportedProblem, match="attention_dropout"):
        integration.enable(tiny(attention_dropout=0.1))
    with pytest.raises(openmsa.UnsupportedProblem, match="index_local_blocks"):
        integration.enable(tiny(index_local_blocks=0))
    with pytest.raises(openmsa.InvalidInput, match="MiniMaxM3VLTextModel"):
        integration.enable(torch.nn.Linear(2, 2))
    with pytest.raises(openmsa.InvalidInput, match="grid"):
        integration.enable(tiny(), grid="token")
