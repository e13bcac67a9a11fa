"""The `preheat recipes` and `preheat init` commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.views.console import Json
from preheat.cli.views.output import say

if TYPE_CHECKING:
    from preheat.recipe import NamedRecipe

__all__ = ["app", "init"]

app = typer.Typer(
    help="List and show the built-in recipes and those of installed packages; print the JSON schema for editors.",
    invoke_without_command=True,
)


def _find(name: str) -> NamedRecipe:
    from preheat.errors import RecipeError, suggest_nearest
    from preheat.recipe import named_recipes

    known = named_recipes()
    if name not in known:
        raise RecipeError(f"{name}: no recipe of that name; {suggest_nearest(name, list(known))}")
    return known[name]


@app.callback()
def recipes(context: typer.Context, json: Json = False) -> None:
    """List the built-in recipes, and those of installed packages (entry-point group `preheat.recipes`).

    Example: `preheat recipes`, `preheat recipes show demo`
    """
    # The callback also runs ahead of `show` and `schema`.
    if context.invoked_subcommand is not None:
        return
    from preheat.cli.views.console import build_console, emit
    from preheat.recipe import named_recipes

    summaries = {name: recipe.read_summary() for name, recipe in named_recipes().items()}
    packages = {name: recipe.package for name, recipe in named_recipes().items() if recipe.package}
    if json:
        emit({"recipes": summaries, "packages": packages})
        return
    from rich.table import Table

    table = Table("recipe", "what for", *(["package"] if packages else []), box=None, pad_edge=False)
    for name, summary in summaries.items():
        table.add_row(name, summary, *([packages.get(name, "")] if packages else []))
    build_console().print(table)


@app.command("show")
def show(name: str) -> None:
    """Print a recipe with its comments. Example: `preheat recipes show demo`"""
    from preheat.recipe.yaml_io import read_text

    say(read_text(_find(name).path, name), end="")


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of a recipe, for editors. Example: `preheat recipes schema > recipe.schema.json`"""
    import json as text

    from preheat.recipe import build_json_schema

    say(text.dumps(build_json_schema(), indent=1, allow_nan=False))


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe of `preheat recipes`.")],
    out: Annotated[Path | None, typer.Option("--out", help="The output file; default: NAME.yaml.")] = None,
) -> None:
    """Copy a recipe for you to edit; comments explain each line.

    Example: `preheat init demo`
    """
    from preheat.errors import RecipeError
    from preheat.recipe.yaml_io import read_text

    source, target = _find(name), out or Path(f"{name}.yaml")
    # Never over a file that the user may have edited.
    if target.exists():
        raise RecipeError(f"{target}: already exists; name another file with --out")
    try:
        target.write_text(read_text(source.path, name), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{target}: cannot be written ({error.strerror})") from None
    # Chains are recipes of `preheat compress`, which nothing trains.
    then = (
        f"preheat compress RUN --recipe {target}"
        if source.is_chain
        else f"preheat plan {target}, then preheat train {target}"
    )
    say(f"wrote {target}; next: {then}")
