"""Prefill and decode latency of several models, timed in alternating turns so that machine load affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from preheat.models.layerwise import plain_forward

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Speed", "call_in_turns", "measure_speeds"]

Timing = TypeVar("Timing")


@dataclass(frozen=True)
class Speed:
    """Medians over the turns.

    Attributes:
        prompt: prompt length in tokens.
        first_token: seconds until the first token (prefill).
        decode: tokens per second after that, batch size 1.
        low, high: the slowest and the fastest turn's `decode`.
    """

    prompt: int
    first_token: float
    decode: float
    low: float
    high: float


def measure_speeds(
    models: Mapping[str, PreTrainedModel], prompt: Tensor, *, tokens: int = 32, turns: int = 5
) -> dict[str, Speed]:
    """Times greedy decoding of each model with its own forward and a KV cache; the first turn is warmup.

    Args:
        models: by name.
        prompt: [1, length].
        tokens: number of tokens to generate.
        turns: timed turns per model.

    Example:
        >>> measure_speeds({"before": a, "after": b}, torch.tensor([[1, 2, 3]]))["after"].decode  # doctest: +SKIP
        161.2
    """

    def time_generation(model: PreTrainedModel) -> tuple[float, float]:
        with plain_forward(model):
            return _time_once(model, prompt, tokens)

    timings = call_in_turns({name: partial(time_generation, model) for name, model in models.items()}, turns)
    return {name: _median_speed(prompt.shape[1], measured) for name, measured in timings.items()}


def call_in_turns(runs: Mapping[str, Callable[[], Timing]], turns: int) -> dict[str, list[Timing]]:
    """Calls each of `runs` once per turn, so that machine load affects all alike; the first turn is warmup."""
    timings: dict[str, list[Timing]] = {name: [] for name in runs}
    # Turn 0 warms up: kernels are loaded and memory is allocated.
    for turn in range(turns + 1):
        for name, run in runs.items():
            timing = run()
            if turn:
                timings[name].append(timing)
    return timings


def _time_once(model: PreTrainedModel, prompt: Tensor, tokens: int) -> tuple[float, float]:
    """Returns the seconds to the first token, and tokens per second after it."""
    import torch
    from transformers import DynamicCache

    from preheat.models.token_mixers import pass_cache

    device = model.device
    # A new cache for each call: positions would go beyond the last call's.
    cache, prompt = pass_cache(model, DynamicCache(config=model.config)), prompt.to(device)
    with torch.no_grad():
        start = time.perf_counter()
        # The logits of the last position only, as generation computes them.
        token = model(input_ids=prompt, use_cache=True, logits_to_keep=1, **cache).logits[:, -1:].argmax(-1)
        int(token)  # synchronizes with the GPU
        first = time.perf_counter() - start
        # The token stays on the device, so that the loop synchronizes once, at its end.
        start = time.perf_counter()
        for _ in range(tokens):
            token = model(input_ids=token, use_cache=True, **cache).logits[:, -1:].argmax(-1)
        int(token)
        return first, tokens / (time.perf_counter() - start)


def _median_speed(prompt: int, timings: Sequence[tuple[float, float]]) -> Speed:
    first, decode = zip(*timings, strict=True)
    return Speed(prompt, statistics.median(first), statistics.median(decode), min(decode), max(decode))
