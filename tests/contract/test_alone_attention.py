"""The plain functions of the attention techniques, in a loop written by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from .by_hand import by_hand, falls, plain_backward


def _masked(model: Any, tokens: torch.Tensor, may: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' own eager attention under an explicit mask, [length, length]."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    bias = torch.zeros(may.shape).masked_fill(~may, float("-inf"))
    return model(tokens, attention_mask=bias.expand(len(tokens), 1, -1, -1), use_cache=False).logits.detach()


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, use_cache=False).logits.detach()


def test_alone_sliding_window() -> None:
    from preheat.techniques.sliding_window import add_sliding_window

    model, tokens = by_hand()
    plain, i = copy.deepcopy(model), torch.arange(16)
    assert add_sliding_window(model, window=5) == 3
    back = i[:, None] - i
    wanted = _masked(plain, tokens, (back >= 0) & (back < 5))
    assert torch.allclose(_logits(model, tokens), wanted, atol=1e-5)
    mixed = copy.deepcopy(plain)
    assert add_sliding_window(mixed, window=5, every=3) == 2
    assert not torch.allclose(_logits(mixed, tokens), wanted, atol=1e-4)
    with pytest.raises(ValueError, match="already have an attention pattern"):
        add_sliding_window(model, window=5)
    falls(model, tokens, torch.optim.AdamW(model.parameters(), lr=0.01), plain_backward)


def test_alone_block_sparse_attention() -> None:
    from preheat.techniques.block_sparse_attention import add_block_sparse_attention

    model, tokens = by_hand()
    plain, i = copy.deepcopy(model), torch.arange(16)
    assert add_block_sparse_attention(model, local=4, global_tokens=2) == 3
    back = i[:, None] - i
    wanted = _masked(plain, tokens, (back >= 0) & ((back < 4) | (i < 2)))
    assert torch.allclose(_logits(model, tokens), wanted, atol=1e-5)
    padded = torch.ones_like(tokens)
    padded[:, 12:] = 0  # a mask of the caller's is respected beside the pattern
    assert torch.allclose(
        model(tokens, attention_mask=padded, use_cache=False).logits[:, :12], wanted[:, :12], atol=1e-5
    )
    falls(model, tokens, torch.optim.AdamW(model.parameters(), lr=0.01), plain_backward)


def test_alone_shifted_groups() -> None:
    from preheat.techniques.shifted_groups import add_shifted_groups

    model, tokens = by_hand()
    plain = _logits(model, tokens)
    assert add_shifted_groups(model, group=8) == 3
    trained = _logits(model, tokens)
    assert torch.allclose(trained[:, :4], plain[:, :4], atol=1e-5), "the first half group is in one group for all heads"
    assert not torch.allclose(trained[:, 4:], plain[:, 4:], atol=1e-4)
    twin = copy.deepcopy(model).eval()
    assert torch.allclose(_logits(twin, tokens), plain, atol=1e-5), "evaluation attends in full, in a copy too"
    falls(model, tokens, torch.optim.AdamW(model.parameters(), lr=0.01), plain_backward)
