"""The `preheat doctor` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.views.console import Json
from preheat.core.json_types import JsonObject

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

__all__ = ["app"]

app = typer.Typer(
    help="List problems of this machine or of a run, each with the command that fixes it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.callback()
def _doctor() -> None:
    """List problems of this machine or of a run, each with the command that fixes it."""


@app.command("oom")
def oom(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that ran out of memory.")],
    json: Json = False,
) -> None:
    """Show what filled the memory of a run, the three cheapest fallbacks by the plan, and allocator settings
    if the free memory was fragmented.

    Example: `preheat doctor oom runs/demo`
    """
    from preheat.cli.views.console import build_console, emit
    from preheat.training.recovery.oom_report import diagnose

    diagnosis = diagnose(run)
    if json:
        emit(diagnosis)
    else:
        build_console().print(_render(diagnosis, run), soft_wrap=True)


def _render(diagnosis: JsonObject, run: Path) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from preheat.cli.views.console import format_rate
    from preheat.sanitize import format_memory

    failure = diagnosis["failure"]
    parts: list[RenderableType] = []
    if failure:
        requested = f" when {format_memory(failure.requested / 2**30)} more were asked for" if failure.requested else ""
        head = f"out of memory in step {failure.step + 1}, {failure.phase}, on rank {failure.rank}{requested}"
        # By category, the largest first.
        filled = Table("memory in use", "", box=None, pad_edge=False, title=None)
        for name, gib in sorted(diagnosis["in_use"].items(), key=lambda item: -item[1]):
            filled.add_row(
                f"{name} (activations and temporary tensors)" if name == "other" else name, format_memory(gib)
            )
        parts += [Text(head, style="bold"), filled]
    else:
        parts.append(Text("the plan says that it does not fit", style="bold"))
    parts.append(
        Text(
            f"predicted peak: {format_memory(diagnosis['peak_gib'])} (in {diagnosis['peak_phase']}) of "
            f"{format_memory(diagnosis['room_gib'])} available"
        )
    )
    # Recoveries that the run has tried already.
    for rung in diagnosis["fallbacks"]:
        parts.append(Text(f"resumed from step {rung.step} with {', '.join(rung.changed) or 'the recipe as written'}"))
    # Fixes that fit by the plan, with their cost in time.
    if diagnosis["options"]:
        table = Table("fixes, the cheapest first", "peak", "s a step", "", box=None, pad_edge=False)
        for way in diagnosis["options"]:
            flags = " ".join(f"--set {item}" for item in way["set"])
            table.add_row(
                flags,
                format_memory(way["peak_gib"]),
                format_rate(way["seconds_per_step"])
                if way["seconds_per_step"] >= 0.1
                else f"{way['seconds_per_step']:.2g}",
                f"{way['slower']:+.0%}",
            )
        # The first fix as a command to copy.
        parts += [
            table,
            Text(
                f"preheat train {run}/recipe.yaml --out {run} --resume "
                f"{' '.join(f'--set {item}' for item in diagnosis['options'][0]['set'])}"
            ),
        ]
    else:
        least = diagnosis["least"]
        message = f"no fallback fits: the least needs {format_memory(least['peak_gib'])}"
        message += (
            f"; it would fit with {' '.join(f'--set {item}' for item in diagnosis['shorter'])}"
            if diagnosis["shorter"]
            else "; use a smaller model"
        )
        parts.append(Text(message, style="yellow"))
    if diagnosis["allocator"]:
        advice = diagnosis["allocator"]
        parts.append(
            Text(
                f"{advice['why']}: run it with --set {advice['set']}, or, if that is not available, start it with "
                f"{advice['or']}"
            )
        )
    return Group(*parts)
