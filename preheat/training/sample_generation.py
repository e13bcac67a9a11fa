"""Text that a run writes: after the same prompts before the first step and after the last, in its events and in samples.json."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError
from preheat.inference.load import load_draft_model
from preheat.inference.text_generation import Prompt, Tokens, prompt_tokens, write_texts
from preheat.run_dir import Reader

if TYPE_CHECKING:
    from preheat.core import Build
    from preheat.data.chat.template import Template
    from preheat.data.packing import Rows
    from preheat.recipe import Recipe
    from preheat.run_dir import Writer

__all__ = ["Samples", "questions"]


class Samples:
    """The samples of a run.

    Args:
        template: lays out the prompts as chats.
        positions: tokens that the model can read.
        validation: rows whose questions are answered too (`sample.rows`).

    Attributes:
        prompts: those of the recipe, then those of the rows.
        expected: the row's own answer to each; None without one.

    Raises:
        RecipeError, DataError: a prompt that cannot be written after: found before anything is trained.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Any,
        *,
        template: Template | None = None,
        positions: int = 0,
        validation: Rows | None = None,
    ):
        self.recipe, self.tokenizer, self.template = recipe, tokenizer, template
        room = positions - recipe.sample.tokens if positions else 0
        if recipe.sample.rows and positions and room < 1:
            raise RecipeError(
                f"sample.tokens: {recipe.sample.tokens} leave no room for a question in {positions} positions"
            )
        asked = questions(validation, recipe.sample.rows, tokenizer, room) if recipe.sample.rows else []
        self.prompts: list[Prompt] = [*recipe.sample.prompts, *(question for question, _ in asked)]
        self.expected = [*(None for _ in recipe.sample.prompts), *(answer for _, answer in asked)]
        for number, prompt in enumerate(recipe.sample.prompts, 1):
            prompt_tokens(tokenizer, prompt, template, positions=positions, where=f"sample.prompts: prompt {number}")

    @property
    def before(self) -> bool:
        """Whether there is something to write before training: a model that was trained already."""
        model = self.recipe.model
        return bool(self.prompts) and model.path is not None and model.weights == "pretrained"

    def write(self, build: Build, writer: Writer, *, step: int) -> None:
        """Writes a text after each prompt into the run's events, and all that the run has so far into samples.json."""
        settings = self.recipe.sample
        if settings.compile == "auto":  # what compiling keeps of the device's memory is not in the plan of a run
            settings = replace(settings, compile=False)
        # Opened for this call alone: while the model trains, the draft's memory is the run's.
        draft = None if settings.draft is None else load_draft_model(settings.draft, self.tokenizer)
        texts = write_texts(
            build, self.tokenizer, self.prompts, settings, template=self.template, draft=draft, seed=self.recipe.seed
        )
        for prompt, text, expected in zip(self.prompts, texts, self.expected, strict=True):
            shown = prompt.text if isinstance(prompt, Tokens) else prompt
            own = {} if expected is None else {"expected": expected}
            writer.event("sample", step=step, prompt=shown, text=text.text, ended=text.ended, **own)
        writer.json("samples.json", Reader(writer.path).samples())


def questions(rows: Rows | None, count: int, tokenizer: Any, room: int = 0) -> list[tuple[Tokens, str]]:
    """The questions of the first validation rows, as the model reads them in training, each with the row's own answer.

    Args:
        rows: packed rows with documents of a question, which is read, and an answer, which is trained.
        count: at most so many.
        room: longest question in tokens; 0: any.

    Raises:
        RecipeError: the rows hold no question with an answer.
    """
    from preheat.data.packing import IGNORED

    found: list[tuple[Tokens, str]] = []
    for row in map(rows.row, range(len(rows))) if rows is not None else ():
        if row.images or row.group != 1:
            break  # what was drawn, or compared, is not told by a text alone
        start = 0
        for size in row.documents:
            tokens, labels = row.tokens[start : start + size], row.labels[start : start + size]
            start += size
            trained = (labels != IGNORED).nonzero()[0]
            # The label of a place is the token behind it: the question ends with the first place that has one.
            if not len(trained) or trained[0] == 0 or (room and trained[0] >= room):
                continue
            # Of a chat of several turns, the first answer.
            gaps = (trained[1:] - trained[:-1] > 1).nonzero()[0]
            last = trained[gaps[0]] if len(gaps) else trained[-1]
            ids = tuple(tokens[: trained[0] + 1].tolist())
            answer = tokenizer.decode(tokens[trained[0] + 1 : last + 2].tolist(), skip_special_tokens=True)
            found.append((Tokens(ids, tokenizer.decode(ids)), answer))
            if len(found) == count:
                return found
    if not found:
        raise RecipeError(
            "sample.rows: the validation rows hold no question with an answer (text alone, pairs and images have "
            "none); "
            "write sample.prompts, or leave it out"
        )
    return found
