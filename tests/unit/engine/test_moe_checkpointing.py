"""Experts under checkpointing by a budget, which traces a layer before its first forward pass."""

from pathlib import Path

import pytest
import torch

from preheat.core import Slot
from preheat.engine.builder import build
from preheat.engine.moe_aux_loss import TOKENS
from preheat.recipe import parse

from ...architectures.tiny import tiny_config
from ...conftest import DEVICE, uneven


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_a_traced_layer_counts_no_tokens(name: str, tmp_path: Path) -> None:
    config = tiny_config(name)
    config.save_pretrained(tmp_path)
    techniques = "{efficient_attention: {}, activation_checkpointing: {mode: budget, budget: 0.5}}"
    recipe = parse(
        f"model: {{path: {tmp_path}, weights: random}}\nstop: {{max_steps: 1}}\nbatch: {{size: 4, seq_len: 32}}\n"
        f"techniques: {techniques}"
    )
    b = build(recipe, vocabulary=96, device=DEVICE)
    batch = uneven(padded=True)
    loss = b.slot(Slot.FORWARD_BACKWARD)(b, [batch], batch.weight)
    loads = loss.metrics[TOKENS]
    tokens = int((~batch.padding).sum())  # type: ignore[operator]
    assert loads.sum(1).tolist() == [tokens * config.num_experts_per_tok] * len(loads)
    assert all(torch.isfinite(p.grad).all() for p in b.trained[0].parameters() if p.grad is not None)
