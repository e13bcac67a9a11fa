"""What was measured, and two of it side by side, as plain values with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from preheat.evaluation.bootstrap import Metric, difference, interval

__all__ = ["Result", "compared", "described", "kept", "read_kept"]


@dataclass(frozen=True)
class Result:
    """Of one task or one text.

    Attributes:
        metrics: by name; of those without rows of their own only the value is known (lm-eval's own sums), see `alone`.
        rows: questions, or rows of text.
        identity: two results with equal ones are over the same rows, and can be compared row by row.
        tokens: that a loss was taken over; None for a task.
        truncated: contexts that lost their beginning.
        alone: metrics without an interval.
    """

    metrics: Mapping[str, Metric]
    rows: int
    identity: str
    tokens: int | None = None
    truncated: int = 0
    alone: Mapping[str, float] = field(default_factory=dict)


def described(result: Result, *, seed: int = 0) -> dict[str, Any]:
    """{rows, tokens, truncated, metrics: {name: {value, low, high}}}; low and high are None without an interval."""
    metrics = {name: _values(metric.value, interval(metric, seed=seed)) for name, metric in result.metrics.items()}
    metrics |= {name: _values(value, None) for name, value in result.alone.items()}
    return {"rows": result.rows, "tokens": result.tokens, "truncated": result.truncated, "metrics": metrics}


def compared(before: Result, after: Result, *, seed: int = 0) -> dict[str, Any]:
    """{paired, metrics: {name: {value, low, high}}} of after - before.

    Where the rows differ (another tokenizer cuts the text otherwise), a loss or a perplexity a token means two things and is left out.
    """
    paired = before.identity == after.identity and len(before.metrics) > 0
    metrics = {}
    for name, metric in after.metrics.items():
        if name in before.metrics and (paired or name not in ("loss", "perplexity")):
            metrics[name] = _values(*difference(before.metrics[name], metric, paired=paired, seed=seed))
    for name, value in after.alone.items():
        if name in before.alone:
            metrics[name] = _values(value - before.alone[name], None)
    return {"paired": paired, "metrics": metrics}


def _values(value: float, found: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = found or (None, None)
    return {"value": value, "low": low, "high": high}


def kept(result: Result) -> dict[str, Any]:
    """A result with its rows as plain values, to compare with later; `read_kept` reads it back."""
    metrics = {n: {"kind": m.kind, "higher": m.higher, "rows": m.rows.tolist()} for n, m in result.metrics.items()}
    same = {"rows": result.rows, "identity": result.identity, "tokens": result.tokens, "truncated": result.truncated}
    return {**same, "alone": dict(result.alone), "metrics": metrics}


def read_kept(values: Mapping[str, Any]) -> Result:
    """What `kept` made."""
    metrics = {n: Metric(np.array(m["rows"], np.float64), m["kind"], m["higher"]) for n, m in values["metrics"].items()}
    return Result(metrics, **{key: values[key] for key in ("rows", "identity", "tokens", "truncated", "alone")})
