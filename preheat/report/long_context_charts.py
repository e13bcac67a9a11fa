"""Charts of long-context evaluations before and after training.

Accuracy by depth and length is a heat map; loss by position and by context length are curves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from preheat.core.run_records import PartEstimate, ResultFigures, Results
from preheat.report.formatting import format_headline, format_loss, format_percent, read_number
from preheat.report.page import LegendEntry, figure, series_colour, two_columns
from preheat.report.svg import NARROW, SENTINEL, render_plot, set_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_heat_map", "render_lengths"]

Parts = Sequence[PartEstimate]


def render_lengths(after: Results, before: Results) -> str:
    """Returns the charts of all tasks with per-part results; "" if there are none."""
    drawings = list[str]()
    for task, result in after.tasks.items():
        parts = _keep_measured(result)
        if not parts:
            continue
        old = [part for part in _keep_measured(before.tasks.get(task)) if part.subset == parts[0].subset]
        # The keys of the parts say which kind of task it is.
        if parts[0].depth is not None:
            two = [("before", old), ("after", parts)] if old else [("", parts)]
            shown = "".join(
                draw_heat_map(f"length-{len(drawings)}-{n}", task, when, subset) for n, (when, subset) in enumerate(two)
            )
        elif parts[0].start is not None:
            shown = _render_positions(f"length-{len(drawings)}", task, parts, old)
        else:
            shown = _render_continuation(f"length-{len(drawings)}", task, parts)
        drawings.append(two_columns(shown))
    return "".join(drawings)


def _keep_measured(result: ResultFigures | None) -> Parts:
    """Returns the parts of a result that have a value; all are of the same kind."""
    return [part for part in (result.parts if result and result.parts else ()) if read_number(part.value) is not None]


def draw_heat_map(name: str, task: str, when: str, parts: Parts) -> str:
    """Draws a heat map of accuracy at each depth and length.

    Args:
        name: unique in the page.
        when: before, after or "".
        parts: with a length and a depth each.
    """
    cells = [(part.length or 0, part.depth or 0.0, part.value) for part in parts]
    across, down = sorted({length for length, _, _ in cells}), sorted({depth for _, depth, _ in cells})
    length, depth, least = min(cells, key=lambda cell: (cell[2], cell[0]))
    mean = sum(right for _, _, right in cells) / len(cells)
    worst = f"the least at {length:,} tokens and depth {format_percent(depth)}: {format_percent(least)}"
    caption = f"{format_percent(mean)} right, {worst}."

    def draw(axes: Axes) -> None:
        from matplotlib.patches import Rectangle

        for length, depth, right in cells:
            x, y = across.index(length), down.index(depth)
            axes.add_patch(
                Rectangle(
                    (x, y),
                    0.96,
                    0.94,
                    facecolor=SENTINEL["series-1"],
                    # Opacity on the page's own colour works in light and in dark mode; 0.65 at most keeps the figure
                    # readable.
                    alpha=0.05 + 0.6 * min(max(right, 0.0), 1.0),
                    linewidth=0,
                )
            )
            shown = f"{100 * right:.0f}"
            axes.annotate(shown, (x + 0.48, y + 0.47), ha="center", va="center", color=SENTINEL["ink"], fontsize=8.5)
        axes.set_xlim(0, len(across))
        # Depth 0 is the beginning of the context and is drawn on top.
        axes.set_ylim(len(down), 0)
        axes.set_xticks([n + 0.48 for n in range(len(across))], [f"{n:,.0f}" for n in across])
        axes.set_yticks([n + 0.47 for n in range(len(down))], [f"{100 * d:.0f} %" for d in down])
        axes.tick_params(axis="x", length=0, labelsize=8.5)
        axes.spines["bottom"].set_visible(False)
        axes.set_xlabel("tokens of context; depth of the answer on the left", loc="right", labelpad=4)

    title = f"{format_headline(task)}: right at depth and length, %" + (f", {when}" if when else "")
    return figure(title, caption, render_plot(name, (NARROW[0], 0.9 + 0.27 * len(down)), f"{title}. {caption}", draw))


def _render_positions(name: str, task: str, parts: Parts, old: Parts) -> str:
    lines = [(LegendEntry("before", "series-2"), old)] if old else []
    lines.append((LegendEntry("after" if old else "loss", "series-1"), parts))
    falls = parts[0].end or 0
    # The position up to which more context helps: the loss falls from each stretch to the next.
    for current, following in itertools.pairwise(parts):
        if following.value >= current.value:
            break
        falls = following.end or 0
    caption = (
        f"From {format_loss(parts[0].value)} in the first {parts[0].end:,} positions to {format_loss(parts[-1].value)} "
        f"beyond {parts[-1].start:,}; it falls up to position {falls:,}."
    )

    def draw(axes: Axes) -> None:
        for (_, colour, _), points in lines:
            ends = [part.end or 0 for part in points]
            axes.plot(
                ends,
                [part.value for part in points],
                color=SENTINEL[colour],
                linewidth=1.6,
                marker="o",
                markersize=4.5,
            )
            low, high = [read_number(part.low) for part in points], [read_number(part.high) for part in points]
            if None not in (*low, *high):
                axes.fill_between(ends, low, high, color=SENTINEL[colour], alpha=0.15, linewidth=0)
        ends = [part.end or 0 for part in parts]
        if min(ends) > 0:
            axes.set_xscale("log", base=2)
        _set_ticks(axes, ends)
        axes.set_xlabel("up to this position, tokens", loc="right", labelpad=2)

    title = f"{format_headline(task)}: loss by position, nats a token"
    return figure(title, caption, render_plot(name, NARROW, f"{title}. {caption}", draw), [entry for entry, _ in lines])


def _render_continuation(name: str, task: str, parts: Parts) -> str:
    across = sorted({part.length or 0 for part in parts})
    lines = [(n, series_colour(k), [part for part in parts if part.length == n]) for k, n in enumerate(across)]
    longest = {part.share: part.value for part in lines[-1][2]}
    alone, together = format_loss(longest.get(0.0)), format_loss(longest.get(1.0))
    caption = f"Of {across[-1]:,} tokens: {alone} with nothing before them, {together} with all."

    def draw(axes: Axes) -> None:
        for _, colour, points in lines:
            axes.plot(
                [part.share or 0.0 for part in points],
                [part.value for part in points],
                color=SENTINEL[colour],
                linewidth=1.6,
                marker="o",
                markersize=4.5,
            )
        _set_ticks(axes, [0.0, 0.25, 0.5, 1.0], format_percent)
        axes.set_xlabel("share of the context that is read", loc="right", labelpad=2)

    title = f"{format_headline(task)}: loss of the last tokens, nats a token"
    legend = [LegendEntry(f"{n:,} tokens", colour) for n, colour, _ in lines]
    return figure(title, caption, render_plot(name, NARROW, f"{title}. {caption}", draw), legend)


def _set_ticks(axes: Axes, positions: Sequence[float], label: Callable[[float], str] = lambda n: f"{n:,.0f}") -> None:
    from matplotlib.ticker import NullLocator

    shown = (
        positions
        if len(positions) < 8
        # Every second one, counted from the last, so that the largest keeps its label.
        else [position for n, position in enumerate(positions) if (len(positions) - 1 - n) % 2 == 0]
    )
    axes.set_xticks(list(shown), [label(position) for position in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    set_ticks(axes.yaxis)
    axes.grid(axis="y", color=SENTINEL["grid"], linewidth=0.8)
