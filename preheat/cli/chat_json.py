"""`preheat chat --json`: a chat for programs, with one JSON object per line in and out.

in   {"message": TEXT}   {"system": TEXT}   {"reset": true}
out  {"ready": {...}}    {"request": {...}}   {"text": PART} ... {"answer": {...}}   {"error": TEXT}

A valid request is written back before its answer, so that the output alone is the whole conversation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preheat.cli.views.output import say
from preheat.errors import PreheatError, RecipeError
from preheat.files import BadJson, parse_json, to_json
from preheat.hardware.interrupts import ignore_keyboard_interrupt, raise_keyboard_interrupt
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from preheat.data.chat.template import Template
    from preheat.inference.load import LoadedModel
    from preheat.recipe import Sample

__all__ = ["choose_format", "serve_requests"]

_KEYS = ("message", "system", "reset")


@dataclass(frozen=True)
class _Answer:
    """The end of a reply.

    Attributes:
        finish_reason: stop, length or context.
        dropped: old messages dropped to make room.
        prompt, read: tokens of the prompt, and those of them that were not in the cache yet.
    """

    text: str
    tokens: int
    seconds: float
    finish_reason: str
    dropped: int
    prompt: int
    read: int


@dataclass(frozen=True)
class _Ready:
    """The model that answers; `format` says how messages reach it."""

    step: int | None
    format: str
    positions: int | None


def choose_format(opened: LoadedModel, model: str, setting: str | None) -> tuple[Template | None, str]:
    """Returns the chat template that is named or that the model has, or None for plain text; and its description."""
    from preheat.cli.options.generation import choose_template

    if setting is None and opened.template is None and not opened.tokenizer.chat_template:
        return None, "plain text: the model has no chat template, so it continues each message"
    return choose_template(opened, model, setting, True)


def serve_requests(
    opened: LoadedModel, template: Template | None, description: str, settings: Sample, *, system: str | None, seed: int
) -> None:
    """Answers the requests of standard input until its end; a bad request is an error and ends nothing.

    Ctrl-C ends an answer. Between answers it does nothing: it may be meant for an answer that has just ended. On a
    terminal it ends the chat then.
    """
    speak = _open_chat(opened, template, settings, system, seed)
    with nullcontext() if sys.stdin.isatty() else ignore_keyboard_interrupt():
        _write({"ready": _Ready(opened.step, description, opened.build.model.positions)})
        _answer_lines(speak)


def _answer_lines(speak: Callable[[tuple[str, str]], None]) -> None:
    from preheat.cli.views.line_input import read_line

    while (line := read_line(False)) is not None:
        if not line.strip():
            continue
        try:
            with raise_keyboard_interrupt():
                request = _read_request(line)
                key, text = request
                _write({"request": {key: True if key == "reset" else text}})
                speak(request)
        except KeyboardInterrupt:
            _write({"error": "interrupted; the text so far stays in the conversation"})
        except PreheatError as error:
            _write({"error": shorten(str(error), 700)})


def _read_request(line: str) -> tuple[str, str]:
    """Returns the key and the text of a request.

    Raises:
        RecipeError: it is none.
    """
    try:
        request = parse_json(line)
    except (BadJson, ValueError) as error:
        raise RecipeError(f"request: {shorten(line.strip(), 40)}: must be a JSON object ({error})") from None
    if not isinstance(request, dict) or len(request) != 1 or next(iter(request)) not in _KEYS:
        raise RecipeError(f"request: {quote_value(request)}: must have one of the keys {', '.join(_KEYS)}")
    ((key, value),) = request.items()
    if key == "reset":
        if value is not True:
            raise RecipeError(f"reset: {quote_value(value)}: must be true")
        return key, ""
    if not isinstance(value, str) or (key == "message" and not value.strip()):
        raise RecipeError(f"{key}: {quote_value(value)}: must be a text")
    return key, value


def _open_chat(
    opened: LoadedModel, template: Template | None, settings: Sample, system: str | None, seed: int
) -> Callable[[tuple[str, str]], None]:
    """Returns the function that carries out a request."""
    from preheat.inference.conversation import Conversation

    def send(part: str) -> None:
        _write({"text": part})

    if template is None:

        def send_part(_: int, part: str) -> None:
            if part:
                send(part)

        def continue_text(request: tuple[str, str]) -> None:
            key, text = request
            if key == "system":
                raise RecipeError("system: a model without a chat template has no system message; leave it out")
            if key == "message":
                start = time.monotonic()
                (written,) = opened.write([text], settings, seed=seed, on_text=send_part)
                seconds = time.monotonic() - start
                tokens = len(written.tokens)
                _write({"answer": _Answer(written.text, tokens, seconds, written.finish_reason, 0, 0, 0)})

        return continue_text
    talk = Conversation(opened, template, settings, system=system, seed=seed)

    def converse(request: tuple[str, str]) -> None:
        key, text = request
        if key == "reset":
            talk.reset()
        elif key == "system":
            talk.system = text or None
        else:
            start = time.monotonic()
            answer = talk.say(text, send)
            written = answer.written
            _write(
                {
                    "answer": _Answer(
                        written.text,
                        len(written.tokens),
                        time.monotonic() - start,
                        written.finish_reason,
                        answer.dropped,
                        answer.prompt,
                        answer.read,
                    )
                }
            )

    return converse


def _write(record: dict[str, str | dict[str, str | bool] | _Answer | _Ready]) -> None:
    say(to_json(record))
