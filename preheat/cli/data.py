"""The `preheat data` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.options.foreign_options import ForeignOptions
from preheat.cli.options.recipe_argument import load_recipe
from preheat.cli.views.console import From, Json, RecipeArgument, Set

if TYPE_CHECKING:
    from rich.table import Table

    from preheat.cli.views.output import PlainConsole
    from preheat.core.data_record import CleaningRecord, DataPreview, OverlapRecord

__all__ = ["data"]


def data(
    recipe: RecipeArgument,
    set: Set = None,
    from_: From = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Packed sequences to show.")] = 3,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page with all of this.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="FILE|TASK",
            help=(
                "Count training rows that share 13 words with evaluation data: a file, or a task as in `preheat eval "
                "--tasks` (NAME=FILE, FILE.yaml). Repeatable; data.clean.against leaves such rows out."
            ),
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show a recipe's data as the model will see it, with the trained tokens marked, and the findings of the checks.

    Example: `preheat data my.yaml --rows 5 --html data.html`, `preheat data my.yaml --against humaneval.jsonl`. Exit
    code 4: a check failed.
    """
    # Reports recipe errors before torch is imported, which takes seconds.
    chosen = load_recipe(recipe, "data", set, foreign=ForeignOptions(from_))
    from preheat import report
    from preheat.cli.views.console import build_console, emit
    from preheat.data.cleaning.corpus import find_overlaps
    from preheat.data.cleaning.overlap import open_evaluation_texts
    from preheat.data.preview import build_preview
    from preheat.data.rows.example_kinds import require_examples
    from preheat.errors import DataError
    from preheat.planning.plan_request import data_of
    from preheat.recipe.validate import read_clean

    # Reports a missing file before all rows are read.
    for name in against or ():
        open_evaluation_texts(name, knob="--against")
    # Data that training would refuse is shown all the same: this command is for finding out why.
    prepared = data_of(chosen, refuse=False)
    shown = build_preview(prepared, chosen.name, rows=rows, seed=chosen.seed)
    if against:
        size = read_clean(chosen.data).overlap_words
        shown["overlaps"] = find_overlaps(prepared.streams, against, size, knob="--against")
    page = report.write_data(shown, html) if html else None
    if json:
        emit({**shown, "page": str(page) if page else None})
    else:
        _print(build_console(), shown)
        if page:
            build_console().print(f"page: {page}", soft_wrap=True)
    # After printing: the rows that are shown help to find the cause.
    require_examples(chosen, prepared)
    if prepared.blocked:
        raise DataError("\n".join(prepared.blocked))


def _print(screen: PlainConsole, shown: DataPreview) -> None:
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    from preheat.data.row_account import RowAccount
    from preheat.sanitize import escape_control_characters

    # Without colours, trained text is set in quotation marks.
    colours = screen.is_terminal and not screen.no_color
    for example in shown["examples"]:
        for n, document in enumerate(example["documents"]):
            what = f", class {document['label']}" if document["label"] is not None else ""
            # Pairs alternate: chosen, rejected.
            if example["compared"]:
                what = ", rejected" if n % 2 else ", chosen"
            title = (
                f"{document['where']}: {document['tokens']:,} tokens, {document['trained']:,} trained{what} "
                f"(sequence {example['row']:,})"
            )
            screen.print(Rule(Text(escape_control_characters(title)), align="left", characters="─" if colours else "-"))
            text = Text()
            for span, trained, _ in document["spans"]:
                span = escape_control_characters(span)
                text.append(span if colours or not trained else f"«{span}»", "bold green" if trained else "dim")
            screen.print(text, soft_wrap=True)
        if example["padding"]:
            screen.print(Text(f"and {example['padding']:,} positions of padding", "dim"))
    screen.print(Rule(Text(escape_control_characters(shown["name"])), align="left", characters="─" if colours else "-"))
    screen.print(
        Text.assemble("shown in ", ("green" if colours else "«»", "bold green"), " is trained on, the rest is read")
    )
    counts, lengths, packing = shown["counts"], shown["lengths"], shown["packing"]
    table = Table.grid(padding=(0, 2))
    table.add_row("layout", Text(escape_control_characters(shown["layout"])))
    if shown["template"]:
        table.add_row("template", Text(escape_control_characters(shown["template"])))
    if shown["classes"]:
        table.add_row(
            "classes", Text(escape_control_characters(f"{len(shown['classes'])}: {', '.join(shown['classes'])}"))
        )
    table.add_row("rows", RowAccount.of_counts(counts).text())
    for source in counts["sources"]:
        weight = f", weight {source['weight']:g}" if source["weight"] != 1 else ""
        account = f"; {RowAccount.of(source).text()}" if len(counts["sources"]) > 1 else ""
        table.add_row(
            "source",
            Text(escape_control_characters(f"{source['source']}: {source['tokens']:,} tokens{weight}{account}")),
        )
    table.add_row("duplicates", f"{packing['duplicates']:,} of the training examples are duplicates")
    cut = f"; {lengths['longer_than_a_row']:,} longer than a sequence" + (
        f", {packing['cut']:,} with a truncated answer" if packing["cut"] else ""
    )
    table.add_row(
        "lengths",
        (
            f"median {lengths['median']:,.0f}, 95 % up to {lengths['p95']:,.0f}, longest {lengths['longest']:,} "
            f"tokens{cut}"
        ),
    )
    full = f"{packing['efficiency']:.1%} of their positions hold text, {packing['trained']:,} labels"
    table.add_row("packing", f"{packing['how']}: {packing['rows']:,} sequences of {packing['length']:,} tokens; {full}")
    screen.print(table)
    # The longest bar has 36 characters.
    most = max((bar["count"] for bar in lengths["bars"]), default=0)
    bars = Table.grid(padding=(0, 2))
    for bar in lengths["bars"]:
        upto = f"{bar['from']:,} to {bar['to']:,}" if bar["to"] else f"{bar['from']:,} or more"
        bars.add_row(f"  {upto}", f"{bar['count']:,}", Text("█" * round(36 * bar["count"] / max(most, 1)), "cyan"))
    screen.print(bars)
    if "cleaning" in counts:
        screen.print(_build_cleaning_table(counts["cleaning"]))
    for overlap in shown.get("overlaps", ()):
        screen.print(Text(escape_control_characters(_format_overlap(overlap))), soft_wrap=True)
        for row, question, shared in overlap["examples"]:
            line = f"  {row}: “{shared}” of {question}"
            screen.print(Text(escape_control_characters(line), "dim"), soft_wrap=True)
    for line in shown["preflight"]:
        screen.note(line)
    if not shown["preflight"] and not shown["blocked"]:
        screen.print("the checks before training found nothing")


def _build_cleaning_table(cleaning: CleaningRecord) -> Table:
    """Returns the rows that each reason of `data.clean` left out, and the personal data."""
    from rich.table import Table
    from rich.text import Text

    from preheat.report import list_cleaning
    from preheat.sanitize import escape_control_characters

    table = Table("data.clean", "threshold", "rows", "example", box=None, pad_edge=False)
    for line in list_cleaning(cleaning):
        reason, threshold, rows, example = (Text(escape_control_characters(cell)) for cell in line)
        table.add_row(reason, threshold, rows, example)
    return table


def _format_overlap(overlap: OverlapRecord) -> str:
    short = f"; {overlap['short']:,} are too short to be found (fewer than 8 words)" if overlap["short"] else ""
    return (
        f"against {overlap['name']}: {overlap['rows']:,} of {overlap['read']:,} training rows share words with its "
        f"{overlap['texts']:,} texts{short}"
    )
