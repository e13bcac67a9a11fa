"""The `preheat try` command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from preheat.cli.views.console import Json

if TYPE_CHECKING:
    from rich.table import Table

    from preheat.core.bench import TrialResult

__all__ = ["try_"]


def try_(
    technique: Annotated[
        str,
        typer.Option(
            "--technique",
            help="gradient_accumulation, mixed_precision, zero, efficient_attention, or integration: all together.",
        ),
    ],
    model_size: Annotated[
        str,
        typer.Option(
            "--model-size",
            "--model_size",
            help="tiny (0.4 M parameters outside embedding and head), small (15 M), medium (110 M) or large (350 M).",
        ),
    ] = "tiny",
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", "--batch_size", min=1, help="Sequences per micro-batch; default: by size and length."
        ),
    ] = None,
    accumulation_steps: Annotated[
        int | None,
        typer.Option(
            "--accumulation-steps",
            "--accumulation_steps",
            min=1,
            help=(
                "Micro-batches per step of gradient_accumulation and integration; default: 4, or 2 if 4 are too many."
            ),
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            help="auto (by this machine), fp32, bf16, fp16, bf16_weights, bf16_master, fp16_master or fp8.",
        ),
    ] = "auto",
    zero_stage: Annotated[
        int,
        typer.Option(
            "--zero-stage", "--zero_stage", help="1: shard optimizer states; 2: gradients too; 3: weights too."
        ),
    ] = 1,
    cpu_offload: Annotated[
        bool, typer.Option("--cpu-offload", "--cpu_offload", help="With zero: optimizer states in host memory.")
    ] = False,
    seq_len: Annotated[int, typer.Option("--seq-len", "--seq_len", min=16, help="Tokens per sequence.")] = 256,
    benchmark: Annotated[
        bool, typer.Option("--benchmark", help="Compare all techniques, alone and together, in one table.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare speed, memory and loss with and without one technique, on Python's standard library as text.

    Each trial runs in its own process, for a few minutes and in at most 16 GiB. A trial that would need more memory is
    skipped; its prediction is printed.

    Example: `preheat try --technique mixed_precision --model-size small`, or `preheat try --technique integration
    --benchmark`.
    """
    from contextlib import nullcontext

    from preheat.bench.try_technique import TrialOptions, run_trial
    from preheat.cli.views.console import build_console, emit
    from preheat.core.units import format_memory, format_rate

    # Both spellings are accepted, as for the options.
    names = technique.replace("-", "_")
    wish = TrialOptions(
        names,
        model_size,
        batch_size,
        accumulation_steps,
        precision.replace("-", "_"),
        zero_stage,
        cpu_offload,
        seq_len,
        benchmark,
    )
    screen = build_console()
    with nullcontext() if json else screen.status("starting") as status:
        # Under --json nothing is printed besides the result.
        result = run_trial(wish, status.update if status is not None else lambda line: None)
    if json:
        emit(result)
        return
    screen.print(
        (
            f"{result.model_size}: {result.model}; micro-batches of {result.batch.rows} sequences of "
            f"{result.batch.length:,} tokens, {result.steps} steps"
        ),
        soft_wrap=True,
    )
    screen.print(_build_table(result))
    screen.print(
        "times: without it; cosine: of the first gradients; on a GPU: tensors of a step there, by the dry run",
        style="dim",
        soft_wrap=True,
    )
    for row in result.rows:
        if row.predicted and row.not_run:
            speed, peak = format_rate(row.predicted.tokens_per_second), format_memory(row.predicted.peak_gib)
            screen.print(f"- {row.name}: predicted here {speed} tokens/s in {peak}", soft_wrap=True)
    for line in result.verdicts:
        screen.print(f"- {line}", soft_wrap=True)
    for row in result.rows:
        for notice in row.notices or ():
            screen.note(f"{row.name}: {notice}")
    for line in result.notes:
        screen.note(line)


def _build_table(result: TrialResult) -> Table:
    from rich.table import Table

    from preheat.core.bench import MeasuredTrialRow
    from preheat.core.units import format_memory, format_rate

    zero = any(isinstance(row, MeasuredTrialRow) and row.optimizer_gib is not None for row in result.rows)
    titles = ["contender", "tokens/s", "times", "peak", "loss", "cosine", *(["states"] if zero else []), "on a GPU"]
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title == "contender" else "right", no_wrap=True)
    for row in result.rows:
        on_gpu = result.gpu.get(row.name)
        # A contender that would need too much by its prediction is not run.
        cells = ["not run", "-", "-", "-", "-", "-"]
        if isinstance(row, MeasuredTrialRow):
            cells = [
                format_rate(row.tokens_per_second),
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                format_memory(row.peak_gib),
                f"{row.loss:.3f}",
                "-" if row.gradient_cosine is None else f"{row.gradient_cosine:.6f}",
                "-" if row.optimizer_gib is None else format_memory(row.optimizer_gib),
            ]
        table.add_row(row.name, *(cells if zero else cells[:-1]), "-" if on_gpu is None else format_memory(on_gpu))
    return table
