"""A small decoder with pluggable attention, for examples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Decoder", "PlainAttention"]


class PlainAttention(nn.Module):
    """Causal attention that materializes all scores: [batch, length, dim] -> the same."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        # [batch, heads, length, dim / heads] each
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (dim // self.heads) ** -0.5  # [batch, heads, length, length]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1).to(v.dtype)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, dim))


class _Layer(nn.Module):
    def __init__(self, dim: int, attention: nn.Module):
        super().__init__()
        self.before_attention, self.attention = nn.LayerNorm(dim), attention
        self.before_feed_forward = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        # Pre-norm: the residual stream itself is never normalized.
        x = x + self.attention(self.before_attention(x))
        return x + self.feed_forward(self.before_feed_forward(x))


class Decoder(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary].

    Args:
        attention: factory called once per layer; the module maps [batch, length, dim] to the same.
    """

    def __init__(self, *, vocabulary: int, dim: int, num_layers: int, length: int, attention: Callable[[], nn.Module]):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(_Layer(dim, attention()) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        # GPT-2's standard deviation; torch's default of 1 would drown the layers' outputs in the residual stream.
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean cross entropy in nats."""
        return functional.cross_entropy(self(tokens).flatten(0, 1).float(), labels.flatten())
