"""Sample texts of a run: generated from fixed prompts before the first step and after the last."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from preheat.core.run_records import SampleEvent
from preheat.errors import RecipeError
from preheat.inference.load import load_draft_model
from preheat.inference.text_generation import Prompt, Tokens, tokenize_prompt, write_texts
from preheat.run.reader import Reader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from preheat.core import Build
    from preheat.data.chat.template import Template
    from preheat.data.packing import Rows
    from preheat.recipe import Recipe
    from preheat.run.writer import Writer

__all__ = ["Samples", "read_questions"]


class Samples:
    """Generates the samples of a run and stores them in its events and in samples.json.

    Args:
        template: formats the prompts as chats.
        positions: context length of the model.
        validation: rows whose questions are answered too (`sample.rows`).

    Attributes:
        prompts: the recipe's prompts, then those of the rows.
        expected: the reference answer of each prompt; None for the recipe's prompts.

    Raises:
        RecipeError, DataError: a prompt is invalid; raised before training.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: Template | None = None,
        positions: int = 0,
        validation: Rows | None = None,
    ):
        self.recipe, self.tokenizer, self.template = recipe, tokenizer, template
        # Tokens that a question may have, if the answer is to fit in the context as well.
        room = positions - recipe.sample.max_new_tokens if positions else 0
        if recipe.sample.rows and positions and room < 1:
            raise RecipeError(
                f"sample.max_new_tokens: {recipe.sample.max_new_tokens} leave no room for a question "
                f"in {positions} positions"
            )
        pairs = read_questions(validation, recipe.sample.rows, tokenizer, room) if recipe.sample.rows else []
        self.prompts: list[Prompt] = [*recipe.sample.prompts, *(question for question, _ in pairs)]
        self.expected = [*(None for _ in recipe.sample.prompts), *(answer for _, answer in pairs)]
        # The tokens are discarded: this only checks each prompt before training, rather than after hours of it.
        for number, prompt in enumerate(recipe.sample.prompts, 1):
            tokenize_prompt(tokenizer, prompt, template, positions=positions, where=f"sample.prompts: prompt {number}")

    @property
    def before(self) -> bool:
        """True if samples are generated before training, i.e. if the model starts from pretrained weights."""
        model = self.recipe.model
        return bool(self.prompts) and model.path is not None and model.weights == "pretrained"

    def write(self, build: Build, writer: Writer, *, step: int) -> None:
        """Generates a text for each prompt, logs it as an event, and rewrites samples.json with all samples so far."""
        settings = self.recipe.sample
        if settings.compile == "auto":  # the run's memory plan does not include the memory that compiling keeps
            settings = replace(settings, compile=False)
        # Loaded for this call only: during training, the memory of the draft model belongs to the run.
        draft = None if settings.draft_model is None else load_draft_model(settings.draft_model, self.tokenizer)
        texts = write_texts(
            build, self.tokenizer, self.prompts, settings, template=self.template, draft=draft, seed=self.recipe.seed
        )
        for prompt, text, expected in zip(self.prompts, texts, self.expected, strict=True):
            shown = prompt.text if isinstance(prompt, Tokens) else prompt
            writer.write_event(
                SampleEvent(step=step, prompt=shown, text=text.text, ended=text.finish_reason, expected=expected)
            )
        writer.write_json("samples.json", Reader(writer.path).samples())


def read_questions(
    rows: Rows | None, count: int, tokenizer: PreTrainedTokenizerBase, room: int = 0
) -> list[tuple[Tokens, str]]:
    """Returns the questions of the first validation rows, formatted as in training, each with its reference answer.

    Args:
        rows: packed rows whose documents hold a question (masked) and an answer (trained on).
        count: maximum number of questions.
        room: longest question in tokens; 0: any.

    Raises:
        RecipeError: the rows hold no question with an answer.
    """
    from preheat.data.packing import IGNORED

    pairs: list[tuple[Tokens, str]] = []
    for row in map(rows.row, range(len(rows))) if rows is not None else ():
        # All rows of a dataset are alike here, so the first one decides.
        if row.images or row.group != 1:
            break  # images and preference pairs cannot be shown as one text
        # Documents of a packed row lie one after the other; `row.documents` holds their sizes in tokens.
        start = 0
        for size in row.documents:
            tokens, labels = row.tokens[start : start + size], row.labels[start : start + size]
            start += size
            trained = (labels != IGNORED).nonzero()[0]
            # Labels are shifted: a position's label is the next token, so the question ends at the first label.
            if not len(trained) or trained[0] == 0 or (room and trained[0] >= room):
                continue
            # In a chat of several turns, take the first answer.
            # A gap between trained positions is a turn of the user, whose tokens are masked.
            gaps = (trained[1:] - trained[:-1] > 1).nonzero()[0]
            last = trained[gaps[0]] if len(gaps) else trained[-1]
            # The label at position i is the token i + 1: the question is tokens[: first + 1], the answer tokens[first +
            # 1 : last + 2].
            ids = tuple(tokens[: trained[0] + 1].tolist())
            answer = tokenizer.decode(tokens[trained[0] + 1 : last + 2].tolist(), skip_special_tokens=True)
            pairs.append((Tokens(ids, tokenizer.decode(ids)), answer))
            if len(pairs) == count:
                return pairs
    if not pairs:
        raise RecipeError(
            "sample.rows: the validation rows hold no question with an answer (text alone, pairs and images have "
            "none); "
            "write sample.prompts, or leave it out"
        )
    return pairs
