"""Collects the figures of a report: the content of `report.json`, from which the page is drawn."""

from __future__ import annotations

import math
from pathlib import Path

from preheat.core.json_types import JsonObject
from preheat.core.plan import Plan
from preheat.files import strict
from preheat.report.formatting import (
    count,
    duration,
    gib,
    grouped,
    headline,
    loss,
    mapping,
    number,
    off_by,
    percent,
    signed_percent,
    value,
)
from preheat.run.layout import MEMORY_KEYS, METRIC_KEYS
from preheat.run.reader import Reader

__all__ = ["collect"]

_PREDICTED = (
    *("fits", "peak_gib", "available_gib", "tokens_per_second", "seconds_per_step", "mfu"),
    *("flops_per_step", "seconds_total"),
)
"""Fields of `Plan` that a report shows."""
NOT_IN_TIMELINE = ("sample", "baseline")  # events with sections of their own


def collect(path: str | Path) -> JsonObject:
    """Reads a run and computes the figures of its report.

    Returns:
        {title, run, state, verdict, setup: [(what, value)], summary, predicted, measured, difference, curves,
        expert_loads, not_finite, evaluations, evaluation, baseline, memory, phases, changes, samples, events,
        environment, recipe, damaged, again}. Missing values are None; losses that are not finite are NaN here and null
        in `report.json`.

    Raises:
        RunError: the folder holds no run. Damaged files of a run are skipped and listed in `damaged`.
    """
    import shlex

    run = Reader(path)
    plan, environment, changes = run.plan, run.environment, run.changes
    metrics, evaluations, events, samples = run.metrics(), run.evaluations(), run.events(), run.samples()
    evaluation = run.evaluation
    recipe, recipe_text = run.raw_recipe()
    # A damaged or foreign file may hold anything: enforce the types that the page relies on.
    recipe, environment, changes, evaluation = map(mapping, (recipe, environment, changes, evaluation))
    metrics, evaluations = ([m for m in lines if _is_step(m.get("step"))] for lines in (metrics, evaluations))
    events = [e for e in events if isinstance(e.get("kind"), str)]
    # The last measurement, and the session that it belongs to: a resumed run may have several.
    at = max((n for n, e in enumerate(events) if e["kind"] == "measured"), default=-1)
    measured: JsonObject = events[at] if at >= 0 else {}
    measured_in = sum(e["kind"] in ("started", "resumed") for e in events[: at + 1])
    last = metrics[-1] if metrics else {}
    finished: JsonObject = next((e for e in reversed(events) if e["kind"] == "finished"), {})
    # The newest evaluation, for runs that have not finished.
    evaluated = evaluations[-1] if evaluations else {}
    # If the run continued after `finished`, that event describes an earlier session: ignore it.
    went_on = "steps" in finished and "step" in last and finished["steps"] != last["step"]
    end = {} if went_on else finished

    figures: JsonObject = {
        "title": headline(recipe.get("name") or run.path.resolve().name),
        "run": str(path),
        "state": _state(events, metrics, plan),
        "setup": _setup(recipe, plan, environment),
        "summary": {
            "steps": end.get("steps", last.get("step")),
            "skipped_steps": last.get("skipped_steps"),
            "steps_planned": plan.steps if plan else None,
            "tokens": end.get("tokens", last.get("tokens")),
            "seconds": end.get("seconds", last.get("elapsed")),
            "first_loss": metrics[0].get("loss") if metrics else None,
            "loss": end.get("loss", last.get("loss")),
            "validation_loss": _first(end.get("validation_loss"), evaluated.get("validation_loss")),
            "sessions": sum(e["kind"] in ("started", "resumed") for e in events),
            "measured_session": measured_in or None,
            "parameters": strict(plan.parameters) if plan else None,
            "model": recipe.get("model"),
            "data": mapping(recipe.get("data")).get("source"),
        },
        "predicted": {key: getattr(plan, key, None) for key in _PREDICTED} | (plan.predicted.known() if plan else {}),
        "measured": {k: measured.get(k) for k in ("peak_gib", "tokens_per_second", "seconds_per_step", "mfu")}
        | {k: measured[k] for k in (*MEMORY_KEYS, "machine") if k in measured},
        "curves": {name: [line.get(name) for line in metrics] for name in METRIC_KEYS},
        "expert_loads": _expert_loads(metrics),
        "not_finite": [
            m["step"] for m in metrics if not math.isfinite(_real(m.get("loss"))) or _bad(m.get("gradient_norm"))
        ],
        "evaluations": evaluations,
        "evaluation": evaluation,
        "baseline": next(
            (
                {k: v for k, v in e.items() if k not in ("time", "kind")}
                for e in reversed(events)
                if e["kind"] == "baseline"
            ),
            None,
        ),
        "memory": plan.memory if plan else None,
        "phases": plan.phases if plan else None,
        "changes": changes,
        "samples": samples,
        "events": [e for e in events if e["kind"] not in NOT_IN_TIMELINE],
        "environment": environment,
        "recipe": recipe_text,
        "damaged": run.damage_notes,
        "again": (
            f"preheat train {shlex.quote(str(run.path / 'recipe.yaml'))} --out {shlex.quote(str(run.path) + '-again')}"
        ),
    }
    # predicted / measured - 1 for every figure that has both.
    predicted, real = figures["predicted"], figures["measured"]
    figures["difference"] = {
        k: off_by(predicted.get(k), real.get(k)) for k in (*MEMORY_KEYS, "tokens_per_second", "seconds_per_step", "mfu")
    }
    figures["verdict"] = _verdict(figures)
    return figures


