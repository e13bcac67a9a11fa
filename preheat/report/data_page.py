"""HTML page of `preheat data`: examples with their trained tokens marked, lengths, sources, results of the checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from preheat.report.formatting import LONG, escape, grouped, headline, nbsp_units, percent
from preheat.report.run_page import GENERATOR, document, scrolling
from preheat.run_dir import write_user_file

__all__ = ["write_data"]


def write_data(shown: dict[str, Any], path: str | Path) -> Path:
    """Writes the page and returns its path.

    Args:
        shown: the result of `preheat.data.preview.preview`, and `name`.

    Raises:
        RunError: the page cannot be written.
    """
    return write_user_file(path, _page(shown), marks=[GENERATOR], fix="name another file with --html")


def _page(shown: dict[str, Any]) -> str:
    messages = [(line, " bad") for line in shown["blocked"]] + [(line, "") for line in shown["preflight"]]
    notices = "".join(f'<p class="notice{kind}">{escape(line)}</p>' for line, kind in messages)
    packing, counts = shown["packing"], shown["counts"]
    verdict = (
        "The checks before training refuse this data."
        if shown["blocked"]
        else "The checks before training let it pass."
    )
    left = ", ".join(f"{n:,} {why}" for why, n in counts["dropped"].items()) or "none left out"
    tiles = (
        ("Rows read", grouped(counts["read"]), left),
        (
            "Examples to train on",
            grouped(packing["documents"]),
            f"{counts['validation']['documents']:,} to validate on",
        ),
        ("Tokens", grouped(packing["tokens"]), f"{packing['trained']:,} are trained on"),
        (
            "Packed sequences",
            grouped(packing["rows"]),
            f"of {packing['length']:,} tokens, {percent(packing['efficiency'])} text",
        ),
        ("Longest", grouped(shown["lengths"]["longest"]), f"median {shown['lengths']['median']:,.0f} tokens"),
        ("Longer than a row", grouped(shown["lengths"]["longer_than_a_row"]), f"{packing['cut']:,} with a cut answer"),
        ("Duplicates", grouped(packing["duplicates"]), "examples that stand there before"),
        ("Layout", shown["layout_kind"], shown["layout_reason"]),
    )
    drawn = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{nbsp_units(figure)}</dd><dd>{nbsp_units(below)}</dd></div>"
        for label, figure, below in tiles
    )
    template = f" Chat template: {shown['template']}." if shown["template"] else ""
    return document(
        f"{shown['name']} · preheat data",
        f"""<header id="verdict"><p class="eyebrow">preheat data</p><h1>{escape(headline(shown["name"]))}</h1>
<p class="verdict">{escape(verdict + template)}</p>{notices}</header>
<dl class="tiles">{drawn}</dl>
<section id="examples"><h2>As the model sees it</h2><p class="small"><mark>Marked</mark> is trained on; the rest is \
read. Sequences in the order of training, each document with its file and row.</p>
{"".join(map(_example, shown["examples"]))}</section>
<section id="lengths"><h2>Tokens of an example</h2>{_bars(shown["lengths"]["bars"])}</section>
<section id="sources"><h2>Sources</h2>{_sources(counts["sources"])}</section>
<footer>The same as data: preheat data --json.</footer>""",
    )


def _example(example: dict[str, Any]) -> str:
    parts = []
    for n, doc in enumerate(example["documents"]):
        what = f", class {doc['label']}" if doc["label"] is not None else ""
        if example["compared"]:
            what = ", rejected" if n % 2 else ", chosen"
        title = (
            f"{doc['where']}: {doc['tokens']:,} tokens, {doc['trained']:,} trained{what} (sequence {example['row']:,})"
        )
        text = "".join(
            f"<mark>{escape(span, LONG)}</mark>" if trained else escape(span, LONG) for span, trained, _ in doc["spans"]
        )
        parts.append(f'<p class="small">{escape(title)}</p><pre class="tokens">{text}</pre>')
    if example["padding"]:
        parts.append(f'<p class="small">and {example["padding"]:,} places of padding</p>')
    return "".join(parts)


def _bars(bars: list[dict[str, Any]]) -> str:
    most = max((bar["count"] for bar in bars), default=0) or 1
    rows = []
    for bar in bars:
        upto = f"{bar['from']:,} to {bar['to']:,}" if bar["to"] else f"{bar['from']:,} or more"
        width = f'<span class="bar" style="width: {100 * bar["count"] / most:.1f}%"></span>' if bar["count"] else ""
        rows.append(
            f'<tr><td>{escape(upto)}</td><td class="n">{bar["count"]:,}</td><td class="track">{width}</td></tr>'
        )
    head = '<tr><th scope="col">tokens</th><th scope="col" class="n">examples</th><th scope="col"></th></tr>'
    return scrolling(f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>")


def _sources(sources: list[dict[str, Any]]) -> str:
    rows = []
    for source in sources:
        left = ", ".join(f"{n:,} {why}" for why, n in source["dropped"].items()) or "none"
        cell = (
            f'{escape(source["source"])}<br><span class="small">{escape(source["layout"])}; left out: '
            f"{escape(left)}</span>"
        )
        rows.append(
            f'<tr><td class="free">{cell}</td><td class="n">{source["read"]:,}</td>'
            f'<td class="n">{source["tokens"]:,}</td>'
            f'<td class="n">{source["weight"]:g}</td></tr>'
        )
    head = "".join(
        f'<th scope="col"{" class=n" if n else ""}>{t}</th>'
        for n, t in enumerate(("source", "rows", "tokens", "weight"))
    )
    return scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>")
