"""A plan: the predicted memory and speed of a recipe, the verdict on it, and what a search adds. No torch.

`planning` returns a `Plan`; commands, pages and run folders read it. Its JSON is what `preheat plan --json` prints and
`preheat plan --schema` describes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from preheat.core.config_reading import ConfigReading
from preheat.core.device import Device, MachineUse
from preheat.core.field_types import Numerics
from preheat.core.json_types import Omitted, Record

__all__ = [
    "Alternative",
    "Candidate",
    "Cost",
    "Energy",
    "HostLaunches",
    "Improvement",
    "Improvements",
    "Interval",
    "LargestValue",
    "LongestContext",
    "Parameters",
    "Plan",
    "PlanFigures",
    "Predicted",
    "Price",
    "Rejection",
    "RooflineFigure",
    "RooflinePoint",
    "Searched",
    "SpeedNow",
    "Startup",
    "StepSeconds",
    "Timeline",
    "Verdict",
]


class Verdict(StrEnum):
    """A plan's answer to the question if a run fits in memory."""

    FITS = "fits"
    TIGHT = "fits tightly"
    """The upper end of the interval of the peak exceeds the device's memory."""
    UNSAFE = "does not fit safely"
    """The memory that must be held is above `SAFE` of the device's: such a run may be tried, and a search avoids it."""
    NO = "does not fit"


SAFE = 0.97
"""Share of a device's memory above which a predicted peak runs out of memory in practice."""
SAFE_WITH_RETRIES = 0.95
"""The same of the peak without cached memory, if the allocator must release that in each step: the segments that it
cannot release need room, too."""
_NINE_IN_TEN = 1.6449  # standard deviations from the mean of a normal distribution to its 95th percentile


class Interval(NamedTuple):
    """Nine in ten measured values lie between these bounds."""

    low: float
    high: float

    @classmethod
    def from_spread(cls, value: float, factors: tuple[float, float]) -> Interval:
        return cls(value * factors[0], value * factors[1])


@dataclass(frozen=True)
class FasterSize:
    """A size of the model that a larger one would make faster.

    Attributes:
        key: of the recipe.
        better: the next multiple of 64.
        gain: by how much a step is faster at `better`: 0.1 is 10 %.
    """

    key: str
    size: int
    better: int
    gain: float


@dataclass(frozen=True)
class Parameters:
    """Numbers of weights; a 4-bit weight counts as one.

    Attributes:
        total: all; of a pipeline those of one stage.
        active: all but those of the experts that a token is not sent to.
        trained: those that the optimizer updates.
    """

    total: int
    active: int
    trained: int


@dataclass(frozen=True)
class SpeedNow:
    """The speed of a busy machine at present, next to the speed on an idle machine."""

    tokens_per_second: float
    seconds_per_step: float
    machine: MachineUse


@dataclass(frozen=True)
class HostLaunches:
    """The operators that a host launches in a step.

    Attributes:
        seconds_each: of Python, autograd and launch.
    """

    operators: int
    seconds_each: float


@dataclass(frozen=True)
class Price:
    """The price of a device-hour, in a currency."""

    per_hour: float
    currency: str


@dataclass(frozen=True)
class Cost:
    """Price of a run, in the currency of the price per device-hour.

    Attributes:
        hour: of all devices.
        million_tokens: of a million tokens.
        run: of the whole run; None if its length is unknown.
    """

    hour: float
    million_tokens: float
    run: float | None


@dataclass(frozen=True)
class Energy:
    """Upper bound of a run's energy in kWh, with the boards at full power and without hosts, network and cooling.

    Attributes:
        kilowatts: power of all devices.
        million_tokens: kWh of a million tokens.
        run: kWh of the whole run; None if its length is unknown.
    """

    kilowatts: float
    million_tokens: float
    run: float | None


@dataclass(frozen=True)
class Startup:
    """Techniques that delay the first step, compared with a plan without them (or with them, if the plan has none).

    Attributes:
        pays_from_steps: steps of a run from which on a run with them ends sooner; None: never.
    """

    techniques: tuple[str, ...]
    pays_from_steps: int | None


@dataclass(frozen=True)
class StepSeconds:
    """The predicted seconds of a step, split in two ways.

    Attributes:
        kinds: {kind of operator: seconds}, as in `core.operator_kinds`.
        gradients: forward and backward.
        update: clipping and the optimizer's step.
    """

    kinds: Mapping[str, float]
    gradients: float
    update: float


