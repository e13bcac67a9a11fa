"""HTML page of `preheat bench`: verdicts, speed and memory gain of each technique, figures of every contender.

bench.json ──render──▶ bench.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preheat.report import svg
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
from preheat.report.run_page import document, scrolling, write_figures

__all__ = ["write_bench"]

MEMORY_SEEN, SPEED_SEEN = 0.02, 0.03
"""Relative differences below these count as none; the same thresholds as for the verdicts."""


def write_bench(folder: str | Path) -> Path:
    """Writes `bench.html` next to a `bench.json` and returns its path.

    Raises:
        RunError: there is no bench.json, it is damaged, or the page cannot be written.
    """
    source = Path(folder) / "bench.json"
    return write_figures(source, "preheat bench", ("name", "rows"), _page)


def _page(result: dict[str, Any]) -> str:
    verdicts = "".join(f"<li>{nbsp_units(v['message'])}</li>" for v in result["verdicts"])
    verdict_list = (
        f"<ul>{verdicts}</ul>" if verdicts else '<p class="small">Nothing was left out, so there is no verdict.</p>'
    )
    waterfalls = _waterfalls(result)
    falls = f'<section id="give"><h2>What each technique gives</h2>{waterfalls}</section>' if waterfalls else ""
    return document(
        f"{result['name']} · preheat bench",
        f"""<header id="verdict"><p class="eyebrow">preheat bench</p><h1>{escape(headline(result["name"]))}</h1>
<p class="verdict">{escape(_headline(result))}</p></header>
<section id="verdicts"><h2>Verdicts</h2>{verdict_list}</section>
{falls}
<section id="contenders"><h2>Every contender</h2>{_table(result)}</section>
<footer>{escape(result["repeats"])} turns of {escape(result["steps"])} steps each, every turn in a process of its \
own, in alternation. Speed: median over the turns
of the median step; ratios within a round. Memory: the greatest of the turns, less what the imports took. Cosine: of \
the first step's
gradients with those of {escape(result["rows"][0]["name"])}. All figures as data: bench.json.</footer>""",
    )


def _headline(result: dict[str, Any]) -> str:
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


def _waterfalls(result: dict[str, Any]) -> str:
    rows = {row["name"]: row for row in result["rows"] if not row["failed"]}
    if "plain" not in rows or "all" not in rows:
        return ""
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
        overlap = combined - plain - sum(size for _, size in parts)
        parts.append(("overlap", overlap if abs(overlap) >= threshold else 0.0))
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
        drawn.append(f"<figure><figcaption><h3>{title}, {unit}</h3><p>{caption}</p></figcaption>{drawing}</figure>")
    return f'<div class="two">{"".join(drawn)}</div>'


def _table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    predicted = [row["predicted"]["peak_gib"] if not row["failed"] and row["predicted"] else None for row in rows]
    unit, texts = sizes([*(None if row["failed"] else row["peak_gib"] for row in rows), *predicted])
    titles = ("contender", "tokens/s", "times plain", f"peak, {unit}", "start-up", "loss", "cosine")
    head = "".join(f'<th scope="col"{" class=n" if n else ""}>{title}</th>' for n, title in enumerate(titles))
    shown = "".join(
        _row(row, peak, f"predicted {guess}" if size is not None else "", len(titles) - 1)
        for row, peak, guess, size in zip(rows, texts, texts[len(rows) :], predicted, strict=False)
    )
    return scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{shown}</tbody></table>")


def _between(row: dict[str, Any]) -> str:
    return f"{row['ratio_spread'][0]:.2f} to {row['ratio_spread'][1]:.2f}" if len(row["speeds"]) > 1 else "one turn"


def _row(row: dict[str, Any], peak: str, predicted: str, columns: int) -> str:
    name = f'<th scope="row">{escape(row["name"])}</th>'
    if row["failed"]:
        return f'<tr>{name}<td class="free bad" colspan="{columns}">{escape(row["failed"])}</td></tr>'
    cells: Sequence[tuple[str, str]] = (
        (grouped(row["tokens_per_second"]), f"{grouped(row['spread'][0])} to {grouped(row['spread'][1])}"),
        (f"{row['ratio']:.2f}", _between(row)),
        (peak, predicted),
        (f"{row['startup_seconds']:.1f} s", ""),
        (loss(row["loss"]), ""),
        (f"{row['gradient_cosine']:.6f}" if number(row["gradient_cosine"]) is not None else "none in common", ""),
    )
    shown = "".join(
        f'<td class="n">{nbsp_units(value)}'
        + (f'<br><span class="small">{nbsp_units(below)}</span>' if below else "")
        + "</td>"
        for value, below in cells
    )
    return f"<tr>{name}{shown}</tr>"
