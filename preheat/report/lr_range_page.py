"""HTML page of `preheat train RECIPE --find-lr`: the loss by learning rate, and the measured table.

lr-range.json ──write_lr_range──▶ lr-range.html
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core.lr_range import LrRange
from preheat.report import page
from preheat.report.page import LegendEntry, number_cell
from preheat.report.svg import SENTINEL, draw_both_widths, render_plot, set_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["describe_end", "format_lr", "write_lr_range"]


def format_lr(value: float) -> str:
    """Returns a learning rate with two digits, as a recipe reads it.

    >>> format_lr(0.00123), format_lr(1.0)
    ('1.2e-03', '1.0e+00')
    """
    return f"{value:.1e}"


def describe_end(result: LrRange) -> str:
    """Returns a sentence with the steps of the test, their rates, and why it ended."""
    rates = f"from {format_lr(result.points[0].lr)} to {format_lr(result.points[-1].lr)}"
    end = "the last rate" if result.diverged_at is None else f"the loss diverged at {format_lr(result.diverged_at)}"
    return f"{len(result.points)} of {result.steps} steps at rates {rates}, until {end}."


def write_lr_range(source: Path) -> Path:
    """Writes the page of a file of results next to it and returns its path.

    Raises:
        RunError: the file is missing or damaged, or the page cannot be written.
    """
    return page.write_figures(source, "preheat train --find-lr", LrRange, _render_page)


def _render_page(result: LrRange) -> str:
    if not result.points:
        raise ValueError("no steps")
    verdict = (
        f"Suggested: {format_lr(result.suggested)}, a tenth of the rate with the lowest loss "
        f"({format_lr(result.lowest)}); the loss falls fastest at {format_lr(result.steepest)}. The recipe has "
        f"{format_lr(result.present)}. {describe_end(result)}"
    )
    rows = (
        page.row(
            *(number_cell(text) for text in (
                f"{n:,}", format_lr(p.lr), f"{p.loss:.4f}", f"{p.smoothed:.4f}",
                "overflow" if p.gradient_norm is None else f"{p.gradient_norm:.3g}",
            ))
        )
        for n, p in enumerate(result.points, 1)
    )  # fmt: skip
    titles = ("step", "learning rate", "loss", "smoothed", "gradient norm")
    summary = f"Rates, losses and gradient norms of {len(result.points):,} steps"
    table = f"<details><summary>{summary}</summary>{page.table(titles, rows, text=())}</details>"
    return page.document(
        "learning-rate range test · preheat",
        f"""{page.header("preheat train --find-lr", "Learning-rate range test", verdict)}
{page.section("plots", "Loss by learning rate", _draw(result))}
{page.section("figures", "Every step", table)}
<footer>Each loss is that before the update with the rate. Smith 2017 (arXiv:1506.01186); the rule is that of fastai \
(arXiv:2002.04688).</footer>""",
    )


def _draw(result: LrRange) -> str:
    rates = [p.lr for p in result.points]
    caption = "Light: single steps; dark: their mean. The dashed line is the suggested rate."

    def draw(axes: Axes) -> None:
        axes.plot(rates, [p.loss for p in result.points], color=SENTINEL["series-1"], linewidth=0.9, alpha=0.5)
        axes.plot(rates, [p.smoothed for p in result.points], color=SENTINEL["series-1"], linewidth=2)
        axes.set_xscale("log", nonpositive="mask")
        axes.axvline(result.suggested, color=SENTINEL["ink"], linewidth=1.2, linestyle="--")
        # A diverged loss would press the part that matters flat.
        smoothed = [p.smoothed for p in result.points]
        lowest, first = min(smoothed), smoothed[0]
        room = max(first - lowest, 1e-9 * abs(first)) or 1.0
        axes.set_ylim(lowest - 0.15 * room, first + 0.6 * room)
        set_ticks(axes.xaxis, format=lambda rate: f"{rate:.0e}".replace("e-0", "e-").replace("e+0", "e"))
        set_ticks(axes.yaxis)
        axes.tick_params(which="minor", length=0)
        axes.grid(axis="y", color=SENTINEL["grid"], linewidth=0.8)
        axes.set_xlabel("learning rate", loc="right", labelpad=2)

    legend = [LegendEntry("loss", "series-1"), LegendEntry("suggested", "ink")]
    drawing = draw_both_widths("lr-range", lambda name, size: render_plot(name, size, caption, draw))
    return page.figure("", caption, drawing, legend)
