"""Results of `preheat bench`, `preheat bench --inference` and `preheat try`. No torch.

`bench` returns them; commands and pages read them. Their JSON is what these commands print with `--json` and write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preheat.core.json_types import Omitted, Record
from preheat.core.plan import Predicted

__all__ = [
    "BenchResult",
    "FailedRow",
    "InferenceMachine",
    "InferenceModel",
    "InferenceResult",
    "InferenceRow",
    "Machine",
    "MeasuredRow",
    "MeasuredTrialRow",
    "Spread",
    "TrialBatch",
    "TrialResult",
    "TrialRow",
    "TechniqueVerdict",
    "profile_folder",
]


def profile_folder(contender: str) -> str:
    """Returns the folder of a contender's profile, relative to that of `bench.json`.

    Example:
        >>> profile_folder("without lora")
        'profiles/without-lora'
    """
    return f"profiles/{re.sub('[^a-zA-Z0-9_-]+', '-', contender)}"


@dataclass(frozen=True)
class Machine:
    """The device on which a benchmark was measured."""

    name: str
    kind: str
    threads: int
    torch: str


@dataclass(frozen=True, kw_only=True)
class _Row(Record):
    """A contender of `preheat bench`.

    Attributes:
        failed: the reason why it did not run; empty if it ran.
        fits: False if the plan does not fit.
        predicted: by the plan; None if its techniques reject the recipe.
    """

    name: str
    techniques: tuple[str, ...]
    failed: str = ""
    fits: bool = True
    predicted: Predicted | None


@dataclass(frozen=True, kw_only=True)
class FailedRow(_Row):
    """A contender of `preheat bench` that did not run."""

    def __post_init__(self) -> None:
        if not self.failed:
            raise ValueError("the row has neither figures nor a reason why it failed")


@dataclass(frozen=True, kw_only=True)
class MeasuredRow(_Row):
    """A contender of `preheat bench` and its figures.

    Attributes:
        tokens_per_second: median of its turns.
        speeds: tokens per second of each turn.
        spread: lowest and highest of `speeds`.
        ratio: speed over that of the baseline, the median of the rounds.
        ratio_spread: lowest and highest ratio of a round.
        mfu: model FLOPs utilisation.
        peak_gib: highest of the turns; the parts of it are known on a GPU only.
        startup_seconds: from the start of the process to the end of the first step.
        loss: of the last step; None in files if it is not finite.
        gradient_cosine: of the first step's gradients with those of the baseline; None if no parameter is trained in
            both.
        changes: {technique: what it changed}.
        notices: what techniques reported about the run.
        finding: the largest gap between its profile and its plan, one sentence; None: it was not profiled.
    """

    tokens_per_second: float
    speeds: tuple[float, ...]
    spread: tuple[float, float]
    ratio: float
    ratio_spread: tuple[float, float]
    mfu: float | None
    peak_gib: float
    allocated_gib: Omitted[float] = None
    reserved_gib: Omitted[float] = None
    context_gib: Omitted[float] = None
    startup_seconds: float
    loss: float | None
    gradient_cosine: float | None
    changes: Mapping[str, tuple[str, ...]]
    notices: tuple[str, ...]
    finding: Omitted[str] = None


@dataclass(frozen=True)
class TechniqueVerdict:
    """The recipe with a technique, compared with the recipe without it.

    Attributes:
        speed: ratio with / without; None if one of the two failed.
        within_noise: None if a failure or a single turn of each allows no verdict.
        freed_gib: peak without it less the peak with it.
    """

    technique: str
    speed: float | None
    within_noise: bool | None
    freed_gib: float | None
    message: str


@dataclass(frozen=True)
class BenchResult:
    """The comparison of several recipes by `preheat bench`, in `bench.json`.

    Attributes:
        steps: of each turn.
        repeats: turns of each contender.
        available_gib: memory of the device; None in files if no contender could be planned.
        rows: the first is the baseline.
        recipe: the recipe with every default.
        notes: reasons of techniques that are slower than the baseline, and other processes that used the machine.
    """

    name: str
    machine: Machine
    steps: int
    repeats: int
    available_gib: float | None
    rows: tuple[MeasuredRow | FailedRow, ...]
    verdicts: tuple[TechniqueVerdict, ...]
    recipe: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("the result has no rows")

    @property
    def measured(self) -> dict[str, MeasuredRow]:
        """Rows of the contenders that ran, by name."""
        return {row.name: row for row in self.rows if isinstance(row, MeasuredRow)}


@dataclass(frozen=True)
class Spread:
    """The median, the lowest and the highest of repeated measurements."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class InferenceMachine:
    """The device on which generation was measured; memory in bytes."""

    kind: str
    name: str
    memory: int
    torch: str


