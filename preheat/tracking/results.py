"""Sends the results of `preheat bench` and `preheat compress` to a tracker: one run there, with a table."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core.schema import Tracking
from preheat.errors import RunError
from preheat.files import parse_json, read_bytes
from preheat.tracking.progress import SentState
from preheat.tracking.sender import finite_numbers, flatten
from preheat.tracking.tracker import Start, Table, find, find_local_folder

if TYPE_CHECKING:
    from preheat.core.json_types import JsonObject

__all__ = ["result_file", "send_result"]

_ROWS = {"bench.json": "rows", "inference.json": "rows", "compress.json": "variants"}
"""File of a result -> the key of its rows."""


def result_file(folder: Path) -> Path | None:
    """Returns the file of the results in a folder; None if it holds none."""
    return next((folder / name for name in _ROWS if (folder / name).is_file()), None)


def send_result(file: Path, tracker_name: str, settings: Tracking) -> None:
    """Sends the results of a benchmark or of a compression.

    Each row is in the table `results`, and its numbers are `ROW/KEY` in the summary; the page is the artifact.

    Raises:
        RunError: the file is damaged.
    """
    folder, tracker = file.parent, find(tracker_name)()
    try:
        content = read_bytes(file)
        result: JsonObject = parse_json(content)
        rows = [dict(flatten(row)) for row in result[_ROWS[file.name]]]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file}: is damaged ({error})") from None
    sent = SentState.read(folder, tracker_name)
    name = settings.name or folder.absolute().name
    sent = sent or SentState(tracker_name, settings.project, name)
    start = Start(
        run=hashlib.sha256(content).hexdigest()[:32],
        folder=folder,
        project=sent.project,
        name=sent.name,
        tags=(*settings.tags, file.stem),
        parameters={key: value for key, value in flatten(result) if not isinstance(value, str) or len(value) < 1000},
        local=find_local_folder(settings, tracker_name),
    )
    if start.local is not None:
        start.local.mkdir(parents=True, exist_ok=True)
    sent.known = tracker.start(start, sent.known)
    sent.url = tracker.url
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [["" if (value := row.get(key)) is None else str(value) for key in columns] for row in rows]
    tracker.table(0, "results", Table(columns, cells))
    tracker.summary({f"{row['name']}/{key}": value for row in rows for key, value in finite_numbers(row).items()})
    if (page := file.with_suffix(".html")).is_file():
        tracker.artifact(page)
    tracker.finish("finished")
    sent.write(folder)
