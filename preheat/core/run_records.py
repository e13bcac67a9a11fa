"""The records that a run folder holds, apart from the plan: settings of the session, results, events and metrics. No
torch.

A field is a key of the file, and the order of the fields is that of the keys: `files.to_json` writes a record, and
`run.reader` reads it. `run.layout` lists the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from preheat.core.device import MachineUse
from preheat.core.json_types import INLINE, OMITTED, JsonObject, Omitted, Record
from preheat.core.phases import Phase

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

__all__ = [
    "Baseline",
    "BestScore",
    "Checkpoint",
    "Damaged",
    "DataRecord",
    "DataSize",
    "Environment",
    "Estimate",
    "Evaluation",
    "EvaluationMetrics",
    "Event",
    "Failed",
    "Fallback",
    "Finished",
    "MachineLoad",
    "MachineRecord",
    "Measured",
    "MicroBatchSize",
    "NewBest",
    "Notice",
    "OtherEvent",
    "OutOfMemory",
    "Overflow",
    "Overflows",
    "PartEstimate",
    "ProcessStatus",
    "Prompt",
    "PutBack",
    "RankState",
    "ResultDifference",
    "ResultDifferences",
    "ResultFigures",
    "Results",
    "Resumed",
    "SampleEvent",
    "RemovedRows",
    "Rewound",
    "SampleTexts",
    "SetAside",
    "SkippedFallback",
    "Spike",
    "Started",
    "StepMetrics",
    "Stopping",
    "StoredMetric",
    "StoredPart",
    "StoredResult",
    "StoredResults",
    "SystemMetrics",
    "Unevaluated",
    "Unsaved",
    "Usage",
    "event_type",
]


class _NullIsNaN(Record):
    """Reads null as NaN, which JSON cannot express."""

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(
            lambda value: math.nan if value is None else value, core_schema.nullable_schema(handler(source))
        )


class _Check:
    """Metadata of a type: checks its values when they are read."""

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._check_value, handler(source))

    def _check_value(self, value: Any) -> object:
        raise NotImplementedError


@dataclass(frozen=True)
class _Below(_Check):
    """Requires a number from 0 to below a limit."""

    limit: float

    def _check_value(self, value: float) -> float:
        if not 0 <= value < self.limit:
            raise ValueError("out of range")
        return value


class _PhaseName:
    """Reads the name of a phase, those of earlier versions included."""

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._parse_phase, core_schema.str_schema())

    def _parse_phase(self, name: str) -> Phase:
        if (phase := Phase.of(name)) is None:
            raise ValueError("no phase of a run")
        return phase


class _SizesAreNumbers(_Check):
    """Requires numbers for the sizes of the training data."""

    def _check_value(self, counts: JsonObject) -> JsonObject:
        sizes = counts.get("train") or {}
        if not isinstance(sizes, Mapping) or not all(
            isinstance(sizes.get(key, 0), int | float) for key in ("documents", "tokens")
        ):
            raise ValueError("the sizes of the training data are no numbers")
        return counts


Real: TypeAlias = Annotated[float, _NullIsNaN()]
"""A number that is NaN if it was not finite."""
OmittedReal: TypeAlias = Annotated[float | None, _NullIsNaN(), OMITTED]
"""A number that is NaN if it was not finite; its key is left out of the file if it is None."""
Count: TypeAlias = Annotated[int, _Below(2**53)]
"""An integer that survives readers whose numbers are all floats, as in a browser."""
Time: TypeAlias = Annotated[float, _Below(253402300800)]
"""Seconds since 1970, before the year 10,000."""


# environment.json, data.json


@dataclass(frozen=True, kw_only=True)
class MachineRecord(Record):
    """The machine of a session.

    Attributes:
        device: name of the GPU or CPU.
    """

    device: Omitted[str] = None
    memory_gib: Omitted[float] = None
    cores: Omitted[int] = None
    system: Omitted[str] = None


@dataclass(frozen=True, kw_only=True)
class Environment(Record):
    """The environment of a session.

    Attributes:
        device: cpu or cuda.
        segments: on a GPU, those of torch's allocator: fixed or expandable.
        versions: package -> version.
        repeats: how exactly a second run repeats the losses.
    """

    command: Omitted[str] = None
    device: Omitted[str] = None
    segments: Omitted[str] = None
    threads: Omitted[int] = None
    machine: Omitted[MachineRecord] = None
    versions: Omitted[Mapping[str, str | None]] = None
    processes: Omitted[Count] = None
    repeats: Omitted[str] = None


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """The size of the training data."""

    documents: int | float
    tokens: int | float


@dataclass(frozen=True, kw_only=True)
class DataRecord(Record):
    """The data of a run.

    Attributes:
        layout: as the user reads it; `layout_kind` names the kind of examples.
        template: name of the chat template.
        classes: names of a classifier's classes.
        counts: of `data.preparation.PreparedData`.
        preflight: warnings of the checks.
        chat: whether samples are generated with the chat template.
    """

    source: str | list[str | JsonObject] = ""
    layout: str = ""
    layout_kind: str = ""
    layout_reason: str = ""
    template: str | None = None
    classes: tuple[str, ...] | None = ()
    counts: Annotated[JsonObject, _SizesAreNumbers()] | None = None
    preflight: tuple[str, ...] = ()
    fingerprint: str = ""
    chat: Omitted[bool] = None

    @property
    def trained_on(self) -> DataSize | None:
        """The size of the training data; None if it is not recorded, as for a stream."""
        sizes = (self.counts or {}).get("train") or {}
        if not {"documents", "tokens"} <= sizes.keys():
            return None
        return DataSize(documents=sizes["documents"], tokens=sizes["tokens"])


# evaluation.json, before.json


@dataclass(frozen=True)
class Estimate:
    """A metric with its interval; `low` and `high` are None without one."""

    value: Real = math.nan
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class PartEstimate(Record):
    """A metric over a subset of the rows or of their positions, with its interval.

    Attributes:
        length, depth, share: tokens of the context; the depth of what is asked, or the share that is read.
        start, end: range of positions.
    """

    length: Omitted[int] = None
    depth: Omitted[float] = None
    share: Omitted[float] = None
    start: Omitted[int] = None
    end: Omitted[int] = None
    value: Real
    low: float | None = None
    high: float | None = None

    @property
    def subset(self) -> frozenset[str]:
        """The keys that locate the part."""
        return frozenset(key for key in ("length", "depth", "share", "start", "end") if getattr(self, key) is not None)


_SUBSETS = (frozenset({"length", "depth"}), frozenset({"length", "share"}), frozenset({"start", "end"}))


@dataclass(frozen=True, kw_only=True)
class ResultFigures(Record):
    """The result of one task or one text; see `evaluation.results.Result` for the counts."""

    rows: int | None = None
    tokens: int | None = None
    truncated: int = 0
    no_room: int = 0
    unread_rows: int = 0
    metrics: Mapping[str, Estimate]
    parts: Omitted[tuple[PartEstimate, ...]] = None

    def __post_init__(self) -> None:
        _require_alike(self.parts or ())


@dataclass(frozen=True, kw_only=True)
class ResultDifference(Record):
    """The difference of two results, after - before.

    Attributes:
        paired: whether it was computed row by row, because both had the same rows.
    """

    paired: bool = True
    metrics: Mapping[str, Estimate]
    parts: Omitted[tuple[PartEstimate, ...]] = None

    def __post_init__(self) -> None:
        _require_alike(self.parts or ())


def _require_alike(parts: Sequence[PartEstimate]) -> None:
    if parts and not (parts[0].subset in _SUBSETS and all(part.subset == parts[0].subset for part in parts)):
        raise ValueError("the parts have no common subset")


@dataclass(frozen=True)
class Results:
    """Results by the name of the text or task."""

    texts: Mapping[str, ResultFigures] = field(default_factory=dict)
    tasks: Mapping[str, ResultFigures] = field(default_factory=dict)


@dataclass(frozen=True)
class ResultDifferences:
    """Differences by the name of the text or task."""

    texts: Mapping[str, ResultDifference] = field(default_factory=dict)
    tasks: Mapping[str, ResultDifference] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """The newest evaluation, after a step compared with the one before training."""

    step: Omitted[Count] = None
    after: Omitted[Results] = None
    before: Omitted[Results] = None
    difference: Omitted[ResultDifferences] = None


@dataclass(frozen=True)
class StoredMetric:
    """A metric with the summands of its rows; see `evaluation.bootstrap.Metric`."""

    kind: str
    higher: bool
    rows: list[list[Real]]

    def __post_init__(self) -> None:
        if len({len(row) for row in self.rows}) > 1:
            raise ValueError("the rows have several lengths")


@dataclass(frozen=True)
class StoredPart:
    """A metric of a subset of the rows; see `evaluation.results.Part`."""

    place: Mapping[str, int | float]
    metric: StoredMetric


@dataclass(frozen=True, kw_only=True)
class StoredResult:
    """A result with its rows, to be compared with later ones; see `evaluation.results.Result`."""

    rows: Count
    identity: str
    tokens: Count | None
    truncated: Count
    no_room: Count = 0
    unread_rows: Count = 0
    alone: Mapping[str, Real]
    metrics: Mapping[str, StoredMetric]
    parts: tuple[StoredPart, ...] = ()


@dataclass(frozen=True)
class StoredResults:
    """Results with their rows, by the name of the text or task."""

    texts: Mapping[str, StoredResult] = field(default_factory=dict)
    tasks: Mapping[str, StoredResult] = field(default_factory=dict)


# events.jsonl


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """An event of a run.

    Attributes:
        time: seconds since 1970; set when the event is written.
    """

    time: Omitted[Time] = None
    kind: str = field(default="", init=False)


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """A run begins."""

    kind: str = field(default="started", init=False)
    step: Omitted[Count] = None


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """A session resumes the run from a step."""

    kind: str = field(default="resumed", init=False)
    step: Count


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint is complete.

    Attributes:
        path: below the run's folder.
        wait_seconds: seconds that training waited for it.
        seconds: from its beginning until it was complete on disk.
    """

    kind: str = field(default="checkpoint", init=False)
    step: Count
    path: Omitted[str] = None
    wait_seconds: OmittedReal = None
    seconds: OmittedReal = None


