"""A model before and what was made of it: quality on held-out text, logits, bytes, and speed in turns."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from preheat.compress import speed
from preheat.compress.export import shared
from preheat.compress.texts import Texts
from preheat.training.opened import Opened

if TYPE_CHECKING:
    from preheat.evaluation.results import Result

__all__ = ["Before", "held_logits"]


@dataclass
class Before:
    """A model as it was.

    Attributes:
        plain: a copy in bf16, to be timed against.
        quality: loss and perplexity of the held-out rows.
        bytes: of its weights in bf16.
        logits: over rows of real text.
        texts, measured, turns: what it is measured on, how many rows of that at most, and how often times are taken.
    """

    plain: Any
    quality: Result
    bytes: int
    logits: list[Tensor]
    texts: Texts
    measured: int
    turns: int

    @classmethod
    def of(cls, opened: Opened, texts: Texts, *, measured: int, turns: int) -> Before:
        """Measures a model as it is; then merges it in place, with all weights in fp32: what methods begin from."""
        from preheat.ops.adapters import merge, names_of
        from preheat.ops.quantized_folder import to_half
        from preheat.ops.quantized_training import unfake_

        model: Any = opened.build.trained[0]
        quality, logits = _quality(opened, texts, measured), held_logits(opened)
        if names_of(model):
            merge(model)
        unfake_(model)
        model.float().requires_grad_(False)
        plain = copy.deepcopy(model)
        to_half(plain)
        unique = {id(p): p.numel() for p in model.parameters()}
        return cls(plain, quality, 2 * sum(unique.values()), logits, texts, measured, turns)

    def against(self, made: Opened, place: Path) -> dict[str, Any]:
        """What became of it.

        Args:
            made: the model after.
            place: its folder, whose weights are counted.

        Returns:
            {before, after: {loss, perplexity, perplexity_interval, rows, tokens, bytes, prompt_tokens, first_token_seconds, decode_tokens_per_second,
            decode_interval}, max_logit_difference, largest_logit, top_1_agreement, perplexity_rise, perplexity_rise_interval}
        """
        found = held_logits(made)
        difference = shared.compare(self.logits, found)
        agree = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(self.logits, found, strict=True))
        after = _quality(made, self.texts, self.measured)
        first = self.texts.calibration[0]
        prompt = first[:, : max(2, min(128, first.shape[1] - 1))]
        timed = speed.speeds({"before": self.plain, "after": made.build.trained[0]}, prompt, turns=self.turns)
        return {
            "before": {**_told(self.quality), "bytes": self.bytes, "dtype": "bfloat16", **_timed(timed["before"])},
            "after": {**_told(after), **_timed(timed["after"]), "bytes": _bytes(made, place)},
            "max_logit_difference": difference.largest,
            "largest_logit": difference.scale,
            "top_1_agreement": agree / difference.tokens,
            **_rise(self.quality, after),
        }


def held_logits(opened: Opened) -> list[Tensor]:
    """Logits of a model as it stands over rows of real text."""
    from preheat.models.adapter import plain_logits

    rows = shared.rows(opened.tokenizer, opened.build.model.positions, [])
    return [plain_logits(opened.build.trained[0], row).cpu() for row in rows]  # type: ignore[arg-type]


def _bytes(made: Opened, place: Path) -> int:
    """Of the weights: as they stand on disk where any are quantized; in bf16 otherwise, as those of the model before."""
    from preheat.ops.quantized_folder import quantized_modules

    model: Any = made.build.trained[0]
    if quantized_modules(model):
        return sum(p.stat().st_size for p in place.glob("*.safetensors"))
    return 2 * sum({id(p): p.numel() for p in model.parameters()}.values())


def _quality(opened: Opened, texts: Texts, measured: int) -> Result:
    """Loss and perplexity of held-out text."""
    from preheat.evaluation.texts import bytes_of_tokens, measure_text

    micro = min(8, opened.recipe.batch.size)
    return measure_text(opened.build, texts.held_out, micro=micro, limit=measured, sizes=bytes_of_tokens(opened.tokenizer))


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


def _timed(found: speed.Speed) -> dict[str, Any]:
    return {
        "prompt_tokens": found.prompt,
        "first_token_seconds": found.first_token,
        "decode_tokens_per_second": found.decode,
        "decode_interval": [found.low, found.high],
    }
