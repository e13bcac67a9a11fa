"""A head tied to an adapted embedding: both remain one matrix, and merging changes both.

peft's own option (`ensure_weight_tying`) gives the head a second set of parameters over the same memory, each with its
own gradient and optimizer state. Here the head has none, and both gradients accumulate in the embedding's adapter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from preheat.ops.distributed.dtensor_utils import full_tensor

__all__ = ["Pair", "TiedHead", "pair_of", "tie", "untie"]

_EMBEDDING = "tied_to"


class Pair(NamedTuple):
    """A low-rank addition to a head's weight: scale * (down @ up).t().

    Attributes:
        down: [width, rank].
        up: [rank, vocabulary].
    """

    down: Tensor
    up: Tensor
    scale: float

    def lowered(self, hidden: Tensor) -> Tensor:
        """Projects hidden states [..., width] to scaled [..., rank]; times `up` it is the addition to the logits."""
        return hidden @ self.down.to(hidden.dtype) * self.scale


class TiedHead(nn.Linear):
    """A head that applies the adapter of its tied embedding. `tie` converts a head in place."""

    def pair(self) -> Pair | None:
        """Returns the embedding's adapter; None if it is disabled."""
        # Read at each call, because adapters are disabled and enabled between calls.
        embedding: Any = vars(self)[_EMBEDDING]
        if embedding.disable_adapters:
            return None
        (name,) = embedding.active_adapters
        # peft's names in an embedding: B is [width, rank], A is [rank, vocabulary]. The head adds the transpose.
        down, up = embedding.lora_embedding_B[name], embedding.lora_embedding_A[name]
        return Pair(full_tensor(down), full_tensor(up), embedding.scaling[name])

    def forward(self, hidden: Tensor) -> Tensor:
        logits, pair = super().forward(hidden), self.pair()
        if pair is None:
            return logits
        # Autocast lowers both matmuls anyway; without it the pair's own precision (fp32) is kept.
        dtype = hidden.dtype if torch.is_autocast_enabled(hidden.device.type) else pair.up.dtype
        return logits + (pair.lowered(hidden.to(dtype)) @ pair.up.to(dtype)).to(logits.dtype)


def pair_of(head: nn.Module) -> Pair | None:
    """Returns the low-rank addition to a head's weight; None if there is none or it is disabled."""
    return head.pair() if isinstance(head, TiedHead) else None


def tie(head: nn.Module, embedding: nn.Module) -> None:
    """Gives a head the adapter of its embedding (peft's LoRA Embedding), in place.

    Raises:
        ValueError: the head is not a plain Linear, or the embedding is more than a lookup table.
    """
    base: Any = embedding.get_base_layer()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        raise ValueError(f"the head is a {type(head).__name__}, which would not have the embedding's adapter")
    # Gemma scales its embeddings in a subclass (embed_scale), which the head does not share.
    if type(base).forward is not nn.Embedding.forward and getattr(base, "embed_scale", None) is None:
        raise ValueError(f"the embedding is a {type(base).__name__}, which does more than look rows up")
    vars(head)[_EMBEDDING] = embedding  # not a submodule, which would register its parameters twice
    # Only the class changes, so that the weight stays tied and references stay valid.
    head.__class__ = TiedHead


def untie(head: nn.Module) -> None:
    """Turns the head back into a plain Linear, after the adapter is merged."""
    del vars(head)[_EMBEDDING]
    head.__class__ = nn.Linear
