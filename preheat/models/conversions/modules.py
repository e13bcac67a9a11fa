"""Modules of converted architectures that transformers does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from preheat.hardware.transfers import to_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


__all__ = ["CentredEmbedding", "DynamicRotary", "Passthrough", "FeedForward", "LongRotary", "RMSNorm", "replace_rotary"]


class RMSNorm(nn.Module):
    """RMSNorm: x / rms(x) * weight (+ bias), computed in fp32 and cast to the dtype of x.

    Args:
        width: size of the last dimension.
        eps: added to the mean square.
        bias: add a bias, for a LayerNorm whose bias cannot be folded into a following linear map.
    """

    def __init__(self, width: int, eps: float, *, bias: bool = False):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        # x * rsqrt(mean(x ** 2) + eps) in fp32, cast before the weight as in transformers' LlamaRMSNorm.
        wide = x.float()
        out = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return out if self.bias is None else out + self.bias


class CentredEmbedding(nn.Embedding):
    """An embedding whose rows are centred at lookup, so that a head tied to it keeps its weights."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows = super().forward(tokens)
        return rows - rows.mean(-1, keepdim=True)


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)) if gated, else down(act(up(x))); no biases.

    Args:
        width: size of the last dimension of x.
        inner: size between the matrices.
        activation: transformers' name of the function.
        gated: three matrices or two.
        dropout: on the result.
    """

    def __init__(self, width: int, inner: int, activation: str, *, gated: bool, dropout: float = 0.0):
        from transformers.activations import ACT2FN

        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False) if gated else None
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = ACT2FN[activation]
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        # [..., inner]
        up = self.up_proj(x)
        inner = self.act_fn(up) if self.gate_proj is None else self.act_fn(self.gate_proj(x)) * up
        return self.dropout(self.down_proj(inner))


class DynamicRotary(nn.Module):
    """transformers' dynamic rotary embedding without its branch on the longest position, which waits for the device.

    The frequencies are those of the longest position of each call. transformers keeps those of the longest call so far
    until a short one comes; on a first call both are the same.

    Args:
        config: of the model, with `rope_parameters` of type dynamic.
    """

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.config = config

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        rope, most = config.rope_parameters, config.max_position_embeddings
        width = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        dim = int(width * rope.get("partial_rotary_factor", 1.0))
        # transformers' formula: its own function creates two of its tensors on the host.
        longest = (position_ids.max() + 1).clamp(min=most)  # stays on the device
        stretched = (rope["factor"] * longest / most) - (rope["factor"] - 1)
        # base' = base * (factor * L / most - (factor - 1)) ** (dim / (dim - 2)) for the longest position L.
        base = rope["rope_theta"] * stretched ** (dim / (dim - 2))
        steps = torch.arange(0, dim, 2, dtype=torch.int64, device=x.device).float() / dim
        return _build_tables(x, position_ids, 1.0 / (base**steps), 1.0)


class LongRotary(nn.Module):
    """transformers' longrope embedding (Phi-3 and 4) without the writes to and reads of its buffers in each call.

    The long frequencies apply if the longest position of the call is beyond the model's original length, as there.

    Args:
        config: of the model, with `rope_parameters` of type longrope.
    """

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.config = config

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        original = self.config.rope_parameters["original_max_position_embeddings"]
        # Computed on the host, since they depend on the configuration only, and copied without a synchronization.
        near, scale = ROPE_INIT_FUNCTIONS["longrope"](self.config, None, seq_len=original)
        far, _ = ROPE_INIT_FUNCTIONS["longrope"](self.config, None, seq_len=original + 1)
        # Both tables are cheap, and `where` chooses between them without a branch on the host.
        near, far = to_device(near, x.device), to_device(far, x.device)
        return _build_tables(x, position_ids, torch.where(position_ids.max() + 1 > original, far, near), scale)


def _build_tables(x: Tensor, position_ids: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    # [rows, length, dim / 2], then twice: frequency n rotates dimensions n and n + dim / 2 (rotated halves).
    angles = position_ids[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def replace_rotary(model: PreTrainedModel) -> None:
    """Replaces transformers' rotary embeddings that depend on the longest position by ours, in place."""
    ours = {"dynamic": DynamicRotary, "longrope": LongRotary}
    for name, module in list(model.named_modules()):
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and kind in ours:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, ours[kind](module.config))


class Passthrough(nn.Module):
    """Placeholder for a module that another pipeline stage has: returns hidden states unchanged."""

    def forward(self, hidden: Tensor, *_: object, **__: object) -> Tensor:
        return hidden
