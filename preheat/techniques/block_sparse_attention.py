"""Block-sparse attention: each token sees its neighbourhood and a few global tokens at its document's beginning.

What: a token sees `local` tokens back and the first `global_tokens` of its document, which see everything that is
before them. (BigBird adds random blocks; these are left out: kernels gain nothing from them, and windows of stacked
layers reach as far.)
Helps: attention's work is linear in length, given a kernel that skips what is hidden (`efficient_attention`); the
global tokens are where models park attention that they have no use for, which a bare window cuts off. Hurts: another
model: what lies between is reached only through the layers below. Text is generated without a cache here, and
transformers' own models know no such pattern.
Source: Beltagy et al. 2020 (arXiv:2004.05150); Zaheer et al. 2020 (arXiv:2007.14062); first tokens as sinks: Xiao et
al. 2023 (arXiv:2309.17453).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from preheat.core import Build, Change, Context, Stage, Tag, Technique, Trials
from preheat.recipe import Count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["BlockSparseAttention", "add_block_sparse_attention"]


def add_block_sparse_attention(model: PreTrainedModel, *, local: int, global_tokens: int) -> int:
    """Limits the attention of a transformers model to neighbours and global tokens. In place.

    A model that attends by transformers' own functions is switched to preheat's kernels; padding masks go on working
    (global tokens are then counted from a row's beginning, padding included: pad on the right).

    Args:
        local: tokens back that a token sees, itself included.
        global_tokens: tokens at a document's beginning that all of it sees.

    Returns:
        How many layers are limited.

    Raises:
        ValueError: a number below 1, or a model whose attention cannot be replaced.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=16)
        >>> add_block_sparse_attention(
        ...     LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)), local=4, global_tokens=1
        ... )
        2
    """
    from preheat.models.attention_patch import limit_layers
    from preheat.ops.attention.multihead import attend_any
    from preheat.ops.attention.patterns import within_window

    for name, number in (("local", local), ("global_tokens", global_tokens)):
        if number < 1:
            raise ValueError(f"{name}: {number} must be at least 1")
    return limit_layers(
        model, functools.partial(within_window, window=local, global_tokens=global_tokens), attend=attend_any
    )


@dataclass(frozen=True, kw_only=True)
class BlockSparseAttention(Technique):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Any] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"local": 5, "global_tokens": 2},))
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.ATTENTION_PATTERN, Tag.SLIDING_WINDOW, Tag.GLOBAL_TOKENS})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.ATTENTION_PATTERN})

    local: Literal["auto"] | Count = "auto"
    """Tokens back that a token sees, itself included; auto: a quarter of batch.length."""
    global_tokens: Count = 4
    """Tokens at the beginning of each document that all of it sees."""

    def _local(self, context: Context | Build) -> int:
        return max(1, context.recipe.batch.length // 4) if self.local == "auto" else int(self.local)

    def check(self, context: Context) -> list[str]:
        local, length = self._local(context), context.recipe.batch.length
        if local + self.global_tokens >= length:
            return [
                f"local: {local} and {self.global_tokens} global of {length} tokens hide nothing; use less than "
                "batch.length together"
            ]
        return []

    def apply(self, build: Build, part: Any) -> Change:
        local = self._local(build)
        count = add_block_sparse_attention(part, local=local, global_tokens=self.global_tokens)
        return Change(f"{count} layers see {local} tokens back and the first {self.global_tokens} of a document", count)
