"""Reads lines of standard input, typed or piped."""

from __future__ import annotations

import sys

from preheat.cli.views.output import say
from preheat.errors import DataError
from preheat.hardware.interrupts import raise_keyboard_interrupt

__all__ = ["read_line"]


def read_line(live: bool) -> str | None:
    """Returns the next line of the input, or None at its end.

    Raises:
        DataError: it is not UTF-8.
    """
    if not live:
        try:
            # An empty string is the end of the input; an empty line still has its line feed.
            return sys.stdin.readline() or None
        except UnicodeDecodeError as error:
            raise DataError(f"standard input: byte {error.start} is not text in UTF-8; convert it") from None
    try:
        with raise_keyboard_interrupt():
            return input("> ")
    # Ctrl-C at the prompt ends the chat, Ctrl-C within an answer only that answer.
    except (EOFError, KeyboardInterrupt):
        say()
        return None
