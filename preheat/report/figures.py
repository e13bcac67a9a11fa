"""Everything that a report says, as data: what `report.json` holds and what the page is drawn from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from preheat.report.words import MISSING, count, duration, gib, grouped, loss, number, off_by, signed_percent
from preheat.run import METRIC_KEYS, Reader

__all__ = ["collect"]

NOT_IN_TIMELINE = ("sample", "baseline")  # they have places of their own


def collect(path: str | Path) -> dict[str, Any]:
    """Reads a run and works out the figures of its report.

    Returns:
        {title, run, state, verdict, summary, predicted, measured, difference, curves, expert_loads, not_finite, evaluations, evaluation,
        baseline, memory, phases, changes, samples, events, environment, recipe, damaged, again}. Values that the run
        does not hold are None; losses that were not finite are NaN here and null in `report.json` (see `strict`).

    Raises:
        RunError: no run lies there. Files of it that are damaged are left out, and named in `damaged`.
    """
    import shlex

    run = Reader(path)
    plan, environment, changes = run.plan, run.environment, run.changes
    metrics, evaluations, events, samples = run.metrics(), run.evaluations(), run.events(), run.samples()
    evaluation = run.evaluation
    recipe, recipe_text = run.recipe_shown()
    data = recipe.get("data")
    measured: dict[str, Any] = next((e for e in reversed(events) if e["kind"] == "measured"), {})
    last = metrics[-1] if metrics else {}
    finished: dict[str, Any] = next((e for e in reversed(events) if e["kind"] == "finished"), {})
    evaluated = evaluations[-1] if evaluations else {}
    # `finished` tells of an earlier session when the run went on after it.
    went_on = "steps" in finished and "step" in last and finished["steps"] != last["step"]
    end = {} if went_on else finished

    figures: dict[str, Any] = {
        "title": str(recipe.get("name") or run.path.resolve().name),
        "run": str(path),
        "state": _state(events, metrics, plan),
        "summary": {
            "steps": end.get("steps", last.get("step")),
            "steps_planned": plan.get("steps"),
            "tokens": end.get("tokens", last.get("tokens")),
            "seconds": end.get("seconds", last.get("elapsed")),
            "first_loss": metrics[0]["loss"] if metrics else None,
            "loss": end.get("loss", last.get("loss")),
            "validation_loss": _first(end.get("validation_loss"), evaluated.get("validation_loss")),
            "sessions": sum(e["kind"] in ("started", "resumed") for e in events),
            "parameters": plan.get("parameters"),
            "model": recipe.get("model"),
            "data": data.get("source") if isinstance(data, dict) else None,
        },
        "predicted": {
            k: plan.get(k)
            for k in (
                "fits",
                "peak_gib",
                "available_gib",
                "tokens_per_second",
                "seconds_per_step",
                "mfu",
                "flops_per_step",
                "seconds_total",
            )
        },
        "measured": {k: measured.get(k) for k in ("peak_gib", "tokens_per_second", "seconds_per_step", "mfu")},
        "curves": {name: [line.get(name) for line in metrics] for name in METRIC_KEYS},
        "expert_loads": _loads(metrics),
        "not_finite": [m["step"] for m in metrics if not math.isfinite(_real(m["loss"])) or _bad(m.get("gradient_norm"))],
        "evaluations": evaluations,
        "evaluation": evaluation,
        "baseline": next(
            ({k: v for k, v in e.items() if k not in ("time", "kind")} for e in reversed(events) if e["kind"] == "baseline"),
            None,
        ),
        "memory": plan.get("memory"),
        "phases": plan.get("phases"),
        "changes": changes,
        "samples": samples,
        "events": [e for e in events if e["kind"] not in NOT_IN_TIMELINE],
        "environment": environment,
        "recipe": recipe_text,
        "damaged": run.words,
        "again": f"preheat train {shlex.quote(str(run.path / 'recipe.yaml'))} --out {shlex.quote(str(run.path) + '-again')}",
    }
    predicted, real = figures["predicted"], figures["measured"]
    figures["difference"] = {
        k: off_by(predicted[k], real[k]) for k in ("peak_gib", "tokens_per_second", "seconds_per_step", "mfu")
    }
    figures["verdict"] = _verdict(figures)
    return figures


def _loads(metrics: list[dict[str, Any]]) -> list[list[Any]]:
    """[step, load of each layer], of the lines that tell of as many layers as the last one."""
    lines = [line for line in metrics if line.get("expert_loads")]
    return [[m["step"], m["expert_loads"]] for m in lines if len(m["expert_loads"]) == len(lines[-1]["expert_loads"])]


def _first(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def _real(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _bad(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _state(events: list[dict[str, Any]], metrics: list[dict[str, Any]], plan: dict[str, Any]) -> dict[str, str]:
    """How the run stands, by the events of its last session: {kind: finished|stopped|failed|open, words}."""
    session: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["kind"] in ("started", "resumed"):
            session = {}
        session[event["kind"]] = event
    step = metrics[-1]["step"] if metrics else 0
    planned = number(plan.get("steps"))
    at = f"step {step:,}" + (f" of {planned:,.0f}" if planned else "")
    if "failed" in session:
        told = [str(v) for k, v in session["failed"].items() if k not in ("time", "kind", "step") and isinstance(v, str) and v]
        return {"kind": "failed", "words": f"Failed at {at}" + (f": {told[0]}" if told else ". No reason was recorded.")}
    if "stopping" in session:
        why = session["stopping"].get("reason") or session["stopping"].get("signal")
        return {"kind": "stopped", "words": f"Stopped early at {at}" + (f" ({why})" if why else "") + "."}
    if "finished" in session:
        return {"kind": "finished", "words": f"Finished at {at}."}
    if not events and not metrics:
        return {"kind": "open", "words": "Not started: neither a step nor an event is recorded."}
    return {
        "kind": "open",
        "words": f"No end is recorded: the run is still going on, or it was killed. What follows stands at {at}.",
    }


def _verdict(figures: dict[str, Any]) -> str:
    """The run in a few sentences."""
    summary, predicted, measured = figures["summary"], figures["predicted"], figures["measured"]
    parts = [f"{_what(summary)}{_length(summary)}", _losses(summary, figures["baseline"])]
    for name, key, words in (("memory", "peak_gib", gib), ("tokens/s", "tokens_per_second", grouped)):
        guess, real, off = number(predicted[key]), number(measured[key]), figures["difference"][key]
        if guess is None and real is None:
            parts.append(f"Peak {name}: {MISSING}." if key == "peak_gib" else f"Rate in {name}: {MISSING}.")
            continue
        unit = "" if key == "peak_gib" else f" {name}"
        left = f"Predicted {words(guess)}{unit}" if guess is not None else f"No prediction of {name}"
        right = f"measured {words(real)}" if real is not None else "not measured yet"
        parts.append(f"{left}, {right}" + (f" ({signed_percent(off)})" if off is not None else "") + ".")
    return " ".join(parts)


def _what(summary: dict[str, Any]) -> str:
    model = summary["model"] if isinstance(summary["model"], dict) else {}
    parameters = summary["parameters"] if isinstance(summary["parameters"], dict) else {}
    name = Path(str(model["path"])).name if model.get("path") else str(model.get("family") or "model")
    total, trained = number(parameters.get("total")), number(parameters.get("trained"))
    if total is not None:
        name += f" of {count(total)} parameters"
        if trained is not None and trained < total:
            name += f" ({count(trained)} of them trained)"
    elif model.get("size"):
        name += f" of size {model['size']}"
    return name[:1].upper() + name[1:] + (f" on {_sources(summary['data'])}" if summary["data"] else "")


def _sources(data: Any) -> str:
    """What a run read, in words: `data.source` is a name, or a list of names and of mappings with one each.

    >>> _sources([{"source": "stdlib", "weight": 1}, "notes.txt"])
    'stdlib and notes.txt'
    """
    several = data if isinstance(data, list) else [data]
    return " and ".join(str(one.get("source") if isinstance(one, dict) else one) for one in several)


def _length(summary: dict[str, Any]) -> str:
    steps = number(summary["steps"])
    if not steps:
        return ": no step is recorded yet."
    words = f", trained for {steps:,.0f} step{'s' if steps != 1 else ''}"
    if number(summary["tokens"]) is not None:
        words += f" ({count(summary['tokens'])} tokens)"
    return words + (
        f" in {duration(summary['seconds'])}." if number(summary["seconds"]) is not None else f"; its time is {MISSING}."
    )


def _losses(summary: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    first, final, held_out = summary["first_loss"], summary["loss"], summary["validation_loss"]
    if final is None:
        words = f"Loss {MISSING}"
    elif number(first) is not None and number(final) is not None and first != final:
        words = f"The loss went from {loss(first)} to {loss(final)}"
    else:
        words = f"The loss is {loss(final)}"
    if held_out is None:
        return f"{words}; validation loss {MISSING}."
    words += f"; the validation loss is {loss(held_out)}"
    bigram, held = number((baseline or {}).get("bigram")), number(held_out)
    if bigram is not None and held is not None:
        words += f", {'below' if held < bigram else 'not below'} the {loss(bigram)} of a bigram model"
    return words + "."
