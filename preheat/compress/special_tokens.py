"""BOS, EOS and padding tokens, written to the tokenizer, config and generation settings of a folder."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import remote_code
from preheat.compress.export.verify import TEXTS
from preheat.data.chat.template import Template
from preheat.errors import RunError
from preheat.inference.load import LoadedModel
from preheat.inference.text_generation import find_template, find_turn_ends
from preheat.model_folder import beginning_tokens
from preheat.models.generation.config import ends_of, read_generation
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["EndTokens", "end_texts", "set_end_tokens", "require_same_tokens"]


@dataclass
class EndTokens:
    """End-of-text tokens of a model.

    Attributes:
        tokenizer: to be saved; for a chat model its EOS token is the end of a turn.
        tokens: all tokens that end a text.
        end_of_turn: the token that ends an assistant's turn; None: no chat model, or its turns end in no token.
        notes: messages for the user.
        chats: True if the model was trained on chats, rendered by the tokenizer's template.
        string: the string that ends an answer if no token does; else ''.
    """

    tokenizer: PreTrainedTokenizerFast
    tokens: list[int]
    end_of_turn: int | None
    notes: list[str]
    chats: bool
    string: str = ""


def set_end_tokens(model: PreTrainedModel, opened: LoadedModel) -> EndTokens:
    """Sets BOS, EOS and padding tokens in the config and the generation settings, in place.

    Values stated by the base are kept; a new model gets the tokenizer's. Generation also stops at the tokenizer's own
    EOS and, after training on chats, at the token that ended each turn: otherwise it would wait for a base's EOS that
    no turn contained.

    Raises:
        RunError: the base's generation settings are damaged.
    """
    from transformers import GenerationConfig

    # The base's own settings have precedence over values derived from the config.
    settings, notes = read_generation(opened.build.weights.folder)
    if settings is None:
        settings = GenerationConfig.from_model_config(model.config)
        settings._from_model_config = False  # or transformers would derive them from the config again on load
    model.generation_config = settings
    tokenizer, turn, string, turn_notes = _end_turns(opened)
    # Only missing values: a base's own EOS may differ from that of its tokenizer.
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        own = getattr(opened.tokenizer, key)
        for target in (model.config, settings):
            if getattr(target, key, None) is None and own is not None:
                setattr(target, key, own)
    ends = ends_of(settings)
    # Generation stops at any of them.
    ends += [n for n in (opened.tokenizer.eos_token_id, turn) if n is not None and n not in ends]
    if turn is not None and tokenizer.eos_token_id == turn:
        model.config.eos_token_id = turn
        ends = [turn, *(n for n in ends if n != turn)]  # readers that support a single EOS take the first
    settings.eos_token_id = ends if len(ends) > 1 else ends[0]
    return EndTokens(tokenizer, ends, turn, notes + turn_notes, opened.template is not None, string)


def _end_turns(opened: LoadedModel) -> tuple[PreTrainedTokenizerFast, int | None, str, list[str]]:
    """Returns a tokenizer whose EOS ends a chat turn, the token and else the string that ends a turn, and notes."""
    # A copy: the run's tokenizer is still needed as it was trained.
    tokenizer = copy.deepcopy(opened.tokenizer)
    if opened.template is None:
        return tokenizer, None, "", []
    template = find_template(None, tokenizer, model="the run")
    tokens, strings = find_turn_ends(template, tokenizer)
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    turn = next(iter(tokens), None)
    # The string that ends a turn may be an added token.
    if turn is None and strings:
        turn = added.get(strings[0])
        if turn is None:
            note = (
                f"each answer ends with the text {quote_value(strings[0], 40)}, which is no token of its own: other "
                "tools "
                "stop there only if configured to (transformers: stop_strings; llama.cpp: --reverse-prompt), or "
                "train with it in model.add_tokens"
            )
            return tokenizer, None, strings[0], [note]
    if turn is None or turn == tokenizer.eos_token_id:
        return tokenizer, turn, "", []
    # A new EOS must not change how texts are encoded or chats are rendered.
    before = _encode_samples(tokenizer, template)
    ending = copy.deepcopy(tokenizer)
    ending.eos_token = tokenizer.convert_ids_to_tokens(turn)
    # Templates write {{ eos_token }}, which the new token would change as well.
    variables = {**template.variables, "eos_token": ending.eos_token}
    if _encode_samples(ending, replace(template, variables=variables)) != before:
        note = (
            f"each answer ends with {ending.eos_token!r}; the tokenizer's eos_token stays {tokenizer.eos_token!r}, "
            "since texts and its template use it: stop at the tokens in generation_config.json"
        )
        return tokenizer, turn, "", [note]
    return ending, turn, "", []


def _encode_samples(tokenizer: PreTrainedTokenizerFast, template: Template) -> list[list[int] | str]:
    """Returns how texts are tokenized and a chat is rendered; a new EOS token must not change either."""
    # Two turns of the user, so that the end of the assistant's turn is inside the rendered text.
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}, {"role": "user", "content": "?"}]
    return [tokenizer.encode(text) for text in TEXTS] + [template.prompt(chat)]


def end_texts(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Returns a copy of a tokenizer that appends EOS to each text, as in a classifier's training data.

    Raises:
        RunError: the tokenizer's post-processing cannot be changed.
    """
    from tokenizers import processors

    changed = copy.deepcopy(tokenizer)
    if _has_end_tokens(changed, tokenizer):
        return changed
    marks = [(tokenizer.eos_token, tokenizer.eos_token_id)]
    begin = ""
    if beginning_tokens(tokenizer):
        begin, marks = f"{tokenizer.bos_token} ", [*marks, (tokenizer.bos_token, tokenizer.bos_token_id)]
    # $A is the text, $B the second text of a pair, :1 its type.
    one = f"{begin}$A {tokenizer.eos_token}"
    # Replaces the tokenizer's own post-processor: in a sequence of two, the second does not see the first's tokens.
    changed.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=one, pair=f"{one} $B:1 {tokenizer.eos_token}:1", special_tokens=marks
    )
    # With these, transformers rebuilds the post-processor when it loads the tokenizer.
    if {"add_bos_token", "add_eos_token"} & changed.init_kwargs.keys():
        changed.init_kwargs["add_eos_token"] = True
    if not _has_end_tokens(changed, tokenizer):
        raise RunError(
            "--to hf: the tokenizer cannot be made to end each text, as the classifier's texts ended in training"
        )
    return changed


def _has_end_tokens(changed: PreTrainedTokenizerFast, plain: PreTrainedTokenizerFast) -> bool:
    """Returns True if texts are encoded as in training: BOS if the tokenizer adds one, plain tokens, EOS."""
    return all(changed.encode(text) == _encode_document(plain, text) for text in TEXTS)


def _encode_document(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Returns a text's tokens as a training document."""
    return [*beginning_tokens(tokenizer), *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def require_same_tokens(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Checks that transformers loads the same tokenizer from the saved folder.

    Raises:
        RunError: it loads a different one.
    """
    from transformers import AutoTokenizer

    reloaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=remote_code.is_allowed())
    # "a" has no space in front, which some tokenizers add.
    for text in (*TEXTS, "a"):
        if reloaded.encode(text) != tokenizer.encode(text):
            raise RunError(
                f"{folder.name}: read by transformers, its tokenizer splits {quote_value(text, 30)} differently from "
                "the "
                "one in training; nothing was written; please report it"
            )
