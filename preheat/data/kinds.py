"""The layouts by name: their fields, and the techniques that some of them need."""

from __future__ import annotations

from collections.abc import Iterable

from preheat.technique import Tag, registry

__all__ = ["LAYOUTS", "problems_with"]

LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "prompt": (("prompt", "completion"), ("system",)),
    "alpaca": (("instruction", "output"), ("input", "system", "history")),
    "sharegpt": (("conversations",), ("system", "tools")),
    "messages": (("messages",), ("system", "tools")),
    "preference": (("chosen", "rejected"), ("prompt", "conversations", "messages", "system", "tools")),
    "unpaired": (("completion", "label"), ("prompt", "conversations", "messages", "system", "tools")),
    "classes": (("text", "label"), ()),
}
"""Layout -> the fields that it needs, and those that it reads where they stand."""

_TAGS = {"preference": Tag("compares"), "unpaired": Tag("likes"), "classes": Tag("classifies")}

_WORDS = {
    "text": "plain text",
    "prompt": "prompts with completions",
    "alpaca": "instructions with outputs",
    "sharegpt": "conversations",
    "messages": "conversations",
    "preference": "pairs of a chosen and a rejected answer",
    "unpaired": "answers that were liked or not",
    "classes": "texts with a class each",
}


def problems_with(layout: str, tags: Iterable[str]) -> str | None:
    """Why a recipe whose techniques provide `tags` cannot train on data of a layout, with the fix; None when it can."""
    tags = frozenset(tags)
    needed = _TAGS.get(layout)
    if needed and needed not in tags:
        able = [name for name, cls in registry().items() if needed in cls.provides]
        fix = f"add techniques.{' or '.join(able)}" if able else "no technique here trains on such rows"
        return f"data.layout: the rows are {_WORDS[layout]}; {fix}"
    for other, tag in _TAGS.items():
        if tag in tags and other != layout and needed not in tags:
            name = next((name for name, cls in registry().items() if tag in cls.provides), tag)
            needs = " and ".join(f"columns.{role}" for role in LAYOUTS[other][0])
            return f"techniques.{name}: needs data.layout: {other}, the rows are {_WORDS[layout]}; state data.layout and {needs}, or remove it"
    return None
