"""Sliding windows: tokens attend to a limited number of last tokens, in all or most layers.

What: limits a layer's attention to the last `window` tokens; every n-th layer may stay full, as in Gemma 3. Tokens
further back are still reached through the layers below.
Helps: attention cost and, at inference, its cache grow with the window and not with the length, given a kernel that
skips masked blocks (`efficient_attention`).
Hurts: a different model: it cannot use what it cannot reach. The plain kernel still computes all scores. Text is
generated without a cache, and families without their own window (llama, gpt2) are exported without it.
Source: Beltagy et al. 2020 (arXiv:2004.05150); Jiang et al. 2023 (arXiv:2310.06825); every sixth layer full: Gemma 3
(arXiv:2503.19786).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from preheat.core import Build, Change, Context, Numerics, Stage, Tag, Technique, Trials
from preheat.recipe import Bound, Count

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["SlidingWindow", "add_sliding_window"]


def add_sliding_window(model: PreTrainedModel, *, window: int, every: int | None = None) -> int:
    """Limits the attention of a transformers model's layers to the last `window` tokens, itself included, in place.

    A model that uses transformers' own attention functions is switched to preheat's kernels; padding masks still work.

    Args:
        window: tokens, at least 1.
        every: every n-th layer stays full; None: none does.

    Returns:
        The number of limited layers.

    Raises:
        ValueError: a window below 1, `every` below 2, or a model whose attention cannot be replaced.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=16)
        >>> add_sliding_window(LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes)), window=4, every=6)
        5
    """
    from preheat.models.attention_patch import limit_layers
    from preheat.ops.attention.multihead import attend_any
    from preheat.ops.attention.patterns import limit_to_window

    if window < 1:
        raise ValueError(f"window: {window} must be at least 1")
    # The n-th layer of each n stays full, so 1 would limit none.
    if every is not None and every < 2:
        raise ValueError(f"every: {every} would leave every layer full; use 2 or more")
    # A wrapper of the kernel, not a mask: kernels with windows skip the blocks outside of it.
    return limit_layers(model, functools.partial(limit_to_window, window=window), attend=attend_any, every=every)


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Technique):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"window": 5, "every": 2},))
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.ATTENTION_PATTERN, Tag.SLIDING_WINDOW})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.ATTENTION_PATTERN})

    window: Literal["auto"] | Count = "auto"
    """Tokens that a token sees, itself included; auto: a quarter of batch.seq_len."""
    every: Annotated[int, Bound(2)] | None = None
    """Every n-th layer stays full (Gemma 3: 6); all are limited by default."""

    def _window_tokens(self, context: Context | Build) -> int:
        return max(1, context.recipe.batch.seq_len // 4) if self.window == "auto" else int(self.window)

    def check(self, context: Context) -> list[str]:
        problems, length = [], context.recipe.batch.seq_len
        if self._window_tokens(context) >= length:
            problems.append(
                f"window: {self._window_tokens(context)} of {length} tokens hides "
                "nothing; use less than batch.seq_len, or leave it out"
            )
        if self.every is not None and self.every > context.model.layers:
            problems.append(
                f"every: {self.every} of {context.model.layers} layers "
                f"leaves none full; use at most {context.model.layers}"
            )
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        window = self._window_tokens(build)
        count = add_sliding_window(part, window=window, every=self.every)
        return Change(f"{count} of {build.model.layers} layers see {window} tokens back", count)

    # Memory and time repeat with this period over the depth, as a dry run extrapolates them.
    def period(self) -> int:
        return self.every or 1
