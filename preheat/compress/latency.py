"""How fast models read a prompt and write after it: all of them in turns, so that what else the machine does meets each alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from preheat.models.layerwise import plainly

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Speed", "speeds"]


@dataclass(frozen=True)
class Speed:
    """Medians over the turns.

    Attributes:
        prompt: tokens that were read.
        first_token: seconds from the prompt to its first token.
        decode: tokens a second after that, one row at a time.
        low, high: the slowest and the fastest turn's `decode`.
    """

    prompt: int
    first_token: float
    decode: float
    low: float
    high: float


def speeds(models: Mapping[str, Any], prompt: Tensor, *, tokens: int = 32, turns: int = 5) -> dict[str, Speed]:
    """Times each model by its own forward with a KV cache, greedily; the first turn of each is not counted.

    Args:
        models: by name.
        prompt: [1, length].
        tokens: written after it.

    Example:
        >>> speeds({"before": a, "after": b}, torch.tensor([[1, 2, 3]]))["after"].decode            # doctest: +SKIP
        161.2
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for turn in range(turns + 1):
        for name, model in models.items():
            with plainly(model):
                once = _once(model, prompt, tokens)
            if turn:
                found[name].append(once)
    return {name: _median(prompt.shape[1], turned) for name, turned in found.items()}


def _once(model: Any, prompt: Tensor, tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and tokens a second after it."""
    import torch
    from transformers import DynamicCache

    device = model.device
    cache, prompt = DynamicCache(config=model.config), prompt.to(device)
    with torch.no_grad():
        start = time.perf_counter()
        token = (
            model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        )
        int(token)  # a GPU has done it only when it is asked
        first = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(tokens):
            token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        int(token)
        return first, tokens / (time.perf_counter() - start)


def _median(prompt: int, turned: Sequence[tuple[float, float]]) -> Speed:
    first, decode = zip(*turned, strict=True)
    return Speed(prompt, statistics.median(first), statistics.median(decode), min(decode), max(decode))