@dataclass(frozen=True)
class Alternative:
    """Another plan that fits and is better in something, or what would fit if the plan does not.

    Attributes:
        what: readable description of techniques and micro-batch, or of the options.
        recipe: `techniques` of its recipe.
        tradeoff: what it gives up.
        options: options of the command to type instead; empty: other techniques.
    """

    what: str
    recipe: Mapping[str, Any]
    peak_gib: float
    tokens_per_second: float
    seconds_per_step: float
    mfu: float
    tradeoff: str
    cost: Cost | None = None
    energy: Energy | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rejection:
    """Why a candidate was not chosen.

    Attributes:
        recipe: readable description of its settings.
    """

    recipe: str
    reason: str


@dataclass(frozen=True)
class Searched:
    """Extent of the search.

    Attributes:
        candidates: number of estimated candidates; 0: the recipe was planned as it is.
        confirmed: True if the best was dry-run with all its layers.
        interrupted: True if Ctrl-C ended the search early.
    """

    candidates: int = 0
    dry_runs: int = 0
    confirmed: bool = False
    interrupted: bool = False


@dataclass(frozen=True)
class LongestContext:
    """The longest sequences that fit.

    Attributes:
        length: tokens; 0 if not even the shortest fits.
        peak_gib: predicted peak at this length.
        limit: the reason why no longer sequence fits.
    """

    length: int
    peak_gib: float | None
    limit: str


@dataclass(frozen=True)
class Improvement:
    """One or more changes of another trainer's file, with the plan of its run after them.

    Attributes:
        kinds: of the changes: checkpointing, micro-batch, loss, kernels, packing, base, optimizer, sharding, attention.
        keys: {dotted key of the file: its value}; null: the key is taken out. Empty if the format is only read.
        ours: the same in the recipe's keys.
        speedup: times the speed of the run as it is, over the tokens that are no padding.
        numerics: largest change of the results, compared with the run as it is.
    """

    kinds: tuple[str, ...]
    keys: Mapping[str, Any]
    ours: tuple[str, ...]
    fits_safely: bool
    peak_gib: float
    tokens_per_second: float
    speedup: float
    numerics: Numerics


@dataclass(frozen=True)
class Improvements:
    """The changes of another trainer's file that help most: to be faster, or to fit.

    Attributes:
        singles: each change alone, the best first.
        together: those that help together; None if none helps.
        note: a change whose gain is not known; empty if there is none.
    """

    singles: tuple[Improvement, ...]
    together: Improvement | None
    note: str = ""


@dataclass(frozen=True)
class LargestValue:
    """The largest value of a key with which a plan fits safely; the plan is of this value.

    Attributes:
        key: of the recipe, or of another trainer's file.
        value: the largest that fits.
        next_value: the smallest value that is known not to fit; None: none was found.
        next_peak_gib: predicted peak with it; None if it is refused, or none was found.
        limit: the reason why no larger value fits.
        overrides: the recipe's settings that follow from the value, as after `--set`.
        line: the line of another trainer's file that sets the value; None for a key of the recipe.
    """

    key: str
    value: int | float
    next_value: int | float | None
    next_peak_gib: float | None
    limit: str
    overrides: tuple[str, ...]
    line: str | None = None


