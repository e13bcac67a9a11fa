"""HTML page of `preheat bench`: verdicts, speed and memory gain of each technique, figures of every contender.

bench.json ──render──▶ bench.html
"""

from __future__ import annotations

from pathlib import Path

from preheat.core.bench import BenchResult, FailedRow, MeasuredRow, profile_folder
from preheat.files import parse_json, read_record
from preheat.report import page, svg
from preheat.report.formatting import (
    choose_unit,
    escape,
    format_change,
    format_gib,
    format_grouped,
    format_headline,
    format_loss,
    format_percent,
    format_sizes,
    join_units,
)
from preheat.report.profile_page import write_profile

__all__ = ["format_ratio_range", "write_bench"]

MEMORY_SEEN, SPEED_SEEN = 0.02, 0.03
"""Relative differences below these count as none; the same thresholds as for the verdicts."""


def write_bench(folder: str | Path) -> Path:
    """Writes `bench.html` next to a `bench.json` and returns its path; also the pages of the contenders' profiles.

    Raises:
        RunError: there is no bench.json, it is damaged, or the page cannot be written.
    """
    source = Path(folder) / "bench.json"
    written = page.write_figures(source, "preheat bench", BenchResult, _render_page)
    result = read_record(BenchResult, parse_json(source.read_bytes()))
    for row in result.measured.values():
        if row.finding is not None:
            write_profile(Path(folder) / profile_folder(row.name), f"{result.name}, {row.name}")
    return written


def _render_page(result: BenchResult) -> str:
    verdicts = [join_units(text) for text in (*(verdict.message for verdict in result.verdicts), *result.notes)]
    notices = [join_units(f"{row.name}: {notice}") for row in result.measured.values() for notice in row.notices]
    return page.document(
        f"{result.name} · preheat bench",
        f"""{page.header("preheat bench", format_headline(result.name), _render_headline(result))}
{page.section("verdicts", "Verdicts", page.bullets(verdicts) if verdicts else page.small(_NO_VERDICT))}
{page.section("give", "Gain of each technique", _render_waterfalls(result))}
{page.section("contenders", "Every contender", _render_table(result) + (page.bullets(notices) if notices else ""))}
{page.section("profiles", "Where the time of a step goes", _render_findings(result))}
<footer>{"One turn" if result.repeats == 1 else f"{escape(result.repeats)} turns, in alternation,"} of \
{escape(result.steps)} steps, each in a process of its own. Speed: the median step, and of several turns their median;
ratios within a round. Memory: the greatest of the turns, less what the imports took. Cosine: of \
the first step's
gradients with those of {escape(result.rows[0].name)}. All figures as data: bench.json.</footer>""",
    )


_NO_VERDICT = "Nothing was left out, so there is no verdict."


def _render_headline(result: BenchResult) -> str:
    plain, combined = result.measured.get("plain"), result.measured.get("all")
    if not plain or not combined:
        return f"{len(result.rows)} contenders on this machine."
    turns = "" if len(combined.speeds) > 1 else "In one turn, which gives no verdict on speed. "
    return (
        f"{turns}All together: {combined.ratio:.2f} times the speed of the plain recipe "
        f"({format_grouped(combined.tokens_per_second)} against {format_grouped(plain.tokens_per_second)} tokens/s) in "
        f"{format_percent(combined.peak_gib / plain.peak_gib)} of its memory "
        f"({format_gib(combined.peak_gib)} against {format_gib(plain.peak_gib)})."
    )