@dataclass(frozen=True, kw_only=True)
class NewBest(Event):
    """An evaluation is the best so far.

    Attributes:
        score: name of the score.
    """

    kind: str = field(default="best", init=False)
    step: Count
    score: str
    value: Real


@dataclass(frozen=True, kw_only=True)
class SetAside(Event):
    """The run goes back to a checkpoint, and later ones are renamed.

    Attributes:
        step: the step from which the run continues.
        checkpoints: their names now.
    """

    kind: str = field(default="set_aside", init=False)
    step: Count
    checkpoints: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PutBack(Event):
    """The run could not continue from the earlier checkpoint, and the later ones were renamed back.

    Attributes:
        checkpoints: their names.
    """

    kind: str = field(default="put_back", init=False)
    checkpoints: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Damaged(Event):
    """A damaged checkpoint or file is passed over."""

    kind: str = field(default="damaged", init=False)
    checkpoint: Omitted[str] = None
    file: Omitted[str] = None
    problem: Omitted[str] = None


@dataclass(frozen=True, kw_only=True)
class Unsaved(Event):
    """A checkpoint is skipped, because it does not fit in memory."""

    kind: str = field(default="unsaved", init=False)
    step: Omitted[Count] = None
    reason: Omitted[str] = None


@dataclass(frozen=True, kw_only=True)
class Unevaluated(Event):
    """An evaluation is skipped, because it ended the run twice."""

    kind: str = field(default="unevaluated", init=False)
    step: Omitted[Count] = None


