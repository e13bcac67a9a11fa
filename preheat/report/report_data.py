"""Collects the figures of a report: the content of `report.json`, from which the page is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from preheat.core.json_types import JsonObject, Omitted, Record
from preheat.core.plan import Parameters, Plan
from preheat.core.run_records import (
    Baseline,
    BestScore,
    Environment,
    Evaluation,
    EvaluationMetrics,
    Event,
    Failed,
    Finished,
    MachineLoad,
    Measured,
    NewBest,
    Resumed,
    SampleEvent,
    SampleTexts,
    Started,
    StepMetrics,
    Stopping,
    Usage,
)
from preheat.core.slots import Change
from preheat.report.formatting import (
    count,
    format_duration,
    format_gib,
    format_grouped,
    format_headline,
    format_loss,
    format_percent,
    format_signed_percent,
    format_value,
    read_mapping,
    read_number,
    relative_error,
)
from preheat.run.reader import Reader

__all__ = [
    "Baselines",
    "Curves",
    "Differences",
    "MeasuredFigures",
    "Predictions",
    "RunFigures",
    "RunState",
    "Summary",
    "collect",
    "name_model",
]


@dataclass(frozen=True)
class RunState:
    """The state of a run by the events of its last session."""

    kind: Literal["finished", "stopped", "failed", "open"]
    message: str


@dataclass(frozen=True)
class Summary:
    """The outcome of a run. The end of the run says it, or its newest lines if the run has none.

    Attributes:
        seconds: of training, over all sessions.
        best: the best evaluation, if the recipe keeps the best checkpoint or stops early.
        reason: why the run is complete, as in the event `finished`.
        measured_session: number of the session that was measured last, from 1.
        model: section `model` of the recipe, as written.
        data: `data.source` of the recipe, as written.
    """

    steps: int | None
    skipped_steps: float | None
    steps_planned: int | None
    tokens: float | None
    seconds: float | None
    first_loss: float | None
    loss: float | None
    validation_loss: float | None
    best: BestScore | None
    reason: str | None
    sessions: int
    measured_session: int | None
    parameters: Parameters | None
    model: object
    data: object


@dataclass(frozen=True, kw_only=True)
class Predictions(Record):
    """The figures of the plan; None without a plan."""

    fits: bool | None = None
    peak_gib: float | None = None
    available_gib: float | None = None
    tokens_per_second: float | None = None
    seconds_per_step: float | None = None
    mfu: float | None = None
    flops_per_step: float | None = None
    seconds_total: float | None = None
    allocated_gib: Omitted[float] = None
    reserved_gib: Omitted[float] = None
    context_gib: Omitted[float] = None
    energy_kwh: Omitted[float] = None
    cost: Omitted[float] = None

    @classmethod
    def of(cls, plan: Plan | None) -> Predictions:
        """Returns the figures of a plan."""
        if plan is None:
            return cls()
        return cls(
            fits=plan.fits,
            peak_gib=plan.peak_gib,
            available_gib=plan.available_gib,
            tokens_per_second=plan.tokens_per_second,
            seconds_per_step=plan.seconds_per_step,
            mfu=plan.mfu,
            flops_per_step=plan.flops_per_step,
            seconds_total=plan.seconds_total,
            allocated_gib=plan.predicted.allocated_gib,
            reserved_gib=plan.predicted.reserved_gib,
            context_gib=plan.predicted.context_gib,
            energy_kwh=plan.predicted.energy_kwh,
            cost=plan.predicted.cost,
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredFigures(Record):
    """The figures of the event `measured` that a plan predicts, and how busy the machine was."""

    peak_gib: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    mfu: float | None
    allocated_gib: Omitted[float] = None
    reserved_gib: Omitted[float] = None
    context_gib: Omitted[float] = None
    machine: Omitted[MachineLoad] = None


@dataclass(frozen=True)
class Baselines(Record):
    """Losses of simple models on the validation rows, in nats a token; `vocabulary` is the number of tokens."""

    vocabulary: Omitted[int]
    unigram: Omitted[float]
    bigram: Omitted[float]


@dataclass(frozen=True)
class Differences:
    """predicted / measured - 1 of every figure that has both; of energy and cost once the run has finished."""

    peak_gib: float | None
    allocated_gib: float | None
    reserved_gib: float | None
    context_gib: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    mfu: float | None
    energy_kwh: float | None = None
    cost: float | None = None


@dataclass(frozen=True)
class Curves:
    """The columns of `StepMetrics` over the steps."""

    step: Sequence[int]
    tokens: Sequence[float | None]
    loss: Sequence[float | None]
    lr: Sequence[float | None]
    gradient_norm: Sequence[float | None]
    seconds: Sequence[float | None]
    tokens_per_second: Sequence[float | None]
    memory: Sequence[float | None]
    elapsed: Sequence[float | None]
    length: Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """The figures of a run: the content of `report.json`.

    Attributes:
        setup: (label, value) of the recipe's main settings.
        losses_by_source: of a mixture: source -> (step, training loss) of the steps that have a token of it.
        expert_loads: [step, load of each layer].
        not_finite: steps whose loss or gradient was not finite.
        usage: device-hours, energy and cost of all sessions so far; None if they are not recorded.
        memory, phases: predicted GiB at the peak by category, and the peak of each phase.
        events: those that have no section of their own.
        recipe: as text.
        damaged: what was left out of the run's files.
        again: the command that repeats the run.
    """

    title: str
    run: str
    state: RunState
    setup: Sequence[tuple[str, str]]
    summary: Summary
    predicted: Predictions
    measured: MeasuredFigures
    usage: Usage | None
    curves: Curves
    losses_by_source: Mapping[str, Sequence[tuple[int, float]]]
    expert_loads: Sequence[tuple[int, Sequence[float]]]
    not_finite: Sequence[int]
    evaluations: Sequence[EvaluationMetrics]
    evaluation: Evaluation
    baseline: Baselines | None
    memory: Mapping[str, float] | None
    phases: Mapping[str, float] | None
    changes: Mapping[str, Sequence[Change]]
    samples: Sequence[SampleTexts]
    events: Sequence[Event]
    environment: Environment
    recipe: str
    damaged: Sequence[str]
    again: str
    difference: Differences
    verdict: str


def collect(path: str | Path, *, with_curves: bool = True, largest: int | None = None) -> RunFigures:
    """Reads a run and computes the figures of its report. Losses that are not finite are NaN.

    Args:
        with_curves: reads the metrics of all steps and evaluations. Without them, which a long run has a million of,
            figures that follow from them are empty, and the usage is that of the newest sample.
        largest: see `Reader`.

    Raises:
        RunError: the folder holds no run. Damaged files of a run are skipped and listed in `damaged`.
    """
    import shlex

    run = Reader(path, largest=largest)
    plan, environment, evaluation, changes = run.plan, run.environment, run.evaluation, run.changes
    events, samples = run.events(), run.samples()
    metrics, evaluations = (run.metrics(), run.evaluations()) if with_curves else ([], [])
    recipe, recipe_text = run.read_raw_recipe()
    predicted, measured = Predictions.of(plan), _build_measured(events)
    state = _find_state(events, metrics, plan)
    usage = run.usage() if with_curves else next((s.usage for s in reversed(run.newest_system()) if s.usage), None)
    # Energy and cost are predicted for the whole run.
    difference = _compute_differences(predicted, measured, usage if state.kind == "finished" else None)
    event = next((event for event in reversed(events) if isinstance(event, Baseline)), None)
    baseline = Baselines(event.vocabulary, event.unigram, event.bigram) if event else None
    summary = _build_summary(recipe, plan, metrics, evaluations, events)
    return RunFigures(
        title=format_headline(recipe.get("name") or run.path.resolve().name),
        run=str(path),
        state=state,
        setup=_collect_setup(recipe, plan, environment, run.data.counts or {}),
        summary=summary,
        predicted=predicted,
        measured=measured,
        usage=usage,
        curves=Curves(**{name: [getattr(line, name) for line in metrics] for name in Curves.__dataclass_fields__}),
        losses_by_source=_collect_losses_by_source(metrics),
        expert_loads=_collect_expert_loads(metrics),
        not_finite=[line.step for line in metrics if _is_not_finite(line)],
        evaluations=evaluations,
        evaluation=evaluation,
        baseline=baseline,
        memory=plan.memory if plan else None,
        phases=plan.phases if plan else None,
        changes=changes,
        samples=samples,
        # Samples and baselines have sections of their own.
        events=[event for event in events if not isinstance(event, SampleEvent | Baseline)],
        environment=environment,
        recipe=recipe_text,
        damaged=run.damage_notes,
        again=(
            f"preheat train {shlex.quote(str(run.path / 'recipe.yaml'))} --out {shlex.quote(str(run.path) + '-again')}"
        ),
        difference=difference,
        verdict=_write_verdict(summary, predicted, measured, difference, baseline),
    )


def _build_summary(
    recipe: JsonObject,
    plan: Plan | None,
    metrics: Sequence[StepMetrics],
    evaluations: Sequence[EvaluationMetrics],
    events: Sequence[Event],
) -> Summary:
    last = metrics[-1] if metrics else StepMetrics(0)
    end = next((event for event in reversed(events) if isinstance(event, Finished)), Finished())
    # If the run continued after `finished`, that event describes an earlier session: ignore it.
    if end.steps is not None and metrics and end.steps != last.step:
        end = Finished()
    # The newest evaluation, for runs that have not finished.
    evaluated = evaluations[-1].validation_loss if evaluations else None
    # A resumed run may have several measurements: of the last one, the session that it belongs to.
    at = max((n for n, event in enumerate(events) if isinstance(event, Measured)), default=-1)
    return Summary(
        steps=last.step if end.steps is None and metrics else end.steps,
        skipped_steps=last.skipped_steps,
        steps_planned=plan.steps if plan else None,
        tokens=last.tokens if end.tokens is None else end.tokens,
        seconds=last.elapsed if end.seconds is None else end.seconds,
        first_loss=metrics[0].loss if metrics else None,
        loss=last.loss if end.loss is None else end.loss,
        validation_loss=evaluated if end.validation_loss is None else end.validation_loss,
        best=_best(events, last.step),
        reason=end.reason,
        sessions=_count_sessions(events),
        measured_session=_count_sessions(events[: at + 1]) or None,
        parameters=plan.parameters if plan else None,
        model=recipe.get("model"),
        data=read_mapping(recipe.get("data")).get("source"),
    )


def _best(events: Sequence[Event], step: int) -> BestScore | None:
    """Returns the best evaluation up to a step. A resumed run records it again if it went back to an earlier one."""
    found = next((event for event in reversed(events) if isinstance(event, NewBest)), None)
    return BestScore(found.step, found.value, found.score) if found is not None and found.step <= step else None


def _count_sessions(events: Iterable[Event]) -> int:
    return sum(isinstance(event, Started | Resumed) for event in events)


def _build_measured(events: Sequence[Event]) -> MeasuredFigures:
    """Returns the figures of the last measurement."""
    event = next((event for event in reversed(events) if isinstance(event, Measured)), Measured())
    return MeasuredFigures(**{name: getattr(event, name) for name in MeasuredFigures.__dataclass_fields__})


def _compute_differences(predicted: Predictions, measured: MeasuredFigures, usage: Usage | None) -> Differences:
    figures = {**vars(measured), **(vars(usage) if usage else {})}
    return Differences(
        **{
            name: relative_error(getattr(predicted, name), figures.get(name))
            for name in Differences.__dataclass_fields__
        }
    )


def _collect_setup(
    recipe: JsonObject, plan: Plan | None, environment: Environment, counts: JsonObject
) -> list[tuple[str, str]]:
    """Returns (label, value) pairs of the recipe for the head of the page; settings that it lacks are left out."""
    model, data, batch, optimizer, schedule, stop, techniques = (
        read_mapping(recipe.get(key))
        for key in ("model", "data", "batch", "optimizer", "schedule", "stop", "techniques")
    )
    size, length, rate = (
        read_number(batch.get("size")),
        read_number(batch.get("seq_len")),
        read_number(optimizer.get("lr")),
    )
    micro = read_number(read_mapping(techniques.get("gradient_accumulation")).get("steps"))
    per_step = f"{size:,.0f} sequences" + (f", {size * length:,.0f} tokens" if length else "") if size else None
    if per_step and micro and micro > 1:
        per_step += f", in {micro:,.0f} micro-batches"
    steps = plan.steps if plan else None
    limits = [
        f"stop.{key} {format_value(limit)}" for key, limit in stop.items() if limit is not None and key != "max_steps"
    ]
    planned = (
        [f"{steps:,.0f}"] if steps else [format_value(stop["max_steps"])] if stop.get("max_steps") else []
    ) + limits
    warmup = read_number(schedule.get("warmup_ratio"))
    curve = str(schedule.get("kind") or "") + (
        f" after {format_percent(warmup)} warm-up" if warmup and warmup < 1 else ""
    )
    held_out = read_number(data.get("validation"))
    setup = {
        "Model": name_model(model),
        "Data": _describe_sources(data["source"])
        + (f", {format_percent(held_out)} held out" if held_out and held_out < 1 else "")
        if data.get("source")
        else None,
        "Rows": _describe_rows(counts),
        "Batch of a step": per_step,
        "Sequence length": f"{length:,.0f} tokens" if length else None,
        "Learning rate": f"{rate:g}" + (f", {curve}" if curve else "") if rate is not None else None,
        "Steps": ", ".join(planned) or None,
        "Seed": format_value(recipe["seed"]) if recipe.get("seed") is not None else None,
        "Techniques": ", ".join(map(str, techniques)) or "none",
        "Device": _name_device(environment),
    }
    return [(what, text) for what, text in setup.items() if text]


def _describe_rows(counts: JsonObject) -> str | None:
    """Returns the rows that were read and left out, by reason; None if no row was left out."""
    read = read_number(counts.get("read"))
    dropped = {str(reason): read_number(count) for reason, count in read_mapping(counts.get("dropped")).items()}
    left_out = ", ".join(f"{count:,.0f} {reason}" for reason, count in dropped.items() if count)
    return f"{read:,.0f} read; left out: {left_out}" if read and left_out else None


def name_model(model: JsonObject) -> str | None:
    """Returns the name of the model: a checkpoint's path or preset, or family and size of a new model."""
    for key in ("path", "preset"):
        if model.get(key):
            return str(model[key]) + (", weights drawn at random" if model.get("weights") == "random" else "")
    layers, width = read_number(model.get("num_layers")), read_number(model.get("hidden_size"))
    if model.get("size"):
        return f"{model.get('family') or 'model'} of size {model['size']}"
    if layers and width:
        return f"{model.get('family') or 'model'}, {layers:,.0f} layers of width {width:,.0f}"
    return str(model["family"]) if model.get("family") else None


