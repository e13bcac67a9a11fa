"""HTML page of `preheat compress`: quality against size and speed, a table of all variants, the chosen one.

compress.json ──write_compress──▶ compress.html
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core.compression import CompressedVariant, CompressionResult, TimedFigures
from preheat.report import page
from preheat.report.formatting import escape
from preheat.report.page import LegendEntry, number_cell, series_colour
from preheat.report.svg import NARROW, SENTINEL, render_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["find_pareto_front", "write_compress"]


def find_pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the Pareto front (both coordinates minimized), sorted by x.

    Example:
        >>> find_pareto_front([(1.0, 3.0), (2.0, 2.0), (2.5, 2.5), (3.0, 1.0)])
        [0, 1, 3]
    """
    indices, least = [], float("inf")
    # By x, then y: a point is on the front if it is lower than all points left of it.
    for n in sorted(range(len(points)), key=lambda n: points[n]):
        if points[n][1] < least:
            indices.append(n)
            least = points[n][1]
    return indices


def write_compress(folder: str | Path) -> Path:
    """Writes `compress.html` next to a `compress.json` and returns its path.

    Raises:
        RunError: there is no compress.json, it is damaged, or the page cannot be written.
    """
    source = Path(folder) / "compress.json"
    return page.write_figures(source, "preheat compress", CompressionResult, _render_page)


def _render_page(result: CompressionResult) -> str:
    chosen = result.chosen_variant
    before, after = chosen.before, chosen.after
    faster = after.decode_tokens_per_second / before.decode_tokens_per_second
    headline = (
        f"{chosen.name}: {after.bytes / before.bytes:.0%} of bf16's bytes, {faster:.2f} times its tokens a second, "
        f"perplexity {_format_rise(chosen.perplexity_rise)}; chosen as {result.chosen_because}."
    )
    done = page.bullets(f"<b>{escape(v.name)}</b>: {escape(v.what)}" for v in result.variants)
    charts = page.two_columns(_render_pareto(result, "size"), _render_pareto(result, "time"))
    notes = page.bullets(map(escape, result.notes)) if result.notes else ""
    return page.document(
        f"{result.source} · preheat compress",
        f"""{page.header("preheat compress", Path(result.source).name, headline)}
{page.section("pareto", "Quality against size and speed", charts)}
{page.section("variants", "Every variant", _render_table(result))}
{page.section("what", "Steps", done)}
{page.section("notes", "Notes", notes)}
<footer>Data: {escape(result.texts)}; {result.calibration_rows} calibration sequences, {after.tokens:,} held-out \
tokens. Bytes: of the weights. Times: medians of
turns taken alternately with the same model in bf16, one sequence, a prompt of {after.prompt_tokens} tokens. All \
figures as data: compress.json.</footer>""",
    )


def _collect_points(result: CompressionResult, by: str) -> list[tuple[str, float, float]]:
    """Returns (name, MiB or milliseconds per token, perplexity) of each variant; the original model comes first."""

    def read_axis(figures: TimedFigures) -> float:
        return figures.bytes / 2**20 if by == "size" else 1e3 / figures.decode_tokens_per_second

    first = result.variants[0].before
    return [("bf16", read_axis(first), first.perplexity)] + [
        (v.name, read_axis(v.after), v.after.perplexity) for v in result.variants
    ]


