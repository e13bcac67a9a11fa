"""The `preheat demo` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preheat.cli.views.console import Json, Set

__all__ = ["demo"]


def demo(
    set: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; default: a new one under runs/.")] = None,
    json: Json = False,
) -> None:
    """Plan and train a small model on Python's standard library, evaluate it, generate text and write a report. Takes
    two minutes, offline.

    Example: `preheat demo`
    """
    from preheat import recipe as recipes

    recipes.load("demo", set or [])  # reports a wrong key before torch is imported
    from preheat.cli.train import run
    from preheat.cli.views.console import console
    from preheat.run_dir import Reader

    # Before the user's settings, which win.
    first = _precision_settings()
    if first and not json:
        console().print(
            "this CPU is slow in bf16: the demo computes in fp32 (techniques.mixed_precision.mode=fp32)", style="dim"
        )
    settings = [*first, *(set or [])]
    result = run(
        recipes.load("demo", settings),
        out=out or _first_free(Path("runs") / "demo"),
        resume=False,
        force=False,
        json=json,
        # `preheat train`, which resumes the demo, does not choose the precision by itself.
        again=["train", "demo", *(part for item in settings for part in ("--set", item))],
    )
    if json:
        return
    screen = console()
    reader = Reader(result["run"])
    for base in reader.events("baseline"):
        screen.print(
            f"validation loss, nats a token: this model {result['validation_loss']:.2f}, bigram "
            f"{base['bigram']:.2f}, unigram {base['unigram']:.2f}"
        )
    for sample in reader.events("sample"):
        screen.print("─" * 60, style="dim")
        screen.print(sample["prompt"], style="bold", end="")
        screen.print(sample["text"])
    screen.print("─" * 60, style="dim")
    screen.print(f"open {result['report']} in a browser; edit the recipe with: preheat init demo")


def _precision_settings() -> list[str]:
    """Returns settings applied before the user's: fp32 if bf16 on this CPU would turn two minutes into an hour."""
    import torch

    from preheat.hardware.probe import quick_half

    slow = not torch.cuda.is_available() and quick_half() == torch.float32
    return ["techniques.mixed_precision.mode=fp32"] if slow else []


def _first_free(path: Path) -> Path:
    """Returns the path, or the first free one of path-2, path-3, ... if it exists."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
