"""Converts a chat template for readers with plain Jinja.

They do not trim whitespace around blocks, and know neither special tokens nor transformers' own tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from preheat.data.chat.render_limits import limit_rendering
from preheat.data.chat.template import Template
from preheat.errors import DataError

if TYPE_CHECKING:
    from preheat.data.chat.messages import Message

__all__ = ["convert_to_jinja", "render"]

_MARKS = ("generation", "endgeneration")
# Whitespace and characters that HTML escapes, a system message, several turns.
_PROBES: tuple[Sequence[Mapping[str, str]], ...] = (
    ({"role": "user", "content": ' a <b> & "c" \n'},),
    ({"role": "system", "content": "s"}, {"role": "user", "content": "a"}),
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c\n\n d"}),
)


def convert_to_jinja(template: Template) -> str | None:
    """Returns Jinja text that renders chats like the template.

    It is rendered by `jinja2.Template(text).render(messages=..., add_generation_prompt=True)`. Special tokens are set
    inside it, and whitespace is written as it is after trimming; the marks of the assistant's text, which render
    nothing, are dropped.

    Returns:
        None if the template uses features that plain Jinja lacks (loop controls, today's date).
    """
    import jinja2

    try:
        # A template is foreign code: its time and output are limited.
        with limit_rendering(template.name):
            text = _render_nodes(template)
        # Rendering decides, because no static check knows every difference of the environments.
        return text if all(_is_same_rendering(text, template, chat) for chat in _PROBES) else None
    except jinja2.TemplateError:
        return None


def render(text: str, chat: Sequence[Message]) -> str:
    """Renders like `jinja2.Template`, but in a sandbox.

    Raises:
        jinja2.TemplateError: it is no Jinja, or does not render this chat.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment().from_string(text).render(messages=list(chat), add_generation_prompt=True)


def _is_same_rendering(text: str, template: Template, chat: Sequence[Message]) -> bool:
    try:
        wanted = template.prompt(chat)
    except DataError:  # the template rejects this chat
        return True
    with limit_rendering(template.name):
        return render(text, chat) == wanted


def _render_nodes(template: Template) -> str:
    import jinja2

    # The options of transformers' environment: the lexer's output has whitespace trimmed accordingly.
    # The lexer splits the text into tokens (line, kind, text).
    parts = list(jinja2.Environment(trim_blocks=True, lstrip_blocks=True).lex(template.text))
    output = [
        f"{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}" for name, value in template.variables.items()
    ]
    # Written without "-" and "+", since the lexer has applied the trimming that they ask for.
    tags = {"block_begin": "{%", "block_end": "%}", "variable_begin": "{{", "variable_end": "}}"}
    tags |= {"raw_begin": "{% raw %}", "raw_end": "{% endraw %}"}
    skipped = ""
    # Drops comments and {% generation %} tags; everything else is written as it was.
    for number, (_, kind, value) in enumerate(parts):
        if skipped:
            skipped = "" if kind == skipped else skipped
        elif kind == "comment_begin":
            skipped = "comment_end"
        elif kind == "block_begin" and _find_first_name(parts[number + 1 :]) in _MARKS:
            skipped = "block_end"
        else:
            output.append(tags.get(kind, value))
    text = "".join(output)
    return f"{text}\n" if text.endswith("\n") else text  # Jinja drops one trailing newline


def _find_first_name(parts: Sequence[tuple[int, str, str]]) -> str:
    return next((value for _, kind, value in parts if kind != "whitespace"), "")
