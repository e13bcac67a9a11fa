"""Block-sparse attention: each token attends to its neighbourhood and to a few global tokens at its document's start.

What: a token attends to the last `local` tokens and to the first `global_tokens` of its document, which attend to
everything before them. BigBird's random blocks are left out: kernels gain nothing from them, and stacked windows reach
as far.
Helps: attention is linear in length, given a kernel that skips masked blocks (`efficient_attention`); the global tokens
serve as attention sinks, which a plain window cuts off.
Hurts: a different model: tokens in between are reached only through the layers below. Text is generated without a
cache, and transformers' own models do not know this pattern.
Source: Beltagy et al. 2020 (arXiv:2004.05150); Zaheer et al. 2020 (arXiv:2007.14062); first tokens as sinks: Xiao et
al. 2023 (arXiv:2309.17453).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import Build, Change, Context, Numerics, Stage, Tag, Technique, Trials
from preheat.recipe import Count

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["BlockSparseAttention", "add_block_sparse_attention"]


def add_block_sparse_attention(model: PreTrainedModel, *, local: int, global_tokens: int) -> int:
    """Limits the attention of a transformers model to neighbours and global tokens, in place.

    A model that uses transformers' own attention functions is switched to preheat's kernels. Padding masks still work,
    but global tokens are then counted from the start of the row, padding included: pad on the right.

    Args:
        local: number of last tokens that a token sees, itself included.
        global_tokens: number of tokens at a document's start that the whole document sees.

    Returns:
        The number of limited layers.

    Raises:
        ValueError: a number is below 1, or the model's attention cannot be replaced.

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
    from preheat.ops.attention.patterns import limit_to_window

    for name, number in (("local", local), ("global_tokens", global_tokens)):
        if number < 1:
            raise ValueError(f"{name}: {number} must be at least 1")
    # A wrapper of the kernel, not a mask: kernels with windows skip the blocks outside of it.
    return limit_layers(
        model, functools.partial(limit_to_window, window=local, global_tokens=global_tokens), attend=attend_any
    )


@dataclass(frozen=True, kw_only=True)
class BlockSparseAttention(Technique):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"local": 5, "global_tokens": 2},))
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.ATTENTION_PATTERN, Tag.SLIDING_WINDOW, Tag.GLOBAL_TOKENS})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.ATTENTION_PATTERN})

    local: Literal["auto"] | Count = "auto"
    """Number of last tokens that a token sees, itself included; auto: a quarter of batch.seq_len."""
    global_tokens: Count = 4
    """Tokens at the start of each document that the whole document sees."""

    def _local_tokens(self, context: Context | Build) -> int:
        return max(1, context.recipe.batch.seq_len // 4) if self.local == "auto" else int(self.local)

    def check(self, context: Context) -> list[str]:
        local, length = self._local_tokens(context), context.recipe.batch.seq_len
        # Together they would cover every row: the model would be the one without the technique.
        if local + self.global_tokens >= length:
            return [
                f"local: {local} and {self.global_tokens} global of {length} "
                "tokens hide nothing; use less than batch.seq_len together"
            ]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        local = self._local_tokens(build)
        count = add_block_sparse_attention(part, local=local, global_tokens=self.global_tokens)
        return Change(f"{count} layers see {local} tokens back and the first {self.global_tokens} of a document", count)