def _render_waterfalls(result: BenchResult) -> str:
    rows = result.measured
    if "plain" not in rows or "all" not in rows:
        return ""
    # A technique's gain is the difference between all techniques and all without it.
    left_out = [name for name in rows["all"].techniques if f"without {name}" in rows]
    if not left_out:
        return ""
    drawn = []
    noise = {verdict.technique for verdict in result.verdicts if verdict.within_noise}
    peaks = {name: row.peak_gib for name, row in rows.items()}
    speeds = {name: row.tokens_per_second for name, row in rows.items()}
    for key, title, values, unit, scale, least in (
        ("peak_gib", "Peak memory", peaks, *choose_unit([*peaks.values()]), MEMORY_SEEN),
        ("tokens_per_second", "Speed", speeds, "thousand tokens/s", 1e-3, SPEED_SEEN),
    ):
        plain, combined = values["plain"] * scale, values["all"] * scale
        threshold = least * max(plain, combined)  # smaller differences are below the noise and drawn as none
        parts = [(name, combined - values[f"without {name}"] * scale) for name in left_out]
        if key == "tokens_per_second":  # draw no difference if the verdict found none
            parts = [(name, 0.0 if name in noise else size) for name, size in parts]
        parts = [(name, size if abs(size) >= threshold else 0.0) for name, size in parts]
        # Gains measured one by one do not add up to the gain of all: the rest is their overlap.
        overlap = combined - plain - sum(size for _, size in parts)
        parts.append(("overlap", overlap if abs(overlap) >= threshold else 0.0))
        # Less memory is better, more speed is better.
        better = -1 if key == "peak_gib" else 1
        bars = [svg.Span("plain", 0.0, plain, "series-6")]
        at = plain
        for name, size in parts:
            unchanged = format_change(size, max(plain, combined)) == "0"
            colour = "series-6" if name == "overlap" or unchanged else "series-3" if size * better >= 0 else "series-2"
            bars.append(svg.Span(name, at, at + size, colour))
            at += size
        bars.append(svg.Span("all", 0.0, combined, "series-1"))
        alt_text = f"{title} in {unit}: from {plain:.3g} plain to {combined:.3g} with all; " + ", ".join(
            f"{name} {format_change(size, max(plain, combined))}" if size else f"{name} no difference seen"
            for name, size in parts
        )
        caption = "Each bar is what changes when that technique alone is left out; overlap is what they share."
        drawing = svg.draw_spans(f"fall-{key.replace('_', '-')}", bars, alt_text, unit=unit)
        drawn.append(page.figure(f"{title}, {unit}", caption, drawing))
    return page.two_columns(*drawn)


def _render_table(result: BenchResult) -> str:
    rows = result.rows
    peaks = [row.peak_gib if isinstance(row, MeasuredRow) else None for row in rows]
    predicted = [row.predicted.peak_gib if isinstance(row, MeasuredRow) and row.predicted else None for row in rows]
    unit, texts = format_sizes([*peaks, *predicted])
    titles = ("contender", "tokens/s", "times plain", f"peak, {unit}", "start-up", "loss", "cosine")
    return page.table(
        titles,
        [
            page.failed_row(row.name, row.failed, len(titles))
            if isinstance(row, FailedRow)
            else _render_row(row, peak, f"predicted {guess}" if size is not None else "")
            for row, peak, guess, size in zip(rows, texts, texts[len(rows) :], predicted, strict=False)
        ],
    )


def _render_findings(result: BenchResult) -> str:
    rows = [
        page.named_row(row.name, page.text_cell(row.finding), link=f"{profile_folder(row.name)}/profile.html")
        for row in result.measured.values()
        if row.finding is not None
    ]
    return page.table(("contender", "largest gap to its plan"), rows, text=(0, 1)) if rows else ""


def format_ratio_range(row: MeasuredRow) -> str:
    """Returns the lowest and highest speed ratio of a contender's turns."""
    low, high = row.ratio_spread
    return f"{low:.2f} to {high:.2f}" if len(row.speeds) > 1 else "one turn"


def _render_row(row: MeasuredRow, peak: str, predicted: str) -> str:
    cosine = "none in common" if row.gradient_cosine is None else f"{row.gradient_cosine:.6f}"
    low, high = row.spread
    return page.named_row(
        row.name,
        page.number_cell(format_grouped(row.tokens_per_second), f"{format_grouped(low)} to {format_grouped(high)}"),
        page.number_cell(f"{row.ratio:.2f}", format_ratio_range(row)),
        page.number_cell(peak, predicted),
        page.number_cell(f"{row.startup_seconds:.1f} s"),
        page.number_cell(format_loss(row.loss)),
        page.number_cell(cosine),
    )
