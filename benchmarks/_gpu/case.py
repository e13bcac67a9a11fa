"""A case of `gpu_check.py`: its name, its limits and what it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Case", "Skip", "Where", "Wrong"]


class Skip(Exception):
    """A case that cannot run here; the message says why."""


class Wrong(Exception):
    """A case that ran and gave a wrong result.

    Args:
        message: what was wrong.
        figures: what was measured all the same.
    """

    def __init__(self, message: str, figures: dict[str, Any]):
        super().__init__(message)
        self.figures = figures


@dataclass(frozen=True)
class Where:
    """On what a case runs.

    Attributes:
        kind: cuda or cpu.
        tiny: sizes that a CPU takes within seconds: to try the cases themselves.
        folder: for files; shared by the cases of a part, and removed with the last of them.
        sites: by another trainer's name (`trl`), the folders of its packages, joined as in PYTHONPATH.
        planned: folder with recipes that were planned beforehand; "" plans on the card.
        plan_to: folder to write such recipes to, instead of training; "" trains.
        card: the GPU, by its name in the catalogue, that `plan_to` plans for.
    """

    kind: str
    tiny: bool
    folder: str
    sites: Mapping[str, str] = field(default_factory=dict)
    planned: str = ""
    plan_to: str = ""
    card: str = ""


@dataclass(frozen=True)
class Case:
    """One check.

    Attributes:
        name: `group/what`, as `--only` selects it.
        run: gives figures that JSON can hold; raises `Wrong` or `Skip`.
        seconds: after which it is ended.
        fresh: it needs a process that nothing ran in before.
        spoils: nothing may run in its process afterwards (a limit of memory, a process group).
    """

    name: str
    run: Callable[[Where], dict[str, Any]] = field(repr=False)
    seconds: float = 60.0
    fresh: bool = False
    spoils: bool = False
