"""Evaluation results, their comparison, their values with intervals, and their records with all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from preheat.core.run_records import (
    Estimate,
    PartEstimate,
    ResultDifference,
    ResultFigures,
    StoredMetric,
    StoredPart,
    StoredResult,
)
from preheat.evaluation.bootstrap import KINDS, Metric, compute_difference, compute_interval

__all__ = [
    "Part",
    "Result",
    "ResultSet",
    "is_comparable",
    "compare_results",
    "describe_result",
    "serialize",
    "deserialize",
]


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
        by_source: of a mixture, the mean loss of each source. It is not stored.
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
    by_source: Mapping[str, float] | None = None


class ResultSet(NamedTuple):
    """Results by the name of the text or task."""

    texts: dict[str, Result]
    tasks: dict[str, Result]


def describe_result(result: Result, *, seed: int = 0) -> ResultFigures:
    """Returns the values of a result with their intervals."""
    metrics = {
        name: _estimate(metric.value, compute_interval(metric, seed=seed)) for name, metric in result.metrics.items()
    }
    metrics |= {name: Estimate(value) for name, value in result.alone.items()}
    parts = [
        _estimate_part(part.subset, part.metric.value, compute_interval(part.metric, seed=seed))
        for part in result.parts
    ]
    return ResultFigures(
        rows=result.rows,
        tokens=result.tokens,
        truncated=result.truncated,
        no_room=result.no_room,
        unread_rows=result.unread_rows,
        metrics=metrics,
        parts=tuple(parts) or None,
    )


def compare_results(before: Result, after: Result, *, seed: int = 0) -> ResultDifference:
    """Returns after - before.

    If the rows differ (e.g. with another tokenizer), losses and perplexities per token are not comparable and left out.
    """
    # Equal rows in equal order: differences per row cancel their difficulty.
    paired = before.identity == after.identity and len(before.metrics) > 0
    metrics = {}
    for name, metric in after.metrics.items():
        # Per-token losses of different rows may be over different tokens, so their difference means nothing.
        if name in before.metrics and (paired or name not in ("loss", "perplexity")):
            metrics[name] = _estimate(*compute_difference(before.metrics[name], metric, paired=paired, seed=seed))
    for name, value in after.alone.items():
        if name in before.alone:
            metrics[name] = Estimate(value - before.alone[name])
    # Parts by their subset, since a task's lengths may have changed between the two.
    old = {tuple(part.subset.items()): part.metric for part in before.parts}
    parts = [
        _estimate_part(place, *compute_difference(old[tuple(place.items())], metric, seed=seed))
        for place, metric in after.parts
        if paired and tuple(place.items()) in old
    ]
    return ResultDifference(paired=paired, metrics=metrics, parts=tuple(parts) or None)


def _estimate(value: float, bounds: tuple[float, float] | None) -> Estimate:
    return Estimate(value, *(bounds or ()))


def _estimate_part(subset: Mapping[str, float], value: float, bounds: tuple[float, float] | None) -> PartEstimate:
    length, start, end = (int(subset[key]) if key in subset else None for key in ("length", "start", "end"))
    depth, share = subset.get("depth"), subset.get("share")
    low, high = bounds or (None, None)
    return PartEstimate(length=length, depth=depth, share=share, start=start, end=end, value=value, low=low, high=high)


def is_comparable(before: Result, after: Result | None) -> bool:
    """Returns True if two results can be `compare_results`: equal kinds of metrics, and equal shapes if the rows
    are equal."""
    same = after is not None and before.identity == after.identity

    def is_alike(old: Metric, new: Metric | None) -> bool:
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
    parts = all(is_alike(part.metric, places.get(tuple(part.subset.items()))) for part in before.parts)
    # A metric that only one of the two has is left out and does no harm.
    return parts and all(is_alike(metric, after.metrics.get(name)) for name, metric in before.metrics.items())


def serialize(result: Result) -> StoredResult:
    """Returns a result with its rows as a record; `deserialize` reads it back."""
    return StoredResult(
        rows=result.rows,
        identity=result.identity,
        tokens=result.tokens,
        truncated=result.truncated,
        no_room=result.no_room,
        unread_rows=result.unread_rows,
        alone=result.alone,
        metrics={name: _store_metric(metric) for name, metric in result.metrics.items()},
        parts=tuple(StoredPart(part.subset, _store_metric(part.metric)) for part in result.parts),
    )


def deserialize(stored: StoredResult) -> Result:
    """Returns the result that `serialize` recorded."""
    # The value and its interval are computed again from the rows; only `alone` has stored values.
    return Result(
        metrics={name: _load_metric(metric) for name, metric in stored.metrics.items()},
        rows=stored.rows,
        identity=stored.identity,
        tokens=stored.tokens,
        truncated=stored.truncated,
        no_room=stored.no_room,
        unread_rows=stored.unread_rows,
        alone=stored.alone,
        parts=[Part(part.place, _load_metric(part.metric)) for part in stored.parts],
    )


def _store_metric(metric: Metric) -> StoredMetric:
    return StoredMetric(metric.kind, metric.higher, metric.rows.tolist())


def _load_metric(stored: StoredMetric) -> Metric:
    return Metric(np.array(stored.rows, np.float64), stored.kind, stored.higher)
