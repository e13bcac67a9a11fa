"""Charts of a run's report, each a figure of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from preheat.report import expert_heatmap, svg
from preheat.report.formatting import (
    choose_unit,
    format_gib,
    format_grouped,
    format_headline,
    format_loss,
    format_percent,
    read_number,
)
from preheat.report.page import LegendEntry, figure, series_colour
from preheat.report.report_data import Baselines, RunFigures
from preheat.report.svg import Curve

__all__ = [
    "CATEGORY_COLOURS",
    "draw_evaluations",
    "draw_losses",
    "draw_losses_by_source",
    "draw_memory",
    "draw_over_time",
    "list_categories",
]

CATEGORY_COLOURS = {
    "parameters": "series-1",
    "gathered weights": "series-7",
    "gradients": "series-2",
    "communication buffers": "series-8",
    "optimizer": "series-3",
    "activations": "series-4",
    "temporary": "series-5",
    "overhead": "series-6",
}
"""Categories of memory in the order of drawing -> colour."""
COLOURS_OF_SOURCES = 6
"""Number of colours of `series_colour`."""


def draw_losses(figures: RunFigures) -> str:
    """Draws training and validation loss in one chart, with the baselines as horizontal lines."""
    steps = svg.read_numbers(figures.curves.step)
    raw = svg.read_numbers(figures.curves.loss)
    evaluated = [e for e in figures.evaluations if read_number(e.validation_loss) is not None]
    finite = [(s, v) for s, v in zip(steps, raw, strict=True) if math.isfinite(v)]
    sentences = []
    lines: list[Curve] = []
    legend = []
    if finite:
        # A window of a twentieth of the run: it follows the curve and hides the noise of single steps.
        smoothed = svg.smooth(raw, len(raw) // 40)
        lines.append(Curve("each step", steps, raw, style="raw"))
        legend.append(LegendEntry("training, each step", "series-1", "raw"))
        if len(raw) >= 40:
            lines.append(Curve("smoothed", steps, smoothed))
            legend.append(LegendEntry("smoothed", "series-1"))
        sentences.append(
            f"Training loss from {format_loss(finite[0][1])} at step {finite[0][0]:,.0f} to "
            f"{format_loss(finite[-1][1])} at step {finite[-1][0]:,.0f}, in nats a token."
        )
    elif raw:
        sentences.append("No step has a finite training loss.")
    else:
        sentences.append("No step is recorded yet.")
    if evaluated:
        x, y = svg.read_numbers([e.step for e in evaluated]), svg.read_numbers([e.validation_loss for e in evaluated])
        lines.append(Curve("validation", x, y, "series-2", "points"))
        legend.append(LegendEntry("validation", "series-2"))
        sentences.append(f"Validation loss {format_loss(y[-1])} at step {x[-1]:,.0f}, {format_loss(min(y))} at best.")
        best = figures.summary.best
        if best is not None and (at := [e for e in evaluated if e.step == best.step]):
            # A dot on the validation curve, whatever the score by which the step is the best.
            point = svg.read_numbers([best.step]), svg.read_numbers([at[-1].validation_loss])
            lines.append(Curve("best", *point, "series-3", "points"))
            legend.append(LegendEntry(f"best {best.name}", "series-3"))
    else:
        sentences.append("There is no validation loss.")
    levels = _collect_baselines(figures.baseline)
    if levels:
        sentences.append(
            "For comparison, on the same split: "
            + ", ".join(f"{name} {format_loss(level)}" for name, level in levels)
            + "."
        )
    if figures.not_finite:
        sentences.append(f"Loss or gradient was not finite at {_format_steps(figures.not_finite)} (▼).")
    caption = " ".join(sentences)
    if not lines:
        return figure("", caption, "")
    # Baselines last, so that their labels are drawn over the curves.
    lines += [Curve(f"{name} {level:.2f}", [0.0], [level], style="named") for name, level in levels]
    drawing = svg.draw_both_widths(
        "loss", lambda name, size: svg.draw_curves(name, lines, caption, marks=figures.not_finite, size=size)
    )
    return figure("", caption, drawing, legend)


def draw_losses_by_source(figures: RunFigures) -> list[str]:
    """Draws the training and validation loss of each source of a mixture, each if recorded."""
    validated: dict[str, list[tuple[int, float]]] = {}
    for evaluation in figures.evaluations:
        for name, loss in (evaluation.validation_loss_by_source or {}).items():
            validated.setdefault(name, []).append((evaluation.step, loss))
    # Sorted: a source is missing in the first steps if none of its tokens was in them.
    names = sorted({*figures.losses_by_source, *validated})
    drawn = [
        _draw_sources("training", "Training loss", figures.losses_by_source, names, "line"),
        _draw_sources("validation", "Validation loss", validated, names, "points"),
    ]
    return [drawing for drawing in drawn if drawing]


def _draw_sources(
    name: str, title: str, losses: Mapping[str, Sequence[tuple[int, float]]], names: Sequence[str], style: str
) -> str:
    """Draws a curve for each source, in the colours of their places in `names`."""
    lines, last = [], []
    # More curves than colours could not be told apart.
    for n, source in enumerate(names[:COLOURS_OF_SOURCES]):
        x, y = (svg.read_numbers([point[axis] for point in losses.get(source, ())]) for axis in (0, 1))
        if not any(map(math.isfinite, y)):
            continue
        # As in `draw_losses`: a window of a twentieth of the run.
        drawn = svg.smooth(y, len(y) // 40) if style == "line" else y
        lines.append(Curve(source, x, drawn, series_colour(n), style))
        last.append(f"{source} {format_loss(y[-1])} at step {x[-1]:,.0f}")
    if not lines:
        return ""
    more = len(names) - COLOURS_OF_SOURCES
    caption = f"{', '.join(last)}, in nats a token." + (f" {more} more sources are in report.json." if more > 0 else "")
    legend = [LegendEntry(line.name, line.colour) for line in lines]
    drawing = svg.draw_curves(f"{name}-loss-by-source", lines, f"{title} by source. {caption}")
    return figure(title, caption, drawing, legend)


def _collect_baselines(baseline: Baselines | None) -> list[tuple[str, float]]:
    """Returns (name, nats per token) of the baselines: uniform, unigram and bigram models."""
    if baseline is None:
        return []
    levels = []
    vocabulary = read_number(baseline.vocabulary)
    if vocabulary is not None and vocabulary > 1:
        # Cross entropy of a uniform guess: ln(vocabulary size).
        levels.append(("uniform", math.log(vocabulary)))
    for name, loss_of_model in (("unigram", baseline.unigram), ("bigram", baseline.bigram)):
        if (level := read_number(loss_of_model)) is not None:
            levels.append((name, level))
    return levels


def _format_steps(steps: Sequence[int]) -> str:
    shown = ", ".join(f"{s:,}" for s in steps[:4])
    return (
        ("step " if len(steps) == 1 else "steps ") + shown + (f" and {len(steps) - 4:,} more" if len(steps) > 4 else "")
    )


def draw_over_time(figures: RunFigures) -> list[str]:
    """Draws learning rate, gradient norm, tokens/s, memory and expert load over the steps, each if recorded."""
    curve, predicted, measured = figures.curves, figures.predicted, figures.measured
    # Bytes after each step, and peaks in GiB: all in one unit for the axis.
    bytes_held = svg.read_numbers(curve.memory)
    peaks = [read_number(predicted.peak_gib), read_number(measured.peak_gib)]
    unit, scale = choose_unit([*(v / 2**30 for v in bytes_held), *peaks])

    def convert_to_unit(value: float) -> str:
        return f"{value:,.3g} {unit}"

    sessions, session = figures.summary.sessions, figures.summary.measured_session
    part = f" in session {session} of {sessions}" if sessions > 1 and session else ""
    expected, peak = (None if size is None else size * scale for size in peaks)
    drawn = [
        _draw_curve("lr", "Learning rate", curve.step, svg.read_numbers(curve.lr), _format_rate, noisy=False),
        _draw_curve(
            "gradient-norm",
            "Gradient norm, before clipping",
            curve.step,
            svg.read_numbers(curve.gradient_norm),
            lambda v: f"{v:.3g}",
        ),
        _draw_curve(
            "rate",
            "Tokens per second",
            curve.step,
            svg.read_numbers(curve.tokens_per_second),
            format_grouped,
            level=("predicted", read_number(predicted.tokens_per_second)),
            measured=(part.strip() or "over the run", read_number(measured.tokens_per_second)),
        ),
        _draw_curve(
            "memory-after-step",
            f"Memory after each step, {unit}",
            curve.step,
            [v / 2**30 * scale for v in bytes_held],
            convert_to_unit,
            level=("predicted peak", expected),
            measured=(f"peak{part}", peak),
            noisy=False,
        ),
    ]
    if figures.expert_loads:
        drawn.append(figure("Load of experts", *expert_heatmap.draw_loads(figures.expert_loads)))
    return [drawing for drawing in drawn if drawing]


def draw_evaluations(figures: RunFigures) -> list[str]:
    """Draws each task metric and the forgetting loss over the steps, if there are at least two evaluations."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for evaluation in figures.evaluations:
        # The forgetting text is no task, but its loss is drawn like one.
        values = {("forgetting", "loss"): evaluation.forgetting_loss}
        for task, metrics in (evaluation.tasks or {}).items():
            values |= {(task, metric): value for metric, value in metrics.items()}
        for key, value in values.items():
            if (real := read_number(value)) is not None:
                lines.setdefault(key, []).append((evaluation.step, real))
    drawings = []
    for n, ((task, metric), points) in enumerate(lines.items()):
        # A single evaluation is in the table.
        if len(points) > 1:
            x, y = [p[0] for p in points], [p[1] for p in points]
            caption = f"From {y[0]:.3g} at step {x[0]:,.0f} to {y[-1]:.3g} at step {x[-1]:,.0f}."
            title = format_headline(f"{task}: {metric.replace('_', ' ')}")
            drawn = svg.draw_curves(
                f"evaluation-{n}",
                [Curve(metric, x, y, "series-2", "points")],
                f"{title}. {caption}",
            )
            drawings.append(figure(title, caption, drawn))
    return drawings


