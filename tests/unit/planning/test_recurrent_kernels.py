"""Recurrent layers planned with fused kernels: the layers' own shapes, and less memory than PyTorch's code."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM

from preheat.core import Phase
from preheat.hardware.catalogue import find_accelerator
from preheat.planning.dry_run import observe
from preheat.planning.plan_request import choose_hardware
from preheat.planning.recurrent_kernels import fused_recurrent_kernels, list_packages
from preheat.planning.request import Request
from preheat.recipe import Recipe, parse

from ...architectures.tiny import tiny_config

DELTA = ["causal-conv1d", "flash-linear-attention"]
PACKAGES = {
    "qwen3_5_text": DELTA,
    "kimi_linear": DELTA,
    "lfm2": ["causal-conv1d"],
    "falcon_h1": ["mamba-ssm"],
    "mamba2": ["mamba-ssm"],
}


def recipe_of(name: str, folder: Path) -> Recipe:
    tiny_config(name, max_position_embeddings=1024).save_pretrained(folder)
    return parse(
        f"model: {{path: {folder}, weights: random}}\nbatch: {{size: 2, seq_len: 512}}\nstop: {{max_steps: 1}}\n"
        "techniques: {mixed_precision: {mode: bf16}, efficient_attention: {}}"
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_fused_kernels_give_every_gradient_and_keep_less(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(name, tmp_path)
    device, _, _ = choose_hardware(find_accelerator("H100"), recipe, 1)
    fused = observe(Request(recipe, device, vocabulary=96))
    plain = observe(Request(recipe, dataclasses.replace(device, at_hand=True), vocabulary=96))
    assert list_packages(fused) == PACKAGES[name]
    assert list_packages(plain) == []
    # Each parameter has a gradient of its size, so AdamW holds two moments of it.
    for category in ("parameters", "gradients", "optimizer"):
        # up to the rounding of allocations: a convolution's gradient is part of a larger tensor or not
        expected = plain.categories[Phase.UPDATE][category]
        assert fused.categories[Phase.UPDATE][category] == pytest.approx(expected, rel=0.01)
    # A short convolution alone keeps the same: its inputs.
    assert fused.passing < (1.0 if name == "lfm2" else 0.95) * plain.passing
    assert sum(fused.kernels.values()) < sum(plain.kernels.values())


def test_a_delta_rule_keeps_its_inputs_and_the_products_within_chunks() -> None:
    """By the source of flash-linear-attention 0.4 (ops/gated_delta_rule/chunk.py, save_for_backward)."""
    with FakeTensorMode(), torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_5_text"))
        rows, tokens, key_heads, heads, width, deep = 2, 256, 2, 4, 64, 32
        query, key = (torch.empty(rows, tokens, key_heads, width, dtype=torch.bfloat16) for _ in range(2))
        value = torch.empty(rows, tokens, heads, deep, dtype=torch.bfloat16, requires_grad=True)
        g = torch.empty(rows, tokens, heads)
        beta = torch.empty(rows, tokens, heads, dtype=torch.bfloat16)
        kept: list[int] = []
        with (
            fused_recurrent_kernels(
                [model], choose_hardware(find_accelerator("H100"), parse("stop: {max_steps: 1}"), 1)[0]
            ),
            torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes), lambda _: None),
        ):
            function = sys.modules[type(model).__module__].torch_chunk_gated_delta_rule
            out, _ = function(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        assert out.shape == value.shape
    token = 2 * key_heads * (width * 2 + 4)  # q and k normalized, and their norms in fp32
    token += heads * (deep * 2 + 2 + 4 + 64 * 2)  # v, beta, the decay in fp32, a token against those of its chunk
    assert sum(kept) == rows * tokens * token
