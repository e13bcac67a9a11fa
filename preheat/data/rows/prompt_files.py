"""Reads prompts from a file: lines of text, or JSONL rows that are text, {"prompt": text} or {"messages": [...]}."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.data.rows.file_readers import describe_missing_path, display_path, expand_path, read_jsonl, read_lines
from preheat.errors import DataError

if TYPE_CHECKING:
    from preheat.data.chat.messages import Message

__all__ = ["read_prompts"]


def read_prompts(path: Path, *, knob: str = "--file") -> list[str | list[Message]]:
    """Reads the prompts of a file, in order, without blank lines.

    Args:
        path: `.jsonl` with one JSON value per line; any other file with one prompt per line.
        knob: setting that names the file, for messages.

    Raises:
        DataError: the file is missing, not in UTF-8 or without prompts, or a row is not a prompt; with the line.
    """
    path = expand_path(knob, path)
    if not path.exists():
        raise describe_missing_path(knob, path)
    if not path.is_file():
        raise DataError(f"{knob} {display_path(path)}: is not a file; name one with a prompt per line")
    prompts: list[str | list[Message]] = []
    try:
        if path.suffix == ".jsonl":
            prompts = [_read_prompt(row, where) for where, row in read_jsonl(path)]
        else:
            prompts = [text for _, line in read_lines(path) for text in line.splitlines() if text.strip()]
    except OSError as error:
        raise DataError(f"{knob} {display_path(path)}: cannot be read ({error.strerror or error})") from None
    if not prompts:
        raise DataError(f"{knob} {display_path(path)}: holds no prompt; write one per line")
    return prompts


def _read_prompt(row: object, where: str) -> str | list[Message]:
    if isinstance(row, Mapping):
        # A row of training data may have both: the conversation takes precedence.
        row = row.get("messages", row.get("prompt"))
    if isinstance(row, str):
        return row
    if (
        not isinstance(row, list)
        or not row
        or any(
            not isinstance(m, Mapping) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str)
            for m in row
        )
    ):
        raise DataError(
            f'{where}: is not a prompt; write {{"prompt": "..."}} or {{"messages": [{{"role": "user", '
            f'"content": "..."}}]}}'
        )
    # The template adds the generation prompt after the last message, which must be a question.
    if row[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the chat ends with the assistant's message, so there is nothing to answer; leave it out"
        )
    return row
