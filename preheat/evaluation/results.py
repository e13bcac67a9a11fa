"""Evaluation results, their comparison, and their serialization as plain values with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from preheat.evaluation.bootstrap import KINDS, Metric, difference, interval

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["Part", "Result", "comparable", "compared", "described", "serialize", "deserialize"]


class Part(NamedTuple):
    """A metric over a subset of the rows or of their positions.

    Attributes:
        subset: the subset: {length, depth}, {length, share} or {start, end}.
    """

    subset: Mapping[str, float]
    metric: Metric


@dataclass(frozen=True)
class Result:
    """The result of one task or one text.

    Attributes:
        metrics: by name.
        rows: number of questions, or of rows of text.
        identity: digest of the rows; results with equal digests can be compared row by row.
        tokens: number of tokens of the loss; None for a task.
        truncated: number of contexts whose beginning was cut; for a text, examples whose end was cut.
        no_room: examples of a text that were left out: their prompt leaves no room for an answer.
        unread_rows: rows of a text that were not read.
        alone: metrics of which only the value is known, without an interval (e.g. aggregates of lm-eval).
        parts: the first metric by subset, or the metric that `preheat.evaluation.long_context` chooses.
    """

    metrics: Mapping[str, Metric]
    rows: int
    identity: str
    tokens: int | None = None
    truncated: int = 0
    no_room: int = 0
    unread_rows: int = 0
    alone: Mapping[str, float] = field(default_factory=dict)
    parts: Sequence[Part] = ()


def described(result: Result, *, seed: int = 0) -> JsonObject:
    """Returns a result as plain values.

    Returns:
        {rows, tokens, truncated, no_room, unread_rows, metrics: {name: {value, low, high}}}; low and high are None
        without an interval. If the result has parts, also parts: [{length, depth (or other keys of `Part.subset`),
        value, low, high}].
    """
    metrics = {name: _values(metric.value, interval(metric, seed=seed)) for name, metric in result.metrics.items()}
    metrics |= {name: _values(value, None) for name, value in result.alone.items()}
    summary = {
        "rows": result.rows,
        "tokens": result.tokens,
        "truncated": result.truncated,
        "no_room": result.no_room,
        "unread_rows": result.unread_rows,
        "metrics": metrics,
    }
    parts = [{**part.subset, **_values(part.metric.value, interval(part.metric, seed=seed))} for part in result.parts]
    return {**summary, "parts": parts} if parts else summary


def compared(before: Result, after: Result, *, seed: int = 0) -> JsonObject:
    """Returns {paired, metrics: {name: {value, low, high}}} of after - before.

    If the rows differ (e.g. with another tokenizer), losses and perplexities per token are not comparable and left out.
    """
    # Equal rows in equal order: differences per row cancel their difficulty.
    paired = before.identity == after.identity and len(before.metrics) > 0
    metrics = {}
    for name, metric in after.metrics.items():
        # Per-token losses of different rows may be over different tokens, so their difference means nothing.
        if name in before.metrics and (paired or name not in ("loss", "perplexity")):
            metrics[name] = _values(*difference(before.metrics[name], metric, paired=paired, seed=seed))
    for name, value in after.alone.items():
        if name in before.alone:
            metrics[name] = _values(value - before.alone[name], None)
    summary = {"paired": paired, "metrics": metrics}
    # Parts by their subset, since a task's lengths may have changed between the two.
    old = {tuple(part.subset.items()): part.metric for part in before.parts}
    parts = [
        {**place, **_values(*difference(old[tuple(place.items())], metric, seed=seed))}
        for place, metric in after.parts
        if paired and tuple(place.items()) in old
    ]
    return {**summary, "parts": parts} if parts else summary


def _values(value: float, bounds: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = bounds or (None, None)
    return {"value": value, "low": low, "high": high}


def comparable(before: Result, after: Result | None) -> bool:
    """Returns True if two results can be `compared`: equal kinds of metrics, and equal shapes if the rows are equal."""
    same = after is not None and before.identity == after.identity

    def alike(old: Metric, new: Metric | None) -> bool:
        # Rows are compared one by one only if they are equal; otherwise only the features must agree.
        shape = slice(None) if same else slice(1, None)
        return new is None or (old.kind == new.kind and old.rows.shape[shape] == new.rows.shape[shape])

    # Nothing to compare with: check that the stored metrics can be computed at all.
    if after is None:
        shapes = [
            (m.kind, m.rows.shape[1:]) for m in (*before.metrics.values(), *(part.metric for part in before.parts))
        ]
        return all(
            kind in KINDS and len(shape) == 1 and (kind == "macro_f1" or shape == (2,)) for kind, shape in shapes
        )
    places = {tuple(part.subset.items()): part.metric for part in after.parts}
    parts = all(alike(part.metric, places.get(tuple(part.subset.items()))) for part in before.parts)
    # A metric that only one of the two has is left out and does no harm.
    return parts and all(alike(metric, after.metrics.get(name)) for name, metric in before.metrics.items())


_LATER = ("no_room", "unread_rows")
"""Counts that older runs lack."""


def serialize(result: Result) -> JsonObject:
    """Serializes a result with its rows as plain values; `deserialize` reads it back."""

    def plain(metric: Metric) -> JsonObject:
        return {"kind": metric.kind, "higher": metric.higher, "rows": metric.rows.tolist()}

    metrics = {name: plain(metric) for name, metric in result.metrics.items()}
    parts = [{"place": dict(part.subset), "metric": plain(part.metric)} for part in result.parts]
    same = {key: getattr(result, key) for key in ("rows", "identity", "tokens", "truncated", *_LATER)}
    return {**same, "alone": dict(result.alone), "metrics": metrics, "parts": parts}


def deserialize(values: JsonObject) -> Result:
    """Reads a result that `serialize` wrote."""

    def metric(m: JsonObject) -> Metric:
        return Metric(np.array(m["rows"], np.float64), m["kind"], m["higher"])

    # The value and its interval are computed again from the rows; only `alone` has stored values.
    metrics = {name: metric(m) for name, m in values["metrics"].items()}
    parts = [Part(p["place"], metric(p["metric"])) for p in values.get("parts", ())]  # older runs have no parts
    # `to_json` writes null for NaN.
    alone = {name: math.nan if value is None else value for name, value in values["alone"].items()}
    same = {key: values[key] for key in ("rows", "identity", "tokens", "truncated")}
    later = {key: values.get(key, 0) for key in _LATER}
    return Result(metrics, parts=parts, alone=alone, **later, **same)
