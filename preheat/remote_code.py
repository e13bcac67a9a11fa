"""Consent to run Python code that comes with a model's folder. No torch.

It belongs to the person at this command (`--trust-remote-code`) or in this program (`trust_remote_code=True`), never to a recipe or a
folder, which may be somebody else's: these can only ask for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from preheat.errors import RecipeError
from preheat.sanitize import quoted, shorten

__all__ = ["OPTION", "VARIABLE", "allowed", "consent", "may_run", "names_of_code", "trusting"]

OPTION = "--trust-remote-code"
VARIABLE = "PREHEAT_TRUST_REMOTE_CODE"
"""Of the environment: how the processes that a command starts have its consent."""

_consent: ContextVar[bool] = ContextVar("consent", default=False)


def allowed() -> bool:
    """Whether whoever started this command or called this function allowed code from model folders to run."""
    return _consent.get() or os.environ.get(VARIABLE) == "1"


@contextlib.contextmanager
def consent() -> Iterator[None]:
    """Within, `trusting` may be called for this process and those that it starts; on leaving, all is as it was."""
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
def trusting(given: bool) -> Iterator[None]:
    """Within, code from model folders may run if `given`, or if it was allowed before.

    Example:
        >>> with trusting(True):
        ...     allowed()
        True
    """
    mark = _consent.set(given or _consent.get())
    try:
        yield
    finally:
        _consent.reset(mark)


def names_of_code(settings: Mapping[str, Any]) -> list[str]:
    """The classes that a configuration (config.json, tokenizer_config.json) takes from code beside it, [] without any.

    Example:
        >>> names_of_code({"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoTokenizer": ["tokenizer_x.X", None]}})
        ['configuration_x.XConfig', 'tokenizer_x.X']
    """
    places = settings.get("auto_map")
    if not isinstance(places, Mapping):
        return []
    names = [name for value in places.values() for name in (value if isinstance(value, list | tuple) else [value])]
    return [name for name in names if isinstance(name, str)]


def may_run(knob: str, folder: str, code: list[str]) -> bool:
    """Whether transformers may run this code of a folder, which cannot be opened otherwise; False where there is none.

    Raises:
        RecipeError: nobody allowed it.
    """
    if code and not allowed():
        more = f" and {len(code) - 1} more" if len(code) > 1 else ""
        raise RecipeError(
            f"{knob}: {shorten(folder, 200)} wants to run its own code ({quoted(code[0])}{more}), which a "
            "recipe or a folder cannot "
            f"allow; read that code and add {OPTION} (in Python: trust_remote_code=True) if you trust its author"
        )
    return bool(code)
