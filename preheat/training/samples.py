"""Text that a run writes: the same prompts before the first step and after the last, in the run's events and in samples.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError
from preheat.models.generate import generate, stop_tokens
from preheat.run import Reader

if TYPE_CHECKING:
    from preheat.recipe import Recipe
    from preheat.run import Writer
    from preheat.technique import Build

__all__ = ["Samples", "prompt_tokens"]

Prompt = str | Sequence[Mapping[str, Any]]


def prompt_tokens(
    tokenizer: Any, prompt: Prompt, template: Any = None, *, positions: int = 0, where: str = "--prompt"
) -> list[int]:
    """A prompt as the model was trained to see its beginning.

    Args:
        prompt: a text to continue, or a chat to answer.
        template: preheat.data.templates.Template; a text is then the user's message of a chat.
        positions: tokens that the model can read; 0: not stated.
        where: what errors call the prompt.

    Raises:
        RecipeError: a chat without a template, nothing to begin with, or no room for an answer.
    """
    if template is None and not isinstance(prompt, str):
        raise RecipeError(
            f"{where}: is a chat, and there is no chat template; name one (e.g. chatml), or write the prompt as text"
        )
    if template is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        ids = tokenizer.encode(template.prompt(messages), add_special_tokens=False)
    else:
        ids = [*_begin(tokenizer), *tokenizer.encode(prompt, add_special_tokens=False)]
    if not ids:
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if first is None:
            raise RecipeError(f"{where}: is empty, and the tokenizer has no token to begin with; write some text")
        ids = [first]
    if positions and len(ids) >= positions:
        raise RecipeError(f"{where}: has {len(ids):,} tokens, the model only {positions:,} positions; shorten it")
    return ids


def _begin(tokenizer: Any) -> list[int]:
    """The beginning-of-text token where the tokenizer's own rules put one, as documents have it in training."""
    first, plain = (tokenizer.encode("a", add_special_tokens=own)[:1] for own in (True, False))
    return first if first == [tokenizer.bos_token_id] != plain else []


class Samples:
    """The samples of a run.

    Args:
        template: for prompts that are chats, and for texts where the data are chats.

    Raises:
        RecipeError: a prompt that cannot be written after; before anything is trained.
    """

    def __init__(self, recipe: Recipe, tokenizer: Any, template: Any = None, *, positions: int = 0):
        self.recipe, self.tokenizer = recipe, tokenizer
        self.prompts = [
            prompt_tokens(tokenizer, prompt, template, positions=positions, where=f"sample.prompts: prompt {number}")
            for number, prompt in enumerate(recipe.sample.prompts, 1)
        ]
        self.positions = positions

    @property
    def before(self) -> bool:
        """Whether the model can write anything before training."""
        return bool(self.prompts) and self.recipe.model.path is not None and self.recipe.model.weights == "pretrained"

    def write(self, build: Build, writer: Writer, *, step: int) -> None:
        """Writes a text for each prompt into the run, and all that the run has so far into samples.json."""
        made = generate(
            build.trained[0],  # type: ignore[arg-type]
            self.tokenizer,
            self.prompts,
            self.recipe.sample,
            stop=stop_tokens(self.tokenizer, build.weights.folder),
            positions=self.positions,
            seed=self.recipe.seed,
        )
        for prompt, text in zip(self.recipe.sample.prompts, made, strict=True):
            writer.event("sample", step=step, prompt=prompt, text=text.text, ended=text.ended)
        writer.json("samples.json", Reader(writer.path).samples())
