"""A model and a loop written by hand, for the plain functions of techniques."""

from __future__ import annotations

from typing import Any

import torch


def by_hand() -> tuple[Any, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=96,
    )
    return LlamaForCausalLM(config), torch.randint(96, (4, 16))


def falls(model: Any, tokens: torch.Tensor, optimizer: torch.optim.Optimizer, backward: Any) -> None:
    losses = []
    for _ in range(15):
        losses.append(float(backward(model, tokens)))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.15, losses


def plain_backward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def falls_by(optimizer: Any) -> None:
    model, tokens = by_hand()
    falls(model, tokens, optimizer(model), plain_backward)
