"""The layouts by name, and their fields."""

from __future__ import annotations

__all__ = ["LAYOUTS"]

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
