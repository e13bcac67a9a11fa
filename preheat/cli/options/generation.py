"""Shared by `generate` and `chat`: sampling options, chat template selection, and generation statistics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preheat.cli.views.output import build_console
from preheat.recipe import Sample, field_docs
from preheat.recipe.consistency import sample_problems

if TYPE_CHECKING:
    from preheat.data.chat.template import Template
    from preheat.inference.load import LoadedModel

__all__ = [
    "HELP",
    "ChatTemplate",
    "MinP",
    "Penalty",
    "Seed",
    "Set",
    "Stop",
    "Temperature",
    "TopK",
    "TopP",
    "Watched",
    "choose_template",
    "note",
    "build_sampling",
]

# The same texts as in the recipe's section `sample`.
HELP = field_docs(Sample)
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help=HELP["temperature"])]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help=HELP["top_p"])]
TopK = Annotated[int, typer.Option("--top-k", min=0, help=HELP["top_k"])]
MinP = Annotated[float, typer.Option("--min-p", min=0.0, max=1.0, help=HELP["min_p"])]
Penalty = Annotated[float, typer.Option("--repetition-penalty", min=0.01, help=HELP["repetition_penalty"])]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help=HELP["stop"] + " Repeatable.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="sample.KEY=VALUE",
        help=(
            "A generation setting without an option of its own: sample.cache=int8, sample.draft_model=FOLDER, "
            "sample.prompt_lookup_tokens=4 … Repeatable."
        ),
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed for sampling at a temperature above 0.")]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="NAME|FILE",
        help="The chat template: chatml, alpaca … or a .jinja file; default: the run's or the tokenizer's.",
    ),
]


def build_sampling(overrides: Sequence[str] = (), *, variant: str = "", **values: Any) -> Sample:
    """Returns the sampling settings of the command line.

    Args:
        overrides: `sample.key=value` each, for settings without an option of their own.
        variant: the value of --variant that some of them are from, which errors name instead of --set.

    Raises:
        RecipeError: an override is not a sampling setting, or the settings contradict each other.
    """
    from preheat.errors import RecipeError
    from preheat.recipe.validate import RecipeReader
    from preheat.recipe.yaml_io import compose
    from preheat.sanitize import shorten

    option = f"--variant {variant}" if variant else "--set"
    overridden = {}
    for item in overrides:
        key, equals, raw = item.partition("=")
        # Prompts have options and files of their own here.
        name = key.strip().removeprefix("sample.")
        if not equals or name == key.strip() or name in ("prompts", "rows"):
            place = option if variant else f"--set {shorten(item)}"
            example = "cache=int8" if variant else "--set sample.cache=int8"
            raise RecipeError(f"{place}: here it takes generation settings, e.g. {example}")
        # YAML, as in a recipe: 0.8 is a number, int8 a text.
        overridden[name] = compose(raw, option if variant else f"--set {shorten(item)}", numbered=False)[0]
    # The recipe's own checks, with their messages.
    reader = RecipeReader(option, {}, hints={})
    sample: Sample = reader.flat(Sample, {**values, **overridden}, ("sample",))
    reader.refuse()
    # Settings that are valid each but contradict each other; named as the user gave them.
    if problems := sample_problems(sample):
        messages = [
            (
                f"{option + ': ' if variant else ''}sample.{name}"
                if name in overridden
                else f"--{name.replace('_', '-')}",
                problem,
            )
            for name, problem in problems
        ]
        raise RecipeError("; ".join(f"{name}: {problem}" for name, problem in messages))
    return sample


def choose_template(
    opened: LoadedModel, model: str, setting: str | None, use_chat: bool | None
) -> tuple[Template | None, str]:
    """Returns (chat template or None for plain text, description of the choice).

    Args:
        setting: --template.
        use_chat: --chat or --no-chat; None: as the run was trained.

    Raises:
        RecipeError: a template is needed and there is none.
    """
    from preheat.inference.text_generation import find_template

    # Plain text, unless the user or the run's training calls for a template.
    if use_chat is False or (use_chat is None and setting is None and opened.template is None):
        return None, "plain text"
    chat_template = find_template(setting, opened.tokenizer, model=model)
    own = setting is None and opened.template is not None
    return chat_template, f"chat, {opened.template}, as the run was trained" if own else f"chat, {chat_template.name}"


class Watched:
    """Context manager that adds up the seconds spent inside.

    The caller sets `tokens`, `kind` (of the device) and `compiled`.
    """

    def __init__(self) -> None:
        self.tokens, self.seconds, self.kind, self.compiled = 0, 0.0, "cpu", False

    def __enter__(self) -> Watched:
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        # Summed, since several models are entered one after another.
        self.seconds += time.perf_counter() - self._begun

    def figures(self) -> dict[str, float | bool | None]:
        from preheat.hardware.gpu_memory import read_memory_peak

        return {
            "tokens_per_second": self.tokens / self.seconds if self.seconds else None,
            "peak_gib": read_memory_peak(self.kind).total / 2**30,
            "compiled": self.compiled,
        }

    def summary(self) -> str:
        from preheat.core.units import format_memory, format_rate
        from preheat.hardware.gpu_memory import read_memory_peak

        speed, peak = format_rate(self.tokens / self.seconds), read_memory_peak(self.kind).total / 2**30
        return (
            f"{self.tokens:,} tokens in {self.seconds:.2f} s, {speed} tokens/s, "
            f"peak memory {format_memory(peak)}{', compiled for single tokens' if self.compiled else ''}"
        )


def note(text: str) -> None:
    """Prints a dim line on standard error, apart from the generated text."""
    build_console(error=True).print(text, style="dim", soft_wrap=True)
