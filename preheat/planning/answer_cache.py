"""Whole answers of `preheat plan` for a given device, stored by content: a repeated plan does not import torch.

A stored answer is used only while everything that it was computed from is unchanged: the recipe, the options, the files
that the recipe names, the measurements in the cache folder, preheat's source, Python and the installed packages.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat import remote_code
from preheat.cache_folder import cache_folder, store_json
from preheat.core.plan import Plan, PlanFigures
from preheat.errors import RunError
from preheat.files import BadJson, read_record, to_json
from preheat.hardware.stored_values import Damaged, read_json
from preheat.recipe.paths import list_possible_paths

if TYPE_CHECKING:
    from preheat.core import Recipe
    from preheat.core.json_types import JsonObject

__all__ = ["Answer", "compute_key", "load", "compute_source_digest", "store"]

_FORMAT = 2
_FILES = 2000  # files of a named folder at most; the state of more is not checked, so their answers are not stored


def compute_key(recipe: Recipe, question: Mapping[str, object]) -> str | None:
    """Returns the key of a plan's answer; None if it depends on something that cannot be checked, such as a hub.

    Args:
        question: everything else that the answer depends on, as JSON values.
    """
    files: list[object] = []
    for value in list_possible_paths(recipe):
        state = _read_state(Path(value).expanduser())
        if state is None:
            return None
        files.append([value, state])
    parts = [
        _FORMAT,
        recipes.to_values(recipe),
        question,
        files,
        # Rates of this machine and of its links, and the runs that refine them.
        [[path.name, _compute_digest(path)] for path in sorted(cache_folder().glob("*.json"))],
        remote_code.is_allowed(),
        {name: value for name, value in os.environ.items() if name.startswith("PREHEAT_") and name not in _APART},
        compute_source_digest(),
        _list_packages(),
        sys.version,
        platform.machine(),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


_APART = ("PREHEAT_CACHE", "PREHEAT_PROCESSES", remote_code.VARIABLE)
"""Variables that change no answer, or are part of the key already."""


@dataclass(frozen=True)
class Answer:
    """A stored answer.

    Attributes:
        recipe: the chosen recipe as YAML.
        figures: of its page; None: not computed yet.
    """

    plan: Plan
    recipe: str
    figures: PlanFigures | None


def load(key: str) -> Answer | None:
    """Returns the stored answer; None if there is none, or if its file is damaged."""
    try:
        stored = read_json(_entry_path(key)) or {}
    except Damaged:
        return None
    answer = stored.get("answer")
    if not isinstance(answer, dict) or stored.get("sha256") != _compute_checksum(answer):
        return None
    try:
        return read_record(Answer, answer)
    except BadJson:
        return None


def store(key: str, answer: Answer) -> None:
    """Stores an answer, unless JSON cannot hold it or the folder cannot be written."""
    try:
        text = json.dumps(asdict(answer), allow_nan=False)
        plain = json.loads(text)
        # Names of files that are not UTF-8 would be read back as others.
        if json.dumps(asdict(read_record(Answer, plain))) != text:
            return
    except (TypeError, ValueError):  # infinite, or not JSON: it would be read back as something else
        return
    try:
        store_json(_entry_path(key), {"sha256": _compute_checksum(plain), "answer": plain})
    except RunError:  # the plan is printed all the same, and computed again the next time
        return


def _entry_path(key: str) -> Path:
    return cache_folder() / "answers" / f"{key}.json"


def _compute_checksum(answer: JsonObject) -> str:
    return hashlib.sha256(to_json(answer).encode()).hexdigest()


def _compute_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:  # removed meanwhile
        return ""


def _read_state(path: Path) -> object | None:
    """Returns size and time of a file, or of all files of a folder; None if it is not here, or has too many files."""
    try:
        if not path.is_dir():
            status = path.stat()
            return [status.st_size, status.st_mtime_ns]
        state: list[object] = []
        for file in _iterate_files(path):
            status = file.stat()
            state.append([str(file), status.st_size, status.st_mtime_ns])
            if len(state) > _FILES:
                return None
        return state
    except (OSError, ValueError):
        return None


def _iterate_files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            yield Path(root, name)


@functools.cache
def compute_source_digest() -> str:
    """Returns the digest of preheat's source: any change of it may change what a step does."""
    house = Path(__file__).parents[1]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(house.rglob("*.py")))).hexdigest()


def _list_packages() -> list[str]:
    """Returns the installed packages with their versions, by the names of their folders."""
    names: set[str] = set()
    for folder in sys.path:
        if Path(folder).name == "_vendor":  # setuptools adds its own copies once something imports it
            continue
        try:
            names.update(entry for entry in os.listdir(folder or ".") if entry.endswith((".dist-info", ".egg-info")))
        except OSError:  # an archive, or missing
            continue
    return sorted(names)
