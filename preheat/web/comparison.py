"""Compares runs: their recipes key by key, their evaluations with intervals. Reads files as data only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from preheat.core.json_types import JsonObject
from preheat.core.run_records import Estimate, Evaluation, ResultFigures
from preheat.report.formatting import format_value
from preheat.run.reader import Reader
from preheat.sanitize import shorten
from preheat.web.limits import LARGEST_FILE

__all__ = ["Comparison", "KeyRow", "MetricRow", "compare_runs", "estimate_difference"]

_MISSING = "not set"


@dataclass(frozen=True)
class KeyRow:
    """A key of the recipes whose values differ, with the value of each run."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class MetricRow:
    """A metric of the newest evaluations.

    Attributes:
        result: name of the text or task, and of the metric.
        estimates: of each run; None: not evaluated.
        differences: from the first run; None for the first run, and if either was not evaluated.
        has_same_rows: False if the runs were evaluated on different numbers of rows or tokens.
    """

    result: str
    estimates: tuple[Estimate | None, ...]
    differences: tuple[Estimate | None, ...]
    has_same_rows: bool


@dataclass(frozen=True)
class Comparison:
    """The differences of runs.

    Attributes:
        same_keys: number of recipe keys with the same value in all runs.
        steps: step of each run's evaluation; None without one.
        problems: sentences on files that could not be read.
    """

    keys: tuple[KeyRow, ...]
    same_keys: int
    metrics: tuple[MetricRow, ...]
    steps: tuple[int | None, ...]
    problems: tuple[str, ...]


def compare_runs(folders: Sequence[Path], names: Sequence[str]) -> Comparison:
    """Reads recipes and evaluations of runs, and returns how the runs differ.

    Args:
        names: of the runs, for problems.

    Raises:
        RunError: a folder holds no run.
    """
    readers = [Reader(folder, largest=LARGEST_FILE) for folder in folders]
    recipes = [dict(_flatten(reader.read_raw_recipe()[0])) for reader in readers]
    evaluations = [reader.evaluation for reader in readers]
    problems = [f"{name}: {note}." for name, reader in zip(names, readers, strict=True) for note in reader.damage_notes]
    rows, same = _compare_recipes(recipes)
    steps = tuple(evaluation.step for evaluation in evaluations)
    return Comparison(rows, same, _compare_evaluations(evaluations), steps, tuple(problems))


def _flatten(values: JsonObject, above: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(value, dict):
            # An empty section has no keys to compare.
            yield from _flatten(value, path)
        else:
            yield path, value


def _compare_recipes(recipes: Sequence[dict[str, object]]) -> tuple[tuple[KeyRow, ...], int]:
    rows, same = [], 0
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    for key in keys:
        # Not by ==: 1 and True are equal, and so are an absent key and no value.
        values = [(key in recipe, repr(recipe.get(key))) for recipe in recipes]
        if len(set(values)) == 1:
            same += 1
            continue
        rows.append(KeyRow(key, tuple(_show(recipe[key]) if key in recipe else _MISSING for recipe in recipes)))
    return tuple(rows), same


def _show(value: object) -> str:
    if value is None or value in ("", []):
        # As in the file: `format_value` calls all of them "not recorded".
        return {"": '""', "[]": "[]"}.get(str(value), "null")
    return shorten(format_value(value), 400)


def _compare_evaluations(evaluations: Sequence[Evaluation]) -> tuple[MetricRow, ...]:
    results = [
        {**evaluation.after.texts, **evaluation.after.tasks} if evaluation.after else {} for evaluation in evaluations
    ]
    rows = []
    for name in dict.fromkeys(name for result in results for name in result):
        figures: list[ResultFigures | None] = [result.get(name) for result in results]
        sizes = {(result.rows, result.tokens) for result in figures if result is not None}
        for metric in dict.fromkeys(metric for result in figures if result is not None for metric in result.metrics):
            estimates = [result.metrics.get(metric) if result is not None else None for result in figures]
            first = estimates[0]
            differences = [
                estimate_difference(first, estimate) if first is not None and estimate is not None and n else None
                for n, estimate in enumerate(estimates)
            ]
            title = f"{name} {metric.replace('_', ' ')}"
            rows.append(MetricRow(title, tuple(estimates), tuple(differences), len(sizes) == 1))
    return tuple(rows)


def estimate_difference(first: Estimate, second: Estimate) -> Estimate:
    """Returns second - first with its interval; without an interval if either has none.

    The estimates count as independent, which is too wide if both were measured on the same rows. The interval of a
    difference from two intervals that need not be symmetric: Zou and Donner, Statistics in Medicine 27 (2008),
    equation 3.

    Example:
        >>> estimate_difference(Estimate(2.0, 1.7, 2.3), Estimate(1.5, 1.1, 1.9))
        Estimate(value=-0.5, low=-1.0, high=0.0)
    """
    value = second.value - first.value
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return Estimate(value)
    low = value - math.hypot(second.value - second.low, first.high - first.value)
    high = value + math.hypot(second.high - second.value, first.value - first.low)
    return Estimate(value, round(low, 12) + 0.0, round(high, 12) + 0.0)  # without a negative zero
