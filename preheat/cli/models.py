"""The `preheat models` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from preheat.cli.views.console import Json
from preheat.cli.views.output import say

if TYPE_CHECKING:
    from preheat.models.presets import Preset

__all__ = ["app"]

app = typer.Typer(help="List and show public models that can be planned by name.", invoke_without_command=True)

_OTHERS = (
    "show NAME says what one is; preheat plan NAME plans it, by any of its names on the hub in any case\n"
    "a model that is not listed: preheat plan OWNER/NAME downloads its config.json from the hub and nothing else; "
    "preheat plan FOLDER, a folder with its config.json; or without one, a size: preheat plan 7B"
)


@app.callback()
def models(context: typer.Context, json: Json = False) -> None:
    """List the models whose published configurations a recipe can name as `model.preset`. Downloads nothing.

    Example: `preheat models`, `preheat models show qwen2.5-0.5b`
    """
    # The callback also runs ahead of `show`.
    if context.invoked_subcommand is not None:
        return
    from preheat.cli.views.console import emit
    from preheat.models.presets import PRESETS

    if json:
        emit(
            {
                "models": {
                    name: {"hub": p.hub, "chat": p.chat, "parameters": p.parameters, "active": p.active}
                    for name, p in PRESETS.items()
                }
            }
        )
        return
    rows = [("preset", "parameters", "active", "on the hub", "gated")]
    for name, p in PRESETS.items():
        # None: the hub's page does not say.
        gated = "not known" if p.licence.gate is None else "yes" if p.licence.gate else "no"
        rows.append((name, f"{p.parameters:,}", f"{p.active:,}" if p.active else "", p.hub, gated))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # no table of rich: it would crop the names to the terminal's width
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        padded[1:3] = [cell.rjust(width) for cell, width in zip(row[1:3], widths[1:3], strict=True)]
        say("  ".join(padded).rstrip())
    say(f"\n{_OTHERS}")


@app.command("show")
def show(name: str, json: Json = False) -> None:
    """Show the size and requirements of a public model, and what plans and trains it, or why preheat cannot train it.

    NAME is the name of a preset or of a model on the hub, in any case. Example: `preheat models show Qwen/Qwen3-8B`
    """
    from preheat.cli.views.console import build_console, emit
    from preheat.models.presets import PRESETS, needs, resolve_hub_name

    if name not in PRESETS:
        name, _ = resolve_hub_name(name)
    preset = PRESETS[name]
    facts = {
        "on the hub": _format_checkpoints(preset),
        "licence": str(preset.licence),
        "parameters": _format_parameters(preset),
    }
    if preset.stored is not None:
        facts["in the hub's files"] = (
            f"{preset.stored:,}: also {preset.stored_more}; transformers leaves out what it does not train"
        )
    if preset.unconfirmed:
        facts["not confirmed"] = (
            f"{', '.join(preset.unconfirmed)}: no public copy of the file has them; a plan does not depend on them"
        )
    facts |= {"chat template": preset.template, **needs(preset)}
    if json:
        numbers = {"parameters": preset.parameters, "active": preset.active, "stored": preset.stored}
        emit({"name": name, **numbers, "not_trained": preset.not_trained, "needs": facts, "config": preset.config})
        return
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for what, text in facts.items():
        table.add_row(what, text)
    build_console().print(table)
    say("\n" + next_commands(name, preset))


def next_commands(name: str, preset: Preset) -> str:
    """Returns the commands that plan and train a model; for a model that cannot be trained why, and what plans it."""
    if preset.not_trained is not None:
        return (
            f"it cannot be trained here: {preset.text['model_type']} {preset.not_trained}\n"
            f"plan to serve it, without a download:\n  preheat plan {name} --inference --gpu RTX-4090"
        )
    return (
        f"plan it, without a download:\n  preheat plan {name} --gpu RTX-4090\n"
        f"train it:\n  model: {{path: {preset.chat}}}   # or a folder with its config.json and *.safetensors"
    )


def _format_checkpoints(preset: Preset) -> str:
    also = f"; also {', '.join(preset.also)}" if preset.also else ""
    return preset.hub + (f"; tuned to converse: {preset.chat}" if preset.chat != preset.hub else "") + also


def _format_parameters(preset: Preset) -> str:
    if preset.active is None:
        return f"{preset.parameters:,}"
    return f"{preset.parameters:,}, of which {preset.active:,} are active: all but the experts not chosen for a token"
