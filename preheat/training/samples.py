"""Text that a run writes: after the same prompts before the first step and after the last, in its events and in samples.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from preheat.run import Reader
from preheat.training.texts import prompt_tokens, write_texts

if TYPE_CHECKING:
    from preheat.data.templates import Template
    from preheat.recipe import Recipe
    from preheat.run import Writer
    from preheat.technique import Build

__all__ = ["Samples"]


class Samples:
    """The samples of a run.

    Args:
        template: lays out the prompts as chats.
        positions: tokens that the model can read.

    Raises:
        RecipeError, DataError: a prompt that cannot be written after: found before anything is trained.
    """

    def __init__(self, recipe: Recipe, tokenizer: Any, *, template: Template | None = None, positions: int = 0):
        self.recipe, self.tokenizer, self.template = recipe, tokenizer, template
        for number, prompt in enumerate(recipe.sample.prompts, 1):
            prompt_tokens(tokenizer, prompt, template, positions=positions, where=f"sample.prompts: prompt {number}")

    @property
    def before(self) -> bool:
        """Whether there is something to write before training: a model that was trained already."""
        model = self.recipe.model
        return bool(self.recipe.sample.prompts) and model.path is not None and model.weights == "pretrained"

    def write(self, build: Build, writer: Writer, *, step: int) -> None:
        """Writes a text after each prompt into the run's events, and all that the run has so far into samples.json."""
        settings = self.recipe.sample
        made = write_texts(build, self.tokenizer, settings.prompts, settings, template=self.template, seed=self.recipe.seed)
        for prompt, text in zip(settings.prompts, made, strict=True):
            writer.event("sample", step=step, prompt=prompt, text=text.text, ended=text.ended)
        writer.json("samples.json", Reader(writer.path).samples())
