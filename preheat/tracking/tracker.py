"""The interface of experiment trackers, and their registry."""

from __future__ import annotations

import importlib
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat import plugins
from preheat.errors import RecipeError, suggest_nearest
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from preheat.core.schema import Tracking

__all__ = ["GROUP", "Start", "Status", "Table", "Tracker", "find", "find_local_folder", "why_not_writable"]

GROUP = "preheat.trackers"
"""Entry-point group of trackers in other packages."""

Status = Literal["finished", "interrupted", "failed", "killed"]
"""The end of a session of a run; an interrupted run was saved by a signal, a killed one wrote nothing about its end."""

_OWN = ("mlflow", "swanlab", "tensorboard", "trackio", "wandb", "webhook")  # each the name of its module too
_REGISTRY: dict[str, type[Tracker]] = {}
"""Filled as modules with trackers are imported."""


@dataclass(frozen=True)
class Start:
    """The properties of a run that a tracker gets at its start.

    Attributes:
        run: the run's identity (`run.reader.Reader.id`), by which a tracker knows it again.
        folder: the run folder.
        project: the project or experiment that the run belongs to.
        name: the name to show.
        tags: labels.
        parameters: recipe key -> value, e.g. `batch.size`; the plan's figures under `plan.`; the machine's under
            `environment.`.
        local: the folder for files that the tracker keeps on this machine; None: where it keeps them by default.
    """

    run: str
    folder: Path
    project: str
    name: str
    tags: tuple[str, ...]
    parameters: Mapping[str, str | int | float | bool | None]
    local: Path | None


@dataclass(frozen=True)
class Table:
    """Rows of text, such as samples.

    Attributes:
        columns: names of the columns.
        rows: one tuple per row, with a text per column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def render_markdown(self) -> str:
        """Returns the table in Markdown, with line breaks and bars of the texts escaped."""

        def row(cells: Sequence[str]) -> str:
            return "| " + " | ".join(c.replace("|", "\\|").replace("\n", "<br>") for c in cells) + " |"

        return "\n".join([row(self.columns), row(["---"] * len(self.columns)), *map(row, self.rows)])


class Tracker(ABC):
    """Sends one run to one experiment tracker. It lives in a process of its own, which imports no torch.

    A method may raise any error: the process ends, the run continues, and `preheat track` sends the rest later.

    Example:

        class MyTracker(Tracker):
            name = "mine"
            package = "my_package"
            pip = "my-package"

            def start(self, start, known): ...
    """

    name: ClassVar[str]
    """The name in `tracking.to`."""
    package: ClassVar[str]
    """The module that must be importable."""
    pip: ClassVar[str]
    """The package to install, e.g. `preheat[wandb]`."""

    def __init_subclass__(cls) -> None:
        _REGISTRY[cls.name] = cls

    @classmethod
    def conflict(cls, start: Start) -> str | None:
        """Returns why a new run cannot be sent, as far as this machine knows without a network; None if it can.

        Called before training, so it must be fast: no import of the tracker's package.
        """
        return None

    @abstractmethod
    def start(self, start: Start, known: str | None) -> str:
        """Begins or continues a run there.

        Args:
            known: what this method returned in an earlier session of the same run; None in the first one.

        Returns:
            The tracker's own name of the run, by which it continues later.
        """

    @property
    def url(self) -> str | None:
        """Where people see the run; a command or a folder if it is only on this machine."""
        return None

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Sends the metrics of a step; steps rise, and one step may come several times with other names."""

    @abstractmethod
    def table(self, step: int, name: str, table: Table) -> None:
        """Sends a table."""

    @abstractmethod
    def summary(self, values: Mapping[str, float]) -> None:
        """Sends figures of the whole run, such as its measured peak memory."""

    @abstractmethod
    def artifact(self, file: Path) -> None:
        """Sends a file, such as the report."""

    def event(self, kind: str, text: str) -> None:
        """Sends an event that needs attention when it happens, such as an out-of-memory error."""
        return

    def flush(self) -> None:
        """Writes what is buffered; called before the progress is recorded."""
        return

    @abstractmethod
    def finish(self, status: Status) -> None:
        """Ends the session."""


def find(name: str) -> type[Tracker]:
    """Returns a tracker by its name, without importing its package.

    Raises:
        RecipeError: no tracker has this name, its module cannot be imported, or its package is not installed.
    """
    plugins.load()
    modules = {point.name: point.module for point in entry_points(group=GROUP)}
    modules |= {own: f"preheat.tracking.{own}" for own in _OWN}
    if name not in _REGISTRY and name not in modules:
        known = sorted({*modules, *_REGISTRY})
        raise RecipeError(f"tracking.to: {quote_value(name)}: there is no such tracker; {suggest_nearest(name, known)}")
    if name not in _REGISTRY:
        try:
            importlib.import_module(modules[name])
            if name not in _REGISTRY:
                raise ImportError(f"it defines no tracker {name}")
        except plugins.IMPORT_ERRORS as error:
            reason = f"{type(error).__name__}: {shorten(str(error), 200)}"
            raise RecipeError(f"tracking.to: {name}: {modules[name]} cannot be imported ({reason})") from error
    tracker = _REGISTRY[name]
    if importlib.util.find_spec(tracker.package) is None:
        raise RecipeError(f"tracking.to: {name}: is not installed; install it with: pip install '{tracker.pip}'")
    return tracker


def find_local_folder(settings: Tracking, name: str) -> Path | None:
    """Returns where a tracker keeps its files on this machine; None: where it does by default."""
    return None if settings.folder is None else Path(settings.folder) / name


def why_not_writable(folder: Path) -> str | None:
    """Returns why nothing can be written in a folder, which need not exist yet; None if it can."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written (Permission denied)"
    return None
