"""preheat bench"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from preheat.cli.show import Json, RecipeArgument, Set

__all__ = ["bench"]


def bench(
    recipe: RecipeArgument,
    set: Set = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="The recipe whole, without each technique, and each technique alone.")
    ] = False,
    techniques: Annotated[
        str | None, typer.Option("--techniques", metavar="A,B,C", help="Compare these techniques, each alone, with none.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=3, help="Steps of a turn; the first two are not timed.")] = 12,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Turns of each contender.")] = 3,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option("--device", help="Where to run; the recipe's hardware.device when not given."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where the results go; bench/NAME when not given.")] = None,
    json: Json = False,
) -> None:
    """Techniques side by side on this machine: speed with its spread, memory, start-up time, loss and gradients.

    Example: `preheat bench demo --ablate`, or `preheat bench demo --techniques lora,lion`.
    """
    from preheat import recipe as recipes
    from preheat.bench.compare import ablation, chosen
    from preheat.bench.compare import bench as run
    from preheat.cli.show import console, emit
    from preheat.errors import RecipeError
    from preheat.report import write_bench

    if ablate == bool(techniques):
        raise RecipeError("bench: say what to compare: --ablate, or --techniques A,B,C")
    made = recipes.load(recipe, [*(set or []), *([f"hardware.device={device}"] if device else [])])
    contenders = ablation(made) if ablate else chosen(made, [n.strip() for n in (techniques or "").split(",") if n.strip()])
    folder = out or Path("bench") / made.name
    screen = console()
    if json:
        result = run(made, contenders, steps=steps, repeats=repeats, out=folder)
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=screen, transient=True) as progress:
            task = progress.add_task("planning", total=None)
            result = run(
                made,
                contenders,
                steps=steps,
                repeats=repeats,
                out=folder,
                say=lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
            )
    page = write_bench(folder)
    result["report"] = str(page)
    if json:
        emit(result)
        return
    screen.print(_table(result["rows"], wide=screen.width >= 110))
    for verdict in result["verdicts"]:
        screen.print(f"- {verdict['words']}", soft_wrap=True)
    screen.print(f"report: {page}", soft_wrap=True)


def _table(rows: list[dict[str, Any]], wide: bool) -> Any:
    """The report has every column; a narrow terminal gets those that the verdicts speak of."""
    from rich.table import Table

    from preheat.cli.show import memory, rate

    table = Table(box=None, pad_edge=False)
    table.add_column("contender", no_wrap=True)
    more = ("low to high", "start-up", "cosine") if wide else ()
    for title in ("tokens/s", "times plain", "peak", "loss", *more):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        if row["failed"]:
            table.add_row(row["name"], f"[red]{row['failed']}[/red]")
            continue
        cosine = row["gradient_cosine"]
        table.add_row(
            row["name"],
            rate(row["tokens_per_second"]),
            f"{row['ratio']:.2f} ({row['ratio_spread'][0]:.2f} to {row['ratio_spread'][1]:.2f})",
            memory(row["peak_gib"]),
            f"{row['loss']:.3f}",
            *(
                (
                    f"{rate(row['spread'][0])} to {rate(row['spread'][1])}",
                    f"{row['startup_seconds']:.1f} s",
                    "-" if cosine is None else f"{cosine:.6f}",
                )
                if wide
                else ()
            ),
        )
    return table
