"""Makes foreign text safe to display: replaces control characters, masks secrets, shortens long values. No torch."""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "escape_control_characters",
    "has_secret",
    "mask_secrets",
    "quote_value",
    "shorten",
]

# Unsafe in a page or a terminal: control characters, direction overrides (they reorder the text behind them), and
# lone surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


# A password in a URL; tokens of Hugging Face, AWS, GitHub, OpenAI and Slack; signed URLs; webhooks.
_SECRETS = re.compile(
    r"(?<=://)[^/@\s:]+:[^/@\s]+(?=@)|\bhf_[A-Za-z0-9]{30,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36,}"
    r"|\bgithub_pat_\w{50,}|\bsk-(?=\S*\d)(?=\S*[A-Z])[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|(?<=[?&]sig=)[^&\s'\"]{20,}|(?<=[?&]X-Amz-Signature=)[^&\s'\"]{20,}|(?<=[?&]X-Goog-Signature=)[^&\s'\"]{20,}"
    r"|(?<=hooks\.slack\.com/services/)\S+|(?<=/api/webhooks/)\d+/\S+"
)


def has_secret(text: str) -> bool:
    """Returns True if the text holds a password or token of a well-known form.

    Example:
        >>> has_secret("https://me:pass@host/a.jsonl"), has_secret("https://host/a.jsonl")
        (True, False)
    """
    return _SECRETS.search(text) is not None


def mask_secrets(text: str) -> str:
    """Returns the text with passwords and tokens of well-known forms replaced by ***.

    Example:
        >>> mask_secrets("https://me:pass@host/a.jsonl")
        'https://***@host/a.jsonl'
    """
    return _SECRETS.sub("***", text)


def escape_control_characters(text: Any) -> str:
    """Returns the text with control characters replaced by visible ones (from U+2400); line feeds and tabs stay.

    Example:
        >>> escape_control_characters("a\\x1b[31mb")
        'a␛[31mb'
    """

    def make_visible(match: re.Match[str]) -> str:
        code = ord(match.group())
        # U+2400 to U+241F picture the ASCII control characters, U+2421 DEL.
        return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"

    return _CONTROLS.sub(make_visible, str(text).replace("\r\n", "\n"))


def shorten(text: str, limit: int = 80) -> str:
    """Returns the text on one line, without control characters and secrets, its middle cut if longer than `limit`.

    Example:
        >>> shorten("9" * 5000, 20)
        '999999999…999999999'
    """
    # Only the ends are cleaned: the text may be a hundred megabytes long.
    if len(text) > 4 * limit:
        text = text[: 2 * limit] + "…" + text[-2 * limit :]
    text = mask_secrets(" ".join(escape_control_characters(text).split()))
    # Half of what remains for both ends.
    half = (limit - 1) // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"


def quote_value(value: Any, limit: int = 80) -> str:
    """Returns the shortened `repr` of a foreign value, for error messages. Never raises.

    Example:
        >>> quote_value("a" * 5000, 16), quote_value(3)
        ("'aaaaaa…aaaaaa'", '3')
    """
    if isinstance(value, str):
        # Cut before repr, which would copy all of a large text.
        short = value if len(value) <= 4 * limit else value[: 2 * limit] + "…" + value[-2 * limit :]
        return shorten(repr(short), limit)
    try:
        return shorten(repr(value), limit)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints; a value nested in itself
        return f"a {type(value).__name__} too large to show"
