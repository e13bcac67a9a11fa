"""Comparison of a model before and after compression: quality on held-out text, logits, bytes and latency."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.compress.calibration_text import Texts
from preheat.compress.export import verify
from preheat.compress.latency import speeds
from preheat.inference.load import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from preheat.core.json_types import JsonObject
    from preheat.evaluation.results import Result

__all__ = ["Baseline", "held_logits", "quality"]


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

        model: PreTrainedModel = opened.build.trained[0]
        # First, while adapters and fake quantization are those that the model was trained with.
        result, logits = quality(opened, texts, measured), held_logits(model, opened)
        if names_of(model):
            merge(model)
        unfake_(model)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        model.float().requires_grad_(False)
        # After the merge and the cast: rounded once from fp32.
        plain = _half(model)
        return cls(plain, result, _bytes(plain), dtype, logits, texts, measured)

    def against(self, compressed: LoadedModel) -> tuple[JsonObject, PreTrainedModel]:
        """Compares a compressed model with this one; returns the figures, and the model to time.

        What is not quantized is cast to bf16 in the model that is timed.

        Returns:
            {before, after: {loss, perplexity, perplexity_interval, rows, tokens, bytes}, max_logit_difference,
            largest_logit, top_1_agreement, perplexity_rise, perplexity_rise_interval}, and the model
        """
        from preheat.ops.quantization.serialization import quantized_modules

        model: PreTrainedModel = compressed.build.trained[0]
        logits = held_logits(model, compressed)
        difference = verify.compare(self.logits, logits)
        same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(self.logits, logits, strict=True))
        after = quality(compressed, self.texts, self.measured)
        # Both are timed in bf16; quantized maps keep their own formats.
        timed = model if quantized_modules(model) else _half(model)
        row = {
            "before": {**_told(self.quality), "bytes": self.bytes, "dtype": "bfloat16"},
            "after": {**_told(after), "bytes": _bytes(timed)},
            "max_logit_difference": difference.largest,
            "largest_logit": difference.scale,
            "top_1_agreement": same / difference.tokens,
            **_rise(self.quality, after),
        }
        return row, timed

    def time(self, rows: Sequence[JsonObject], models: Mapping[str, PreTrainedModel], *, turns: int) -> None:
        """Times the models in alternating turns and adds the figures to `rows`, in place.

        Args:
            rows: figures of the variants, with their `name`.
            models: by that name; this model is "before".
            turns: timed turns per model.
        """
        # At least two tokens, at most 128, and one fewer than the row.
        first = self.texts.calibration[0]
        prompt = first[:, : max(2, min(128, first.shape[1] - 1))]
        for name, speed in speeds(models, prompt, turns=turns).items():
            for row in rows:
                # The original model's times belong to every row.
                if name in ("before", row["name"]):
                    row["before" if name == "before" else "after"] |= {
                        "prompt_tokens": speed.prompt,
                        "first_token_seconds": speed.first_token,
                        "decode_tokens_per_second": speed.decode,
                        "decode_interval": [speed.low, speed.high],
                    }


def _half(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy in bf16 without fake quantization, which would round the weights again in each forward pass."""
    from preheat.ops.quantization.fake_quant import unfake_
    from preheat.ops.quantization.serialization import to_half

    half = copy.deepcopy(model)
    unfake_(half)
    to_half(half)
    return half


def _bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of the weights; shared weights count once."""
    # By identity, so that a tied head counts once.
    return sum({id(p): p.nbytes for p in model.parameters()}.values())


def held_logits(model: PreTrainedModel, opened: LoadedModel) -> list[Tensor]:
    """Returns the logits of a model over rows of real text."""
    from preheat.models.hf import plain_logits

    rows = verify.rows(opened.tokenizer, opened.build.model.positions, [])
    return [plain_logits(model, row).cpu() for row in rows]


def quality(opened: LoadedModel, texts: Texts, measured: int) -> Result:
    """Returns loss and perplexity on held-out text."""
    from preheat.evaluation.perplexity import bytes_of_tokens, measure_text

    micro = min(8, opened.recipe.batch.size)
    return measure_text(
        opened.build, texts.held_out, micro=micro, limit=measured, sizes=bytes_of_tokens(opened.tokenizer)
    )


def _told(result: Result) -> JsonObject:
    from preheat.evaluation.results import described

    data = described(result)
    loss, perplexity = (data.metrics[key] for key in ("loss", "perplexity"))
    return {
        "loss": loss.value,
        "perplexity": perplexity.value,
        "perplexity_interval": [perplexity.low, perplexity.high],
        "rows": data.rows,
        "tokens": data.tokens,
    }


def _rise(before: Result, after: Result) -> JsonObject:
    """Returns the relative rise of perplexity with its 95 % interval (paired bootstrap over the rows)."""
    from preheat.evaluation.results import compared

    loss = compared(before, after).metrics["loss"]
    low, high = (None if v is None else math.expm1(v) for v in (loss.low, loss.high))
    # perplexity = exp(loss), so the relative rise is exp(difference of losses) - 1.
    return {"perplexity_rise": math.expm1(loss.value), "perplexity_rise_interval": [low, high]}
