"""preheat try"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from preheat.cli.show import Json

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
        typer.Option("--batch-size", "--batch_size", min=1, help="Rows of a micro-batch; by size and length when not given."),
    ] = None,
    accumulation_steps: Annotated[
        int,
        typer.Option(
            "--accumulation-steps",
            "--accumulation_steps",
            min=1,
            help="Micro-batches in a step of gradient_accumulation and integration.",
        ),
    ] = 4,
    precision: Annotated[
        str, typer.Option("--precision", help="fp32, bf16, fp16, bf16_weights, bf16_master, fp16_master or fp8.")
    ] = "bf16",
    zero_stage: Annotated[
        int,
        typer.Option("--zero-stage", "--zero_stage", help="1: optimizer states shared out; 2: gradients too; 3: weights too."),
    ] = 1,
    cpu_offload: Annotated[bool, typer.Option("--cpu-offload", "--cpu_offload", help="zero: states on the host.")] = False,
    seq_len: Annotated[int, typer.Option("--seq-len", "--seq_len", min=16, help="Tokens of a row.")] = 256,
    benchmark: Annotated[bool, typer.Option("--benchmark", help="All techniques, alone and together, in one table.")] = False,
    json: Json = False,
) -> None:
    """One technique against without it, on real text (Python's own library), each in its own process: speed, memory, loss.

    A trial takes a few minutes and at most 16 GiB; what would need more is told with its prediction.

    Example: `preheat try --technique mixed_precision --model-size small`, or `preheat try --technique integration --benchmark`.
    """
    from contextlib import nullcontext

    from preheat.bench.trial import Wish, trial
    from preheat.cli.show import console, emit

    names = technique.replace("-", "_")
    wish = Wish(
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
    screen = console()
    with nullcontext() if json else screen.status("starting") as status:
        made = trial(wish, status.update if status is not None else lambda words: None)
    if json:
        emit(made)
        return
    batch = made["batch"]
    screen.print(
        f"{made['model_size']}: {made['model']}; micro-batches of {batch['rows']} rows of {batch['length']:,} tokens, {made['steps']} steps",
        soft_wrap=True,
    )
    screen.print(_table(made))
    for words in made["words"]:
        screen.print(f"- {words}", soft_wrap=True)
    for words in made["notes"]:
        screen.print(f"[yellow]note:[/yellow] {words}", soft_wrap=True)


def _table(made: dict[str, Any]) -> Any:
    from rich.table import Table

    from preheat.cli.show import memory, rate

    table = Table("contender", box=None, pad_edge=False)
    for title in ("tokens/s", "times without", "peak", "states", "loss", "cosine", "predicted", "on a GPU (tensors)"):
        table.add_column(title, justify="right")
    for row in made["rows"]:
        on_gpu = made["gpu"].get(row["name"])
        expected = (
            f"{rate(row['predicted']['tokens_per_second'])}, {memory(row['predicted']['peak_gib'])}"
            if row["predicted"]
            else "-"
        )
        ends = (expected, "-" if on_gpu is None else memory(on_gpu))
        if "tokens_per_second" not in row:
            table.add_row(row["name"], "not run", *["-"] * 5, *ends)
            continue
        table.add_row(
            row["name"],
            rate(row["tokens_per_second"]),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            memory(row["peak_gib"]),
            memory(row["optimizer_gib"]) if "optimizer_gib" in row else "-",
            f"{row['loss']:.3f}",
            "-" if row["gradient_cosine"] is None else f"{row['gradient_cosine']:.6f}",
            *ends,
        )
    return table