@dataclass(frozen=True, kw_only=True)
class Overflow(Event):
    """A step is skipped, because fp16 gradients overflowed."""

    kind: str = field(default="overflow", init=False)
    step: Omitted[Count] = None
    loss_scale: OmittedReal = None


@dataclass(frozen=True, kw_only=True)
class Overflows(Event):
    """Alarmingly many steps in a row were skipped."""

    kind: str = field(default="overflows", init=False)
    step: Omitted[Count] = None
    steps: Omitted[Count] = None
    loss_scale: OmittedReal = None


@dataclass(frozen=True, kw_only=True)
class Spike(Event):
    """The loss or the gradient norm is far above those of the steps before.

    Attributes:
        score: loss or gradient_norm.
        value: of the step; NaN if it is not finite.
        median: of the steps before.
        threshold: least value of a spike.
        rows: of the step's batch, in the order of training: from the first number up to, and without, the second.
    """

    kind: str = field(default="spike", init=False)
    step: Count
    score: str
    value: Real
    median: Real
    threshold: Real
    rows: tuple[Count, Count]


@dataclass(frozen=True, kw_only=True)
class Rewound(Event):
    """The run goes back to a checkpoint before a spike, and leaves out the batches from there to the spike.

    Attributes:
        step: of the checkpoint; 0: the run starts again.
        spike: step of the spike.
        rows: those left out, as in `Spike`.
    """

    kind: str = field(default="rewound", init=False)
    step: Count
    spike: Count
    rows: tuple[Count, Count]


