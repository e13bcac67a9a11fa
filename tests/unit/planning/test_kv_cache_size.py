"""The planned cache against the one that transformers fills."""

from __future__ import annotations

import pytest
import torch

from preheat.models.generation.kv_cache import cache_tensors
from preheat.models.token_mixers import find_cache
from preheat.planning.analytic import ModelSize, count_model_parameters, estimate_prefill_flops, estimate_serving
from preheat.planning.kv_cache_size import count_cache_bytes, observe_layer_caches
from preheat.recipe import parse

from ...architectures.tiny import create_model, tiny_config

KINDS = [
    "deepseek_v3",
    "falcon_h1",
    "gemma3n_text",
    "gemma4_text",
    "gpt2",
    "gpt_oss",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama4_text",
    "mamba2",
    "minimax",
    "nemotron_h",
    "qwen3_5_text",
]


@pytest.mark.parametrize("name", KINDS)
def test_the_cache_of_every_kind_of_layer_is_sized_to_the_byte(name: str) -> None:
    model = create_model(tiny_config(name)).eval()
    windows = [layer.window for layer in observe_layer_caches(model.config) if layer.window]
    for length in (5, 24):
        with torch.no_grad():
            result = model(torch.full((2, length), 3), use_cache=True)
        cache = find_cache(result)
        assert cache is not None
        planned = count_cache_bytes(model.config, length, rows=2, size=4, latent=False)
        # transformers drops a window's oldest token as soon as the text is read; the next pass needs it again.
        dropped = sum(length >= window for window in windows) * 2 * observe_layer_caches(model.config)[0].elements * 4
        held = sum(t.nbytes for layer in cache_tensors(cache) for t in layer if t.dim())
        assert held == planned - dropped


def test_states_do_not_grow_with_the_text() -> None:
    mamba = tiny_config("mamba2")
    assert count_cache_bytes(mamba, 1) == count_cache_bytes(mamba, 1_000_000) > 0
    hybrid = tiny_config("qwen3_5_text")
    state, token = count_cache_bytes(hybrid, 0), 2 * 2 * 8 * 2  # keys and values of 2 heads of 8 in bf16, in one layer
    assert count_cache_bytes(hybrid, 1000) == state + 1000 * token
    # 64 channels by a kernel of 4 in bf16, and 4 heads of 8 by 8 in fp32
    assert state == 64 * 4 * 2 + 4 * 8 * 8 * 4


def test_experts_count_by_what_a_token_uses() -> None:
    model = count_model_parameters(parse("model: {preset: qwen3-30b-a3b}\nstop: {max_steps: 1}"))
    assert model.parameters == pytest.approx(30.5e9, rel=0.01)
    assert model.active == pytest.approx(3.3e9, rel=0.02)
    one, *_ = estimate_serving(model, memory=80 * 2**30, length=64, bandwidth=1e12)
    assert one.alone == pytest.approx(1e12 / (2 * model.active), rel=0.01)
    assert one.tokens_per_second is not None
    # With many rows every expert is read.
    assert one.tokens_per_second == pytest.approx(1e12 * one.rows / (one.weights + one.rows * one.cache), rel=0.01)
    assert estimate_prefill_flops(model, 64) == pytest.approx(2 * 64 * (model.active - model.ends), rel=0.01)


def test_attention_is_counted_in_the_layers_that_have_it() -> None:
    few, many = (
        tiny_config("qwen3_5_text", layer_types=kinds)
        for kinds in (["linear_attention", "full_attention"], ["full_attention", "full_attention"])
    )
    at = 1 << 20
    attention = estimate_prefill_flops(ModelSize(many, 0, 0), at)
    assert attention == 2 * 4 * 4 * 8 * at * at / 2  # layers, FLOPs of a pair, heads, dimension, pairs
    assert estimate_prefill_flops(ModelSize(few, 0, 0), at) == pytest.approx(attention / 2, rel=1e-3)
