"""`preheat bench RECIPE`: compares techniques in training, and prints the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from preheat.cli.options.foreign_options import ForeignOptions
from preheat.cli.options.recipe_argument import load_recipe

if TYPE_CHECKING:
    from rich.table import Table

    from preheat.cli.options.bench_options import TechniqueBenchOptions
    from preheat.core.bench import BenchResult

__all__ = ["compare_techniques"]


def compare_techniques(options: TechniqueBenchOptions) -> None:
    """Compares speed, memory, start-up time, loss and gradients of a recipe with and without techniques."""
    from preheat.cli.views.console import build_console, emit
    from preheat.errors import RecipeError

    if len(options.what) > 1:
        raise RecipeError(
            f"bench: {options.what[1]}: techniques are compared in one recipe; for models side by side add --inference"
        )
    (recipe,) = options.what
    # Exactly one of the two.
    if options.ablate == bool(options.techniques):
        raise RecipeError("bench: name what to compare: --ablate, or --techniques A,B,C")
    overrides = [*options.set, *([f"hardware.device={options.device}"] if options.device else [])]
    loaded = load_recipe(recipe, "bench", overrides, foreign=ForeignOptions(options.from_))
    # Imported after the recipe is checked, since these import torch.
    from preheat.bench.compare import list_ablation, list_alone
    from preheat.bench.compare import run_bench as run
    from preheat.core.bench import FailedRow
    from preheat.files import to_plain_data
    from preheat.report import write_bench

    names = [name.strip() for name in (options.techniques or "").split(",") if name.strip()]
    contenders = list_ablation(loaded) if options.ablate else list_alone(loaded, names)
    folder = options.out or Path("bench") / loaded.name
    screen = build_console()
    if options.json:
        result = run(
            loaded, contenders, steps=options.steps, repeats=options.repeats, profile=options.profile, out=folder
        )
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

        from preheat.cli.views.output import build_progress_bar

        columns = ("{task.description}", BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        with build_progress_bar(screen, *columns) as progress:
            task = progress.add_task("planning", total=None)
            result = run(
                loaded,
                contenders,
                steps=options.steps,
                repeats=options.repeats,
                profile=options.profile,
                out=folder,
                say=lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
            )
    page = write_bench(folder)
    if options.json:
        emit({**to_plain_data(result), "report": str(page)})
        return
    screen.print(_build_table(result, wide=screen.width >= 110))
    for verdict in result.verdicts:
        screen.print(f"- {verdict.message}", soft_wrap=True)
    for note in result.notes:
        screen.print(f"- {note}", soft_wrap=True)
    for name, measured in result.measured.items():
        if measured.finding is not None:
            screen.print(f"- {name}: {measured.finding}", soft_wrap=True)
    for row in result.rows:
        if isinstance(row, FailedRow):
            screen.print(f"{row.name} was not run: {row.failed}", soft_wrap=True)
        else:
            for notice in row.notices:
                screen.note(f"{row.name}: {notice}")
    screen.print(f"report: {page}", soft_wrap=True)


def _build_table(result: BenchResult, wide: bool) -> Table:
    """Returns the result table; a narrow terminal gets only the columns that the verdicts mention."""
    from rich.table import Table

    from preheat.core.units import format_memory, format_rate
    from preheat.report.bench_page import format_ratio_range

    table = Table(box=None, pad_edge=False)
    table.add_column("contender", no_wrap=True)
    more = ("low to high", "start-up", "cosine") if wide else ()
    for title in ("tokens/s", "times plain", "peak", "loss", *more):
        table.add_column(title, justify="right", no_wrap=True)
    for row in result.measured.values():  # others are printed below the table as full sentences
        cosine = row.gradient_cosine
        table.add_row(
            row.name,
            format_rate(row.tokens_per_second),
            f"{row.ratio:.2f} ({format_ratio_range(row)})",
            format_memory(row.peak_gib),
            f"{row.loss:.3f}",
            *(
                (
                    f"{format_rate(row.spread[0])} to {format_rate(row.spread[1])}",
                    f"{row.startup_seconds:.1f} s",
                    "-" if cosine is None else f"{cosine:.6f}",
                )
                if wide
                else ()
            ),
        )
    return table
