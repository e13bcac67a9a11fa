"""Reads conversations in the common formats (ShareGPT, OpenAI) as the messages of chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from preheat.data.rows.file_readers import describe_json_type
from preheat.errors import suggest_nearest
from preheat.files import BadJson, read_value
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = [
    "PLACE",
    "Message",
    "Tools",
    "Unreadable",
    "serialize_answer",
    "describe_json_type",
    "parse_messages",
    "find_order_problem",
    "iterate_texts",
    "parse_tools",
]

ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "customer"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "ipython"), "tool"),
}
"""Name of a role in a data format -> its name in chat templates."""


Message: TypeAlias = Mapping[str, Any]
"""{"role", "content"} and further keys of the template: tool_calls, reasoning_content, name."""

Tools: TypeAlias = Sequence["JsonObject"] | None
"""The schemas of a conversation's tools; None for those of a conversation without any."""


PLACE = "\ufffc"
"""Placeholder of an image in a message's text: Unicode's object replacement character."""


class Unreadable(Exception):
    """An unreadable row, with the check that it fails and the reason."""

    def __init__(self, check: str, message: str):
        super().__init__(message)
        self.check, self.message = check, message


def parse_messages(value: object, field: str) -> list[JsonObject]:
    """Converts a list of {role, content} or {from, value}, or one such object, to messages.

    An image part becomes `PLACE` in the text, and its file (None if another field has it) an item of the message's
    `images`.

    Raises:
        Unreadable: the value is not such a list, or a message has no role or no text.

    Example:
        >>> parse_messages([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "conversations")
        [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise Unreadable("fields", f"field '{field}' is {describe_json_type(value)}, not a list of messages")
    if not turns:
        raise Unreadable("fields", f"field '{field}' is an empty list")
    return [_parse_message(turn, f"message {n} of field '{field}'") for n, turn in enumerate(turns, 1)]


def _parse_message(turn: object, where: str) -> JsonObject:
    if not isinstance(turn, Mapping):
        raise Unreadable("fields", f"{where} is {describe_json_type(turn)}, not an object")
    # The names of OpenAI's format, or ShareGPT's.
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    if role_key not in turn:
        raise Unreadable(
            "fields",
            f"{where} has no 'role', only {', '.join(quote_value(key, 40) for key in list(turn)[:8]) or 'nothing'}",
        )
    name = turn[role_key]
    if not isinstance(name, str) or name not in ROLES:
        near = (
            suggest_nearest(name[:40], sorted(ROLES))
            if isinstance(name, str)
            else f"it is {describe_json_type(name)}, not text"
        )
        raise Unreadable("roles", f"{where} has the role {quote_value(name)}, which is unknown; {near}")
    content, message = turn.get(content_key), dict(turn)
    for key in ("role", "from", "content", "value"):
        message.pop(key, None)
    # Arrow tables have every key in every message, with null for the absent ones.
    message = {"role": ROLES[name], **{k: v for k, v in message.items() if v is not None}}
    # ShareGPT's role for a call: its text is the call itself.
    if name == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _parse_function_calls(content, where)}
    calls = _parse_tool_calls(message.pop("tool_calls", None), where)
    # OpenAI's content parts: [{"type": "text", ...}, {"type": "image_url", ...}].
    if isinstance(content, Sequence) and not isinstance(content, str):
        content, images = _join_parts(content, where)
        message |= {"images": images} if images else {}
    # In OpenAI's format a message that only calls tools has null content.
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise Unreadable("fields", f"{where} has a '{content_key}' that is {describe_json_type(content)}, not text")
    # An empty system message is common and harmless.
    if not content.strip() and not calls and message["role"] != "system":
        raise Unreadable("fields", f"{where} has an empty '{content_key}'")
    message["content"] = content
    if calls:
        message["tool_calls"] = calls
    return {"role": message.pop("role"), "content": message.pop("content"), **message}


def _join_parts(parts: Sequence[object], where: str) -> tuple[str, list[object]]:
    """Joins the parts of a message; returns the text and the files of its images."""
    texts, images = [], []
    for part in parts:
        # A part is plain text, {"type": "text", "text": ...}, or an image.
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url") and not isinstance(text, str):
            file = next((part[key] for key in ("image", "image_url", "path", "url") if part.get(key) is not None), None)
            # OpenAI nests the address: {"image_url": {"url": ...}}.
            images.append(file["url"] if isinstance(file, Mapping) and "url" in file else file)
            text = PLACE
        if not isinstance(text, str):
            kind = (
                quote_value(part.get("type", "an object without text"), 40)
                if isinstance(part, Mapping)
                else describe_json_type(part)
            )
            raise Unreadable("fields", f"{where} has a part that is not text ({kind}); only text and images are read")
        texts.append(text)
    return "".join(texts), images


def _parse_function_calls(value: object, where: str) -> list[JsonObject]:
    """Reads ShareGPT's function_call: one or several calls as JSON."""
    calls = _parse_json(value, where) if isinstance(value, str) else value
    return _parse_tool_calls(calls if isinstance(calls, list) else [calls], where) or []


