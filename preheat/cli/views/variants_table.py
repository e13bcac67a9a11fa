"""Tables of the variants of tasks: other prompts, or a curve over the number of few-shot examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from preheat.cli.views.estimate import format_estimate
from preheat.core.json_types import JsonObject

if TYPE_CHECKING:
    from rich.table import Table

    from preheat.evaluation.tasks import Task

__all__ = ["build_variants_tables"]

_BAR = 20
"""Characters of the longest bar."""


def build_variants_tables(groups: Sequence[Sequence[Task]], summary: JsonObject) -> Iterator[Table]:
    """Yields a table for each group: a bar of each variant's first metric, and its difference from the first variant.

    Args:
        groups: by `preheat.evaluation.variants.find_variants`.
        summary: as `preheat eval --json` prints it.
    """
    from rich.bar import Bar
    from rich.table import Table

    for group in groups:
        metric = next(iter(summary["tasks"][group[0].name]["metrics"]))
        values = [summary["tasks"][task.name]["metrics"][metric] for task in group]
        longest = max(value["value"] for value in values) or 1.0
        table = Table("", metric, "against the first", box=None, pad_edge=False)
        for task, value in zip(group, values, strict=True):
            difference = summary["variants"].get(task.name, {}).get("difference", {}).get("metrics", {}).get(metric)
            bar = Bar(longest, 0, value["value"], width=_BAR)
            table.add_row(task.name, bar, format_estimate(difference, signed=True))
        yield table