def _name_device(environment: Environment) -> str | None:
    name = (environment.machine and environment.machine.device) or environment.device
    parts = ((environment.processes, "process", "processes"), (environment.threads, "thread", "threads"))
    more = [f"{format_value(n)} {many if n != 1 else one}" for n, one, many in parts if n]
    return ", ".join([name, *more]) if name else None


def _collect_losses_by_source(metrics: Sequence[StepMetrics]) -> dict[str, list[tuple[int, float]]]:
    by_source: dict[str, list[tuple[int, float]]] = {}
    for line in metrics:
        for name, loss in (line.loss_by_source or {}).items():
            by_source.setdefault(name, []).append((line.step, loss))
    return by_source


def _collect_expert_loads(metrics: Sequence[StepMetrics]) -> list[tuple[int, Sequence[float]]]:
    """Returns the loads of the lines with as many layers as the first."""
    rows = [(line.step, line.expert_loads) for line in metrics if line.expert_loads]
    # A line with another number of layers is damaged, and the heat map needs a rectangle.
    return [row for row in rows if len(row[1]) == len(rows[0][1])]


def _is_not_finite(line: StepMetrics) -> bool:
    return any(real is not None and read_number(real) is None for real in (line.loss, line.gradient_norm))


def _find_state(events: Sequence[Event], metrics: Sequence[StepMetrics], plan: Plan | None) -> RunState:
    step = metrics[-1].step if metrics else 0
    planned = plan.steps if plan else None
    at = f"step {step:,}" + (f" of {planned:,.0f}" if planned else "")
    starts = [n for n, event in enumerate(events) if isinstance(event, Started | Resumed)]
    # The last session: the end of the one before no longer describes the run.
    session = list(reversed(events[starts[-1] :] if starts else events))
    if failed := next((event for event in session if isinstance(event, Failed)), None):
        return RunState(
            "failed", f"Failed at {at}" + (f": {failed.reason}" if failed.reason else ". No reason was recorded.")
        )
    if stopping := next((event for event in session if isinstance(event, Stopping)), None):
        signal = f" ({stopping.signal})." if stopping.signal else "."
        if planned and step >= planned:
            text = f"All {planned:,.0f} steps are done and saved. The run was stopped before its last figures{signal}"
            return RunState("stopped", text)
        return RunState("stopped", f"Stopped early at {at}{signal}")
    if any(isinstance(event, Finished) for event in session):
        return RunState("finished", f"Finished at {at}{_early(session)}.")
    if not events and not metrics:
        return RunState("open", "Not started: neither a step nor an event is recorded.")
    return RunState(
        "open", f"No end is recorded: the run is still running, or it was killed. Its newest figures are from {at}."
    )