def _render_pareto(result: CompressionResult, by: str) -> str:
    points = _collect_points(result, by)
    best = find_pareto_front([(x, y) for _, x, y in points])
    right = max(x for _, x, _ in points)
    height = max(y for _, _, y in points) - min(y for _, _, y in points)
    unit = "MiB of weights" if by == "size" else "milliseconds a token, one sequence"
    caption = (
        "The lower left is better; on the line is what no other beats in both: "
        f"{', '.join(points[n][0] for n in best)}."
    )

    colours = ["ink", *(series_colour(n) for n in range(len(points) - 1))]

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter

        line = [points[n] for n in best]
        axes.step(
            [x for _, x, _ in line],
            [y for _, _, y in line],
            where="post",
            color=SENTINEL["muted"],
            linewidth=1.2,
            zorder=1,
        )
        for n, (name, x, y) in enumerate(points):
            colour = SENTINEL[colours[n]]
            filled = name == result.chosen
            axes.plot(
                [x],
                [y],
                marker="o",
                markersize=9 if filled else 7,
                color=colour,
                markerfacecolor=colour if filled else SENTINEL["page"],
                clip_on=False,
            )
            # Labels of points that nearly coincide are stacked upwards.
            near = sum(abs(x - x2) <= 0.05 * right and abs(y - y2) <= 0.1 * height for _, x2, y2 in points[:n])
            axes.annotate(
                str(n), (x, y), xytext=(6, 5 + 11 * near), textcoords="offset points", fontsize=9, color=SENTINEL["ink"]
            )
        axes.set_xlim(0, 1.08 * right)
        axes.margins(y=0.15)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            ticks = [tick for tick in axis.get_major_locator()() if low <= tick <= high]
            axis.set_major_formatter(FuncFormatter(functools.partial(_format_tick, _count_decimals(ticks))))
        axes.grid(axis="y", color=SENTINEL["grid"], linewidth=0.8)
        axes.set_xlabel(unit, loc="right", labelpad=2)

    legend = [LegendEntry(f"{n} {name}", colours[n]) for n, (name, _, _) in enumerate(points)]
    title = f"Perplexity against {'size' if by == 'size' else 'latency'}"
    return page.figure(title, caption, render_plot(f"compress-{by}", NARROW, caption, draw), legend)


def _format_tick(decimals: int, value: float, place: int | None) -> str:
    return f"{value:,.{decimals}f}"


def _count_decimals(ticks: Sequence[float]) -> int:
    """Returns the number of decimals that makes all tick labels differ.

    Example:
        >>> _count_decimals([0.0, 0.5, 1.0]), _count_decimals([1.11, 1.11005, 1.1101]), _count_decimals([0.0, 10.0])
        (1, 5, 0)
    """
    # The smallest number of decimals with which the step between ticks is a whole number.
    step = min((b - a for a, b in itertools.pairwise(ticks)), default=0.0)
    if step <= 0:
        return 2
    return next((n for n in range(12) if abs(step * 10**n - round(step * 10**n)) < 1e-3 * step * 10**n), 12)


def _format_rise(share: float) -> str:
    """Returns a rise of perplexity as a signed percentage, or as a factor from 1,000 % on.

    >>> _format_rise(0.004), _format_rise(237.0)
    ('+0.40%', '×238')
    """
    return f"{share:+.2%}" if share < 10 else f"×{1 + share:,.0f}"


def _render_table(result: CompressionResult) -> str:
    titles = (
        "variant",
        "perplexity",
        "rise",
        "weights, MiB",
        "tokens/s",
        "against bf16",
        "first token, ms",
        "largest logit difference",
        "top-1 the same",
    )
    first = result.variants[0].before
    rows = [_render_row("bf16", first, first, None)] + [
        _render_row(v.name + (" (chosen)" if v.name == result.chosen else ""), v.after, v.before, v)
        for v in result.variants
    ]
    return page.table(titles, rows)


def _render_row(name: str, figures: TimedFigures, before: TimedFigures, variant: CompressedVariant | None) -> str:
    cells = [
        f"{figures.perplexity:.4f}",
        _format_rise(variant.perplexity_rise) if variant else "",
        f"{figures.bytes / 2**20:.2f}",
        f"{figures.decode_tokens_per_second:.1f}",
        f"{figures.decode_tokens_per_second / before.decode_tokens_per_second:.2f}" if variant else "",
        f"{1e3 * figures.first_token_seconds:.1f}",
        f"{variant.max_logit_difference:.3g}" if variant else "",
        f"{variant.top_1_agreement:.1%}" if variant else "",
    ]
    return page.named_row(name, *map(number_cell, cells))
