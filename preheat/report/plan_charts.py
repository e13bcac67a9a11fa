"""Charts of a plan: memory over a step, roofline, memory against speed of all candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from preheat.core.plan import Candidate, RooflineFigure, Timeline, Verdict
from preheat.report.formatting import choose_unit, format_gib, format_percent
from preheat.report.page import LegendEntry, figure, series_colour
from preheat.report.svg import NARROW, SENTINEL, WIDE, draw_both_widths, render_plot, set_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_pareto", "draw_roofline", "draw_timeline"]

_SHADES = {"forward": "series-1", "head and loss": "series-4", "backward": "series-2", "update": "series-3"}


def draw_timeline(trace: Timeline, available: float) -> str:
    """Draws the memory of live tensors over the allocations of a step, one colour per phase.

    Args:
        available: the device's memory in GiB, drawn as a line if the chart reaches near it.

    Returns:
        The figure as HTML.
    """
    points, phases = trace.bytes, trace.phases
    most = max((size for _, size in points), default=0.0)
    unit, scale = choose_unit([most])
    caption = f"Tensors alive from allocation to allocation; at most {format_gib(most)}."
    # Each phase ends at the start of the next; the shared point leaves no gap between the colours.
    ends = [*(start for start, _ in phases[1:]), points[-1][0] + 1 if points else 0]

    def draw(axes: Axes) -> None:
        for (start, phase), end in zip(phases, ends, strict=True):
            part = [(n, size * scale) for n, size in points if start <= n <= end]
            colour = SENTINEL[_SHADES.get(phase, "series-6")]
            axes.fill_between([n for n, _ in part], [size for _, size in part], color=colour, alpha=0.25, linewidth=0)
            axes.plot([n for n, _ in part], [size for _, size in part], color=colour, linewidth=1.4)
        # A line far above the curve would flatten it.
        if available <= 2.5 * most:
            axes.axhline(available * scale, color=SENTINEL["ink"], linewidth=1.5)
        axes.set_ylim(0, None)
        axes.set_xticks([])
        axes.margins(x=0.01)
        set_ticks(axes.yaxis)
        axes.grid(axis="y", color=SENTINEL["grid"], linewidth=0.8)
        axes.set_xlabel("allocations of a step, in order", loc="right", labelpad=4)

    legend = [LegendEntry(name, _SHADES.get(name, "series-6")) for name in dict.fromkeys(phase for _, phase in phases)]
    legend += [LegendEntry(f"{format_gib(available)} of the device", "ink")] if available <= 2.5 * most else []
    return figure(f"Memory over a step, {unit}", caption, render_plot("plan-timeline", NARROW, caption, draw), legend)


def draw_roofline(figures: RooflineFigure) -> str:
    """Draws the roofline: FLOP/s against FLOPs per byte; the legend has each operator's share of the matmul time."""
    points, peak, bandwidth = figures.points, figures.peak, figures.bandwidth
    caption = "Under the slope memory decides, under the level the matrix units: " + ", ".join(
        f"{p.operator} {p.flops / peak:.0%} of the peak" for p in points
    )
    # FLOPs per byte at which memory and matrix units are equally fast.
    knee = peak / bandwidth
    low = min([knee / 16, *(p.intensity / 2 for p in points)])
    high = max([knee * 16, *(p.intensity * 2 for p in points)])

    def draw(axes: Axes) -> None:
        axes.plot(
            [low, knee, high], [low * bandwidth / 1e12, peak / 1e12, peak / 1e12], color=SENTINEL["ink"], linewidth=1.5
        )
        for n, p in enumerate(points):
            colour = SENTINEL[series_colour(n)]
            axes.plot([p.intensity], [p.flops / 1e12], marker="o", markersize=7, color=colour)
        axes.set_xscale("log", nonpositive="mask")
        axes.set_yscale("log", nonpositive="mask")
        for axis in (axes.xaxis, axes.yaxis):
            set_ticks(axis)
        axes.tick_params(which="minor", length=0)
        axes.grid(axis="y", color=SENTINEL["grid"], linewidth=0.8)
        axes.set_xlabel("FLOPs a byte", loc="right", labelpad=2)

    legend = [
        LegendEntry(f"{p.operator}, {format_percent(p.share)} of their time", series_colour(n))
        for n, p in enumerate(points)
    ]
    return figure("Roofline, TFLOP/s", f"{caption}.", render_plot("plan-roofline", NARROW, caption, draw), legend)


def draw_pareto(tried: Sequence[Candidate], guesses: Sequence[Candidate], available: float) -> str:
    """Draws tokens/s against memory of all candidates: dry-run ones, and estimated ones in grey.

    Returns "" for a single candidate, since there is nothing to compare.
    """
    if len(tried) + len(guesses) < 2 or len({(p.peak_gib, p.tokens_per_second) for p in (*tried, *guesses)}) < 2:
        return ""
    # Leave out candidates that need far more memory than the device has: they would squeeze the rest into a corner.
    most = max([available * 1.6, *(p.peak_gib for p in tried)]) * 1.08
    shown = [p for p in guesses if p.peak_gib <= most]
    unit, scale = choose_unit([*(p.peak_gib for p in (*tried, *shown)), available])
    beyond = len(guesses) - len(shown)
    caption = (
        "Small marks are estimates, large ones were dry-run, and the filled one was chosen. What is left "
        f"of the line fits the {format_gib(available)} of a device."
    ) + (f" {beyond:,} candidates that need more than {format_gib(most)} are not drawn." if beyond else "")

    # The device's line is drawn only if it does not squeeze the marks into a corner.
    far = max(p.peak_gib for p in (*tried, *shown))
    near = available <= far * 2.5

    def draw(axes: Axes) -> None:
        for p in shown:
            colour = SENTINEL["muted" if p.peak_gib <= available else "warn"]
            axes.plot([p.peak_gib * scale], [p.tokens_per_second], marker="o", markersize=3, color=colour, alpha=0.55)
        for p in tried:
            colour = SENTINEL["series-1" if p.verdict is not Verdict.NO else "warn"]
            axes.plot(
                [p.peak_gib * scale],
                [p.tokens_per_second],
                marker="o",
                markersize=9 if p.best else 6,
                color=colour,
                markerfacecolor=colour if p.best else SENTINEL["page"],
            )
        if near:
            axes.axvline(available * scale, color=SENTINEL["ink"], linewidth=1.5)
        axes.set_xlim(0, max([far, available] if near else [far]) * scale * 1.08)
        axes.set_ylim(0, max(p.tokens_per_second for p in (*tried, *shown)) * 1.12)
        set_ticks(axes.xaxis)
        set_ticks(axes.yaxis)
        axes.grid(axis="y", color=SENTINEL["grid"], linewidth=0.8)
        axes.set_xlabel(f"{unit} of a device", loc="right", labelpad=2)

    unfit = any(p.verdict is Verdict.NO for p in tried) or any(p.peak_gib > available for p in shown)
    legend = [
        LegendEntry("fits", "series-1"),
        *([LegendEntry("estimated", "muted")] if shown else []),
        *([LegendEntry("does not fit", "warn")] if unfit else []),
        *([LegendEntry(f"{format_gib(available)} of the device", "ink")] if near else []),
    ]
    drawings = draw_both_widths(
        "plan-pareto", lambda name, size: render_plot(name, size, caption, draw), wide=(WIDE[0], 3.2)
    )
    return figure("Tokens a second against memory", caption, drawings, legend)
