"""The `preheat compress` command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.options.remote_folder import find_local_folder
from preheat.cli.views.console import Checkpoint, Json
from preheat.core.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from preheat.core.compression import CompressionResult, ImageResult

__all__ = ["compress"]


def compress(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL", help="The folder of a run, of one of its checkpoints, or of a Hugging Face model."
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="NAME[,KEY=VALUE...]",
            help="The method; `preheat compress RUN` without it lists them. Repeatable: each is tried.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help=(
                "A chain of steps instead of methods: inference-speed, edge, edge-vision (image classifiers), or a "
                "file (preheat recipes show edge)."
            ),
        ),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            "--bits",
            help="The average number of bits per weight, allocated for the least loss (method bit_budget).",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[METHOD.]KEY=VALUE",
            help=(
                "A setting of every chosen method that has it, or of the named one: --set group=64, --set "
                "awq.group=64. Repeatable."
            ),
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help=(
                "A text to calibrate and to measure on (different parts of it); default: the run's own data. "
                "Required for a model's folder; for an image classifier a folder of images by class."
            ),
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The output folder; default: MODEL/compressed-NAME.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Maximum number of calibration sequences; default: 128.")
    ] = None,
    length: Annotated[
        int | None, typer.Option("--length", min=2, help="Tokens per sequence; default: the run's, or 512.")
    ] = None,
    measured: Annotated[
        int | None,
        typer.Option(
            "--measured", min=1, help="Maximum number of held-out sequences to measure perplexity on; default: 64."
        ),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            "--within",
            min=0.0,
            help="Choose the smallest variant whose perplexity rises by at most this fraction; default: 0.02.",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    json: Json = False,
) -> None:
    """Compress a trained model, measure quality, size and speed before and after, and write a model card and a page.

    Example: `preheat compress runs/demo --method int8`; `preheat compress runs/demo --method int4 --method gptq --bits
    5`; `preheat compress my-model --method awq --set group=64 --data text.txt`; `preheat compress runs/demo --recipe
    edge`; an image classifier: `preheat compress my-mobilenet --recipe edge-vision --data images`
    """
    # Its bars, one for each file that it loads, would appear between the lines of ours.
    from transformers.utils.logging import disable_progress_bar

    from preheat.compress.atomic_folder import choose_home
    from preheat.compress.compress import compress as run
    from preheat.compress.compress import find_trained_variants, read_variants
    from preheat.engine.checkpoint import at_checkpoint
    from preheat.errors import RecipeError
    from preheat.models.image_classifiers import is_classifier
    from preheat.report.compress_page import write_compress

    model = str(at_checkpoint(Path(find_local_folder(model)), checkpoint))
    classifies_images = is_classifier(Path(model))
    if classifies_images and (recipe is None or data is None):
        raise RecipeError(
            f"MODEL: {model} is an image classifier: it needs a chain of steps and a folder of images by class; "
            "preheat compress MODEL --recipe edge-vision --data IMAGES"
        )
    # A checkpoint's output goes into its run, with the step in its name.
    home, step = (Path(model), "") if classifies_images else choose_home(model)
    if recipe is not None:
        from preheat.compress.chain import load_chain
        from preheat.compress.pipeline import run_chain

        chain = load_chain(recipe)
        target = out or home / (chain.name + step)
        disable_progress_bar()
        with _show_progress(json=json) as say:
            result = run_chain(
                model,
                chain,
                target,
                data=data,
                measured=measured or 64,
                page=(lambda folder: None) if classifies_images else write_compress,
                say=say,
            )
        _show(result, target, json=json)
        return
    named = read_variants(method or [], bits, settings or [])
    if not named and not settings:
        # A run that was trained towards few bits is compressed as it was trained.
        named = find_trained_variants(model)
    if not named:  # does not return: the list is its error message
        _list_methods()
    notes: list[str] = []
    if within is not None and len(named) == 1:
        notes.append("--within chooses among several variants, but there is only one: it had no effect")
    if rows is not None and not any(variant.method.reads_rows for variant in named):
        notes.append("--rows: no chosen method reads calibration sequences: it only affected the timed prompt")
    disable_progress_bar()
    label = named[0].name if len(named) == 1 else "variants"
    target = out or home / f"compressed-{label}{step}"
    with _show_progress(json=json) as say:
        result = run(
            model,
            named,
            target,
            data=data,
            rows=rows or 128,
            length=length,
            measured=measured or 64,
            # None: not given. 0 is a value: no rise at all.
            within=0.02 if within is None else within,
            notes=notes,
            page=write_compress,
            say=say,
        )
    _show(result, target, json=json)


@contextmanager
def _show_progress(*, json: bool) -> Iterator[Callable[[str], None]]:
    """Context manager that shows a line of progress, which the callback changes; nothing with --json."""
    from preheat.cli.views.console import build_console

    if json:
        yield lambda message: None
        return
    with build_console(error=True).status("opening") as status:
        yield status.update


def _show(result: CompressionResult | ImageResult, target: Path, *, json: bool) -> None:
    """Prints the result: a table, notes and exports, or one JSON object."""
    from preheat.cli.views.console import build_console, emit
    from preheat.core.compression import ImageResult

    if json:
        emit(result)
        return
    screen = build_console()
    screen.print(_build_image_table(result) if isinstance(result, ImageResult) else _build_table(result))
    for variant in result.variants:
        screen.print(f"{variant.name}: {variant.what}", soft_wrap=True, style="dim")
    if isinstance(result, ImageResult):
        why, file = result.data, "compress.json"
    else:
        why, file = f"chosen as {result.chosen_because}", "compress.html"
        for note in result.notes:
            screen.print(f"note: {note}", soft_wrap=True)
        for export in result.exports or ():
            screen.print(
                (
                    f"wrote {export.path} ({format_bytes(export.bytes)}); its logits differ by at most "
                    f"{export.max_logit_difference:.2g} (largest {export.largest_logit:.3g})"
                ),
                soft_wrap=True,
            )
    screen.print(f"wrote {result.path}; {why}; all of it: {target / file}", soft_wrap=True)


def _list_methods() -> None:
    import sys

    from preheat.compress.registry import methods
    from preheat.errors import RecipeError

    # The first line of a method's docstring says what it does.
    lines = [
        f"  {name}: {(sys.modules[cls.__module__].__doc__ or '').splitlines()[0]}" for name, cls in methods().items()
    ]
    raise RecipeError("\n".join(["--method: name one (or a budget with --bits):", *lines]))


def _build_table(result: CompressionResult) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for n, title in enumerate(("", "perplexity", "rise", "MiB", "tokens/s", "x bf16", "first ms")):
        table.add_column(title, justify="right" if n else "left", no_wrap=n > 0, overflow="fold")
    first = result.variants[0].before
    for name, figures, before, rise in [
        ("bf16", first, first, None),
        *((v.name, v.after, v.before, v.perplexity_rise) for v in result.variants),
    ]:
        # Relative to the measurement of bf16 that belongs to this variant.
        faster = figures.decode_tokens_per_second / before.decode_tokens_per_second
        table.add_row(
            name,
            f"{figures.perplexity:.4f}",
            "" if rise is None else f"{rise:+.2%}",
            f"{figures.bytes / 2**20:.2f}",
            f"{figures.decode_tokens_per_second:.1f}",
            f"{faster:.2f}",
            f"{1e3 * figures.first_token_seconds:.1f}",
            style="bold" if name == result.chosen else None,
        )
    return table


def _build_image_table(result: ImageResult) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for n, title in enumerate(
        ("", "accuracy", "loss", "parameters", "MiB", "as before", "ms an image", "logits within")
    ):
        table.add_column(title, justify="right" if n else "left", no_wrap=n > 0, overflow="fold")
    for name, figures, logits in [
        ("before", result.before, None),
        *((step.name, step.after, step.logits) for step in result.variants),
    ]:
        table.add_row(
            name,
            f"{figures.accuracy:.1%}",
            f"{figures.loss:.4f}",
            f"{figures.parameters:,}",
            f"{figures.bytes / 2**20:.2f}",
            "" if figures.agreement is None else f"{figures.agreement:.1%}",
            f"{figures.milliseconds:.2f}",
            f"{logits.largest / max(logits.scale, 1.0):.2g}" if logits else "",
        )
    return table
