"""Findings about a machine: the state of one part, what it costs, and the command that mends it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["AppliedFix", "Diagnosis", "Finding", "Fix", "FixKind", "Severity"]


class Severity(StrEnum):
    """The weight of a finding, the worst first."""

    STOPS = "stops"
    """A run would stop, or would not get the GPU that is here."""
    RISKS = "risks"
    """A run may stop later, or may need what is not there."""
    SLOWS = "slows"
    """Runs are slower than they could be here."""
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    OK = "ok"


class FixKind(StrEnum):
    """The person or program that may run a fix."""

    SAFE = "safe"
    """Changes only files that preheat owns and can write again."""
    INSTALL = "install"
    """Installs a Python package into this environment."""
    MANUAL = "manual"
    """Needs root, another shell or a decision: shown, and never run by preheat."""


@dataclass(frozen=True)
class Fix:
    """A command that mends a finding, as a user types it."""

    kind: FixKind
    command: str


@dataclass(frozen=True)
class Finding:
    """The state of one part of a machine.

    Attributes:
        part: what was checked: torch, driver, cache, ...
        message: one line.
        cost: what the finding costs a run, with a figure if one was measured; "" if nothing.
        fix: None if nothing can or has to be done.
        of_recipe: concerns the recipe that was named, not only the machine.

    Example:
        >>> Finding("hub", Severity.OK, "reachable").fix is None
        True
    """

    part: str
    severity: Severity
    message: str
    cost: str = ""
    fix: Fix | None = None
    of_recipe: bool = False


@dataclass(frozen=True)
class AppliedFix:
    """A fix that was run.

    Attributes:
        exit_code: of the command; 127 if it could not be started.
    """

    command: str
    exit_code: int


@dataclass(frozen=True)
class Diagnosis:
    """All findings about a machine, as `preheat doctor --json` prints them.

    Attributes:
        stops: a run would stop: the command's exit code is 1.
        recipe: name of the recipe; None if only the machine was checked.
        fixed: the fixes that were run before the findings were made.
    """

    stops: bool
    findings: tuple[Finding, ...]
    recipe: str | None = None
    fixed: tuple[AppliedFix, ...] = ()