@dataclass(frozen=True)
class Predicted(Record):
    """The predictions of what a run measures; memory in GiB, of which a CPU has the peak only.

    Attributes:
        peak_gib: peak: resident on a CPU, reserved and the context on a GPU.
        allocated_gib: of it tensors, with cuBLAS's workspaces.
        reserved_gib: what torch's allocator has from the driver for them.
        context_gib: what the process holds in addition, by the driver (needs nvidia-ml-py to be measured).
        energy_kwh: of the whole run at most; None if its length or the device's power is unknown.
        cost: of the whole run; None without a length or a price.
    """

    peak_gib: float
    tokens_per_second: float
    allocated_gib: Omitted[float] = None
    reserved_gib: Omitted[float] = None
    context_gib: Omitted[float] = None
    energy_kwh: Omitted[float] = None
    cost: Omitted[float] = None

    def known(self) -> dict[str, float]:
        """Returns the predictions by name, without those that are None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Plan:
    """The predicted memory per device and speed of a recipe.

    Attributes:
        peak_gib: predicted peak memory, GiB, less what the imports take.
        peak_gib_interval: nine of ten measured peaks lay between.
        available_gib: memory of the device, less what was in use before the run.
        in_use_gib: memory in use before the run: on this machine's GPU by other processes, on its CPU by this one.
        allocator_retries: True if it fits only if a GPU's allocator frees cached memory in each step, which takes time.
        memory: {category: GiB} at the peak: parameters, gradients, optimizer, activations, temporary, overhead; with
            several devices also gathered weights and communication buffers, if any phase has them.
        overhead: {line: GiB} of memory["overhead"]: rounding, allocator, context, workspaces, process, code, packing,
            kernels, saving.
        overhead_sources: {line: where its figure is from}.
        allocated_gib: of the peak tensors alone.
        reserved_gib: tensors, and freed ones that the allocator keeps: on a GPU torch's max_memory_reserved less the
            workspaces.
        phases: {phase: GiB}, the peak of each: load, forward, head and loss, backward, update, saving, evaluation,
            generation (if there are samples).
        phase_memory: {phase: {category: GiB}} at the peak of each phase.
        export: {category: GiB} at the peak of `preheat export`, a command of its own; None for several devices.
        peak_phase: the one whose peak is the highest.
        seconds_per_step, tokens_per_second: predicted; on this machine's CPU for an idle machine.
        tokens_per_second_interval: nine of ten measured speeds lay between.
        mfu: predicted model FLOPs utilisation, of `matrix_rate`.
        matrix_rate: FLOP/s of the device's matmuls in the dtype that the recipe computes in.
        fp32_rate: FLOP/s of fp32 matmuls, if the recipe computes in bf16 and this device is slower in it.
        flops_per_step, model_flops_per_step: counted by the dry run, with and without recomputation.
        tokens_per_step: positions of a global batch.
        parameters: numbers of weights.
        steps: steps of the run; None if only time limits it, or if its epochs have unknown sequences.
        seconds_to_start: what the run takes once, before its first step: compiling, taken as a minute on a GPU.
        seconds_total: predicted time to finish; None: unknown.
        slots: {slot: technique that owns it}.
        packages: packages that the device needs for the planned kernels of recurrent layers.
        device: what is planned for.
        watts: of the device's board at most.
        contended: True if the machine was busy when its rates were measured, and is still.
        pace: how many times as long as by this machine's rates steps of earlier runs took, in the median of the last
            nine of 20 s and more: in the predicted seconds; 1 if fewer than three are known.
        now: speed at present, with what other processes use, if a probe found this machine's CPU more than 15 % slower
            than calibrated.
        heap: why preheat's heap, whose memory is predicted, does not work on this machine; None if it does.
        recipe: the planned recipe with every default.
        devices: number of devices.
        host: what the host launches, if it launches a GPU's operators more slowly than they run.
        split: the predicted seconds of a step by kind of operator; None in plans of earlier versions.
        faster_sizes: sizes of a new model that are slower than the next multiple of 64.
        doubt: how a GPU's calibration contradicts its data sheet, whose rates are then used, or, without a data sheet,
            itself.
        chosen: readable description of the techniques.
        numerics: largest change of numerics compared with the given recipe.
        cost, energy: of the run, if a price or the device's power is known.
        currency: of `cost`.
        startup: when techniques that delay the first step pay; None if no other plan can be compared.
        alternatives, rejected, searched: of the search.
        longest_context: for recipes that extend the context.
        largest_value: of `--solve`; None: nothing was solved for.
        improvements: of another trainer's file; None if it is not one, or was searched.
        settled: {technique.setting: value} that the recipe left `auto`.
        text_part: the sentence to print if only the text part of a checkpoint is planned.
        absent: `model.path` of the recipe, if it cannot be read here and its preset is planned.
        reading: how the recipe was read from another trainer's configuration; None if it was not.
        fits: True if the peak is at most what the device has.
        verdict: on the memory.
        chance: probability that the device holds the peak.

    Example:
        >>> from preheat import load_recipe, plan                       # doctest: +SKIP
        >>> plan(load_recipe("demo")).peak_gib                          # doctest: +SKIP
    """

    peak_gib: float
    peak_gib_interval: Interval
    available_gib: float
    in_use_gib: float
    allocator_retries: bool
    memory: Mapping[str, float]
    overhead: Mapping[str, float]
    overhead_sources: Mapping[str, str]
    allocated_gib: float
    reserved_gib: float
    phases: Mapping[str, float]
    phase_memory: Mapping[str, Mapping[str, float]]
    export: Mapping[str, float] | None
    peak_phase: str
    seconds_per_step: float
    tokens_per_second: float
    tokens_per_second_interval: Interval
    mfu: float
    matrix_rate: float
    fp32_rate: float | None
    flops_per_step: float
    model_flops_per_step: float
    tokens_per_step: int
    parameters: Parameters
    steps: int | None
    seconds_to_start: float
    seconds_total: float | None
    slots: Mapping[str, str]
    packages: tuple[str, ...]
    device: Device
    watts: float | None
    contended: bool
    pace: float
    now: SpeedNow | None
    heap: str | None
    devices: int = 1
    host: HostLaunches | None = None
    split: StepSeconds | None = None
    faster_sizes: tuple[FasterSize, ...] = ()
    doubt: str | None = None
    recipe: Mapping[str, Any] | None = None
    chosen: str = "the recipe as it is"
    numerics: Numerics = "exact"
    cost: Cost | None = None
    energy: Energy | None = None
    currency: str = "USD"
    startup: Startup | None = None
    alternatives: tuple[Alternative, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    searched: Searched = Searched()
    longest_context: LongestContext | None = None
    largest_value: LargestValue | None = None
    improvements: Improvements | None = None
    settled: Mapping[str, Any] = field(default_factory=dict)
    text_part: str | None = None
    absent: str | None = None
    reading: ConfigReading | None = None
    fits: bool = field(init=False)
    verdict: Verdict = field(init=False)
    chance: float = field(init=False)

    def __post_init__(self) -> None:
        # Only a damaged file has such an interval; without a width there is no chance to fit.
        if not self.peak_gib > 0 or not self.peak_gib_interval.low < self.peak_gib_interval.high:
            raise ValueError("the peak or its interval is empty")
        object.__setattr__(self, "fits", self.peak_gib <= self.available_gib)
        object.__setattr__(self, "verdict", self._decide_verdict())
        object.__setattr__(self, "chance", self._fit_probability())

    def _decide_verdict(self) -> Verdict:
        if not self.fits:
            return Verdict.NO
        if self._held_gib > (SAFE_WITH_RETRIES if self.allocator_retries else SAFE) * self.available_gib:
            return Verdict.UNSAFE
        return Verdict.TIGHT if self.is_tight else Verdict.FITS

    def _fit_probability(self) -> float:
        """Returns the chance by a normal distribution whose 5th and 95th percentiles are the ends of the interval."""
        low, high = (self._held_gib / self.peak_gib * end for end in self.peak_gib_interval)
        deviation = (high - low) / (2 * _NINE_IN_TEN)
        return (1 + math.erf((self.available_gib - (low + high) / 2) / (deviation * math.sqrt(2)))) / 2

    @property
    def _held_gib(self) -> float:
        """GiB that a device must hold: without the cached memory that torch releases before it fails."""
        return self.peak_gib - (self.overhead.get("allocator", 0.0) if self.allocator_retries else 0.0)

    @property
    def is_tight(self) -> bool:
        """True if the plan fits, but not the upper end of its interval."""
        return self.fits and self.peak_gib_interval.high > self.available_gib

    @property
    def has_room(self) -> bool:
        """True if the plan fits in 90 % of the memory: nine of ten plans are low by at most that margin."""
        return self.peak_gib <= 0.9 * self.available_gib

    @property
    def fits_safely(self) -> bool:
        """True if the plan fits, and not in the last few percent of the memory, where runs fail in practice."""
        return self.fits and self.verdict is not Verdict.UNSAFE

    @property
    def predicted(self) -> Predicted:
        """The predictions of what a run measures."""
        predicted = Predicted(
            self.peak_gib,
            self.tokens_per_second,
            energy_kwh=self.energy.run if self.energy else None,
            cost=self.cost.run if self.cost else None,
        )
        # Only a plan for a GPU has a context among the lines of its overhead.
        if "context" not in self.overhead:
            return predicted
        workspaces = self.overhead.get("workspaces", 0.0)  # torch's allocator also serves them
        return replace(
            predicted,
            allocated_gib=self.allocated_gib + workspaces,
            reserved_gib=self.reserved_gib + workspaces,
            context_gib=self.overhead["context"],
        )


@dataclass(frozen=True)
class Candidate:
    """A candidate of a search on a chart of memory and speed.

    Attributes:
        what: readable description of techniques and micro-batch.
        techniques: the same without the micro-batch.
        verdict: None: estimated, without a dry run.
        best: True for the chosen one.
        recipe: `techniques` of its recipe, if it was dry-run.
    """

    what: str
    techniques: str
    peak_gib: float
    tokens_per_second: float
    verdict: Verdict | None = None
    best: bool = False
    recipe: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """Memory of live tensors over the allocations of a step.

    Attributes:
        phases: (number of its first allocation, phase).
        bytes: (number of the allocation, GiB).
    """

    phases: tuple[tuple[int, str], ...]
    bytes: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RooflinePoint:
    """An operator under the roofline.

    Attributes:
        intensity: FLOPs per byte.
        flops: FLOP/s.
        share: of the time of all operators with FLOPs.
    """

    operator: str
    intensity: float
    flops: float
    share: float


@dataclass(frozen=True)
class RooflineFigure:
    """The operators of a step under the device's roofline.

    Attributes:
        peak: FLOP/s.
        bandwidth: bytes/s.
    """

    peak: float
    bandwidth: float
    points: tuple[RooflinePoint, ...]


@dataclass(frozen=True)
class PlanFigures:
    """The data of the plots on a plan's page.

    Attributes:
        guesses: estimated candidates.
        tried: dry-run candidates.
    """

    timeline: Timeline
    roofline: RooflineFigure
    guesses: tuple[Candidate, ...]
    tried: tuple[Candidate, ...]