def _early(session: Sequence[Event]) -> str:
    """Returns why the session ended before the planned number of steps."""
    end = next((event for event in session if isinstance(event, Finished)), Finished())
    if end.reason == "patience":
        return f", since {end.best.name if end.best else 'the score'} did not improve any more"
    return ", where it reached the target loss" if end.reason == "target_loss" else ""


def _write_verdict(
    summary: Summary,
    predicted: Predictions,
    measured: MeasuredFigures,
    difference: Differences,
    baseline: Baselines | None,
) -> str:
    """Returns a summary of the run in a few sentences."""
    parts = [f"{_describe_training(summary)}{_describe_length(summary)}", _describe_losses(summary, baseline)]
    if summary.best is not None:
        parts.append(
            f"The best {summary.best.name} is {format_loss(summary.best.value)}, at step {summary.best.step:,}."
        )
    for name, guess, real, off, show in (
        ("", read_number(predicted.peak_gib), read_number(measured.peak_gib), difference.peak_gib, format_gib),
        (
            " tokens/s",
            read_number(predicted.tokens_per_second),
            read_number(measured.tokens_per_second),
            difference.tokens_per_second,
            format_grouped,
        ),
    ):
        # Without both there is nothing to say.
        if guess is None and real is None:
            continue
        left = f"Predicted {show(guess)}{name}" if guess is not None else f"No prediction of{name or ' memory'}"
        right = f"measured {show(real)}" if real is not None else "not measured yet"
        parts.append(f"{left}, {right}" + (f" ({format_signed_percent(off)})" if off is not None else "") + ".")
    if measured.machine is not None and measured.machine.alone is False:
        others = read_number(measured.machine.other_cores)
        cores = "the cores" if others is None else f"on average {others:.1f} cores"
        parts.append(f"The speed was measured while other processes used {cores}, so it does not correct later plans.")
    if summary.sessions > 1 and summary.measured_session:
        parts.append(f"Measured in session {summary.measured_session} of {summary.sessions}.")
    return " ".join(filter(None, parts))