@dataclass(frozen=True)
class InferenceModel:
    """A contender of `preheat bench --inference`. What a failed one did not come to is None.

    Attributes:
        name: name in tables.
        model: path of the model.
        engine: preheat or transformers.
        weights_bytes: size of the weights, tied ones once.
        dtype: of the first floating-point weight.
        loss: mean loss per token of the prompts' text, read through the cache; None in files if it is not finite.
        startup_seconds: from the start of the process until the model is open.
        beyond_weights_gib: peak of generation above the opened model; None if the system does not report it.
        failed: the reason why it did not run; empty if it ran.
    """

    name: str
    model: str
    engine: str
    parameters: int | None
    weights_bytes: int | None
    dtype: str | None
    loss: float | None
    startup_seconds: float | None
    beyond_weights_gib: float | None
    failed: str

    def __post_init__(self) -> None:
        if not self.failed and None in (self.parameters, self.weights_bytes, self.dtype, self.startup_seconds):
            raise ValueError("the model has neither figures nor a reason why it failed")


@dataclass(frozen=True)
class InferenceRow:
    """Figures of a contender of `preheat bench --inference` in one shape.

    Attributes:
        rows: rows of the batch.
        length: tokens of each prompt.
        ratio: decoding speed over that of the first contender.
        first_token_ratio: time to the first token over that of the first contender.
        tokens_per_pass: tokens of a row per forward pass.
        cache_predicted_bytes: by the planner's closed form.
        same_text: fraction of rows with the same tokens as the first contender.
    """

    name: str
    rows: int
    length: int
    first_token_seconds: Spread
    prefill_tokens_per_second: Spread
    decode_tokens_per_second: Spread
    ratio: Spread
    first_token_ratio: Spread
    tokens_per_pass: float
    cache_bytes: int
    cache_predicted_bytes: float
    same_text: float


@dataclass(frozen=True)
class InferenceResult:
    """The comparison of several models by `preheat bench --inference`, in `inference.json`.

    Attributes:
        batches: numbers of rows per batch.
        lengths: prompt lengths in tokens.
        tokens: tokens generated after each prompt.
        repeats: timed rounds.
    """

    machine: InferenceMachine
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int
    repeats: int
    models: tuple[InferenceModel, ...]
    rows: tuple[InferenceRow, ...]

    def __post_init__(self) -> None:
        if not (self.batches and self.lengths and self.models and self.rows):
            raise ValueError("the result has no models or no rows")


@dataclass(frozen=True, kw_only=True)
class TrialRow(Record):
    """A contender of `preheat try`, here one that was not run.

    Attributes:
        against: name of its baseline.
        not_run: the reason; empty if it ran.
        ratio: speed over that of the baseline; None if one of the two was not run.
        changes: {technique: what it changed}.
        notices: what techniques reported about the run.
    """

    name: str
    against: str
    predicted: Predicted | None
    not_run: str
    ratio: float | None = None
    changes: Omitted[Mapping[str, tuple[str, ...]]] = None
    notices: Omitted[tuple[str, ...]] = None


@dataclass(frozen=True, kw_only=True)
class MeasuredTrialRow(TrialRow):
    """A contender of `preheat try` and its figures.

    Attributes:
        loss: of the last step that all contenders took.
        gradient_cosine: as in `MeasuredRow`; None for several processes.
        optimizer_gib: largest optimizer state of a process; None if there is one process only.
    """

    tokens_per_second: float
    peak_gib: float
    allocated_gib: Omitted[float] = None
    reserved_gib: Omitted[float] = None
    context_gib: Omitted[float] = None
    loss: float
    gradient_cosine: float | None
    optimizer_gib: Omitted[float] = None


@dataclass(frozen=True)
class TrialBatch:
    """The batch of a trial."""

    rows: int
    length: int
    accumulation_steps: int | None


@dataclass(frozen=True)
class TrialResult:
    """The comparison of a technique with the baseline by `preheat try`.

    Attributes:
        model: readable description of the model.
        verdicts: summary of each comparison.
        notes: limits of this device.
        gpu: {contender: predicted peak of tensors on a GPU, GiB}.
    """

    technique: str
    model_size: str
    model: str
    batch: TrialBatch
    steps: int
    rows: tuple[TrialRow, ...]
    verdicts: tuple[str, ...]
    notes: tuple[str, ...]
    gpu: Mapping[str, float]
    seconds: float
