"""Parts of every HTML page: frame, sections, tiles, tables, figures and legends; and reading and writing its files.

Arguments called `markup` (or `content`, `drawing`) are HTML and used as they are; every other text is escaped here, so
that no page has to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple, TypeVar

from preheat.errors import RunError
from preheat.files import parse_json, read_record, write_user_file
from preheat.report.formatting import MISSING, NOT_FINITE, escape, format_headline, join_units
from preheat.sanitize import shorten

__all__ = [
    "GENERATOR",
    "LegendEntry",
    "bar_cell",
    "bullets",
    "cell",
    "colour_key",
    "document",
    "failed_row",
    "figure",
    "group_row",
    "header",
    "named_row",
    "notice",
    "number_cell",
    "row",
    "section",
    "series_colour",
    "small",
    "table",
    "text_cell",
    "tiles",
    "two_columns",
    "write_figures",
    "write_page",
]

GENERATOR = '<meta name="generator" content="preheat">'
"""Marker in the head of each page: preheat overwrites only files that contain it."""

_Result = TypeVar("_Result")
_MOST_ROWS = 400  # of a table: keeps the page small


# --- the page and its file


def document(title: str, body: str) -> str:
    """Returns a self-contained HTML page with our style; its content security policy blocks external resources."""
    # Inlined, so that a page can be mailed or archived as one file.
    css = resources.files("preheat.report").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{GENERATOR}
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(format_headline(title))}</title>
<style>
{css}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def write_page(page: str, path: str | Path, *, fix: str = "name another file with --html") -> Path:
    """Writes a page to the file that the user named, unless somebody else's file is there, and returns its path.

    Args:
        fix: advice at the end of the error message.

    Raises:
        RunError: the file cannot be written, or preheat did not write it.
    """
    return write_user_file(path, page, marks=[GENERATOR], fix=fix)


def write_figures(source: Path, command: str, kind: type[_Result], draw: Callable[[_Result], str]) -> Path:
    """Writes the page of a JSON file of figures next to it and returns its path.

    Args:
        command: the command that writes the file, for error messages.
        kind: the record in the file.
        draw: the record to HTML.

    Raises:
        RunError: there is no such file, it is damaged, or the page cannot be written.
    """
    try:
        result = read_record(kind, parse_json(source.read_bytes()))
    except FileNotFoundError:
        raise RunError(f"{source}: no such file; {command} writes it") from None
    except ValueError as error:
        raise RunError(f"{source}: is damaged ({shorten(str(error))}); run {command} again") from None
    # The file may have been edited: its records are of the right types, but may contradict each other.
    try:
        page = draw(result)
    except (ArithmeticError, LookupError, ValueError) as error:
        reason = f"{type(error).__name__}: {shorten(str(error))}"
        raise RunError(f"{source}: is damaged ({reason}); run {command} again") from error
    return write_page(page, source.with_suffix(".html"), fix="make the folder writable or free some room")


# --- blocks


def header(eyebrow: str, title: str, verdict: str, notices: str = "") -> str:
    """Returns the head of a page: what wrote it, its title and its answer; `notices` is HTML."""
    return (
        f'<header id="verdict"><p class="eyebrow">{escape(eyebrow)}</p><h1>{escape(title)}</h1>\n'
        f'<p class="verdict">{join_units(verdict)}</p>{notices}</header>'
    )


def notice(text: str, *, bad: bool = False) -> str:
    """Returns a framed message below the verdict."""
    return f'<p class="notice{" bad" if bad else ""}" role="status">{escape(text)}</p>'


def section(name: str, title: str, content: str) -> str:
    """Returns a section with its heading; "" without content."""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>\n' if content else ""


def small(text: str) -> str:
    """Returns a paragraph of explanation."""
    return f'<p class="small">{escape(text)}</p>'


def bullets(items: Iterable[str]) -> str:
    """Returns a list of HTML items."""
    return f"<ul>{''.join(f'<li>{markup}</li>' for markup in items)}</ul>"


def two_columns(*contents: str) -> str:
    """Puts HTML blocks side by side where there is room; "" if all are empty."""
    return f'<div class="two">{"".join(contents)}</div>' if any(contents) else ""


def tiles(entries: Iterable[tuple[str, str, str]]) -> str:
    """Returns tiles of (label, figure, explanation); an entry whose figure is not recorded has none."""
    # A tile that says "not recorded" would only take room.
    shown = "".join(_render_tile(*entry) for entry in entries if entry[1] != MISSING)
    return f'<dl class="tiles">{shown}</dl>' if shown else ""


def _render_tile(label: str, value: str, below: str) -> str:
    kind = ' class="bad"' if value == NOT_FINITE else ""
    explanation = f"<dd>{join_units(below)}</dd>" if below else ""
    return f"<div><dt>{escape(label)}</dt><dd{kind}>{join_units(value)}</dd>{explanation}</div>"


# --- figures


class LegendEntry(NamedTuple):
    """A name in the legend of a figure, with its colour and the style of its line (line, raw or level)."""

    name: str
    colour: str
    style: str = "line"


def series_colour(n: int) -> str:
    """Returns the colour of series `n`, counted from 0; there are six, which repeat."""
    return f"series-{n % 6 + 1}"


def figure(title: str, caption: str, drawing: str, legend: Iterable[LegendEntry] = ()) -> str:
    """Returns a drawing with its title (may be empty), caption and legend."""
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    items = "".join(
        f'<li class="{style}" style="--c: var(--{colour})">{escape(name)}</li>' for name, colour, style in legend
    )
    listed = f'<ul class="legend">{items}</ul>' if items else ""
    return f"<figure><figcaption>{heading}<p>{escape(caption)}</p></figcaption>{listed}{drawing}</figure>"


# --- tables


def table(titles: Sequence[str], rows: Iterable[str], *, text: Iterable[int] = (0,)) -> str:
    """Returns a table that scrolls sideways on a narrow page; beyond `_MOST_ROWS` rows the middle is left out.

    Args:
        titles: of the columns; none for a table without a head.
        rows: by `row`, `named_row`, `group_row` or `failed_row`.
        text: the columns that hold text; all other titles are right-aligned, as their numbers are.
    """
    rows, left = list(rows), set(text)
    if len(rows) > _MOST_ROWS:
        # The beginning and the end are the rows that people look for.
        half = _MOST_ROWS // 2
        left_out = f'<tr><td colspan="9" class="small">{len(rows) - 2 * half:,} rows left out</td></tr>'
        rows = [*rows[:half], left_out, *rows[-half:]]
    heads = "".join(
        f'<th scope="col"{"" if n in left else _class_attribute("n")}>{escape(title)}</th>'
        for n, title in enumerate(titles)
    )
    head = f"<thead><tr>{heads}</tr></thead>" if titles else ""
    return f'<div class="scroll"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def row(*cells: str, kind: str = "") -> str:
    """Returns a row of a table; of kind `sum` it is emphasized."""
    return f"<tr{_class_attribute(kind)}>{''.join(cells)}</tr>"


def named_row(name: str, *cells: str, link: str = "") -> str:
    """Returns a row whose first cell is the name of the row, which leads to a page beside this one if there is one."""
    shown = f'<a href="{escape(link)}">{escape(name)}</a>' if link else escape(name)
    return f'<tr><th scope="row">{shown}</th>{"".join(cells)}</tr>'


def group_row(title: str, columns: int) -> str:
    """Returns the heading of the rows below it, across all columns."""
    return f'<tr><th scope="rowgroup" colspan="{columns}">{escape(title)}</th></tr>'


def failed_row(name: str, reason: str, columns: int) -> str:
    """Returns a row that has a reason in place of its figures."""
    return named_row(name, f'<td class="free bad" colspan="{columns - 1}">{escape(reason)}</td>')


def cell(markup: str, kind: str = "") -> str:
    """Returns a cell of HTML; of kind `n` it is a number, of kind `free` a text that may break anywhere."""
    return f"<td{_class_attribute(kind)}>{markup}</td>"


def text_cell(text: str, below: str = "") -> str:
    """Returns a cell of free text, with a smaller line below it."""
    return cell(join_units(text) + _render_below(below), "free")


def number_cell(text: str, below: str = "") -> str:
    """Returns a cell of a number with its unit, with a smaller line below it."""
    return cell(join_units(text) + _render_below(below), "n")


def bar_cell(share: float) -> str:
    """Returns a cell with a bar that takes this share of its width."""
    return cell(f'<span class="bar" style="width: {100 * share:.1f}%"></span>' if share > 0 else "", "track")


def colour_key(colour: str) -> str:
    """Returns a square of a colour, which ties a row of a table to the drawing above it."""
    return f'<span class="key" style="--c: var(--{colour})"></span>'


def _render_below(text: str) -> str:
    return f'<br><span class="small">{join_units(text)}</span>' if text else ""


def _class_attribute(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
