"""preheat plan"""

from __future__ import annotations

from typing import Annotated

import typer

from preheat.cli.show import Json, RecipeArgument, Set

__all__ = ["plan"]


def plan(
    recipe: RecipeArgument,
    set: Set = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="Devices: what each of so many will need; `parallel.devices` of the recipe."),
    ] = None,
    json: Json = False,
) -> None:
    """What a recipe needs and how fast it will run, without training: a dry run of the very step, on this machine's measured rates.

    Example: `preheat plan demo --set batch.size=64`, or for eight devices `--set techniques.fsdp={} --count 8`. Exit code 3: it does not fit.
    """
    from preheat import load_recipe
    from preheat.cli.show import console, emit, picture
    from preheat.training.session import plan_here

    chosen = load_recipe(recipe, [*(set or []), *([f"parallel.devices={count}"] if count else [])])
    made = plan_here(chosen)
    if json:
        emit(made)
    else:
        console().print(picture(made, chosen.name))
    if not made["fits"]:
        raise typer.Exit(3)
