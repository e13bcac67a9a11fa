"""The plots of a plan: memory over a step, the roofline, memory against speed of all that was looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from preheat.report.plots import NARROW, SENTINEL, WIDE, drawn
from preheat.report.words import escape, gib, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["pareto", "roofline", "timeline"]

_SHADES = {"forward": "series-1", "head and loss": "series-4", "backward": "series-2", "update": "series-3"}


def _figure(title: str, words: str, drawing: str, legend: Sequence[tuple[str, str]] = ()) -> str:
    listed = "".join(f'<li class="line" style="--c: var(--{colour})">{escape(name)}</li>' for name, colour in legend)
    shown = f'<ul class="legend">{listed}</ul>' if listed else ""
    return f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(words)}</p></figcaption>{shown}{drawing}</figure>"


def timeline(found: Mapping[str, Any], available: float) -> str:
    """Memory alive over the allocations of a step: one colour a phase."""
    points, phases = found["bytes"], found["phases"]
    most = max((size for _, size in points), default=0.0)
    words = f"Tensors alive from allocation to allocation; at most {gib(most)}."
    ends = [*(start for start, _ in phases[1:]), points[-1][0] + 1 if points else 0]

    def draw(axes: Axes) -> None:
        for (start, phase), end in zip(phases, ends, strict=True):
            part = [(n, size) for n, size in points if start <= n <= end]
            colour = SENTINEL[_SHADES.get(phase, "series-6")]
            axes.fill_between([n for n, _ in part], [size for _, size in part], color=colour, alpha=0.25, linewidth=0)
            axes.plot([n for n, _ in part], [size for _, size in part], color=colour, linewidth=1.4)
        if available <= 2.5 * most:
            axes.axhline(available, color=SENTINEL["ink"], linewidth=1.5)
        axes.set_ylim(0, None)
        axes.set_xticks([])
        axes.margins(x=0.01)
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        axes.grid(axis="y", color=SENTINEL["grid"], linewidth=0.8)
        axes.set_xlabel("allocations of a step, in order", loc="right", labelpad=4)

    legend = [(phase, _SHADES.get(phase, "series-6")) for phase in dict.fromkeys(phase for _, phase in phases)]
    return _figure("Memory over a step, GiB", words, drawn("plan-timeline", NARROW, words, draw), legend)


def roofline(found: Mapping[str, Any]) -> str:
    """FLOP/s against FLOPs a byte, below what the device can do; a mark's name has its share of the products' time."""
    points, peak, bandwidth = found["points"], found["peak"], found["bandwidth"]
    words = "Under the slope memory decides, under the level the matrix units: " + ", ".join(
        f"{p['operator']} {p['flops'] / peak:.0%} of the peak" for p in points
    )
    knee = peak / bandwidth
    low = min([knee / 16, *(p["intensity"] / 2 for p in points)])
    high = max([knee * 16, *(p["intensity"] * 2 for p in points)])

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        axes.plot([low, knee, high], [low * bandwidth / 1e12, peak / 1e12, peak / 1e12], color=SENTINEL["ink"], linewidth=1.5)
        for n, p in enumerate(points):
            colour = SENTINEL[f"series-{n % 6 + 1}"]
            axes.plot([p["intensity"]], [p["flops"] / 1e12], marker="o", markersize=7, color=colour)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for one in (axes.xaxis, axes.yaxis):
            one.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
            one.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=0)
        axes.grid(axis="y", color=SENTINEL["grid"], linewidth=0.8)
        axes.set_xlabel("FLOPs a byte", loc="right", labelpad=2)

    legend = [(f"{p['operator']}, {percent(p['share'])} of their time", f"series-{n % 6 + 1}") for n, p in enumerate(points)]
    return _figure("Roofline, TFLOP/s", f"{words}.", drawn("plan-roofline", NARROW, words, draw), legend)


def pareto(found: Sequence[Mapping[str, Any]], front: Sequence[tuple[float, float]], available: float) -> str:
    """Memory against tokens a second of all that was looked at, on the front of what was guessed."""
    words = f"{len(found)} dry-run; to the left of the line is what fits, and the filled mark was chosen. In grey the best that was guessed for each memory."
    most = max([available, *(p["peak_gib"] for p in found)]) * 1.08
    shown = [(memory, speed) for memory, speed in front if memory <= most]

    def draw(axes: Axes) -> None:
        for p in found:
            colour = SENTINEL["series-1" if p["fits"] else "warn"]
            axes.plot(
                [p["peak_gib"]],
                [p["tokens_per_second"]],
                marker="o",
                markersize=9 if p["best"] else 6,
                color=colour,
                markerfacecolor=colour if p["best"] else SENTINEL["page"],
            )
        if shown:
            axes.step(*zip(*shown, strict=True), where="post", color=SENTINEL["muted"], linewidth=1.2, zorder=1)
        axes.axvline(available, color=SENTINEL["ink"], linewidth=1.5)
        axes.set_xlim(0, most)
        axes.set_ylim(0, max([p["tokens_per_second"] for p in found] + [speed for _, speed in shown]) * 1.12)
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
        axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
        axes.grid(axis="y", color=SENTINEL["grid"], linewidth=0.8)
        axes.set_xlabel("GiB of a device", loc="right", labelpad=2)

    legend = [("fits", "series-1"), *([("does not fit", "warn")] if any(not p["fits"] for p in found) else [])]
    return _figure("Tokens a second against memory", words, drawn("plan-pareto", (WIDE[0], 3.2), words, draw), legend)
