"""`preheat compress` for image classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["compress_vision"]


def compress_vision(model: str, recipe: str, data: str, out: Path | None, *, json: bool) -> None:
    """Runs a compression pipeline on an image classifier; prints accuracy, bytes and agreement after each step."""
    from contextlib import nullcontext

    from transformers.utils.logging import disable_progress_bar

    from preheat.cli.views.console import console, emit
    from preheat.compress.pipeline import load_chain
    from preheat.compress.vision.pipeline import run_chain

    chain = load_chain(recipe)
    disable_progress_bar()
    with nullcontext() if json else console(error=True).status("opening") as status:
        result = run_chain(
            model,
            chain,
            out or Path(model) / chain.name,
            data=data,
            say=status.update if status is not None else lambda message: None,
        )
    if json:
        emit(result)
        return
    screen = console()
    screen.print(_table(result))
    for step in result["variants"]:
        screen.print(f"{step['name']}: {step['what']}", soft_wrap=True, style="dim")
    screen.print(
        f"wrote {result['path']}; {result['data']}; all of it: {Path(result['path']).parent / 'compress.json'}",
        soft_wrap=True,
    )


def _table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for n, title in enumerate(
        ("", "accuracy", "loss", "parameters", "MiB", "as before", "ms an image", "logits within")
    ):
        table.add_column(title, justify="right" if n else "left", no_wrap=n > 0, overflow="fold")
    for name, figures, logits in [
        ("before", result["before"], None),
        *((step["name"], step["after"], step.get("logits")) for step in result["variants"]),
    ]:
        table.add_row(
            name,
            f"{figures['accuracy']:.1%}",
            f"{figures['loss']:.4f}",
            f"{figures['parameters']:,}",
            f"{figures['bytes'] / 2**20:.2f}",
            f"{figures['agreement']:.1%}" if "agreement" in figures else "",
            f"{figures['milliseconds']:.2f}",
            f"{logits['largest'] / max(logits['scale'], 1.0):.2g}" if logits else "",
        )
    return table
