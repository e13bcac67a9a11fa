"""The `preheat bench` command: compares techniques in training, or measures text generation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from preheat.cli.options.bench_options import InferenceBenchOptions, TechniqueBenchOptions
from preheat.cli.views.console import From, Json, Set

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
    from_: From = None,
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
    profile: Annotated[
        int | None,
        typer.Option(
            "--profile",
            metavar="STEPS",
            help=(
                "After its measured steps, profile so many steps of each contender: where their time goes, beside the "
                "plan. Writes profiles/ in the folder of the results, with a page and a trace for each."
            ),
        ),
    ] = None,
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
                "prompt_lookup_tokens=4, draft_model=FOLDER), dtype=bf16, engine=transformers, "
                "kernel=math (or flash, efficient, cudnn: torch's kernels). Repeatable."
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
    if inference:
        from preheat.cli.bench_inference import measure_inference

        measure_inference(
            InferenceBenchOptions(
                what=tuple(what),
                set=tuple(set or ()),
                batches=batches,
                lengths=lengths,
                tokens=tokens,
                repeats=repeats,
                variant=tuple(variant or ()),
                text=text,
                out=out,
                json=json,
            )
        )
        return
    from preheat.cli.bench_techniques import compare_techniques

    compare_techniques(
        TechniqueBenchOptions(
            what=tuple(what),
            set=tuple(set or ()),
            ablate=ablate,
            techniques=techniques,
            steps=steps,
            repeats=repeats,
            profile=profile,
            device=device,
            out=out,
            json=json,
            from_=from_,
        )
    )
