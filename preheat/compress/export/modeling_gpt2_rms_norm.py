"""A GPT-2 whose norms are RMSNorms, as preheat's technique `rms_norm` trains it.

Exported folders contain a copy of this file, which transformers runs with trust_remote_code=True: it imports nothing
but torch and transformers.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["GPT2RMSNormConfig", "GPT2RMSNormLMHeadModel"]


class GPT2RMSNormConfig(GPT2Config):
    """GPT-2's configuration; `rms_norm_folded`: the model was converted from one with LayerNorms."""

    model_type = "gpt2_rms_norm"


class RMSNorm(nn.Module):
    """x / rms(x) * weight (+ bias), computed in fp32."""

    def __init__(self, width: int, eps: float, bias: bool = False):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        out = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return out if self.bias is None else out + self.bias


class CentredEmbedding(nn.Embedding):
    """An embedding whose rows are centred as they are looked up, so that a head tied to it keeps its weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = super().forward(input)
        return rows - rows.mean(-1, keepdim=True)


class GPT2RMSNormLMHeadModel(GPT2LMHeadModel):
    config_class = GPT2RMSNormConfig

    def __init__(self, config: GPT2RMSNormConfig):
        super().__init__(config)
        folded, width, eps = getattr(config, "rms_norm_folded", False), config.n_embd, config.layer_norm_epsilon
        for block in self.transformer.h:
            block.ln_1, block.ln_2 = RMSNorm(width, eps), RMSNorm(width, eps)
        # The last norm keeps the bias of the LayerNorm, because the head has none.
        self.transformer.ln_f = RMSNorm(width, eps, bias=folded)
        if folded and config.tie_word_embeddings:
            self.transformer.wte = CentredEmbedding(config.vocab_size, width)
        self.post_init()
