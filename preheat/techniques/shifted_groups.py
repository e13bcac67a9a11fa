"""Shifted groups: trains with attention within groups; half of the heads use groups shifted by half a group (S2-Attn).

What: documents are split into groups of `group_size` tokens and attention stays inside; half of the heads split half a
group later, so that their groups span the boundaries of the other half, and information flows along the document from
layer to layer. Evaluation and generation use full attention.
Helps: fine-tunes a pretrained model to longer sequences at the cost of short ones: attention costs length x group, with
any kernel that keeps documents apart.
Hurts: training differs from inference, so it suits fine-tuning (with LoRA and trained embeddings and norms, as its
authors found), not pretraining. LongLoRA's wraparound of the last half group, which leaks last tokens to the first, is
left out.
Source: Chen et al. 2023, LongLoRA (arXiv:2309.12307).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from preheat.core import Build, Change, Context, Numerics, Stage, Tag, Technique, Trials
from preheat.recipe import Bound

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

__all__ = ["ShiftedGroups", "add_shifted_groups"]


def add_shifted_groups(model: PreTrainedModel, *, group: int) -> int:
    """Makes a transformers model attend in shifted groups in training mode, in place.

    A model that uses transformers' own attention functions is switched to preheat's kernels; padding masks still work.

    Args:
        group: tokens, at least 2; the authors use a quarter of the length.

    Returns:
        The number of layers.

    Raises:
        ValueError: a group below 2, or a model whose attention cannot be replaced.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=16)
        >>> add_shifted_groups(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)), group=4)
        2
    """
    from preheat.models.attention_patch import limit_layers
    from preheat.ops.attention.multihead import attend_any

    if group < 2:
        raise ValueError(f"group: {group} must be at least 2")

    # A partial, not a closure: after a deep copy, it checks the training mode of the copy.
    return limit_layers(model, functools.partial(_limit_to_training, model, group), attend=attend_any)


def _limit_to_training(model: PreTrainedModel, group: int, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    from preheat.ops.attention.patterns import limit_to_shifted_groups

    # Checked in each call: the same model trains and is evaluated in between.
    return limit_to_shifted_groups(kernel, group) if model.training else kernel


@dataclass(frozen=True, kw_only=True)
class ShiftedGroups(Technique):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"group_size": 10},))
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.ATTENTION_PATTERN, Tag.PER_HEAD_PATTERN})
    # Groups change the documents, which compiled layers have as data only.
    conflicts: ClassVar[frozenset[Tag]] = frozenset(
        {
            Tag.ATTENTION_PATTERN,
            Tag.COMPILED_LAYERS,
        }
    )

    group_size: Literal["auto"] | Annotated[int, Bound(2)] = "auto"
    """Tokens per group; auto: a quarter of batch.seq_len."""

    def _group_tokens(self, context: Context | Build) -> int:
        return max(2, context.recipe.batch.seq_len // 4) if self.group_size == "auto" else int(self.group_size)

    def check(self, context: Context) -> list[str]:
        problems, length = [], context.recipe.batch.seq_len
        if self._group_tokens(context) >= length:
            problems.append(
                f"group_size: {self._group_tokens(context)} of {length} tokens splits nothing; use less than "
                "batch.seq_len"
            )
        # Both halves must have equally many heads.
        if context.model.heads % 2:
            problems.append(f"takes half of the heads, and the model has {context.model.heads}; leave it out")
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        group = self._group_tokens(build)
        count = add_shifted_groups(part, group=group)
        return Change(
            f"{count} layers attend in groups of {group} tokens while "
            f"training, half of the heads shifted by {group // 2}",
            count,
        )
