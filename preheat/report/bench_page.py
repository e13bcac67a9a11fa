"""HTML page of `preheat bench`: verdicts, speed and memory gain of each technique, figures of every contender.

bench.json ──render──▶ bench.html
"""

from __future__ import annotations

from pathlib import Path

from preheat.core.json_types import JsonObject
from preheat.report import page, svg
from preheat.report.formatting import (
    change,
    escape,
    gib,
    grouped,
    headline,
    loss,
    nbsp_units,
    number,
    percent,
    sizes,
    unit_of,
)

__all__ = ["ratio_range", "write_bench"]

MEMORY_SEEN, SPEED_SEEN = 0.02, 0.03
"""Relative differences below these count as none; the same thresholds as for the verdicts."""


def write_bench(folder: str | Path) -> Path:
    """Writes `bench.html` next to a `bench.json` and returns its path.

    Raises:
        RunError: there is no bench.json, it is damaged, or the page cannot be written.
    """
    source = Path(folder) / "bench.json"
    return page.write_figures(source, "preheat bench", ("name", "rows"), _page)


def _page(result: JsonObject) -> str:
    verdicts = [nbsp_units(v["message"]) for v in result["verdicts"]]
    # Results of older versions have no notices.
    notices = [nbsp_units(f"{row['name']}: {notice}") for row in result["rows"] for notice in row.get("notices", ())]
    return page.document(
        f"{result['name']} · preheat bench",
        f"""{page.header("preheat bench", headline(result["name"]), _headline(result))}
{page.section("verdicts", "Verdicts", page.bullets(verdicts) if verdicts else page.small(_NO_VERDICT))}
{page.section("give", "Gain of each technique", _waterfalls(result))}
{page.section("contenders", "Every contender", _table(result) + (page.bullets(notices) if notices else ""))}
<footer>{escape(result["repeats"])} turns of {escape(result["steps"])} steps each, every turn in a process of its \
own, in alternation. Speed: median over the turns
of the median step; ratios within a round. Memory: the greatest of the turns, less what the imports took. Cosine: of \
the first step's
gradients with those of {escape(result["rows"][0]["name"])}. All figures as data: bench.json.</footer>""",
    )


_NO_VERDICT = "Nothing was left out, so there is no verdict."


def _headline(result: JsonObject) -> str:
    rows = {row["name"]: row for row in result["rows"]}
    plain, combined = rows.get("plain"), rows.get("all")
    if not plain or not combined or plain["failed"] or combined["failed"]:
        return f"{len(result['rows'])} contenders on this machine."
    turns = "" if len(combined["speeds"]) > 1 else "In one turn, which gives no verdict on speed. "
    return (
        f"{turns}All together: {combined['ratio']:.2f} times the speed of the plain recipe "
        f"({grouped(combined['tokens_per_second'])} against "
        f"{grouped(plain['tokens_per_second'])} tokens/s) in {percent(combined['peak_gib'] / plain['peak_gib'])} "
        "of its memory "
        f"({gib(combined['peak_gib'])} against {gib(plain['peak_gib'])})."
    )


def _waterfalls(result: JsonObject) -> str:
    rows = {row["name"]: row for row in result["rows"] if not row["failed"]}
    if "plain" not in rows or "all" not in rows:
        return ""
    # A technique's gain is the difference between all techniques and all without it.
    left_out = [(name, rows[f"without {name}"]) for name in rows["all"]["techniques"] if f"without {name}" in rows]
    if not left_out:
        return ""
    drawn = []
    judged = {verdict["technique"]: verdict for verdict in result["verdicts"]}
    for key, title, unit, scale, least in (
        ("peak_gib", "Peak memory", *unit_of([row["peak_gib"] for row in rows.values()]), MEMORY_SEEN),
        ("tokens_per_second", "Speed", "thousand tokens/s", 1e-3, SPEED_SEEN),
    ):
        plain, combined = rows["plain"][key] * scale, rows["all"][key] * scale
        threshold = least * max(plain, combined)  # smaller differences are below the noise and drawn as none
        parts = [(name, combined - row[key] * scale) for name, row in left_out]
        if key == "tokens_per_second":  # draw no difference if the verdict found none
            parts = [(name, 0.0 if judged.get(name, {}).get("within_noise") else size) for name, size in parts]
        parts = [(name, size if abs(size) >= threshold else 0.0) for name, size in parts]
        # Gains measured one by one do not add up to the gain of all: the rest is their overlap.
        overlap = combined - plain - sum(size for _, size in parts)
        parts.append(("overlap", overlap if abs(overlap) >= threshold else 0.0))
        # Less memory is better, more speed is better.
        better = -1 if key == "peak_gib" else 1
        bars = [svg.Span("plain", 0.0, plain, "series-6")]
        at = plain
        for name, size in parts:
            unchanged = change(size, max(plain, combined)) == "0"
            colour = "series-6" if name == "overlap" or unchanged else "series-3" if size * better >= 0 else "series-2"
            bars.append(svg.Span(name, at, at + size, colour))
            at += size
        bars.append(svg.Span("all", 0.0, combined, "series-1"))
        alt_text = f"{title} in {unit}: from {plain:.3g} plain to {combined:.3g} with all; " + ", ".join(
            f"{name} {change(size, max(plain, combined))}" if size else f"{name} no difference seen"
            for name, size in parts
        )
        caption = "Each bar is what changes when that technique alone is left out; overlap is what they share."
        drawing = svg.spans(f"fall-{key.replace('_', '-')}", bars, alt_text, unit=unit)
        drawn.append(page.figure(f"{title}, {unit}", caption, drawing))
    return page.two_columns(*drawn)


def _table(result: JsonObject) -> str:
    rows = result["rows"]
    predicted = [row["predicted"]["peak_gib"] if not row["failed"] and row["predicted"] else None for row in rows]
    unit, texts = sizes([*(None if row["failed"] else row["peak_gib"] for row in rows), *predicted])
    titles = ("contender", "tokens/s", "times plain", f"peak, {unit}", "start-up", "loss", "cosine")
    return page.table(
        titles,
        [
            page.failed_row(row["name"], row["failed"], len(titles))
            if row["failed"]
            else _row(row, peak, f"predicted {guess}" if size is not None else "")
            for row, peak, guess, size in zip(rows, texts, texts[len(rows) :], predicted, strict=False)
        ],
    )


def ratio_range(row: JsonObject) -> str:
    """Returns the lowest and highest speed ratio of a contender's turns."""
    low, high = row["ratio_spread"]
    return f"{low:.2f} to {high:.2f}" if len(row["speeds"]) > 1 else "one turn"


def _row(row: JsonObject, peak: str, predicted: str) -> str:
    cosine = f"{row['gradient_cosine']:.6f}" if number(row["gradient_cosine"]) is not None else "none in common"
    low, high = row["spread"]
    return page.named_row(
        row["name"],
        page.number_cell(grouped(row["tokens_per_second"]), f"{grouped(low)} to {grouped(high)}"),
        page.number_cell(f"{row['ratio']:.2f}", ratio_range(row)),
        page.number_cell(peak, predicted),
        page.number_cell(f"{row['startup_seconds']:.1f} s"),
        page.number_cell(loss(row["loss"])),
        page.number_cell(cosine),
    )
