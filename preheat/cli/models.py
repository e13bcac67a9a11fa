"""The `preheat models` command."""

from __future__ import annotations

import typer

from preheat.cli.views.console import Json
from preheat.cli.views.output import say

__all__ = ["app"]

app = typer.Typer(help="Public models that can be planned by name: list and show.", invoke_without_command=True)


@app.callback()
def models(context: typer.Context, json: Json = False) -> None:
    """Lists the models whose published configurations a recipe may name as `model.preset`. Nothing is downloaded.

    Example: `preheat models`, `preheat models show qwen2.5-0.5b`
    """
    if context.invoked_subcommand is not None:
        return
    from preheat.cli.views.console import console, emit
    from preheat.models.presets import PRESETS

    if json:
        emit(
            {
                "models": {
                    name: {"hub": p.hub, "chat": p.chat, "parameters": p.parameters} for name, p in PRESETS.items()
                }
            }
        )
        return
    from rich.table import Table

    table = Table("preset", "parameters", "on the hub", "gated", box=None, pad_edge=False)
    table.columns[1].justify, table.columns[2].no_wrap = "right", True
    for name, p in PRESETS.items():
        table.add_row(name, f"{p.parameters:,}", p.hub, "yes" if p.licence.gate else "no")
    console().print(table)


@app.command("show")
def show(name: str, json: Json = False) -> None:
    """What a public model is and needs, and how to plan and to train it. Example: `preheat models show gemma-2-2b`"""
    from preheat.cli.views.console import console, emit
    from preheat.models.presets import find, needs

    preset = find(name)
    facts = {
        "on the hub": preset.hub if preset.hub == preset.chat else f"{preset.hub}; tuned to converse: {preset.chat}",
        "licence": str(preset.licence),
        "parameters": f"{preset.parameters:,}",
        "chat template": preset.template,
        **needs(preset),
    }
    if json:
        emit({"name": name, "parameters": preset.parameters, "needs": facts, "config": preset.config})
        return
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for what, text in facts.items():
        table.add_row(what, text)
    console().print(table)
    say(
        f"\nplan it, without a download:\n  preheat plan {name} --gpu RTX-4090\n"
        f"train it:\n  model: {{path: {preset.chat}}}   # or a folder with its config.json and *.safetensors"
    )
