"""preheat export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from preheat.cli.show import Json

__all__ = ["export"]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    to: Annotated[Literal["hf"], typer.Option("--to", help="hf: a Hugging Face folder, adapters merged.")] = "hf",
    out: Annotated[Path | None, typer.Option("--out", help="The folder to write; RUN/export-hf when not given.")] = None,
    json: Json = False,
) -> None:
    """Writes a run's model for other tools, reads it back and compares the logits.

    Example: `preheat export runs/demo --to hf`
    """
    from preheat.cli.show import console, emit
    from preheat.compress.export import huggingface

    made = huggingface.write(run, out or run / f"export-{to}")
    if json:
        emit(made)
    else:
        merged = f", {made['merged']} adapters merged" if made["merged"] else ""
        console().print(
            f"wrote {made['path']} ({made['bytes'] / 2**20:.1f} MiB{merged}); read back, its logits differ by at most {made['max_logit_difference']:.2g}",
            soft_wrap=True,
        )
        if made["note"]:
            console().print(f"note: {made['note']}", soft_wrap=True)
