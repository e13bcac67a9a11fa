"""Generates text with a build: continues texts and answers chats, with prompts tokenized as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from preheat.data.chat.builtin_templates import SUGGESTIONS
from preheat.errors import DataError, RecipeError
from preheat.model_folder import beginning_tokens
from preheat.models.generation.generate import PrefixCache, Timed, Written, generate, stop_tokens
from preheat.recipe import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from preheat.core import Build
    from preheat.data.chat.messages import Message
    from preheat.data.chat.template import Template
    from preheat.data.rows.formats import Layout

__all__ = [
    "Prompt",
    "load_chat_template",
    "find_template",
    "Tokens",
    "tokenize_prompt",
    "find_turn_ends",
    "write_texts",
]


@dataclass(frozen=True)
class Tokens:
    """The beginning of a training row, as the tokens that the model reads.

    Attributes:
        ids: at least one.
        text: the decoded tokens, for display.
    """

    ids: tuple[int, ...]
    text: str


Prompt = str | Sequence["Message"] | Tokens
"""A text, the messages of a chat, or tokens."""


def find_template(setting: str | None, tokenizer: PreTrainedTokenizerFast, *, model: str) -> Template:
    """The chat template of that name or file, or the tokenizer's own.

    Raises:
        RecipeError: there is none; the message says how to name one.
    """
    from preheat.data.chat.template import load_template

    # A template that the model was not trained with gives poor answers without an error, so none is guessed.
    if setting is None and not tokenizer.chat_template:
        raise RecipeError(
            f"{model}: its tokenizer has no chat template; name the one that it was trained with, e.g. --template "
            "chatml "
            f"(known: {SUGGESTIONS}), or a .jinja file"
        )
    try:
        return load_template(setting, tokenizer, knob="--template")
    except DataError as error:  # not an error of data here: the command line is wrong
        raise RecipeError(str(error)) from None


def load_chat_template(layout: Layout) -> Template | None:
    """The chat template that formats the rows of a layout; None for plain text, whatever template the tokenizer has."""
    return layout.chat_template


def write_texts(
    build: Build,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    settings: Sample | None = None,
    *,
    template: Template | None = None,
    seed: int = 0,
    batch: int = 8,
    on_text: Callable[[int, str | None], None] | None = None,
    kept: PrefixCache | None = None,
    draft: PreTrainedModel | None = None,
    timed: Timed | None = None,
) -> list[Written]:
    """Continues texts and answers chats.

    Args:
        settings: number of tokens and how they are sampled; greedy, at most 64, by default.
        template: formats chats; a plain text is then the user's message.
        draft: the model that `settings.draft_model` names (`load.load_draft_model`).
        seed, batch, on_text, kept, timed: see `preheat.models.generation.generate.generate`.

    Raises:
        RecipeError, DataError: a prompt that cannot be continued (see `tokenize_prompt`), or settings that this model
        does not support.
    """
    settings, positions = settings or Sample(), build.model.positions
    # Error messages count prompts from 1, as users do.
    names = ["--prompt"] if len(prompts) == 1 else [f"prompt {n}" for n in range(1, len(prompts) + 1)]
    ids = [
        tokenize_prompt(tokenizer, p, template, positions=positions, where=name)
        for p, name in zip(prompts, names, strict=True)
    ]
    stop = stop_tokens(tokenizer, build.weights.folder)
    if template is not None:
        tokens, strings = find_turn_ends(template, tokenizer)
        # An assistant's turn may end by other means than a text: <|im_end|> rather than <|endoftext|>.
        stop, settings = stop | tokens, replace(settings, stop=(*settings.stop, *strings))
    assert draft is not None or settings.draft_model is None, "the caller opens the draft model that the settings name"
    model: PreTrainedModel = build.trained[0]
    return generate(
        model,
        tokenizer,
        ids,
        settings,
        stop=stop,
        positions=positions,
        batch=batch,
        seed=seed,
        on_text=on_text,
        kept=kept,
        draft=draft,
        timed=timed,
    )


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerFast,
    prompt: Prompt,
    template: Template | None = None,
    *,
    positions: int = 0,
    where: str = "--prompt",
) -> list[int]:
    """Tokenizes a prompt; returns at least one token.

    Args:
        prompt: a text to continue, or a chat to answer.
        template: formats a chat; with it, a plain text is the user's first message.
        positions: the model's context length; 0: unknown.
        where: the name of the prompt in error messages.

    Raises:
        RecipeError: a chat without a template, an empty prompt, or no room for an answer.
        DataError: the template does not render the chat.
    """
    # Tokens of a training row are used as they are: decoding and encoding again might split them differently.
    if isinstance(prompt, Tokens):
        ids = list(prompt.ids)
    elif template is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        # Templates write their special tokens themselves, so the tokenizer must not add its own.
        ids = tokenizer.encode(template.prompt(messages), add_special_tokens=False, verbose=False)
    elif not isinstance(prompt, str):
        raise RecipeError(
            f"{where}: is a chat, and there is no chat template to lay it out; name one, or write the prompt as text"
        )
    else:
        # As in training rows: the token that the tokenizer puts before a text, and none after it.
        ids = [*beginning_tokens(tokenizer), *tokenizer.encode(prompt, add_special_tokens=False, verbose=False)]
    if not ids:
        # The model predicts after a token, so an empty prompt begins with the token that texts begin with or follow.
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if first is None:
            raise RecipeError(f"{where}: is empty, and the tokenizer has no token to begin with; write some text")
        ids = [first]
    # At least one position must be left for an answer.
    if positions and len(ids) >= positions:
        raise RecipeError(f"{where}: has {len(ids):,} tokens, the model only {positions:,} positions; shorten it")
    return ids


def find_turn_ends(template: Template, tokenizer: PreTrainedTokenizerFast) -> tuple[frozenset[int], tuple[str, ...]]:
    """The end of an assistant's turn: a token, or a string if the template's mark is not a special token."""
    if template.end_of_turn is not None:
        return frozenset({tokenizer.convert_tokens_to_ids(template.end_of_turn)}), ()
    # An unusual string, found in the rendered reply to see what the template writes after it.
    answer = "zq"
    try:
        spoken = template.spans([{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}])
    except DataError:  # a template that needs more than a question and an answer: assume that turns end as texts do
        return frozenset(), ()
    # Only trained text: the model has not learned to write anything after it.
    reply = "".join(piece.text for piece in spoken if piece.trained)
    mark = reply[reply.rfind(answer) + len(answer) :].strip()
    # Without a mark, the model would go on with the question.
    if not mark and template.next_role is not None:
        return frozenset({tokenizer.convert_tokens_to_ids(template.next_role)}), ()
    return frozenset(), (mark,) if mark else ()
