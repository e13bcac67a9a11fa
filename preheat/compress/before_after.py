"""A model before and what was made of it: quality on held-out text, logits, bytes, and speed in turns."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from preheat.compress.calibration_text import Texts
from preheat.compress.export import verify
from preheat.compress.latency import speeds
from preheat.inference.load import LoadedModel

if TYPE_CHECKING:
    from preheat.evaluation.results import Result

__all__ = ["Baseline", "held_logits", "quality"]


@dataclass
class Baseline:
    """A model as it was.

    Attributes:
        plain: a copy in bf16, to be timed against.
        quality: loss and perplexity of the held-out rows.
        bytes: of its weights in bf16.
        dtype: its own precision.
        logits: over rows of real text.
        texts, measured: what it is measured on, and how many rows of that at most.
    """

    plain: Any
    quality: Result
    bytes: int
    dtype: torch.dtype
    logits: list[Tensor]
    texts: Texts
    measured: int

    @classmethod
    def of(cls, opened: LoadedModel, texts: Texts, *, measured: int) -> Baseline:
        """Measures a model as it is; then merges it in place, with all weights in fp32: what methods begin from."""
        from preheat.ops.adapters.peft_layers import merge, names_of
        from preheat.ops.quantization.fake_quant import unfake_

        model: Any = opened.build.trained[0]
        found, logits = quality(opened, texts, measured), held_logits(model, opened)
        if names_of(model):
            merge(model)
        unfake_(model)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        model.float().requires_grad_(False)
        plain = _half(model)
        return cls(plain, found, _bytes(plain), dtype, logits, texts, measured)

    def against(self, made: LoadedModel) -> tuple[dict[str, Any], Any]:
        """What became of it, and the model as it is to be timed: with what is not quantized in bf16.

        Returns:
            {before, after: {loss, perplexity, perplexity_interval, rows, tokens, bytes}, max_logit_difference, largest_logit, top_1_agreement,
            perplexity_rise, perplexity_rise_interval}, and the model
        """
        from preheat.ops.quantization.serialization import quantized_modules

        model: Any = made.build.trained[0]
        found = held_logits(model, made)
        difference = verify.compare(self.logits, found)
        same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(self.logits, found, strict=True))
        after = quality(made, self.texts, self.measured)
        timed = model if quantized_modules(model) else _half(model)
        told = {
            "before": {**_told(self.quality), "bytes": self.bytes, "dtype": "bfloat16"},
            "after": {**_told(after), "bytes": _bytes(timed)},
            "max_logit_difference": difference.largest,
            "largest_logit": difference.scale,
            "top_1_agreement": same / difference.tokens,
            **_rise(self.quality, after),
        }
        return told, timed

    def time(self, found: Sequence[dict[str, Any]], models: Mapping[str, Any], *, turns: int) -> None:
        """Times models in one alternating run, and enters the figures into what is told of each, in place.

        Args:
            found: what is told, by `name`.
            models: by that name, and this one as "before".
        """
        first = self.texts.calibration[0]
        prompt = first[:, : max(2, min(128, first.shape[1] - 1))]
        for name, speed in speeds(models, prompt, turns=turns).items():
            for told in found:
                if name in ("before", told["name"]):
                    told["before" if name == "before" else "after"] |= {
                        "prompt_tokens": speed.prompt,
                        "first_token_seconds": speed.first_token,
                        "decode_tokens_per_second": speed.decode,
                        "decode_interval": [speed.low, speed.high],
                    }


def _half(model: Any) -> Any:
    """A copy in bf16, whose weights are not rounded anew in every pass: that is for training."""
    from preheat.ops.quantization.fake_quant import unfake_
    from preheat.ops.quantization.serialization import to_half

    made = copy.deepcopy(model)
    unfake_(made)
    to_half(made)
    return made


def _bytes(model: Any) -> int:
    """Of the weights, those that modules share once."""
    return sum({id(p): p.nbytes for p in model.parameters()}.values())


def held_logits(model: Any, opened: LoadedModel) -> list[Tensor]:
    """Logits of a model as it stands over rows of real text."""
    from preheat.models.hf import plain_logits

    rows = verify.rows(opened.tokenizer, opened.build.model.positions, [])
    return [plain_logits(model, row).cpu() for row in rows]


def quality(opened: LoadedModel, texts: Texts, measured: int) -> Result:
    """Loss and perplexity of held-out text."""
    from preheat.evaluation.perplexity import bytes_of_tokens, measure_text

    micro = min(8, opened.recipe.batch.size)
    return measure_text(
        opened.build, texts.held_out, micro=micro, limit=measured, sizes=bytes_of_tokens(opened.tokenizer)
    )


def _told(result: Result) -> dict[str, Any]:
    from preheat.evaluation.results import described

    found = described(result)
    loss, perplexity = (found["metrics"][key] for key in ("loss", "perplexity"))
    return {
        "loss": loss["value"],
        "perplexity": perplexity["value"],
        "perplexity_interval": [perplexity["low"], perplexity["high"]],
        "rows": found["rows"],
        "tokens": found["tokens"],
    }


def _rise(before: Result, after: Result) -> dict[str, Any]:
    """How much higher the perplexity is, as a share, and between what (95 % of paired bootstrap resamples of the rows)."""
    from preheat.evaluation.results import compared

    loss = compared(before, after)["metrics"]["loss"]
    low, high = (None if v is None else math.expm1(v) for v in (loss["low"], loss["high"]))
    return {"perplexity_rise": math.expm1(loss["value"]), "perplexity_rise_interval": [low, high]}
