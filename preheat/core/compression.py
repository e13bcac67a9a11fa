"""Results of `preheat compress`: of language models and of image classifiers. No torch.

`compress` returns them; the command, its page and the model cards read them. Their JSON is `compress.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preheat.core.export import ExportResult
from preheat.core.json_types import Omitted, Record

__all__ = [
    "CompressedVariant",
    "CompressionResult",
    "Figures",
    "ImageFigures",
    "ImageQuality",
    "ImageResult",
    "ImageStep",
    "LogitDifference",
    "TimedFigures",
]


@dataclass(frozen=True, kw_only=True)
class Figures(Record):
    """Quality on held-out text and size of a language model.

    Attributes:
        perplexity_interval: 95 % of bootstrap resamples; None if there are too few rows.
        rows, tokens: measured on.
        bytes: of the weights, with everything that is not quantized in bf16.
        dtype: of the original model, if these are its figures.
    """

    loss: float
    perplexity: float
    perplexity_interval: tuple[float | None, float | None]
    rows: int
    tokens: int
    bytes: int
    dtype: Omitted[str] = None


@dataclass(frozen=True, kw_only=True)
class TimedFigures(Figures):
    """Quality, size and speed of a language model in bf16, batch size 1.

    Attributes:
        prompt_tokens: length of the timed prompt.
        decode_interval: the slowest and the fastest turn.
    """

    prompt_tokens: int
    first_token_seconds: float
    decode_tokens_per_second: float
    decode_interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class CompressedVariant(Record):
    """A model compressed by one method, or after one step of a chain, compared with the original model.

    Attributes:
        name: of its folder.
        method: the method, or a description of the step.
        what: what was done.
        bytes: of its weight files; of a step those in memory.
        perplexity_rise: relative; with the 95 % interval of a paired bootstrap over the rows.
        detail, notes, quantized: of a method; None for a step of a chain. `quantized`: its weights are in a format
            that only preheat reads.
    """

    name: str
    method: str
    settings: Mapping[str, Any]
    what: str
    detail: Omitted[str] = None
    notes: Omitted[tuple[str, ...]] = None
    quantized: Omitted[bool] = None
    bytes: int
    before: TimedFigures
    after: TimedFigures
    max_logit_difference: float
    largest_logit: float
    top_1_agreement: float
    perplexity_rise: float
    perplexity_rise_interval: tuple[float | None, float | None]


@dataclass(frozen=True, kw_only=True)
class CompressionResult(Record):
    """Variants of a language model and the chosen one, or the steps of a chain, of which the last one is chosen.

    Attributes:
        path: folder of the chosen variant.
        bytes, before, after, max_logit_difference: of the chosen variant.
        texts: description of the calibration and held-out rows.
        exports: of a chain; None without one.
    """

    path: str
    bytes: int
    before: TimedFigures
    after: TimedFigures
    max_logit_difference: float
    chosen: str
    chosen_because: str
    source: str
    texts: str
    calibration_rows: int
    variants: tuple[CompressedVariant, ...]
    notes: tuple[str, ...]
    exports: Omitted[tuple[ExportResult, ...]] = None

    def __post_init__(self) -> None:
        if self.chosen not in [variant.name for variant in self.variants]:
            raise ValueError("the chosen variant is not among the variants")

    @property
    def chosen_variant(self) -> CompressedVariant:
        return next(variant for variant in self.variants if variant.name == self.chosen)


@dataclass(frozen=True, kw_only=True)
class ImageQuality(Record):
    """Quality on held-out images and size of an image classifier.

    Attributes:
        loss: nats per image.
        bytes: of the weights, or of an exported file.
        agreement: fraction of the images with the original model's top class; None for the original model.
    """

    accuracy: float
    loss: float
    parameters: int
    bytes: int
    agreement: Omitted[float] = None


@dataclass(frozen=True, kw_only=True)
class ImageFigures(ImageQuality):
    """Quality, size and time per image of an image classifier."""

    milliseconds: float


@dataclass(frozen=True)
class LogitDifference:
    """Scores of an exported image classifier compared with those of its model: see `export.verify.Difference`."""

    largest: float
    mean: float
    scale: float
    agreement: float
    images: int


@dataclass(frozen=True, kw_only=True)
class ImageStep(Record):
    """A step of a chain over an image classifier.

    Attributes:
        path: folder that it wrote.
        logits: of an export.
    """

    name: str
    method: str
    settings: Mapping[str, Any]
    path: str
    what: str
    logits: Omitted[LogitDifference] = None
    after: ImageFigures


@dataclass(frozen=True, kw_only=True)
class ImageResult:
    """Steps of a chain over an image classifier, compared with the original one.

    Attributes:
        path: folder of the last step.
        data: description of the images.
    """

    path: str
    source: str
    data: str
    before: ImageFigures
    variants: tuple[ImageStep, ...]