def _setup(recipe: JsonObject, plan: Plan | None, environment: JsonObject) -> list[tuple[str, str]]:
    """Returns (label, value) pairs of the recipe for the head of the page; settings that it lacks are left out."""
    model, data, batch, optimizer, schedule, stop, techniques = (
        mapping(recipe.get(key)) for key in ("model", "data", "batch", "optimizer", "schedule", "stop", "techniques")
    )
    size, length, rate = number(batch.get("size")), number(batch.get("seq_len")), number(optimizer.get("lr"))
    micro = number(mapping(techniques.get("gradient_accumulation")).get("steps"))
    per_step = f"{size:,.0f} sequences" + (f", {size * length:,.0f} tokens" if length else "") if size else None
    if per_step and micro and micro > 1:
        per_step += f", in {micro:,.0f} micro-batches"
    steps = plan.steps if plan else None
    limits = [f"stop.{key} {value(limit)}" for key, limit in stop.items() if limit is not None and key != "max_steps"]
    planned = ([f"{steps:,.0f}"] if steps else [value(stop["max_steps"])] if stop.get("max_steps") else []) + limits
    warmup = number(schedule.get("warmup_ratio"))
    curve = str(schedule.get("kind") or "") + (f" after {percent(warmup)} warm-up" if warmup and warmup < 1 else "")
    held_out = number(data.get("validation"))
    setup = {
        "Model": _model(model),
        "Data": _sources(data["source"]) + (f", {percent(held_out)} held out" if held_out and held_out < 1 else "")
        if data.get("source")
        else None,
        "Batch of a step": per_step,
        "Sequence length": f"{length:,.0f} tokens" if length else None,
        "Learning rate": f"{rate:g}" + (f", {curve}" if curve else "") if rate is not None else None,
        "Steps": ", ".join(planned) or None,
        "Seed": value(recipe["seed"]) if recipe.get("seed") is not None else None,
        "Techniques": ", ".join(map(str, techniques)) or "none",
        "Device": _device(environment),
    }
    return [(what, text) for what, text in setup.items() if text]


def _model(model: JsonObject) -> str | None:
    """Returns the name of the model: a checkpoint's path or preset, or family and size of a new model."""
    for key in ("path", "preset"):
        if model.get(key):
            return str(model[key]) + (", weights drawn at random" if model.get("weights") == "random" else "")
    layers, width = number(model.get("num_layers")), number(model.get("hidden_size"))
    if model.get("size"):
        return f"{model.get('family') or 'model'} of size {model['size']}"
    if layers and width:
        return f"{model.get('family') or 'model'}, {layers:,.0f} layers of width {width:,.0f}"
    return str(model["family"]) if model.get("family") else None


def _device(environment: JsonObject) -> str | None:
    machine, processes, threads = (environment.get(key) for key in ("machine", "processes", "threads"))
    name = mapping(machine).get("device") or environment.get("device")
    more = [
        f"{value(n)} {what}{'s' if n != 1 else ''}" for n, what in ((processes, "process"), (threads, "thread")) if n
    ]
    return ", ".join([str(name), *more]).replace("processs", "processes") if name else None


def _expert_loads(metrics: list[JsonObject]) -> list[list[object]]:
    """Returns [step, load of each layer] of the lines with as many layers as the first."""
    rows = [
        [line["step"], loads]
        for line in metrics
        if isinstance(loads := line.get("expert_loads"), list) and loads and all(number(v) is not None for v in loads)
    ]
    # A line with another number of layers is damaged, and the heat map needs a rectangle.
    return [row for row in rows if len(row[1]) == len(rows[0][1])]


def _first(*values: object) -> object:
    return next((v for v in values if v is not None), None)


def _is_step(step: object) -> bool:
    return isinstance(step, int) and number(step) is not None


def _real(value: object) -> float:
    finite = number(value)
    return math.nan if finite is None else finite


