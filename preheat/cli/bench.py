"""The `preheat bench` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from preheat.cli.options.recipe_argument import load_recipe
from preheat.cli.views.console import Json, Set
from preheat.core.json_types import JsonObject

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["bench"]


def bench(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE|RUN|MODEL...",
            help=(
                "A recipe whose techniques to compare; with --inference, the folders of the runs or models to measure."
            ),
        ),
    ],
    set: Set = None,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate", help="Compare the whole recipe, the recipe without each technique, and each technique alone."
        ),
    ] = False,
    techniques: Annotated[
        str | None,
        typer.Option("--techniques", metavar="A,B,C", help="Compare each of these techniques alone with none."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=3, help="Steps of a turn; the first two are not timed.")] = 12,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Turns of each contender.")] = 3,
    inference: Annotated[
        bool,
        typer.Option(
            "--inference", help="Measure generation: first token, tokens/s and KV cache, by batch size and length."
        ),
    ] = False,
    batches: Annotated[str, typer.Option("--batches", help="With --inference: batch sizes.")] = "1,8",
    lengths: Annotated[str, typer.Option("--lengths", help="With --inference: prompt lengths in tokens.")] = "128,512",
    tokens: Annotated[
        int, typer.Option("--tokens", min=2, help="With --inference: tokens to generate after each prompt.")
    ] = 32,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="KEY=VALUE,...",
            help=(
                "With --inference: also measure each model with these settings: keys of sample (cache=int8, "
                "prompt_lookup_tokens=4, draft_model=FOLDER), dtype=bf16, engine=transformers. Repeatable."
            ),
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text", help="With --inference: a text file for the prompts; default: Python's standard library."
        ),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option("--device", help="The device to run on; default: the recipe's hardware.device."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The folder of the results; default: bench/NAME.")] = None,
    json: Json = False,
) -> None:
    """Compare techniques on this machine (speed and its spread, memory, start-up time, loss, gradients), or the
    generation speed of models.

    Example: `preheat bench demo --ablate`, `preheat bench demo --techniques lora,lion`, or
    `preheat bench runs/mine compressed/mine --inference --variant cache=int8`.
    """
    from preheat.errors import RecipeError

    if inference:
        from preheat.cli.bench_inference import inference as measure

        measure(
            what,
            variant or [],
            set or [],
            batches=batches,
            lengths=lengths,
            tokens=tokens,
            repeats=repeats,
            text=text,
            out=out,
            json=json,
        )
        return
    if len(what) > 1:
        raise RecipeError(
            f"bench: {what[1]}: techniques are compared in one recipe; for models side by side add --inference"
        )
    (recipe,) = what
    # Exactly one of the two.
    if ablate == bool(techniques):
        raise RecipeError("bench: name what to compare: --ablate, or --techniques A,B,C")
    loaded = load_recipe(recipe, "bench", [*(set or []), *([f"hardware.device={device}"] if device else [])])
    # Imported after the recipe is checked, since these import torch.
    from preheat.bench.compare import ablation, chosen
    from preheat.bench.compare import bench as run
    from preheat.cli.views.console import console, emit
    from preheat.report import write_bench

    contenders = (
        ablation(loaded) if ablate else chosen(loaded, [n.strip() for n in (techniques or "").split(",") if n.strip()])
    )
    folder = out or Path("bench") / loaded.name
    screen = console()
    if json:
        result = run(loaded, contenders, steps=steps, repeats=repeats, out=folder)
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

        from preheat.cli.views.output import bar

        columns = ("{task.description}", BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        with bar(screen, *columns) as progress:
            task = progress.add_task("planning", total=None)
            result = run(
                loaded,
                contenders,
                steps=steps,
                repeats=repeats,
                out=folder,
                say=lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
            )
    page = write_bench(folder)
    result["report"] = str(page)
    if json:
        emit(result)
        return
    screen.print(_table(result["rows"], wide=screen.width >= 110))
    for verdict in result["verdicts"]:
        screen.print(f"- {verdict['message']}", soft_wrap=True)
    for row in result["rows"]:
        if row["failed"]:
            screen.print(f"{row['name']} was not run: {row['failed']}", soft_wrap=True)
        for notice in row.get("notices", ()):
            screen.note(f"{row['name']}: {notice}")
    screen.print(f"report: {page}", soft_wrap=True)


def _table(rows: list[JsonObject], wide: bool) -> Table:
    """Returns the result table; a narrow terminal gets only the columns that the verdicts mention."""
    from rich.table import Table

    from preheat.cli.views.console import rate
    from preheat.report.bench_page import ratio_range
    from preheat.sanitize import memory

    table = Table(box=None, pad_edge=False)
    table.add_column("contender", no_wrap=True)
    more = ("low to high", "start-up", "cosine") if wide else ()
    for title in ("tokens/s", "times plain", "peak", "loss", *more):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        if row["failed"]:
            continue  # printed below the table as a full sentence
        cosine = row["gradient_cosine"]
        table.add_row(
            row["name"],
            rate(row["tokens_per_second"]),
            f"{row['ratio']:.2f} ({ratio_range(row)})",
            memory(row["peak_gib"]),
            f"{row['loss']:.3f}",
            *(
                (
                    f"{rate(row['spread'][0])} to {rate(row['spread'][1])}",
                    f"{row['startup_seconds']:.1f} s",
                    "-" if cosine is None else f"{cosine:.6f}",
                )
                if wide
                else ()
            ),
        )
    return table
