"""The tokens that begin, end and pad a text, named in a folder where other tools look: tokenizer, configuration, generation settings."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preheat import remote_code
from preheat.compress.export.verify import TEXTS
from preheat.data.chat.template import Template
from preheat.errors import RunError
from preheat.inference.load import LoadedModel
from preheat.inference.text_generation import find_template, turn_ends
from preheat.model_folder import beginning
from preheat.models.generation.config import ends_of, read_generation
from preheat.sanitize import quoted

__all__ = ["Ends", "end_texts", "name_ends", "require_same_tokens"]


@dataclass
class Ends:
    """How a model's texts end.

    Attributes:
        tokenizer: to be written; its end of text is the end of a turn where the model was trained on chats.
        tokens: each ends a text.
        turn: the one that ends an assistant's turn; None: the model was trained on texts, or its turns end in no token.
        notes: what there is to say.
        chats: the model was trained on chats, laid out by the tokenizer's template.
        string: what ends an answer where no token does; '' otherwise.
    """

    tokenizer: Any
    tokens: list[int]
    turn: int | None
    notes: list[str]
    chats: bool
    string: str = ""


def name_ends(model: Any, opened: LoadedModel) -> Ends:
    """Gives configuration and generation settings the tokens that begin, end and pad, in place.

    What the base states stays; a new model has the tokenizer's. Generation also ends at the tokenizer's own end and, after training on
    chats, at the token that ended each turn: without it, a base's end that no turn contained is waited for.

    Raises:
        RunError: the base's generation settings are damaged.
    """
    from transformers import GenerationConfig

    settings, notes = read_generation(opened.build.weights.folder)
    if settings is None:
        settings = GenerationConfig.from_model_config(model.config)
        settings._from_model_config = False  # what follows is stated, and no default that a reader may derive anew
    model.generation_config = settings
    tokenizer, turn, string, words = _end_turns(opened)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        own = getattr(opened.tokenizer, key)
        for place in (model.config, settings):
            if getattr(place, key, None) is None and own is not None:
                setattr(place, key, own)
    ends = ends_of(settings)
    ends += [n for n in (opened.tokenizer.eos_token_id, turn) if n is not None and n not in ends]
    if turn is not None and tokenizer.eos_token_id == turn:
        model.config.eos_token_id = turn
        ends = [turn, *(n for n in ends if n != turn)]  # readers of a single one take the first
    settings.eos_token_id = ends if len(ends) > 1 else ends[0]
    return Ends(tokenizer, ends, turn, notes + words, opened.template is not None, string)


def _end_turns(opened: LoadedModel) -> tuple[Any, int | None, str, list[str]]:
    """A tokenizer that ends texts as the turns of the run's chats ended, their last token or else string, and what there is to say."""
    tokenizer = copy.deepcopy(opened.tokenizer)
    if opened.template is None:
        return tokenizer, None, "", []
    template = find_template(None, tokenizer, model="the run")
    tokens, strings = turn_ends(template, tokenizer)
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    turn = next(iter(tokens), None)
    if turn is None and strings:
        turn = added.get(strings[0])
        if turn is None:
            words = (
                f"each answer ends with the text {quoted(strings[0], 40)}, which is no token of its own: other tools stop there only when "
                "told to (transformers: stop_strings; llama.cpp: --reverse-prompt), or train with it in model.add_tokens"
            )
            return tokenizer, None, strings[0], [words]
    if turn is None or turn == tokenizer.eos_token_id:
        return tokenizer, turn, "", []
    before = _behaviour(tokenizer, template)
    ending = copy.deepcopy(tokenizer)
    ending.eos_token = tokenizer.convert_ids_to_tokens(turn)
    variables = {**template.variables, "eos_token": ending.eos_token}
    if (
        _behaviour(ending, Template(template.text, template.name, variables, template.special, template.with_tools))
        != before
    ):
        words = (
            f"each answer ends with {ending.eos_token!r}; the tokenizer's eos_token stays {tokenizer.eos_token!r}, since texts and its "
            "template are written with it: stop at what generation_config.json names"
        )
        return tokenizer, turn, "", [words]
    return ending, turn, "", []


def _behaviour(tokenizer: Any, template: Template) -> list[Any]:
    """What a change of the end of text must not change: how texts are cut, and how chats are laid out."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}, {"role": "user", "content": "?"}]
    return [tokenizer.encode(text) for text in TEXTS] + [template.prompt(chat)]


def end_texts(tokenizer: Any) -> Any:
    """A tokenizer that puts the end of text behind each text by itself, as a classifier's texts had it in training; a copy.

    Raises:
        RunError: what it writes behind a text cannot be changed.
    """
    from tokenizers import processors

    changed = copy.deepcopy(tokenizer)
    if _ended(changed, tokenizer):
        return changed
    marks = [(tokenizer.eos_token, tokenizer.eos_token_id)]
    begin = ""
    if beginning(tokenizer):
        begin, marks = f"{tokenizer.bos_token} ", [*marks, (tokenizer.bos_token, tokenizer.bos_token_id)]
    one = f"{begin}$A {tokenizer.eos_token}"
    # In place of the tokenizer's own: of two in a sequence the second does not see what the first put there.
    changed.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=one, pair=f"{one} $B:1 {tokenizer.eos_token}:1", special_tokens=marks
    )
    if {
        "add_bos_token",
        "add_eos_token",
    } & changed.init_kwargs.keys():  # with these, readers make the post-processor anew
        changed.init_kwargs["add_eos_token"] = True
    if not _ended(changed, tokenizer):
        raise RunError(
            "--to hf: the tokenizer cannot be made to end each text, as the classifier's texts ended in training"
        )
    return changed


def _ended(changed: Any, plain: Any) -> bool:
    """Whether texts are as in training: plain tokens, a beginning where the tokenizer puts one, and the end of text."""
    return all(changed.encode(text) == _document(plain, text) for text in TEXTS)


def _document(tokenizer: Any, text: str) -> list[int]:
    """A text's tokens as a document has them in training."""
    return [*beginning(tokenizer), *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def require_same_tokens(tokenizer: Any, folder: Path) -> None:
    """Checks that transformers reads the tokenizer from a folder that was written there.

    Raises:
        RunError: it reads another.
    """
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=remote_code.allowed())
    for text in (*TEXTS, "a"):
        if again.encode(text) != tokenizer.encode(text):
            raise RunError(
                f"{folder.name}: transformers reads its tokenizer so that it cuts {quoted(text, 30)} otherwise than the model was trained "
                "on; nothing was written; please report it"
            )
