"""preheat plan"""

from __future__ import annotations

from preheat.cli.show import Json, RecipeArgument, Set

__all__ = ["plan"]


def plan(recipe: RecipeArgument, set: Set = None, json: Json = False) -> None:
    """What a recipe needs and how fast it will run, without training: a dry run of the very step, on this machine's measured rates.

    Example: `preheat plan demo --set batch.size=64`. Exit code 3: it does not fit.
    """
    import typer

    from preheat import load_recipe
    from preheat.cli.show import console, emit, picture
    from preheat.training.session import plan_here

    chosen = load_recipe(recipe, set or [])
    made = plan_here(chosen)
    if json:
        emit(made)
    else:
        console().print(picture(made, chosen.name))
    if not made["fits"]:
        raise typer.Exit(3)
