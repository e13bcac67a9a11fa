"""The plain functions that change an architecture, on models made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from .by_hand import by_hand, falls, plain_backward


def _trains(model: Any) -> None:
    falls(model, torch.randint(96, (4, 16)), torch.optim.AdamW(model.parameters(), lr=0.01), plain_backward)


def test_alone_grouped_queries() -> None:
    from preheat.techniques.grouped_queries import group_queries

    model, tokens = by_hand()
    attention = model.model.layers[1].self_attn
    key = attention.k_proj.weight.detach().clone()
    before = model(tokens).logits
    assert group_queries(model, 1) == 6
    assert torch.equal(attention.k_proj.weight, (key[:8] + key[8:]) / 2)
    assert model.config.num_key_value_heads == 1
    assert 0 < float((model(tokens).logits - before).detach().norm() / before.detach().norm()) < 0.5
    _trains(model)


def test_alone_rms_norm() -> None:
    from preheat.techniques.rms_norm import layer_norm_to_rms_norm

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            vocab_size=96,
            n_positions=32,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
        )
    )
    tokens = torch.randint(96, (4, 16))
    before = model(tokens).logits.detach()
    assert len(layer_norm_to_rms_norm(model)) == 5
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in model.modules())
    assert float((model(tokens).logits - before).detach().norm() / before.norm()) < 1e-5
    _trains(model)


def test_alone_feed_forward() -> None:
    from preheat.techniques.feed_forward import replace_feed_forward, set_feed_forward

    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, vocab_size=96
    )
    set_feed_forward(config, "relu")
    model = transformers.LlamaForCausalLM(config)
    assert replace_feed_forward(model, "relu") == 3
    assert sum(p.numel() for p in model.model.layers[0].mlp.parameters()) == 3 * 32 * 64
    assert float(model.model.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    _trains(model)


def test_alone_tied_embeddings() -> None:
    from preheat.techniques.tied_embeddings import tie_embeddings

    model, _ = by_hand()
    embedding, head = model.model.embed_tokens.weight.detach().clone(), model.lm_head.weight.detach().clone()
    assert tie_embeddings(model, "mean") == 96 * 32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.allclose(model.lm_head.weight, (embedding + head) / 2)
    assert len(list(model.parameters())) == len(list(by_hand()[0].parameters())) - 1
    _trains(model)


def test_alone_depth_scaled_init() -> None:
    from preheat.techniques.depth_scaled_init import scale_residual_projections

    def spread(layers: int, *, scaled: bool) -> float:
        """Standard deviation of what the layers have added to the stream."""
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64, vocab_size=96
        )
        config.initializer_range = 0.2  # a stream of about 1: the layers' norms then change little
        model = transformers.LlamaForCausalLM(config)
        if scaled:
            assert len(scale_residual_projections(model, layers)) == 2 * layers
        streams = []
        model.model.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
        tokens = torch.arange(96).view(2, 48)
        with torch.no_grad():
            model(input_ids=tokens)
            return float((streams[0] - model.model.embed_tokens(tokens)).std())

    # Sums of independent outputs grow by the root of the depth; scaled ones do not.
    assert spread(32, scaled=False) / spread(4, scaled=False) > 2
    assert spread(32, scaled=True) / spread(4, scaled=True) == pytest.approx(1, abs=0.25)


def test_alone_rope_scaling() -> None:
    from preheat.techniques.rope_scaling import scale_rope

    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=96,
        max_position_embeddings=8,
    )
    assert scale_rope(config, "yarn", 2, beta_fast=16.0) == (8, 16)
    model = transformers.LlamaForCausalLM(config)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(1 + 0.1 * 0.6931, rel=1e-4)
    _trains(model)


def test_alone_sparse_weights() -> None:
    from preheat.techniques.sparse_weights import KeptZeros, zero_two_of_four

    model, tokens = by_hand()
    maps = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    zero_two_of_four(maps)
    places = [m.weight == 0 for m in maps]
    assert all(bool((zeros.view(-1, 4).sum(1) == 2).all()) for zeros in places)
    zeros = KeptZeros([m.weight for m in maps])

    class Keeping(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            zeros.before_update()
            super().step()
            zeros.after_update()

    falls(model, tokens, Keeping(model.parameters(), lr=0.01), plain_backward)
    assert all(torch.equal(m.weight == 0, place) for m, place in zip(maps, places, strict=True))
