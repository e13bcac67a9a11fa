"""Heat map of expert load, layer by layer, over the steps of a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from preheat.report.svg import NARROW, SENTINEL, render_plot, set_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["reduce_columns", "draw_heat_map", "draw_loads"]

_COLUMNS = 40  # of the heat map; longer runs are averaged


def reduce_columns(rows: Sequence[Sequence[float]], most: int = _COLUMNS) -> list[list[float]]:
    """Reduces rows to at most `most` columns by averaging neighbours.

    Example:
        >>> reduce_columns([[1.0, 3.0, 5.0, 5.0]], 2)
        [[2.0, 5.0]]
    """
    count = len(rows[0])
    columns = min(count, most)
    # Cuts as even as integers allow: neighbouring columns differ by one step at most.
    cuts = [n * count // columns for n in range(columns + 1)]
    return [[sum(row[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)] for row in rows]


def draw_heat_map(
    name: str,
    rows: Sequence[Sequence[float]],
    alt_text: str,
    *,
    low: float,
    high: float,
    x: tuple[float, float],
    labels: tuple[str, str],
) -> str:
    """Draws a heat map as an SVG element, rows from the top; `low` has the page's colour and `high` the full colour.

    Args:
        name: unique in the page.
        alt_text: description for screen readers.
        x: x values of the left and right edge.
        labels: of the axes, x and y.
    """

    def draw(axes: Axes) -> None:
        from matplotlib.collections import PolyCollection
        from matplotlib.colors import to_rgb

        width = (x[1] - x[0]) / len(rows[0])
        red, green, blue = to_rgb(SENTINEL["series-1"])
        # Polygons rather than an image: an image is a bitmap, whose colours CSS could not replace.
        boxes, colours = [], []
        for n, row in enumerate(rows):
            for column, value in enumerate(row):
                left = x[0] + column * width
                boxes.append([(left, n - 0.5), (left + width, n - 0.5), (left + width, n + 0.5), (left, n + 0.5)])
                share = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0
                # Load as opacity, so that the lowest load has the background of the page.
                colours.append((red, green, blue, round(share, 2)))
        axes.add_collection(
            PolyCollection(boxes, facecolors=colours, edgecolors="none", linewidths=0, antialiaseds=False)
        )
        axes.set_xlim(*x)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        set_ticks(axes.xaxis, integer=True)
        set_ticks(axes.yaxis, 6, integer=True)
        axes.set_xlabel(labels[0], loc="right", labelpad=2)
        axes.set_ylabel(labels[1])

    return render_plot(name, NARROW, alt_text, draw)


def draw_loads(records: Sequence[tuple[int, Sequence[float]]]) -> tuple[str, str]:
    """Draws the load of experts by layer over the steps; returns (caption, drawing).

    Args:
        records: (step, tokens of the busiest expert over the mean, for each layer), as in `metrics.jsonl`.
    """
    # Transposed from one row per step to one row per layer.
    grid = reduce_columns([list(layer) for layer in zip(*(row for _, row in records), strict=True)])
    (first, begun), (last, ended) = records[0], records[-1]
    high = max(max(row) for row in grid)
    caption = (
        f"The busiest expert's tokens over the mean of its layer, 1 where all are loaded alike: {max(begun):.2f} "
        f"in the worst layer at step {first:,}, "
        f"{max(ended):.2f} at step {last:,} (layer {ended.index(max(ended))}); the darkest is {high:.2f}. No "
        "token is dropped."
    )
    return caption, draw_heat_map(
        "expert-load", grid, caption, low=1.0, high=high, x=(first, last + 1), labels=("step", "layer")
    )
