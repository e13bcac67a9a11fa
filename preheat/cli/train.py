"""preheat train"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preheat.cli.show import Json, RecipeArgument, Set

if TYPE_CHECKING:
    from preheat.recipe import Recipe

__all__ = ["run", "train"]


def run(recipe: Recipe, *, out: Path | None, resume: bool, force: bool, json: bool) -> dict[str, Any]:
    """Trains, writes the report, and shows predicted beside measured (or prints the JSON object)."""
    from contextlib import nullcontext

    from preheat import report as reports
    from preheat.cli.show import Live, console, emit
    from preheat.training.loop import train as start
    from preheat.training.watch import Watch

    screen = console()
    live = nullcontext(Watch()) if json else Live(screen, recipe.name)
    with live as watch:
        made = start(recipe, out=out, resume=resume, force=force, watch=watch)
    page = reports.write(made["run"])
    made["report"] = str(page)
    if json:
        emit(made)
    else:
        screen.print(_summary(made))
    return made


def _summary(made: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from preheat.cli.show import memory, rate

    table = Table("", "predicted", "measured", "difference", box=None, pad_edge=False)
    for words, key, show in (("peak memory", "peak_gib", memory), ("tokens/s", "tokens_per_second", rate)):
        expected, found = made["predicted"][key], made[key]
        if found is not None:
            table.add_row(words, show(expected), show(found), f"{expected / found - 1:+.0%}" if found else "-")
    end = f"stopped by {made['stopped']} at" if made["stopped"] else "done:"
    loss = f"loss {made['loss']:.4f}" + ("" if made["stopped"] else f", validation loss {made['validation_loss']:.4f}")
    return Group(
        Text(f"{end} step {made['steps']:,}, {loss}", style="bold"),
        table,
        Text(f"run: {made['run']}\nreport: {made['report']}"),
    )


def train(
    recipe: RecipeArgument,
    set: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; runs/NAME when not given.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in that folder from its last whole checkpoint, bit for bit.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Train even where the plan says that it does not fit.")] = False,
    json: Json = False,
) -> None:
    """Trains a recipe, and ends with predicted beside measured and a report.

    Example: `preheat train demo --set stop.steps=50 --out runs/first`, and after a crash the same with `--resume`.
    """
    from preheat import recipe as recipes

    run(recipes.load(recipe, set or []), out=out, resume=resume, force=force, json=json)
