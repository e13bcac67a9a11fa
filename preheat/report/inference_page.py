"""HTML page of `preheat bench --inference`: a summary, speed by batch size and length, and all figures.

inference.json ──render──▶ inference.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from preheat.core.bench import InferenceModel, InferenceResult, InferenceRow, Spread
from preheat.report import page, svg
from preheat.report.formatting import escape, format_grouped, format_headline, format_loss, format_percent, format_sizes
from preheat.report.page import LegendEntry, number_cell, series_colour

__all__ = ["write_inference"]


def write_inference(folder: str | Path) -> Path:
    """Writes `inference.html` next to an `inference.json` and returns its path.

    Raises:
        RunError: there is no inference.json, it is damaged, or the page cannot be written.
    """
    source = Path(folder) / "inference.json"
    return page.write_figures(source, "preheat bench --inference", InferenceResult, _render_page)


def _render_page(result: InferenceResult) -> str:
    names = " · ".join(format_headline(model.name) for model in result.models)
    return page.document(
        f"{names} · preheat bench --inference",
        f"""{page.header("preheat bench --inference", names, _render_headline(result))}
{page.section("speed", "Speed", page.two_columns(*_draw_figures(result)))}
{page.section("shapes", "Every shape", _render_shapes(result.rows))}
{page.section("models", "Models", _render_models(result.models))}
<footer>{escape(result.repeats)} rounds in alternation on {escape(result.machine.name)}, each model in a process of \
its own, every shape written once before it was
timed; {escape(result.tokens)} tokens after each prompt, the likeliest each time. Median over the rounds, below it \
the lowest and the highest; ratios within a
round, to {escape(result.models[0].name)}. Cache: bytes of keys and values at the end, next to the closed form. Loss: \
nats a token of the prompts' text, read through the cache. Memory on top of the weights: the
most that generation took. Where tokens are proposed, sequences are generated one after the other and their seconds \
added. All figures as data: inference.json.</footer>""",
    )


def _render_headline(result: InferenceResult) -> str:
    first, ran = result.models[0].name, {row.name for row in result.rows}
    # One model: its speed; several: the fastest against the first.
    if len(ran) < 2:
        row = result.rows[0]
        return (
            f"{first}: {format_grouped(row.decode_tokens_per_second.value)} tokens/s of {row.rows} sequences after "
            f"{row.length} tokens."
        )
    shape = result.rows[0].rows, result.rows[0].length
    same = [row for row in result.rows if (row.rows, row.length) == shape and row.name != first]
    best = max(same, key=lambda row: row.ratio.value)
    return (
        f"Sequences at a time {shape[0]}, prompts of {shape[1]} tokens: {best.name} writes "
        f"{best.ratio.value:.2f} times as fast as {first}, the first token "
        f"after {best.first_token_ratio.value:.2f} times its time."
    )


def _draw_figures(result: InferenceResult) -> list[str]:
    """Draws tokens/s by batch size (longest prompts) and time to first token by prompt length (largest batch)."""
    # One of the two sizes varies, and the other is at its largest.
    longest, most = result.lengths[-1], result.batches[-1]
    speeds = [(row.name, row.rows, row.decode_tokens_per_second.value) for row in result.rows if row.length == longest]
    delays = [(row.name, row.length, row.first_token_seconds.value * 1e3) for row in result.rows if row.rows == most]
    figures = []
    for title, unit, measured, at, fixed in (
        ("Decode", "tokens/s", speeds, "rows", f"length {longest}"),
        ("Time to first token", "milliseconds", delays, "length", f"rows {most}"),
    ):
        lines = []
        for n, name in enumerate(dict.fromkeys(name for name, _, _ in measured)):
            points = sorted((size, value) for owner, size, value in measured if owner == name)
            x, y = zip(*points, strict=True)
            lines.append(svg.Curve(name, x, y, series_colour(n), "points"))
        points_text = "; ".join(
            f"{line.name} " + ", ".join(f"{v:.3g} at {n}" for n, v in zip(line.x, line.y, strict=True))
            for line in lines
        )
        caption = f"By {at}, both axes by factors; {fixed}."
        drawing = svg.draw_by_size(
            f"inference-{at}", lines, f"{title} in {unit} by {at}: {points_text}", format=lambda v: f"{v:g}", label=at
        )
        legend = [LegendEntry(format_headline(line.name), line.colour) for line in lines]
        figures.append(page.figure(f"{title}, {unit}", caption, drawing, legend))
    return figures


def _format_spread(metric: Spread, show: Callable[[float], str]) -> str:
    return number_cell(show(metric.value), f"{show(metric.low)} to {show(metric.high)}")


def _render_shapes(rows: Sequence[InferenceRow]) -> str:
    unit, caches = format_sizes([size / 2**30 for row in rows for size in (row.cache_bytes, row.cache_predicted_bytes)])
    titles = (
        "model",
        "sequences x tokens",
        "first token, ms",
        "prefill tokens/s",
        "decode tokens/s",
        "times the first",
        "tokens a pass",
        f"cache, {unit}",
        "same text",
    )
    shown = [
        page.named_row(
            row.name,
            number_cell(f"{row.rows} x {row.length}"),
            _format_spread(row.first_token_seconds, lambda v: f"{v * 1e3:,.1f}"),
            _format_spread(row.prefill_tokens_per_second, format_grouped),
            _format_spread(row.decode_tokens_per_second, lambda v: format_grouped(v, 0 if v >= 100 else 1)),
            _format_spread(row.ratio, lambda v: f"{v:.2f}"),
            number_cell(f"{row.tokens_per_pass:.2f}"),
            number_cell(caches[2 * n], f"predicted {caches[2 * n + 1]}"),
            number_cell(format_percent(row.same_text)),
        )
        for n, row in enumerate(rows)
    ]
    return page.table(titles, shown)


def _render_models(models: Sequence[InferenceModel]) -> str:
    # A model that failed keeps its row, so that indices stay aligned with `models`.
    weights = [None if m.failed or m.weights_bytes is None else m.weights_bytes / 2**30 for m in models]
    extra = [None if m.failed else m.beyond_weights_gib for m in models]
    unit, texts = format_sizes([*weights, *extra])
    titles = ("model", "parameters", f"weights, {unit}", "in", "loss", f"other, {unit}", "start-up")
    rows = []
    for n, model in enumerate(models):
        if model.failed:
            rows.append(page.failed_row(model.name, model.failed, len(titles)))
            continue
        cells = (
            format_grouped(model.parameters),
            texts[n],
            model.dtype or "",
            format_loss(model.loss),
            texts[len(models) + n],
            f"{model.startup_seconds:.1f} s",
        )
        rows.append(page.named_row(model.name, *map(number_cell, cells)))
    return page.table(titles, rows)