def _parse_json(text: str, where: str) -> object:
    try:
        return read_value(text, once=True)
    except BadJson as error:
        raise Unreadable("fields", f"{where} calls a tool with arguments that are not JSON ({error.message})") from None


def _parse_tool_calls(calls: object, where: str) -> list[JsonObject] | None:
    if not calls:
        return None
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise Unreadable("fields", f"{where} has tool_calls that are {describe_json_type(calls)}, not a list")
    parsed = []
    for call in calls:
        # OpenAI nests the name and the arguments in `function`, ShareGPT does not.
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Unreadable("fields", f"{where} has a tool call without a function name")
        # Llama 3's name for arguments is `parameters`.
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):  # text in OpenAI's API, objects in templates
            arguments = _parse_json(arguments, where) if arguments.strip() else {}
        name = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        parsed.append({"type": "function", **name, "function": {"name": function["name"], "arguments": arguments}})
    return parsed


def parse_tools(value: object, field: str) -> list[JsonObject] | None:
    """Reads tools from a list of schemas or its JSON text; bare functions are wrapped as in OpenAI's API."""
    if value is None or value in ("", "[]"):
        return None
    # Data sets often store tools as JSON text, since schemas have no common Arrow type.
    tools = _parse_json(value, f"field '{field}'") if isinstance(value, str) else value
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Unreadable("fields", f"field '{field}' is {describe_json_type(tools)}, not a list of tools")
    return [
        dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools
    ] or None


def find_order_problem(messages: Sequence[Message]) -> str | None:
    """Returns the problem in the order of roles (answer without a question, two questions in a row, no answer), or
    None.

    Example:
        >>> find_order_problem([{"role": "user"}, {"role": "user"}])
        'message 2 is of the user, after one of the user'
    """
    before = None
    for n, message in enumerate(messages, 1):
        role = message["role"]
        # The previous role -> roles that may follow it. `messages[n - 2]` is
        # the previous message, since n counts from 1.
        allowed = {
            None: ("system", "user"),
            "system": ("user",),
            "user": ("assistant",),
            "assistant": ("user", "tool") if before is not None and messages[n - 2].get("tool_calls") else ("user",),
            "tool": ("tool", "assistant"),
        }[before]
        if role not in allowed:
            after = f"after one of the {before}" if before else "the first"
            return f"message {n} is of the {role}, {after}"
        before = role
    return None if before == "assistant" else f"the last message is of the {before}, so nothing answers it"


def serialize_answer(messages: Sequence[Message]) -> str:
    """Returns contents and tool calls as JSON, to compare answers."""
    return json.dumps([[m["content"], m.get("tool_calls")] for m in messages], ensure_ascii=False, default=str)


def iterate_texts(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yields (where, text) of all contents and tool calls, for the checks of text."""
    for n, message in enumerate(messages, 1):
        yield f"message {n}", message["content"]
        if message.get("tool_calls"):
            # Templates render calls into the text, so special tokens within them do the same harm.
            yield f"message {n}", json.dumps(message["tool_calls"], ensure_ascii=False, default=str)