@dataclass(frozen=True, kw_only=True)
class RemovedRows(Event):
    """The user leaves out rows of the training data, from this step on.

    Attributes:
        rows: as in `Spike`.
    """

    kind: str = field(default="removed_rows", init=False)
    step: Count
    rows: tuple[Count, Count]


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Event):
    """An out-of-memory error in numbers; it holds no tensors.

    Attributes:
        phase: phase of the step in which it happened.
        step: optimizer steps committed by then.
        rank: rank of the process.
        message: message of the error.
        requested: bytes of the allocation that failed; None: unknown.
        room: bytes available to the run without the imports: those held plus those requested; None: unknown.
        overhead: bytes that the plan counts apart from tensors; up to this many may not be in use yet and add to
            `room`.
        in_use: {parameters, gradients, optimizer, other: bytes} at that moment.
        allocator: counters of torch's CUDA allocator, in bytes.
    """

    kind: str = field(default="out_of_memory", init=False)
    phase: Annotated[Phase, _PhaseName()]
    step: Count
    rank: Count
    message: str
    requested: int | None
    room: int | None
    overhead: int
    in_use: Mapping[str, int]
    allocator: Mapping[str, int]


@dataclass(frozen=True)
class SkippedFallback:
    """A fallback that was not chosen, and why."""

    set: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Fallback(Event):
    """The run continues with settings that need less memory.

    Attributes:
        step: the step from which it applies.
        cause: phase that ran out of memory, or another reason.
        changed: the settings of this fallback.
        set: all settings that differ from the recipe as written.
        peak_gib, was_gib: planned peak with the fallback, and before it.
        skipped: fallbacks that were not chosen.
        seconds_per_step: planned, before and with the fallback.
    """

    kind: str = field(default="fallback", init=False)
    step: Count
    cause: Omitted[str] = None
    changed: tuple[str, ...]
    set: tuple[str, ...]
    peak_gib: OmittedReal = None
    was_gib: OmittedReal = None
    skipped: Omitted[tuple[SkippedFallback, ...]] = None
    seconds_per_step: Omitted[tuple[Real, Real]] = None


@dataclass(frozen=True, kw_only=True)
class Stopping(Event):
    """A signal ends the session."""

    kind: str = field(default="stopping", init=False)
    signal: Omitted[str] = None
    step: Omitted[Count] = None


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """A technique's notice to the user."""

    kind: str = field(default="notice", init=False)
    step: Omitted[Count] = None
    message: str


@dataclass(frozen=True, kw_only=True)
class MicroBatchSize(Event):
    """The number of rows in a micro-batch changes.

    Attributes:
        rows, was: rows from this step on, and before.
        why: the reason.
    """

    kind: str = field(default="micro_batch", init=False)
    step: Omitted[Count] = None
    rows: Omitted[int] = None
    was: Omitted[int] = None
    why: Omitted[str] = None


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """How busy the machine was during a session, as recorded; see `MachineUse`."""

    seconds: float | None = None
    own_cores: float | None = None
    other_cores: float | None = None
    cpus: int | None = None
    threads: int | None = None
    alone: bool | None = None

    @classmethod
    def of(cls, use: MachineUse) -> MachineLoad:
        return cls(**vars(use))