def _bad(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _state(events: list[JsonObject], metrics: list[JsonObject], plan: Plan | None) -> dict[str, str]:
    """Returns the state of the run by the events of its last session: {kind: finished|stopped|failed|open, message}."""
    session: dict[str, JsonObject] = {}
    for event in events:
        # A new session: the end of the one before no longer describes the run.
        if event["kind"] in ("started", "resumed"):
            session = {}
        session[event["kind"]] = event
    step = metrics[-1]["step"] if metrics else 0
    planned = plan.steps if plan else None
    at = f"step {step:,}" + (f" of {planned:,.0f}" if planned else "")
    if "failed" in session:
        reasons = [
            str(v)
            for k, v in session["failed"].items()
            if k not in ("time", "kind", "step") and isinstance(v, str) and v
        ]
        return {
            "kind": "failed",
            "message": f"Failed at {at}" + (f": {reasons[0]}" if reasons else ". No reason was recorded."),
        }
    if "stopping" in session:
        why = session["stopping"].get("reason") or session["stopping"].get("signal")
        return {"kind": "stopped", "message": f"Stopped early at {at}" + (f" ({why})" if why else "") + "."}
    if "finished" in session:
        return {"kind": "finished", "message": f"Finished at {at}."}
    if not events and not metrics:
        return {"kind": "open", "message": "Not started: neither a step nor an event is recorded."}
    return {
        "kind": "open",
        "message": f"No end is recorded: the run is still running, or it was killed. Its newest figures are from {at}.",
    }


def _verdict(figures: JsonObject) -> str:
    """Returns a summary of the run in a few sentences."""
    summary, predicted, measured = figures["summary"], figures["predicted"], figures["measured"]
    parts = [f"{_what(summary)}{_length(summary)}", _losses(summary, figures["baseline"])]
    for name, key, show in (("memory", "peak_gib", gib), ("tokens/s", "tokens_per_second", grouped)):
        guess, real, off = number(predicted[key]), number(measured[key]), figures["difference"][key]
        # Without both there is nothing to say.
        if guess is None and real is None:
            continue
        unit = "" if key == "peak_gib" else f" {name}"
        left = f"Predicted {show(guess)}{unit}" if guess is not None else f"No prediction of {name}"
        right = f"measured {show(real)}" if real is not None else "not measured yet"
        parts.append(f"{left}, {right}" + (f" ({signed_percent(off)})" if off is not None else "") + ".")
    if mapping(measured.get("machine")).get("alone") is False:
        others = number(measured["machine"].get("other_cores"))
        cores = "" if others is None else f", on average {others:.1f} cores"
        parts.append(f"The speed was measured beside other work{cores}, so it does not correct later plans.")
    if summary["sessions"] > 1 and summary["measured_session"]:
        parts.append(f"Measured in session {summary['measured_session']} of {summary['sessions']}.")
    return " ".join(filter(None, parts))


def _what(summary: JsonObject) -> str:
    model, parameters = mapping(summary["model"]), mapping(summary["parameters"])
    name = Path(str(model["path"])).name if model.get("path") else str(model.get("family") or "model")
    total, trained = number(parameters.get("total")), number(parameters.get("trained"))
    if total is not None:
        name += f" of {count(total)} parameters"
        if trained is not None and trained < total:
            name += f" ({count(trained)} of them trained)"
    elif model.get("size"):
        name += f" of size {model['size']}"
    name = headline(name)
    return name[:1].upper() + name[1:] + (f" on {_sources(summary['data'])}" if summary["data"] else "")


def _sources(data: object) -> str:
    """Returns the sources of `data.source`, a name or a list of names and of mappings with a `source`.

    >>> _sources([{"source": "stdlib", "weight": 1}, "notes.txt"])
    'stdlib and notes.txt'
    """
    several = data if isinstance(data, list) else [data]
    return " and ".join(headline(entry.get("source") if isinstance(entry, dict) else entry) for entry in several)


def _length(summary: JsonObject) -> str:
    steps = number(summary["steps"])
    # 0 or unknown.
    if not steps:
        return ": no step is recorded yet."
    text = f", trained for {steps:,.0f} step{'s' if steps != 1 else ''}"
    if number(summary["tokens"]) is not None:
        text += f" ({count(summary['tokens'])} tokens)"
    text += f" in {duration(summary['seconds'])}." if number(summary["seconds"]) is not None else "."
    skipped = number(summary["skipped_steps"])
    return text + (f" {skipped:,.0f} of the steps were skipped, as gradients overflowed in fp16." if skipped else "")


def _losses(summary: JsonObject, baseline: JsonObject | None) -> str:
    first, final, held_out = summary["first_loss"], summary["loss"], summary["validation_loss"]
    if final is None and held_out is None:
        return ""
    if final is None:
        return f"The validation loss is {loss(held_out)}."
    if number(first) is not None and number(final) is not None and first != final:
        text = f"The loss went from {loss(first)} to {loss(final)}"
    else:
        text = f"The loss is {loss(final)}"
    if held_out is None:
        return f"{text}."
    text += f"; the validation loss is {loss(held_out)}"
    # A model above the bigram's loss has learned little more than pairs of tokens.
    bigram, validation = number((baseline or {}).get("bigram")), number(held_out)
    if bigram is not None and validation is not None:
        text += f", {'below' if validation < bigram else 'not below'} the {loss(bigram)} of a bigram model"
    return text + "."
