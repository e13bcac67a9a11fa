"""preheat compress for image classifiers"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["compress_vision"]


def compress_vision(model: str, recipe: str, data: str, out: Path | None, *, json: bool) -> None:
    """Runs a chain on an image classifier and tells accuracy, bytes and agreement after each step."""
    from contextlib import nullcontext

    from transformers.utils.logging import disable_progress_bar

    from preheat.cli.views.console import console, emit
    from preheat.compress.pipeline import load_chain
    from preheat.compress.vision.pipeline import run_chain

    chain = load_chain(recipe)
    disable_progress_bar()
    with nullcontext() if json else console(error=True).status("opening") as status:
        made = run_chain(
            model,
            chain,
            out or Path(model) / chain.name,
            data=data,
            say=status.update if status is not None else lambda words: None,
        )
    if json:
        emit(made)
        return
    screen = console()
    screen.print(_table(made))
    for step in made["variants"]:
        screen.print(f"{step['name']}: {step['what']}", soft_wrap=True, style="dim")
    screen.print(
        f"wrote {made['path']}; {made['data']}; all of it: {Path(made['path']).parent / 'compress.json'}",
        soft_wrap=True,
    )


def _table(made: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for n, title in enumerate(
        ("", "accuracy", "loss", "parameters", "MiB", "as before", "ms an image", "logits within")
    ):
        table.add_column(title, justify="right" if n else "left", no_wrap=n > 0, overflow="fold")
    for name, told, logits in [
        ("before", made["before"], None),
        *((step["name"], step["after"], step.get("logits")) for step in made["variants"]),
    ]:
        table.add_row(
            name,
            f"{told['accuracy']:.1%}",
            f"{told['loss']:.4f}",
            f"{told['parameters']:,}",
            f"{told['bytes'] / 2**20:.2f}",
            f"{told['agreement']:.1%}" if "agreement" in told else "",
            f"{told['milliseconds']:.2f}",
            f"{logits['largest'] / max(logits['scale'], 1.0):.2g}" if logits else "",
        )
    return table
