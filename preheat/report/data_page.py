"""HTML page of `preheat data`: examples with their trained tokens marked, lengths, sources, results of the checks."""

from __future__ import annotations

from pathlib import Path

from preheat.core.data_record import (
    IN_EVALUATION_DATA,
    AccountRecord,
    Bar,
    CleaningRecord,
    DataCounts,
    DataPreview,
    ExampleSequence,
    OverlapRecord,
    SourceRecord,
)
from preheat.report import page
from preheat.report.formatting import LONG, escape, format_grouped, format_headline, format_percent

__all__ = ["list_cleaning", "render_cleaning", "write_data"]


def write_data(shown: DataPreview, path: str | Path) -> Path:
    """Writes the page and returns its path.

    Args:
        shown: the result of `preheat.data.preview.build_preview`.

    Raises:
        RunError: the page cannot be written.
    """
    return page.write_page(_render_page(shown), path)


def _render_page(shown: DataPreview) -> str:
    notices = [page.notice(line, bad=True) for line in shown["blocked"]] + list(map(page.notice, shown["preflight"]))
    packing, counts = shown["packing"], shown["counts"]
    verdict = (
        "The checks before training refuse this data."
        if shown["blocked"]
        else "The checks before training let it pass."
    )
    tiles = (
        ("Rows read", format_grouped(counts["read"]), _render_dropped(counts) or "none left out"),
        (
            "Rows to train on",
            format_grouped(packing["documents"]),
            f"{counts['validation']['documents']:,} to validate on",
        ),
        ("Tokens", format_grouped(packing["tokens"]), f"{packing['trained']:,} are trained on"),
        (
            "Packed sequences",
            format_grouped(packing["rows"]),
            f"of {packing['length']:,} tokens, {format_percent(packing['efficiency'])} text",
        ),
        ("Longest", format_grouped(shown["lengths"]["longest"]), f"median {shown['lengths']['median']:,.0f} tokens"),
        (
            "Longer than a sequence",
            format_grouped(shown["lengths"]["longer_than_a_row"]),
            (f"{packing['cut']:,} with a truncated answer"),
        ),
        ("Duplicates", format_grouped(packing["duplicates"]), "examples that occur before"),
        ("Layout", shown["layout_kind"], shown["layout_reason"]),
    )
    template = f" Chat template: {shown['template']}." if shown["template"] else ""
    return page.document(
        f"{shown['name']} · preheat data",
        f"""{page.header("preheat data", format_headline(shown["name"]), verdict + template, "".join(notices))}
{page.tiles(tiles)}
{page.section("examples", "As the model sees it", _EXAMPLES + "".join(map(_render_example, shown["examples"])))}
{page.section("lengths", "Tokens of an example", _render_bars(shown["lengths"]["bars"]))}
{page.section("sources", "Sources", _render_sources(counts["sources"]))}
{render_cleaning(counts["cleaning"]) if "cleaning" in counts else ""}
{_render_overlaps(shown["overlaps"]) if "overlaps" in shown else ""}
<footer>The same as data: preheat data --json.</footer>""",
    )


_EXAMPLES = (
    '<p class="small"><mark>Marked</mark> is trained on; the rest is read. Sequences in the order of training, each '
    "document with its file and row.</p>"
)


def _render_example(example: ExampleSequence) -> str:
    parts = []
    for n, doc in enumerate(example["documents"]):
        what = f", class {doc['label']}" if doc["label"] is not None else ""
        # Documents of preference pairs alternate: the chosen answer, then the rejected one.
        if example["compared"]:
            what = ", rejected" if n % 2 else ", chosen"
        title = (
            f"{doc['where']}: {doc['tokens']:,} tokens, {doc['trained']:,} trained{what} (sequence {example['row']:,})"
        )
        text = "".join(
            f"<mark>{escape(span, LONG)}</mark>" if trained else escape(span, LONG) for span, trained, _ in doc["spans"]
        )
        parts.append(page.small(title) + f'<pre class="tokens">{text}</pre>')
    if example["padding"]:
        parts.append(page.small(f"and {example['padding']:,} positions of padding"))
    return "".join(parts)


def _render_bars(bars: list[Bar]) -> str:
    most = max((bar["count"] for bar in bars), default=0) or 1
    rows = []
    for bar in bars:
        upto = f"{bar['from']:,} to {bar['to']:,}" if bar["to"] else f"{bar['from']:,} or more"
        rows.append(
            page.row(page.cell(escape(upto)), page.number_cell(f"{bar['count']:,}"), page.bar_cell(bar["count"] / most))
        )
    return page.table(("tokens", "examples", ""), rows, text=(0, 2))


def _render_sources(sources: list[SourceRecord]) -> str:
    rows = []
    for source in sources:
        rows.append(
            page.row(
                page.text_cell(source["source"], f"{source['layout']}; left out: {_render_dropped(source) or 'none'}"),
                page.number_cell(f"{source['read']:,}"),
                page.number_cell(f"{source['tokens']:,}"),
                page.number_cell(f"{source['weight']:g}"),
            )
        )
    return page.table(("source", "rows", "tokens", "weight"), rows)


def _render_dropped(counts: AccountRecord | DataCounts) -> str:
    """Returns the rows left out, by reason."""
    return ", ".join(f"{n:,} {why}" for why, n in counts["dropped"].items())


def list_cleaning(cleaning: CleaningRecord) -> list[tuple[str, str, str, str]]:
    """Returns (reason, threshold, rows, example) of each reason of `data.clean`, and of each kind of personal data."""
    lines = []
    for removed in cleaning["removed"]:
        example = ": ".join(removed["examples"][0]) if removed["examples"] else ""
        if removed["reason"] == IN_EVALUATION_DATA and cleaning["short_texts"]:
            short = f"{cleaning['short_texts']:,} of {cleaning['evaluation_texts']:,} texts are too short to be found"
            example = f"{example}; {short}" if example else short
        lines.append((removed["reason"], removed["threshold"], f"{removed['rows']:,}", example))
    effect = {"count": "counted", "mask": "masked", "drop": "rows left out"}.get(cleaning["personal_data"], "")
    for kind, entry in (cleaning["personal"] or {}).items():
        lines.append((f"{kind}, {effect}", f"{entry['count']:,} times", f"{entry['rows']:,}", entry["examples"][0]))
    if cleaning["personal"] == {}:
        lines.append(("personal data", "", "0", ""))
    return lines


def render_cleaning(cleaning: CleaningRecord) -> str:
    """Returns the section of the rows that `data.clean` left out."""
    rows = [
        page.row(page.text_cell(reason, threshold), page.number_cell(count), page.cell(escape(example, LONG)))
        for reason, threshold, count, example in list_cleaning(cleaning)
    ]
    table = page.table(("reason and threshold", "rows", "example"), rows, text=(0, 2))
    return page.section("cleaning", "Cleaning", page.small("A row counts for the first reason that applies.") + table)


def _render_overlaps(overlaps: list[OverlapRecord]) -> str:
    rows = [
        page.row(
            page.text_cell(overlap["name"], f"{overlap['texts']:,} texts, {overlap['short']:,} too short to be found"),
            page.number_cell(f"{overlap['rows']:,}"),
            page.number_cell(f"{overlap['read']:,}"),
            page.cell("<br>".join(escape(f"{row}: {shared} ({of})", LONG) for row, of, shared in overlap["examples"])),
        )
        for overlap in overlaps
    ]
    table = page.table(("evaluation data", "rows that share words", "of", "examples"), rows, text=(0, 3))
    return page.section("overlaps", "Overlap with evaluation data", table)
