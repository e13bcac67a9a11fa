"""preheat export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from preheat.cli.show import Base, Json

__all__ = ["export"]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder; for --to hf also an adapter's folder of peft's.")],
    to: Annotated[
        Literal["hf", "peft"], typer.Option("--to", help="hf: a Hugging Face folder, adapters merged. peft: the adapter alone.")
    ] = "hf",
    out: Annotated[
        Path | None, typer.Option("--out", help="The folder to write; RUN/export-hf or -peft when not given.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option("--dtype", help="hf: precision of the weights; the run's when not given."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0.0,
            help="Largest accepted difference of a logit, as a share of the largest logit; by precision (1e-5 in float32) when not given.",
        ),
    ] = None,
    base: Base = None,
    json: Json = False,
) -> None:
    """Writes a run's model, or its adapter alone, for other tools; reads it back with them and compares the logits.

    Example: `preheat export runs/demo --to hf`, `preheat export runs/mine --to peft`
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from preheat.cli.show import console, emit
    from preheat.compress.export import huggingface, peft
    from preheat.errors import RecipeError

    target = out or run / f"export-{to}"
    disable_progress_bar()
    if to == "peft":
        if dtype is not None or base is not None:
            raise RecipeError(
                f"--{'dtype' if dtype else 'base'}: is for --to hf alone; an adapter is written as it was trained"
            )
        made = peft.write(run, target, tolerance=tolerance)
        what = f"{made['adapted']} maps' adapters, for {made['base']}"
    else:
        made = huggingface.write(run, target, dtype=getattr(torch, dtype) if dtype else None, tolerance=tolerance, base=base)
        what = made["dtype"] + (f", {made['merged']} adapters merged" if made["merged"] else "")
    if json:
        emit(made)
        return
    console().print(
        f"wrote {made['path']} ({made['bytes'] / 2**20:.1f} MiB; {what}); read back by {'peft' if to == 'peft' else 'transformers'}, its logits "
        f"differ by at most {made['max_logit_difference']:.2g} over {made['tokens']} tokens "
        f"(largest logit {made['largest_logit']:.3g}; {made['tolerance']:g} of it accepted)",
        soft_wrap=True,
    )
    if made["note"]:
        console().print(f"note: {made['note']}", soft_wrap=True)
