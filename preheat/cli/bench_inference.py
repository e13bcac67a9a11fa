"""`preheat bench --inference`: reads contenders from the command line, measures them, prints the table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from rich.table import Table

    from preheat.bench.inference import InferenceContender
    from preheat.cli.options.bench_options import InferenceBenchOptions
    from preheat.core.bench import InferenceResult

__all__ = ["measure_inference"]


def measure_inference(options: InferenceBenchOptions) -> None:
    """Measures text generation of several models side by side."""
    from preheat.bench.inference import bench_inference
    from preheat.cli.views.console import build_console, emit
    from preheat.files import to_plain_data
    from preheat.inference.load import require_model
    from preheat.report import write_inference

    for model in options.what:
        require_model(model)
    contenders = _build_contenders(options.what, options.variant, options.set)
    folder = options.out or Path("bench") / (Path(options.what[0]).resolve().name + "-inference")
    measure = partial(
        bench_inference,
        contenders,
        batches=_parse_numbers("--batches", options.batches, 1),
        lengths=_parse_numbers("--lengths", options.lengths, 2),
        tokens=options.tokens,
        repeats=options.repeats,
        text=options.text,
        out=folder,
    )
    screen = build_console()
    if options.json:
        result = measure()
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

        from preheat.cli.views.output import build_progress_bar

        columns = ("{task.description}", BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        with build_progress_bar(screen, *columns) as progress:
            task = progress.add_task("starting", total=None)
            result = measure(
                say=lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
            )
    report = write_inference(folder)
    if options.json:
        emit({**to_plain_data(result), "report": str(report)})
        return
    screen.print(_build_table(result, wide=screen.width >= 160))
    for measured in result.models:
        if measured.failed:
            screen.print(f"{measured.name}: {measured.failed}", style="red", soft_wrap=True)
    screen.print(f"report: {report}", soft_wrap=True)


def _parse_numbers(name: str, text: str, least: int) -> list[int]:
    from preheat.errors import RecipeError

    if not re.fullmatch(r"\d+(,\d+)*", text) or min(map(int, text.split(","))) < least:
        raise RecipeError(f"{name} {text}: must be numbers of {least} or more, separated by commas, e.g. {name} 1,8")
    return sorted({int(number) for number in text.split(",")})


def _build_contenders(models: Sequence[str], variants: Sequence[str], set: Sequence[str]) -> list[InferenceContender]:
    """Returns the contenders: each model with the `--set` settings, then with each variant added."""
    from preheat.bench.inference import InferenceContender
    from preheat.cli.options.generation import build_sampling
    from preheat.errors import RecipeError, suggest_nearest
    from preheat.models.generation.generate import KERNELS
    from preheat.recipe import Sample

    # Of the contender itself; all other keys are settings of sampling.
    own_values = {
        "dtype": ("fp32", "bf16", "fp16"),
        "engine": ("preheat", "transformers"),
        # torch's kernels; those of training alone have no place for a cache.
        "kernel": tuple(KERNELS),
    }
    # A recipe's key means the same.
    variants = [variant.replace("efficient_attention.kernel", "kernel") for variant in variants]
    settable = [*own_values, *(field.name for field in dataclasses.fields(Sample))]
    # Folders of one name are named by their paths.
    short = [Path(model).name for model in models]
    names = [name if short.count(name) == 1 else model for name, model in zip(short, models, strict=True)]
    build_sampling(set)  # so that its errors are not those of a variant
    contenders = []
    for name, model in zip(names, models, strict=True):
        for variant in ("", *variants):
            own = [item.strip() for item in variant.split(",") if item.strip()]
            for item in own:
                key = item.partition("=")[0].strip()
                if key not in settable:
                    hint = suggest_nearest(key, settable)
                    raise RecipeError(f"--variant {shorten(item)}: no setting {quote_value(key, 40)}; {hint}")
            rest = dict(item.partition("=")[::2] for item in own if item.partition("=")[0] in own_values)
            more = [f"sample.{item}" for item in own if item.partition("=")[0] not in rest]
            settings = build_sampling([*set, *more], variant=variant)
            for key, known in own_values.items():
                if (value := rest.get(key, known[0])) not in known:
                    raise RecipeError(f"--variant {key}={value}: must be one of {', '.join(known)}")
            # Sampled texts would differ between contenders anyway.
            if settings.temperature:
                option = f"--variant {variant}" if any(item.startswith("temperature") for item in own) else "--set"
                raise RecipeError(
                    f"{option}: sample.temperature: texts are compared, so decoding is greedy; leave it out"
                )
            kernel = rest.pop("kernel", None)
            if rest.get("engine") == "transformers" and (settings != build_sampling() or kernel is not None):
                raise RecipeError(
                    f"--variant {variant}: runs transformers' own generate, which takes no setting but dtype"
                )
            label = f"{name}, {variant}" if variant else name
            contenders.append(InferenceContender(label, model, settings, kernel=kernel, **rest))  # type: ignore[arg-type]
    if len({contender.name for contender in contenders}) < len(contenders):
        raise RecipeError("preheat bench --inference: a model or a variant is given twice; name each once")
    return contenders


def _build_table(result: InferenceResult, wide: bool) -> Table:
    """Returns the result table; a narrow terminal gets only speed and cache size."""
    from rich.table import Table

    from preheat.core.units import format_bytes, format_rate

    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")  # fold names so that numbers are not cut
    more = ("low to high", "prefill/s", "a pass", "predicted", "same text") if wide else ()
    for title in ("sequences x tokens", "first token", "tokens/s", "times the first", "cache", *more):
        table.add_column(title, justify="right", no_wrap=True)
    for row in result.rows:
        first, speed, ratio = row.first_token_seconds, row.decode_tokens_per_second, row.ratio
        table.add_row(
            row.name.replace(", ", ",").replace(",", ", "),  # allows a line break between settings
            f"{row.rows} x {row.length}",
            f"{first.value * 1e3:,.1f} ms",
            format_rate(speed.value),
            f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
            format_bytes(row.cache_bytes),
            *(
                (
                    f"{format_rate(speed.low)} to {format_rate(speed.high)}",
                    format_rate(row.prefill_tokens_per_second.value),
                    f"{row.tokens_per_pass:.2f}",
                    format_bytes(row.cache_predicted_bytes),
                    f"{row.same_text:.0%}",
                )
                if wide
                else ()
            ),
        )
    return table