@dataclass(frozen=True, kw_only=True)
class Usage(Record):
    """Device-hours, energy and cost of a run so far, over all its sessions.

    Attributes:
        device_hours: hours of the sessions, each from when its model is built to its end, times their devices.
        energy_kwh: of the devices; None if it is unknown for a part of the run.
        energy_sources: of the sessions: nvml, rapl or data sheet, and the share of the devices that was measured.
        cost: in `currency`; None without a price.
        price_per_hour: of a device, in the last session.
    """

    device_hours: float
    energy_kwh: Omitted[float] = None
    energy_sources: Omitted[tuple[str, ...]] = None
    cost: Omitted[float] = None
    currency: Omitted[str] = None
    price_per_hour: Omitted[float] = None


@dataclass(frozen=True, kw_only=True)
class Measured(Event):
    """Memory and speed of a session, to compare with the plan.

    Attributes:
        peak_gib, allocated_gib, reserved_gib, context_gib: see `run.layout.MEMORY_KEYS`.
        tokens_per_second, seconds_per_step: of the median step.
        mfu: model FLOPs utilisation.
        spread: 10th and 90th percentile of the tokens per second.
        usage: of the run so far.
        counters: of techniques, such as recompilations.
    """

    kind: str = field(default="measured", init=False)
    peak_gib: OmittedReal = None
    allocated_gib: OmittedReal = None
    reserved_gib: OmittedReal = None
    context_gib: OmittedReal = None
    tokens_per_second: OmittedReal = None
    seconds_per_step: OmittedReal = None
    mfu: OmittedReal = None
    spread: Omitted[tuple[Real, Real]] = None
    machine: Omitted[MachineLoad] = None
    usage: Omitted[Usage] = None
    counters: Annotated[Mapping[str, int | float], INLINE] = field(default_factory=dict)


Prompt: TypeAlias = str | Sequence[Mapping[str, Any]] | None
"""A text, or the messages of a chat."""


@dataclass(frozen=True, kw_only=True)
class SampleEvent(Event):
    """A generated text; see `SampleTexts` for `expected`.

    Attributes:
        step: 0: before training.
        ended: why the text ends there.
    """

    kind: str = field(default="sample", init=False)
    step: Omitted[Count] = None
    prompt: Prompt
    text: Omitted[str] = None
    ended: Omitted[str] = None
    expected: Omitted[str] = None


@dataclass(frozen=True, kw_only=True)
class Baseline(Event):
    """Losses of simple models on the validation rows, in nats a token.

    Attributes:
        vocabulary: number of tokens.
    """

    kind: str = field(default="baseline", init=False)
    vocabulary: Omitted[int] = None
    unigram: OmittedReal = None
    bigram: OmittedReal = None


@dataclass(frozen=True)
class BestScore:
    """The best evaluation of a run: its step, and the score's value and name."""

    step: Count
    value: Real
    name: str


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The run is complete.

    Attributes:
        loss: of the last step.
        tokens, seconds: over all sessions; seconds of training only.
        skipped_steps: with fp16 loss scaling, steps that changed no weight.
        reason: length (the number of steps), hours, patience or target_loss.
        best: the best evaluation, if the recipe has one.
    """

    kind: str = field(default="finished", init=False)
    steps: Omitted[Count] = None
    loss: OmittedReal = None
    validation_loss: OmittedReal = None
    tokens: Omitted[int] = None
    seconds: OmittedReal = None
    skipped_steps: Omitted[int] = None
    reason: Omitted[str] = None
    best: Omitted[BestScore] = None


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The run ended with an error."""

    kind: str = field(default="failed", init=False)
    reason: Omitted[str] = None


@dataclass(frozen=True, kw_only=True)
class OtherEvent(Event):
    """An event of a technique from another package, or of a later version."""

    kind: str
    step: Omitted[Count] = None
    values: Annotated[JsonObject, INLINE] = field(default_factory=dict)


_EVENTS: dict[str, type[Event]] = {event.kind: event for event in Event.__subclasses__() if event is not OtherEvent}


def event_type(kind: str) -> type[Event]:
    """Returns the class of the events of a kind.

    Example:
        >>> event_type("finished").__name__, event_type("of a later version").__name__
        ('Finished', 'OtherEvent')
    """
    return _EVENTS.get(kind, OtherEvent)


@dataclass(frozen=True)
class SampleTexts(Record):
    """The last samples of a prompt; a missing text is None.

    Attributes:
        before: the text generated before the first step.
        expected: the answer of the validation row that the prompt comes from, if it comes from one.
    """

    prompt: Prompt
    before: str | None
    text: str | None
    expected: Omitted[str] = None


