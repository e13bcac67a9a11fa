"""A head that is tied to an embedding, where the embedding has an adapter: both stay one matrix, and merging changes both alike.

peft's own way (`ensure_weight_tying`) gives the head a second set of parameters over the same memory, each with a gradient and an optimizer
state of its own; here the head has none, and the gradients of both places add up in the embedding's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from preheat.ops.distributed.dtensor_utils import whole

__all__ = ["Pair", "TiedHead", "pair_of", "tie", "untie"]

_EMBEDDING = "tied_to"


class Pair(NamedTuple):
    """What is added to a head's weight: scale * (down @ up).t().

    Attributes:
        down: [width, rank].
        up: [rank, vocabulary].
    """

    down: Tensor
    up: Tensor
    scale: float

    def lowered(self, hidden: Tensor) -> Tensor:
        """[..., rank] of hidden states [..., width], scaled: times `up` it is what the logits are to have besides."""
        return hidden @ self.down.to(hidden.dtype) * self.scale


class TiedHead(nn.Linear):
    """A head whose logits have the adapter of the embedding that it is tied to. Made by `tie`, from the head itself."""

    def pair(self) -> Pair | None:
        """None where the adapter is off."""
        embedding: Any = vars(self)[_EMBEDDING]
        if embedding.disable_adapters:
            return None
        (name,) = embedding.active_adapters
        down, up = embedding.lora_embedding_B[name], embedding.lora_embedding_A[name]
        return Pair(whole(down), whole(up), embedding.scaling[name])

    def forward(self, hidden: Tensor) -> Tensor:
        logits, pair = super().forward(hidden), self.pair()
        if pair is None:
            return logits
        dtype = hidden.dtype if torch.is_autocast_enabled(hidden.device.type) else pair.up.dtype
        return logits + (pair.lowered(hidden.to(dtype)) @ pair.up.to(dtype)).to(logits.dtype)


def pair_of(head: nn.Module) -> Pair | None:
    """What stands beside a head's weight; None where nothing does, or it is off."""
    return head.pair() if isinstance(head, TiedHead) else None


def tie(head: nn.Module, embedding: nn.Module) -> None:
    """Gives a head the adapter of its embedding (peft's LoRA of one), in place.

    Raises:
        ValueError: the head is no plain linear map, or the embedding more than a table of rows.
    """
    base: Any = embedding.get_base_layer()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        raise ValueError(f"the head is a {type(head).__name__}, which would not have the embedding's adapter")
    if type(base).forward is not nn.Embedding.forward and getattr(base, "embed_scale", None) is None:
        raise ValueError(f"the embedding is a {type(base).__name__}, which does more than look rows up")
    vars(head)[_EMBEDDING] = embedding  # no child of the head, which would name its parameters twice
    head.__class__ = TiedHead


def untie(head: nn.Module) -> None:
    """The plain head again, once the adapter is merged."""
    del vars(head)[_EMBEDDING]
    head.__class__ = nn.Linear
