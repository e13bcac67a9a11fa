"""Consent to run Python code from a model's folder. No torch.

Only the caller can give it, by `--trust-remote-code` or `trust_remote_code=True`. Recipes and folders may come from
somebody else, so they can only request it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from preheat.errors import RecipeError
from preheat.sanitize import quote_value, shorten

__all__ = ["OPTION", "VARIABLE", "is_allowed", "preserve_consent", "may_run", "find_code_classes", "trust_remote_code"]

OPTION = "--trust-remote-code"
VARIABLE = "PREHEAT_TRUST_REMOTE_CODE"
"""Environment variable that passes the consent of a command to its child processes."""

# Consent belongs to the context of its caller: another thread does not inherit it.
_consent: ContextVar[bool] = ContextVar("consent", default=False)


def is_allowed() -> bool:
    """Returns True if the user of this command or the caller allowed code from model folders to run."""
    return _consent.get() or os.environ.get(VARIABLE) == "1"


@contextlib.contextmanager
def preserve_consent() -> Iterator[None]:
    """Restores the consent of this process and of its environment when the block ends, whatever was set within it."""
    # `set` returns the token by which the former value is restored.
    before, mark = os.environ.get(VARIABLE), _consent.set(False)
    try:
        yield
    finally:
        _consent.reset(mark)
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


@contextlib.contextmanager
def trust_remote_code(given: bool) -> Iterator[None]:
    """Allows code from model folders within the block if `given`, or if it was allowed before.

    Example:
        >>> with trust_remote_code(True):
        ...     is_allowed()
        True
    """
    # Consent that was given outside of this block stays.
    mark = _consent.set(given or _consent.get())
    try:
        yield
    finally:
        _consent.reset(mark)


def find_code_classes(settings: Mapping[str, Any]) -> list[str]:
    """Returns the classes that a configuration (config.json, tokenizer_config.json) loads from the folder's own code.

    Example:
        >>> classes = {"AutoConfig": "configuration_x.XConfig", "AutoTokenizer": ["tokenizer_x.X", None]}
        >>> find_code_classes({"auto_map": classes})
        ['configuration_x.XConfig', 'tokenizer_x.X']
    """
    places = settings.get("auto_map")
    # A damaged file may hold any value here.
    if not isinstance(places, Mapping):
        return []
    names = [name for value in places.values() for name in (value if isinstance(value, list | tuple) else [value])]
    return [name for name in names if isinstance(name, str)]


def may_run(knob: str, folder: str, code: list[str]) -> bool:
    """Returns True if transformers may run this code, without which the folder cannot be loaded; False without code.

    Raises:
        RecipeError: the code was not allowed.
    """
    if code and not is_allowed():
        more = f" and {len(code) - 1} more" if len(code) > 1 else ""
        raise RecipeError(
            f"{knob}: {shorten(folder, 200)} wants to run its own code ({quote_value(code[0])}{more}), which a "
            "recipe or a folder cannot "
            f"allow; read that code and add {OPTION} (in Python: trust_remote_code=True) if you trust its author"
        )
    return bool(code)
