"""Reasons why techniques cannot be used, as values for code. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from preheat.errors import RecipeError

__all__ = ["MissingPackage", "Problem", "ProblemCode", "TechniqueError"]


class ProblemCode(StrEnum):
    """The kind of a `Problem`."""

    SLOT_TAKEN = "slot-taken"
    """Another technique owns a slot that this one needs."""
    MISSING_TAG = "missing-tag"
    """Nothing in the recipe provides a tag that it needs."""
    ENGINE = "engine"
    """The engine of the recipe does by itself what this one replaces."""
    CONFLICT = "conflict"
    """Another technique provides a tag that it excludes."""
    UNSUPPORTED = "unsupported"
    """Its own check rejects this model, device, batch or setting."""
    BUILD = "build"
    """It was rejected while the model was configured or built."""
    DEVICES = "devices"
    """The parallel degrees do not multiply to the number of devices. Not specific to a technique."""


class MissingPackage(str):
    """A reason of `Technique.check`: a package is not installed.

    Attributes:
        install: the command that installs it.

    Example:
        >>> MissingPackage("needs torchao, which is not installed", "pip install torchao")
        'needs torchao, which is not installed: pip install torchao'
    """

    install: str

    def __new__(cls, text: str, install: str) -> MissingPackage:
        reason = super().__new__(cls, f"{text}: {install}")
        reason.install = install
        return reason


@dataclass(frozen=True)
class Problem:
    """Why one technique cannot be used here.

    Attributes:
        technique: its name; empty if the problem is the recipe's as a whole.
        code: the kind, for code that has to decide.
        text: the reason, for people. Nothing compares or parses it.
        selected_by: key and value of the recipe that select it, if that is not `techniques.NAME`.
        install: command that installs a missing package; "" if the problem is another one.

    >>> str(Problem("nf4", ProblemCode.MISSING_TAG, "needs frozen-base"))
    'nf4: needs frozen-base'
    """

    technique: str
    code: ProblemCode
    text: str
    selected_by: str = ""
    install: str = ""

    def __str__(self) -> str:
        return f"{self.technique}: {self.text}" if self.technique else self.text


class TechniqueError(RecipeError):
    """Techniques of a recipe cannot be used.

    Args:
        problems: at least one.
        message: for the user; by default a line for each problem.
    """

    def __init__(self, problems: Iterable[Problem], message: str = ""):
        # Kept for code that decides by their codes; the message is for people only.
        self.problems = tuple(problems)
        super().__init__(message or "\n".join(map(_format_line, self.problems)))


def _format_line(problem: Problem) -> str:
    return f"{problem.selected_by}: {problem.text}" if problem.selected_by else f"techniques.{problem}"
