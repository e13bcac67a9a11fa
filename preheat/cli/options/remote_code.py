"""The `--trust-remote-code` option of every command that loads a model."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from preheat import remote_code

__all__ = ["add_trust_option"]

_Option = Annotated[
    bool,
    typer.Option(
        remote_code.OPTION,
        help=(
            "Run Python code that comes with a model's folder. A recipe cannot allow it: add this only if you "
            "trust the code's author."
        ),
    ),
]
_NAME = "trust_remote_code"


def add_trust_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--trust-remote-code` to a command; it applies to the whole call and to the processes that it starts."""

    @functools.wraps(function)
    def run(*args: Any, trust_remote_code: bool = False, **kwargs: Any) -> Any:
        if trust_remote_code:
            os.environ[remote_code.VARIABLE] = "1"  # for child processes; `main` restores it
        with remote_code.trust_remote_code(trust_remote_code):
            return function(*args, **kwargs)

    # typer reads options from the signature, so the wrapper must show them all, with types instead of strings.
    signature = inspect.signature(function, eval_str=True)
    option = inspect.Parameter(_NAME, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Option)
    parameters = [*signature.parameters.values(), option]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {**function.__annotations__, _NAME: bool}
    return run
