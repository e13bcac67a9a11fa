"""The `preheat techniques` command."""

from __future__ import annotations

import typer

from preheat.cli.views.console import Json
from preheat.cli.views.output import say

__all__ = ["app"]

app = typer.Typer(help="List and show the techniques.", invoke_without_command=True)


def _render_document(cls: type) -> str:
    import sys

    # The documentation of a technique is that of its module.
    return sys.modules[cls.__module__].__doc__ or ""


@app.callback()
def techniques(context: typer.Context, json: Json = False) -> None:
    """List the techniques that a recipe can name.

    Example: `preheat techniques`, `preheat techniques show lora`
    """
    # The callback also runs ahead of `show`.
    if context.invoked_subcommand is not None:
        return
    from preheat.cli.views.console import build_console, emit
    from preheat.core import registry

    known = registry()
    if json:
        emit(
            {
                "techniques": {
                    name: {
                        "stage": cls.stage.name,
                        "numerics": cls.numerics,
                        "what": _render_document(cls).split("\n")[0],
                    }
                    for name, cls in known.items()
                }
            }
        )
        return
    from rich.table import Table

    screen = build_console()
    # A narrow terminal needs its width for the descriptions.
    wide = screen.width >= 100
    table = Table("technique", *(["stage"] if wide else []), "numerics", "what", box=None, pad_edge=False)
    for name, cls in known.items():
        stage = [cls.stage.name.lower()] if wide else []
        table.add_row(name, *stage, cls.numerics, _render_document(cls).split("\n")[0].partition(": ")[2])
    screen.print(table)


@app.command("show")
def show(name: str) -> None:
    """Show what a technique does, when it helps and hurts, its source and its settings.

    Example: `preheat techniques show lora`
    """
    import dataclasses

    from preheat.core import registry
    from preheat.errors import RecipeError, suggest_nearest
    from preheat.recipe import field_docs

    known = registry()
    if name not in known:
        raise RecipeError(f"{name}: no such technique; {suggest_nearest(name, list(known))}")
    cls = known[name]
    say(_render_document(cls))
    docs = field_docs(cls)
    say("settings:" if dataclasses.fields(cls) else "no settings")
    for f in dataclasses.fields(cls):
        # A mutable default has a factory instead of a value.
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        say(f"  {f.name}: {default!r}  # {docs.get(f.name, '')}")
    say(f"\nin a recipe:\n  techniques:\n    {name}: {{}}")