def _draw_curve(
    name: str,
    title: str,
    steps: Sequence[int],
    values: list[float],
    show: Callable[[float], str],
    *,
    level: tuple[str, float | None] | None = None,
    measured: tuple[str, float | None] | None = None,
    noisy: bool = True,
) -> str:
    """Returns a curve with a caption; "" if no step recorded it."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    if len(finite) == 1:
        caption = f"{show(finite[0])}, recorded once."
    # Equal as shown: a constant curve needs no range.
    elif show(min(finite)) == show(max(finite)):
        caption = f"{show(finite[0])} at every step."
    else:
        caption = (
            f"From {show(finite[0])} to {show(finite[-1])}; least {show(min(finite))}, greatest {show(max(finite))}."
        )
    x = svg.read_numbers(steps)
    if noisy and len(values) >= 40:
        lines = [
            Curve("each step", x, values, style="raw"),
            Curve("smoothed", x, svg.smooth(values, len(values) // 40)),
        ]
    else:
        lines = [Curve("each step", x, values)]
    if level is not None and level[1] is not None:
        lines.append(Curve(f"{level[0]} {show(level[1])}", [0.0], [level[1]], style="level"))
    legend = [LegendEntry(line.name, "series-1", line.style) for line in lines] if len(lines) > 1 else []
    if measured is not None and measured[1] is not None:
        caption += f" Measured {measured[0]}: {show(measured[1])}."
    if level is not None and level[1] is not None:
        caption += f" {level[0].capitalize()}: {show(level[1])}."
    return figure(title, caption, svg.draw_curves(name, lines, f"{title}. {caption}", from_zero=True), legend)


def _format_rate(value: float) -> str:
    """0.0003 -> '3e-4', 0.003 -> '0.003'."""
    return (
        f"{value:.3g}"
        if value == 0 or value >= 1e-3
        else f"{value:.2e}".replace("e-0", "e-").replace(".00e", "e").replace("0e", "e")
    )


def draw_memory(figures: RunFigures) -> str:
    """Draws predicted memory by category as a stacked bar, with the measured peak and the device's memory.

    Returns "" if neither a prediction nor a measurement is recorded.
    """
    predicted, measured = figures.predicted, figures.measured
    parts = list_categories(figures)
    peak, real, available = (
        read_number(predicted.peak_gib),
        read_number(measured.peak_gib),
        read_number(predicted.available_gib),
    )
    if peak is None and real is None:
        return ""
    peaks = ", ".join(
        f"{name} peak {format_gib(size)}"
        for name, size in (("predicted", peak), ("measured", real))
        if size is not None
    )
    sentences = [f"{peaks[0].upper()}{peaks[1:]}."]
    if available is not None:
        sentences.append(
            f"The device has {format_gib(available)}"
            + (
                (
                    ": the prediction is "
                    f"{format_percent(peak / available) if peak >= available / 100 else 'less than 1 %'} of it."
                )
                if peak is not None and available
                else "."
            )
        )
    rows: list[tuple[str, list[tuple[str, float]]]] = []
    if peak is not None:
        # Without categories, the peak is one bar.
        rows.append(("predicted", [(colour, size) for _, size, colour in parts] or [("series-6", peak or 0.0)]))
    if real is not None:
        rows.append(("measured", [("ink", real)]))
    limit = (f"device {format_gib(available)}", available) if available is not None else None
    return figure(
        "At the peak", " ".join(sentences), svg.draw_stacked("memory", rows, " ".join(sentences), limit=limit)
    )


def list_categories(figures: RunFigures) -> list[tuple[str, float, str]]:
    """Returns (category, GiB, colour) of the predicted peak; unknown categories come last."""
    by_category = figures.memory or {}
    # The order of the colours, in every report, so that pages can be compared.
    names = [n for n in CATEGORY_COLOURS if n in by_category] + [n for n in by_category if n not in CATEGORY_COLOURS]
    sizes = [(name, read_number(by_category[name])) for name in names]
    return [
        (name, size, CATEGORY_COLOURS.get(name, "series-6")) for name, size in sizes if size is not None and size >= 0
    ]