def _describe_training(summary: Summary) -> str:
    model, parameters = read_mapping(summary.model), summary.parameters
    name = Path(str(model["path"])).name if model.get("path") else str(model.get("family") or "model")
    if parameters is not None:
        name += f" of {count(parameters.total)} parameters"
        if parameters.trained < parameters.total:
            name += f" ({count(parameters.trained)} of them trained)"
    elif model.get("size"):
        name += f" of size {model['size']}"
    name = format_headline(name)
    return name[:1].upper() + name[1:] + (f" on {_describe_sources(summary.data)}" if summary.data else "")


def _describe_sources(data: object) -> str:
    """Returns the sources of `data.source`, a name or a list of names and of mappings with a `source`.

    >>> _describe_sources([{"source": "stdlib", "weight": 1}, "notes.txt"])
    'stdlib and notes.txt'
    """
    several = data if isinstance(data, list) else [data]
    return " and ".join(format_headline(entry.get("source") if isinstance(entry, dict) else entry) for entry in several)


def _describe_length(summary: Summary) -> str:
    steps = summary.steps
    # 0 or unknown.
    if not steps:
        return ": no step is recorded yet."
    text = f", trained for {steps:,} step{'s' if steps != 1 else ''}"
    if read_number(summary.tokens) is not None:
        text += f" ({count(summary.tokens)} tokens)"
    text += f" in {format_duration(summary.seconds)}." if read_number(summary.seconds) is not None else "."
    skipped = read_number(summary.skipped_steps)
    return text + (f" {skipped:,.0f} of the steps were skipped, as gradients overflowed in fp16." if skipped else "")


def _describe_losses(summary: Summary, baseline: Baselines | None) -> str:
    first, final, held_out = summary.first_loss, summary.loss, summary.validation_loss
    if final is None and held_out is None:
        return ""
    if final is None:
        return f"The validation loss is {format_loss(held_out)}."
    if read_number(first) is not None and read_number(final) is not None and first != final:
        text = f"The loss went from {format_loss(first)} to {format_loss(final)}"
    else:
        text = f"The loss is {format_loss(final)}"
    if held_out is None:
        return f"{text}."
    text += f"; the validation loss is {format_loss(held_out)}"
    # A model above the bigram's loss has learned little more than pairs of tokens.
    bigram, validation = read_number(baseline and baseline.bigram), read_number(held_out)
    if bigram is not None and validation is not None:
        text += f", {'below' if validation < bigram else 'not below'} the {format_loss(bigram)} of a bigram model"
    return text + "."
