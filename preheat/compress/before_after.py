"""Comparison of a model before and after compression: quality on held-out text, logits, bytes and latency."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from preheat.compress.calibration_text import Texts
from preheat.compress.export import verify
from preheat.compress.latency import Speed, measure_speeds
from preheat.core.compression import CompressedVariant, Figures, TimedFigures
from preheat.inference.load import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from preheat.evaluation.results import Result

__all__ = ["Baseline", "Comparison", "Untimed", "compute_held_out_logits", "evaluate_quality"]


@dataclass(frozen=True)
class Comparison:
    """A model before and after compression; see `CompressedVariant`."""

    before: Figures
    after: Figures
    max_logit_difference: float
    largest_logit: float
    top_1_agreement: float
    perplexity_rise: float
    perplexity_rise_interval: tuple[float | None, float | None]


@dataclass(frozen=True)
class Untimed:
    """A `CompressedVariant` before the models are timed, which takes turns between all of them."""

    name: str
    method: str
    settings: Mapping[str, Any]
    what: str
    bytes: int
    comparison: Comparison
    detail: str | None = None
    notes: tuple[str, ...] | None = None
    quantized: bool | None = None

    def timed(self, speeds: Mapping[str, Speed]) -> CompressedVariant:
        """Adds the times of the original model, `before`, and of this variant."""
        comparison = self.comparison
        return CompressedVariant(
            name=self.name,
            method=self.method,
            settings=self.settings,
            what=self.what,
            detail=self.detail,
            notes=self.notes,
            quantized=self.quantized,
            bytes=self.bytes,
            before=_add_times(comparison.before, speeds["before"]),
            after=_add_times(comparison.after, speeds[self.name]),
            max_logit_difference=comparison.max_logit_difference,
            largest_logit=comparison.largest_logit,
            top_1_agreement=comparison.top_1_agreement,
            perplexity_rise=comparison.perplexity_rise,
            perplexity_rise_interval=comparison.perplexity_rise_interval,
        )


def _add_times(figures: Figures, speed: Speed) -> TimedFigures:
    return TimedFigures(
        **vars(figures),
        prompt_tokens=speed.prompt,
        first_token_seconds=speed.first_token,
        decode_tokens_per_second=speed.decode,
        decode_interval=(speed.low, speed.high),
    )


@dataclass
class Baseline:
    """Measurements of the model before compression.

    Attributes:
        plain: a copy in bf16, the reference for timing.
        quality: loss and perplexity on the held-out rows.
        bytes: size of its weights in bf16.
        dtype: its own precision.
        logits: over rows of real text.
        texts: calibration and held-out rows.
        measured: maximum number of held-out rows to measure on.
    """

    plain: PreTrainedModel
    quality: Result
    bytes: int
    dtype: torch.dtype
    logits: list[Tensor]
    texts: Texts
    measured: int

    @classmethod
    def of(cls, opened: LoadedModel, texts: Texts, *, measured: int) -> Baseline:
        """Measures a model, then merges its adapters in place and casts all weights to fp32, as methods expect them."""
        from preheat.ops.adapters.peft_layers import merge, names_of
        from preheat.ops.quantization.fake_quant import unfake_
        from preheat.ops.quantization.packed import unpack_all_

        model: PreTrainedModel = opened.build.trained[0]
        # First, while adapters and fake quantization are those that the model was trained with.
        result, logits = evaluate_quality(opened, texts, measured), compute_held_out_logits(model, opened)
        if names_of(model):
            merge(model)
        unpack_all_(model)
        unfake_(model)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        model.float().requires_grad_(False)
        # After the merge and the cast: rounded once from fp32.
        plain = _copy_in_half(model)
        return cls(plain, result, _count_bytes(plain), dtype, logits, texts, measured)

    def against(self, compressed: LoadedModel) -> tuple[Comparison, PreTrainedModel]:
        """Compares a compressed model with this one; returns the figures, and the model to time.

        What is not quantized is cast to bf16 in the model that is timed.
        """
        from preheat.ops.quantization.serialization import find_quantized_modules

        model: PreTrainedModel = compressed.build.trained[0]
        logits = compute_held_out_logits(model, compressed)
        difference = verify.compare(self.logits, logits)
        same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(self.logits, logits, strict=True))
        after = evaluate_quality(compressed, self.texts, self.measured)
        # Both are timed in bf16; quantized maps keep their own formats.
        timed = model if find_quantized_modules(model) else _copy_in_half(model)
        rise, rise_interval = _compute_rise(self.quality, after)
        comparison = Comparison(
            before=_build_figures(self.quality, self.bytes, "bfloat16"),
            after=_build_figures(after, _count_bytes(timed)),
            max_logit_difference=difference.largest,
            largest_logit=difference.scale,
            top_1_agreement=same / difference.tokens,
            perplexity_rise=rise,
            perplexity_rise_interval=rise_interval,
        )
        return comparison, timed

    def time(self, models: Mapping[str, PreTrainedModel], *, turns: int) -> dict[str, Speed]:
        """Times models, by name, in alternating turns; `turns` of each are timed."""
        # At least two tokens, at most 128, and one fewer than the row.
        first = self.texts.calibration[0]
        prompt = first[:, : max(2, min(128, first.shape[1] - 1))]
        return measure_speeds(models, prompt, turns=turns)


def _copy_in_half(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy in bf16 without fake quantization, which would round the weights again in each forward pass."""
    from preheat.ops.quantization.fake_quant import unfake_
    from preheat.ops.quantization.serialization import cast_to_half

    half = copy.deepcopy(model)
    unfake_(half)
    cast_to_half(half)
    return half


def _count_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of the weights; shared weights count once."""
    # By identity, so that a tied head counts once.
    return sum({id(p): p.nbytes for p in model.parameters()}.values())


def compute_held_out_logits(model: PreTrainedModel, opened: LoadedModel) -> list[Tensor]:
    """Returns the logits of a model over rows of real text."""
    from preheat.models.hf import compute_reference_logits

    rows = verify.tokenize_samples(opened.tokenizer, opened.build.model.positions, [])
    return [compute_reference_logits(model, row).cpu() for row in rows]


def evaluate_quality(opened: LoadedModel, texts: Texts, measured: int) -> Result:
    """Returns loss and perplexity on held-out text."""
    from preheat.evaluation.perplexity import count_token_bytes, measure_text

    micro = min(8, opened.recipe.batch.size)
    return measure_text(
        opened.build, texts.held_out, micro=micro, limit=measured, sizes=count_token_bytes(opened.tokenizer)
    )


def _build_figures(result: Result, bytes: int, dtype: str | None = None) -> Figures:
    from preheat.evaluation.bootstrap import compute_interval

    loss, perplexity = result.metrics["loss"], result.metrics["perplexity"]
    assert result.tokens is not None, "results on text count their tokens"
    return Figures(
        loss=loss.value,
        perplexity=perplexity.value,
        perplexity_interval=compute_interval(perplexity) or (None, None),
        rows=result.rows,
        tokens=result.tokens,
        bytes=bytes,
        dtype=dtype,
    )


def _compute_rise(before: Result, after: Result) -> tuple[float, tuple[float | None, float | None]]:
    """Returns the relative rise of perplexity with its 95 % interval (paired bootstrap over the rows)."""
    from preheat.evaluation.bootstrap import compute_difference

    value, bounds = compute_difference(before.metrics["loss"], after.metrics["loss"])
    # perplexity = exp(loss), so the relative rise is exp(difference of losses) - 1.
    return math.expm1(value), (math.expm1(bounds[0]), math.expm1(bounds[1])) if bounds else (None, None)
