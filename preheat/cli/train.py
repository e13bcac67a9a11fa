"""preheat train"""

from __future__ import annotations

import os
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
    from preheat.cli.show import Alarms, Live, console, emit
    from preheat.training.loop import train as start

    screen = console()
    lead = int(os.environ.get("RANK", "0")) == 0  # of several processes the first shows and reports
    live = Live(screen, recipe.name) if lead and not json else nullcontext(Alarms())
    with live as watch:
        made = start(recipe, out=out, resume=resume, force=force, watch=watch)
    if not lead:
        return made
    if made.get("already_finished"):
        if json:
            emit(made)
        else:
            screen.print(_finished(made), soft_wrap=True)
        return made
    page = reports.write(made["run"])
    made["report"] = str(page)
    if json:
        emit(made)
    else:
        screen.print(_summary(made))
    return made


def _finished(made: dict[str, Any]) -> Any:
    from rich.text import Text

    return Text(
        f"{made['run']}: has finished already, at step {made['steps']:,}; nothing was written. "
        f"To go on longer, resume it with a later end: --set stop.steps={2 * made['steps']}"
    )


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


def _dry_run(
    recipe: str, overrides: list[str], *, gpu: str | None, out: Path | None, resume: bool, nproc: int, json: bool
) -> None:
    """Data, the run's folder and a plan of the recipe as it is; exit code 3 where it does not fit."""
    from preheat.training.asked import asked, hardware

    # Before torch is imported, which takes seconds.
    question = asked(recipe, [*overrides, *([f"parallel.devices={nproc}"] if nproc > 1 else [])])
    from preheat.cli.plan import finish
    from preheat.cli.planned import stated
    from preheat.cli.show import Alarms, console
    from preheat.errors import RecipeError
    from preheat.models.presets import require_weights
    from preheat.run import check_folder
    from preheat.training.session import read_data

    if not question.given:
        raise RecipeError(f"{recipe}: --dry-run takes a recipe; preheat plan takes a model, and writes one with --out")
    check_folder(out or Path("runs") / question.recipe.name, resume=resume)
    if gpu is not None:
        hardware(gpu, question.recipe, 1)  # one that is not known is told before the data is read
    if question.absent is None:
        require_weights(question.recipe)
        data, _, _ = read_data(question.recipe, Alarms())
        if not json:
            rows = f"{len(data.train):,} rows" if hasattr(data.train, "__len__") else "a stream of rows"
            console().print(f"data: {data.source}, {rows} of {question.recipe.batch.length:,} tokens")
    devices = question.recipe.parallel.devices or 1
    made, page = stated(question, gpu, devices, min(devices, 8), None)
    finish(made, page, question, out=None, html=None, json=json)


def train(
    recipe: RecipeArgument,
    set: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; runs/NAME when not given.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in that folder from its last whole checkpoint, bit for bit.")
    ] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Go on with the run where that folder holds one, and begin it where not.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Train even where the plan says that it does not fit.")] = False,
    nproc: Annotated[
        int,
        typer.Option(
            "--nproc", min=1, help="Processes on this host, one a device; the recipe's techniques say how they share the work."
        ),
    ] = 1,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts", min=0, help="With --nproc: start all again so often after one of them died, from the last checkpoint."
        ),
    ] = 0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="What comes before the first step, and nothing written: read the data, build, take a step without memory, plan.",
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="With --dry-run: on a device of the catalogue, or a stated one, as of preheat plan."),
    ] = None,
    json: Json = False,
) -> None:
    """Trains a recipe, and ends with predicted beside measured and a report.

    Example: `preheat train demo --set stop.steps=50 --out runs/first`, and after a crash the same with `--resume`. On several devices:
    `preheat train demo --set techniques.fsdp={} --nproc 2`; on several hosts under torchrun, whose jobs `preheat launch` writes. Would it run?
    `preheat train demo --dry-run`.
    """
    from preheat import recipe as recipes
    from preheat.errors import RecipeError

    if dry_run:
        _dry_run(recipe, set or [], gpu=gpu, out=out, resume=resume, nproc=nproc, json=json)
        return
    if gpu is not None:
        raise RecipeError("--gpu: a run takes the devices that are here; add --dry-run to look at it on another")
    read = recipes.load(recipe, set or [])
    folder = out or Path("runs") / read.name
    if nproc > 1 and "RANK" not in os.environ:
        from preheat.training.launch import start
        from preheat.training.rungs import pending

        command = ["train", recipe, *(part for item in set or [] for part in ("--set", item))]
        command += ["--out", str(out)] if out else []
        command += ["--auto-resume"] if auto_resume or restarts else ["--resume"] if resume else []
        command += [flag for flag, on in (("--force", force), ("--json", json)) if on]
        raise typer.Exit(start(command, processes=nproc, restarts=restarts, again=lambda: bool(pending(folder))))
    resume = resume or (auto_resume and (folder / "recipe.yaml").exists())
    run(read, out=out, resume=resume, force=force, json=json)
