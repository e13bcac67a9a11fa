"""The names, notes and tags that users give to runs: labels.json in each run's folder, so that they move with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from preheat.errors import RunError
from preheat.files import lock_file, parse_json, read_bytes, read_intact, to_json, write_atomic
from preheat.run.layout import LABELS
from preheat.sanitize import quote_value, shorten
from preheat.web.limits import LARGEST_FILE

if TYPE_CHECKING:
    from preheat.web.catalogue import RunEntry
    from preheat.web.index import RunSummary

__all__ = ["Conflict", "Labels", "add_labels", "change_labels", "merge_labels", "name_run", "parse_tags", "read_labels"]

_LONGEST_NAME = 120
_LONGEST_NOTE = 10_000
_LONGEST_TAG, _MOST_TAGS = 40, 20


@dataclass(frozen=True)
class Labels:
    """The labels of a run.

    Attributes:
        name: shown in place of the folder's name; "": the folder's name.
        archived: the table of runs hides the run.
    """

    name: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()
    archived: bool = False


class Conflict(RunError):
    """Somebody else has changed the same label in the meantime."""


def read_labels(folder: Path) -> Labels:
    """Returns the labels of a run; a damaged key counts as not set."""
    try:
        # Writers create an empty file to lock it.
        content = read_bytes(folder / LABELS, LARGEST_FILE) or b"{}"
        values = parse_json(content)
    except ValueError:
        return Labels()
    if not isinstance(values, dict):
        return Labels()
    labels, _ = read_intact(Labels, values)
    return labels


def add_labels(summary: RunSummary) -> RunSummary:
    """Returns the figures of a run with its labels."""
    labels = read_labels(summary.path)
    name = labels.name or summary.name
    return replace(summary, name=name, note=labels.note, tags=labels.tags, archived=labels.archived)


def name_run(entry: RunEntry) -> str:
    """Returns the name of a run in lists to choose from: its label with its folder, or its folder alone."""
    name = read_labels(entry.path).name
    return f"{name} ({entry.name})" if name and name != entry.name else entry.name


def parse_tags(text: str) -> tuple[str, ...]:
    """Returns the tags of a text with commas between them, each once.

    Example:
        >>> parse_tags("baseline, long context,baseline")
        ('baseline', 'long context')
    """
    return tuple(dict.fromkeys(" ".join(tag.split()) for tag in text.split(",") if tag.strip()))


def merge_labels(current: Labels, seen: Labels, wanted: Labels, *, overwrite: bool = False) -> Labels:
    """Returns the labels after a user, who saw `seen`, changed them to `wanted`, while others may have changed them.

    Args:
        overwrite: take the user's value of a label that both changed.

    Raises:
        Conflict: both changed the same label to different values.

    Example:
        >>> merge_labels(Labels(name="a", note="by another tab"), Labels(name="a"), Labels(name="b"))
        Labels(name='b', note='by another tab', tags=(), archived=False)
    """
    name, note = (
        _merge(key, getattr(current, key), getattr(seen, key), getattr(wanted, key), overwrite)
        for key in ("name", "note")
    )
    # Of the tags, each is a label of its own.
    removed = set(seen.tags) - set(wanted.tags)
    tags = dict.fromkeys((*(tag for tag in current.tags if tag not in removed), *_list_added(seen, wanted)))
    archived = wanted.archived if wanted.archived != seen.archived else current.archived
    return Labels(name, note, tuple(tags), archived)


def _list_added(seen: Labels, wanted: Labels) -> list[str]:
    return [tag for tag in wanted.tags if tag not in seen.tags]


def _merge(key: str, current: str, seen: str, wanted: str, overwrite: bool) -> str:
    if wanted == seen:
        return current
    if current not in (seen, wanted) and not overwrite:
        raise Conflict(
            f"{key}: was changed to {quote_value(current, 60)} by another page in the meantime; save again to replace "
            "it"
        )
    return wanted


def change_labels(folder: Path, change: Callable[[Labels], Labels]) -> Labels:
    """Changes the labels of a run and returns them; no other page or server changes them at the same time.

    Raises:
        RunError: a label is too long, or the file cannot be written.
    """
    try:
        with _lock_labels(folder / LABELS):
            labels = change(read_labels(folder))
            _check(labels)
            write_atomic(folder / LABELS, to_json(vars(labels), indent=1) + "\n")
    except OSError as error:
        raise RunError(
            f"{folder}: labels cannot be stored there ({error.strerror}); make the folder writable"
        ) from None
    return labels


@contextlib.contextmanager
def _lock_labels(file: Path) -> Iterator[None]:
    """Holds the lock on the labels of a run, and waits for it."""
    while True:
        # A run that was deleted is not brought back: its folder must exist.
        with open(file, "a", opener=_open_no_link) as lock:
            lock_file(lock, wait=True)
            # `write_atomic` replaces the file: the lock must be on the one that has the name now.
            if _is_same(lock, file):
                yield
                return


def _open_no_link(path: str, flags: int) -> int:
    """Opens a file; a link at its name is an error: it would create a file elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _is_same(opened: TextIO, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened.fileno()), file.stat())
    except FileNotFoundError:
        return False


def _check(labels: Labels) -> None:
    """Checks the lengths of labels.

    Raises:
        RunError: one is too long.
    """
    if len(labels.name) > _LONGEST_NAME:
        raise RunError(f"name: has {len(labels.name):,} characters; use at most {_LONGEST_NAME}")
    if len(labels.note) > _LONGEST_NOTE:
        raise RunError(f"note: has {len(labels.note):,} characters; use at most {_LONGEST_NOTE:,}")
    if len(labels.tags) > _MOST_TAGS:
        raise RunError(f"tags: {len(labels.tags)} tags; use at most {_MOST_TAGS}")
    for tag in labels.tags:
        if len(tag) > _LONGEST_TAG:
            raise RunError(f"tags: {shorten(tag, 60)}: has {len(tag):,} characters; use at most {_LONGEST_TAG}")