# metrics.jsonl


@dataclass(frozen=True, slots=True)
class StepMetrics(Record):
    """The metrics of a step.

    Attributes:
        step: steps committed, from 1; with fp16 loss scaling, skipped ones included.
        tokens: positions of all sequences so far, padding included.
        loss: mean loss of this step: a trained token in nats, or a pair, answer or document if the objective judges
            those.
        lr: learning rate of this step.
        gradient_norm: before clipping.
        seconds: wall-clock seconds of this step.
        tokens_per_second: of this step; counts positions, padding included, as plans and the MFU do.
        memory: bytes in use after this step (resident on a CPU, allocated on a GPU) less what the imports took.
        elapsed: seconds of training so far, over all sessions of the run.
        length: tokens in a sequence of this step.
        skipped_steps: with fp16 loss scaling, steps so far that changed no weight because gradients overflowed.
        loss_scale: with fp16 loss scaling, the scale after this step.
        loss_by_source: of a mixture, the mean loss of the tokens of each source that has one in this step.
        scores: scores of the objective, such as accuracy; counters of techniques, such as recompilations; for mixtures
            of experts, expert_load, experts_idle, expert_loads and balance_loss (engine/moe_aux_loss.py).
    """

    step: int
    tokens: Omitted[int | float] = None
    loss: Omitted[float] = None
    lr: Omitted[float] = None
    gradient_norm: Omitted[float] = None
    seconds: Omitted[float] = None
    tokens_per_second: Omitted[float] = None
    memory: Omitted[int | float] = None
    elapsed: Omitted[float] = None
    length: Omitted[int | float] = None
    skipped_steps: Omitted[int | float] = None
    loss_scale: Omitted[float] = None
    loss_by_source: Omitted[Mapping[str, float]] = None
    scores: Annotated[Mapping[str, float | Sequence[float]], INLINE] = field(default_factory=dict)

    @property
    def expert_loads(self) -> Sequence[float]:
        """The load of the busiest expert of each layer over the layer's mean; empty without experts."""
        loads = self.scores.get("expert_loads", ())
        return () if isinstance(loads, int | float) else loads


@dataclass(frozen=True, slots=True)
class EvaluationMetrics(Record):
    """The values of an evaluation, without their intervals.

    Attributes:
        tokens: those that the validation loss is averaged over.
        scores: validation_<name> of the objective.
        tasks: task -> metric -> value.
        validation_loss_by_source: of a mixture that is split into training and validation: source -> mean loss.
    """

    step: int
    validation_loss: Omitted[float] = None
    forgetting_loss: Omitted[float] = None
    tokens: Omitted[int | float] = None
    scores: Annotated[Mapping[str, float], INLINE] = field(default_factory=dict)
    tasks: Omitted[Mapping[str, Mapping[str, float]]] = None
    validation_loss_by_source: Omitted[Mapping[str, float]] = None


# system.jsonl


@dataclass(frozen=True, slots=True)
class SystemMetrics(Record):
    """The use of the run's process, its machine and its GPUs at a time (hardware/system_metrics.py).

    Attributes:
        time: seconds since 1970.
        step: steps committed by then.
        usage: of the run by then.
    """

    time: float
    step: int
    usage: Omitted[Usage] = None
    figures: Annotated[Mapping[str, float], INLINE] = field(default_factory=dict)


# status.json


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The activity of a rank.

    Attributes:
        step: the step in progress, from 1.
        phase: name of a `Phase`.
        since: time at which the phase began.
        time: of this record; an old one means that the process is stopped or its host is gone.
        line: file and line of preheat that its main thread is in; "" in a run of one process.
    """

    rank: Count
    step: Count
    phase: str
    since: Time
    time: Time
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class ProcessStatus(Record):
    """The process that writes a run, and the activity of all ranks.

    Attributes:
        time: of this record.
        host, pid: of the process.
        started: time at which the process started: another process may get the pid later.
        stopping: the signal that ends the session after the step.
        ranks: those that have published their state.
    """

    time: Time
    host: str
    pid: Count
    started: Time
    stopping: Omitted[str] = None
    ranks: tuple[RankState, ...] = ()
