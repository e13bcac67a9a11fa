"""Rotary scaling: extends a model's context to `factor` times the length that it was trained on.

What: `linear` divides all positions by the factor; `dynamic` raises the rotary base as far as the longest position at
hand needs (NTK-aware), and does not affect short texts; `base` raises it once, for all lengths; `yarn` divides slow
frequencies, keeps fast ones, interpolates in between, and sharpens the attention slightly. It uses transformers'
configuration, so that an exported folder loads with it. `auto` chooses yarn up to 32 times the trained length, the
largest factor in its paper, and a larger base beyond, which long continued training uses.
Helps: a short fine-tuning at the new length (hundreds of steps for yarn) instead of a long pretraining.
Hurts: a factor larger than the data needs costs precision for nearby positions, at short lengths too (except for
dynamic); without training, nothing is learnt about distant tokens.
Source: linear: Chen et al. 2023 (arXiv:2306.15595); dynamic NTK and YaRN: Peng et al. 2023 (arXiv:2309.00071); a larger
base and continued training: Xiong et al. 2023 (arXiv:2309.16039).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from preheat.core import Build, Change, Numerics, Stage, Tag, Technique, Trials
from preheat.recipe import Bound, Count, Positive

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from preheat.recipe import Recipe

__all__ = ["RopeScaling", "choose_kind", "scale_rope"]

# The largest factor in YaRN's paper.
YARN_UP_TO = 32.0


def choose_kind(factor: float) -> str:
    """Returns the scaling that suits a factor if training follows.

    Example:
        >>> choose_kind(8), choose_kind(64)
        ('yarn', 'base')
    """
    return "yarn" if factor <= YARN_UP_TO else "base"


def scale_rope(
    config: PretrainedConfig, kind: str, factor: float, *, original_length: int | None = None, **yarn: float
) -> tuple[int, int]:
    """Sets the rotary scaling of a transformers configuration before the model is created, in place.

    Args:
        kind: linear, dynamic, base or yarn.
        factor: above 1.
        original_length: positions that the model was trained on; `max_position_embeddings` when None.
        yarn: beta_fast, beta_slow, attention_factor.

    Returns:
        The numbers of positions before and after.

    Raises:
        ValueError: the factor is not above 1, or the model has no plain rotary positions.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(max_position_embeddings=2048)
        >>> scale_rope(config, "yarn", 4)
        (2048, 8192)
        >>> config.rope_parameters["rope_type"], config.max_position_embeddings
        ('yarn', 8192)
    """
    from preheat.models.conversions import architecture

    if factor <= 1:
        raise ValueError(f"factor: {factor:g} does not extend the model's positions; it must be above 1")
    return architecture.scale_rope(config, kind, factor, original_length, **yarn)


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Technique):
    stage: ClassVar[Stage] = Stage.STRUCTURE
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(
        settings=(
            {"kind": "auto", "factor": "auto", "original_length": 16},
            {"kind": "base", "original_length": 16},
            {"kind": "dynamic", "original_length": 16},
            {"kind": "linear"},
        ),
        family="llama",
    )
    unsupported_for_images: ClassVar[str] = "supports only text models; leave it out"
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.EXTENDED_CONTEXT})

    kind: Literal["auto", "linear", "dynamic", "base", "yarn"] = "yarn"
    """linear: divides positions; dynamic: raises the base by the longest position at hand; base: raises it once, as far
    as the factor requires; yarn: by frequency. auto: yarn up to a factor of 32, base beyond; the run records the
    choice."""
    factor: Literal["auto"] | Annotated[float, Bound(1, open_low=True)] = 2.0
    """Ratio of the new to the original number of positions; auto: what batch.seq_len needs."""
    original_length: Count | None = None
    """Positions that the model was trained on; by default those of its configuration."""
    beta_fast: Positive | None = None
    """yarn: frequencies with more turns than this over the original length are unchanged; 32 by default."""
    beta_slow: Positive | None = None
    """yarn: frequencies with fewer turns are divided by the factor; 1 by default."""
    attention_factor: Positive | None = None
    """yarn: scale of the rotary tables; 0.1 ln(factor) + 1 by default."""

    def configure(self, config: PretrainedConfig, recipe: Recipe) -> None:
        given = {
            key: value
            for key in ("beta_fast", "beta_slow", "attention_factor")
            if (value := getattr(self, key)) is not None
        }
        # A vision model's positions are those of its text part.
        original = self.original_length or config.get_text_config().max_position_embeddings
        kind, factor = self._choose_kind(recipe, original)
        # Only yarn has these settings; with another kind they would be ignored silently.
        if given and kind != "yarn":
            raise ValueError(f"{next(iter(given))}: is yarn's; remove it, or use kind: yarn")
        if self.factor == "auto" and factor <= 1:
            raise ValueError(
                f"factor: auto: the model's {original:,} positions hold batch.seq_len "
                f"{recipe.batch.seq_len:,} already; raise batch.seq_len, or leave rope_scaling out"
            )
        original, reach = scale_rope(config, kind, factor, original_length=self.original_length, **given)
        # A larger batch.seq_len would read positions beyond the scaled range.
        if recipe.batch.seq_len > reach:
            raise ValueError(
                f"factor: {factor:g} takes the model's {original:,} positions to {reach:,}, but "
                f"batch.seq_len is {recipe.batch.seq_len:,}; use factor: {_find_factor(recipe, original):g}"
            )

    def _choose_kind(self, recipe: Recipe, original: int) -> tuple[str, float]:
        factor = _find_factor(recipe, original) if self.factor == "auto" else float(self.factor)
        return (choose_kind(factor) if self.kind == "auto" else self.kind), factor

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.models.configs import of

        # The model's own configuration has the new number of positions by now.
        config = of(build.recipe, build.model.vocabulary).get_text_config()  # the configuration before scaling
        original = self.original_length or config.max_position_embeddings
        kind, factor = self._choose_kind(build.recipe, original)
        summary = f"{kind} by {factor:g}: {original:,} positions reach {build.model.positions:,}"
        if self.kind == "auto":
            summary += f" ({kind} suits factors {'up to' if factor <= YARN_UP_TO else 'above'} {YARN_UP_TO:g})"
        needed = _find_factor(build.recipe, original)
        if needed < factor:
            summary += f"; batch.seq_len {build.recipe.batch.seq_len:,} needs only {needed:g}"
        return Change(summary, build.model.layers)


def _find_factor(recipe: Recipe, original: int) -> float:
    """Returns the smallest factor that reaches batch.seq_len, rounded up to hundredths."""
    return max(math.ceil(100 * recipe.batch.seq_len / original) / 100, 1.0)
