"""The learning-rate range test of `preheat train --find-lr`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preheat.recipe import Recipe

__all__ = ["LrTest", "find", "parse_lr_test"]

_RANGE = "1e-6..1"
_STEPS = 100
_FEWEST = 10


@dataclass(frozen=True)
class LrTest:
    """The rates of a learning-rate range test."""

    low: float
    high: float
    steps: int

    def list_arguments(self) -> list[str]:
        """Returns the options that ask for this test."""
        return ["--find-lr", "--lr-range", f"{self.low!r}..{self.high!r}", "--lr-steps", str(self.steps)]


def parse_lr_test(text: str | None, steps: int | None) -> LrTest:
    """Returns the test that the options ask for.

    Raises:
        RecipeError: the range has no two rates above 0 in rising order, or the steps are too few.

    Example:
        >>> parse_lr_test("1e-5..0.1", 50)
        LrTest(low=1e-05, high=0.1, steps=50)
    """
    import re

    from preheat.errors import RecipeError
    from preheat.sanitize import quote_value

    text = text or _RANGE
    number = r"[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?"
    match = re.fullmatch(rf"\s*({number})\s*\.\.\s*({number})\s*", text[:60])
    if match is None:
        raise RecipeError(f"--lr-range: {quote_value(text)}: must be LOW..HIGH, such as --lr-range {_RANGE}")
    low, high = float(match[1]), float(match[2])
    if not 0 < low < high < float("inf"):
        raise RecipeError(
            f"--lr-range {text.strip()}: must rise from a rate above 0, such as --lr-range {_RANGE}; the test raises "
            "the rate from the first to the second"
        )
    steps = _STEPS if steps is None else steps
    if steps < _FEWEST:
        raise RecipeError(f"--lr-steps {steps}: must be at least {_FEWEST}; a loss at fewer rates is mostly noise")
    return LrTest(low, high, steps)


def find(recipe: Recipe, test: LrTest, out: str | None, *, force: bool, json: bool) -> None:
    """Runs the test, writes its figures and page, and prints the suggested rate (or the JSON object)."""
    from contextlib import nullcontext

    from preheat.cli.views.console import Alarms, Live, build_console, emit
    from preheat.cli.views.output import say
    from preheat.errors import RecipeError, RunError
    from preheat.files import to_plain_data
    from preheat.report.lr_range_page import describe_end, format_lr, write_lr_range
    from preheat.storage import is_url
    from preheat.training.lr_range import FIGURES, find_lr

    if out is not None and is_url(out):
        raise RecipeError(f"--out {out}: the test is written to a folder of this machine; give one")
    folder = Path(out or Path("runs") / f"{recipe.name}-find-lr")
    lead = int(os.environ.get("RANK", "0")) == 0
    screen = build_console()
    live = Live(screen, recipe.name) if lead and not json else None
    try:
        with live or nullcontext():
            result = find_lr(
                recipe,
                out=folder,
                low=test.low,
                high=test.high,
                steps=test.steps,
                watch=live or Alarms(),
                force=force,
            )
    except RunError:
        # The losses that suggest no rate can be looked at.
        if lead and (folder / FIGURES).exists():
            write_lr_range(folder / FIGURES)
        raise
    if not lead:
        return
    written = write_lr_range(folder / FIGURES)
    lr = format_lr(result.suggested)
    if json:
        emit({**to_plain_data(result), "figures": str(folder / FIGURES), "page": str(written)})
        return
    say(
        f"suggested: {lr}, a tenth of the rate with the lowest loss ({format_lr(result.lowest)}); the loss falls "
        f"fastest at {format_lr(result.steepest)}"
    )
    say(describe_end(result))
    auto = " (auto)" if recipe.optimizer.lr == "auto" else ""
    say(f"the recipe has {format_lr(result.present)}{auto}; to train with the suggested rate: --set optimizer.lr={lr}")
    say(f"page: {written}")
    say(f"figures: {folder / FIGURES}")
