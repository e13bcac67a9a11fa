"""Prompts from a file: a text's lines, or JSONL rows that are text, {"prompt": text} or {"messages": [...]}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preheat.data.files import missing
from preheat.errors import DataError

__all__ = ["read_prompts"]


def read_prompts(path: Path, *, knob: str = "--file") -> list[str | list[Mapping[str, Any]]]:
    """The prompts of a file, in order; lines without text are left out.

    Args:
        path: `.jsonl` holds a JSON value a line; any other file a prompt a line.

    Raises:
        DataError: no such file, no text in UTF-8, no prompt in it, or a row that is none; with the line.
    """
    if not path.exists():
        raise missing(knob, path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{knob} {path}: byte {error.start} is not text in UTF-8; convert the file") from None
    except OSError as error:
        raise DataError(f"{knob} {path}: cannot be read ({error.strerror or error})") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"{knob} {path}: holds no prompt; write one a line")
    return [_row(line, f"{path}:{n}") for n, line in numbered] if path.suffix == ".jsonl" else [line for _, line in numbered]


def _row(line: str, where: str) -> str | list[Mapping[str, Any]]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if isinstance(row, Mapping):
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
            f'{where}: is no prompt; write {{"prompt": "..."}} or {{"messages": [{{"role": "user", "content": "..."}}]}}'
        )
    if row[-1]["role"] == "assistant":
        raise DataError(f"{where}: the chat ends with the assistant's message, so there is nothing to answer; leave it out")
    return row
