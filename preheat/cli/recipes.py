"""The `preheat recipes` and `preheat init` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preheat.cli.views.console import Json
from preheat.cli.views.output import say

__all__ = ["app", "init"]

app = typer.Typer(
    help="List and show the built-in recipes; print the JSON schema for editors.", invoke_without_command=True
)


def _read_summary(path: Path) -> str:
    """Returns the first line of a recipe file, which is a comment that describes it."""
    # Each built-in recipe begins with such a comment.
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def _find(name: str) -> Path:
    from preheat.errors import RecipeError, suggest_nearest
    from preheat.recipe import built_in

    known = built_in()
    if name not in known:
        raise RecipeError(f"{name}: no such built-in recipe; {suggest_nearest(name, list(known))}")
    return known[name]


@app.callback()
def recipes(context: typer.Context, json: Json = False) -> None:
    """List the built-in recipes.

    Example: `preheat recipes`, `preheat recipes show demo`
    """
    # The callback also runs ahead of `show` and `schema`.
    if context.invoked_subcommand is not None:
        return
    from preheat.cli.views.console import build_console, emit
    from preheat.recipe import built_in

    summaries = {name: _read_summary(path) for name, path in built_in().items()}
    if json:
        emit({"recipes": summaries})
        return
    from rich.table import Table

    table = Table("recipe", "what for", box=None, pad_edge=False)
    for name, summary in summaries.items():
        table.add_row(name, summary)
    build_console().print(table)


@app.command("show")
def show(name: str) -> None:
    """Print a built-in recipe with its comments. Example: `preheat recipes show demo`"""
    say(_find(name).read_text(encoding="utf-8"), end="")


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of a recipe, for editors. Example: `preheat recipes schema > recipe.schema.json`"""
    import json as text

    from preheat.recipe import build_json_schema

    say(text.dumps(build_json_schema(), indent=1, allow_nan=False))


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A built-in recipe.")],
    out: Annotated[Path | None, typer.Option("--out", help="The output file; default: NAME.yaml.")] = None,
) -> None:
    """Copy a built-in recipe for you to edit; comments explain each line.

    Example: `preheat init demo`
    """
    from preheat.errors import RecipeError

    source, target = _find(name), out or Path(f"{name}.yaml")
    # Never over a file that the user may have edited.
    if target.exists():
        raise RecipeError(f"{target}: already exists; name another file with --out")
    try:
        target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{target}: cannot be written ({error.strerror})") from None
    # Chains are recipes of `preheat compress`, which nothing trains.
    chain = source.parent.name == "chains"
    then = f"preheat compress RUN --recipe {target}" if chain else f"preheat plan {target}, then preheat train {target}"
    say(f"wrote {target}; next: {then}")
