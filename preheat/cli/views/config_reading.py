"""The reading of another trainer's configuration, as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from preheat.core.config_reading import ConfigReading, KeyTaken, KeyWithoutEffect

__all__ = ["describe_reading"]


def describe_reading(reading: ConfigReading, *, details: bool = False) -> list[str]:
    """Returns the lines that a plan of another trainer's configuration begins with.

    Args:
        details: also list the keys that were taken over or have no effect, and the trainer's defaults.
    """
    counts = (
        f"{len(reading.taken)} keys taken over, {len(reading.without_effect)} without effect, "
        f"{len(reading.not_understood)} not understood"
    )
    lines = [f"read as {reading.trainer} {reading.version}: {counts}" + ("" if details else " (--verbose lists all)")]
    lines += (
        f"  {key.file or reading.file}:{key.line}: {key.key}: {key.value}: not understood; assumed: {key.assumed}"
        for key in reading.not_understood
    )
    lines += (f"  assumed: {text}" for text in reading.assumptions)
    return [*lines, *(_list_details(reading) if details else ())]


def _list_details(reading: ConfigReading) -> Iterator[str]:
    yield "taken over:"
    yield from _list_taken(reading.taken)
    yield "without effect:"
    yield from (f"  {_place(key)}: {key.key}: {key.value}: {key.why}" for key in reading.without_effect)
    yield f"defaults of {reading.trainer} {reading.version}:"
    for default in reading.defaults:
        ours = ", ".join(default.ours)
        yield f"  {'; '.join(filter(None, (default.what, ours)))} ({default.source})"


def _place(key: KeyTaken | KeyWithoutEffect) -> str:
    return f"{key.file}:{key.line}" if key.file else str(key.line)


def _list_taken(keys: Iterable[KeyTaken]) -> Iterator[str]:
    for key in keys:
        ours = ", ".join(key.ours) or "nothing is added for it"
        yield f"  {_place(key)}: {key.key}: {key.value} -> {ours}{f'; {key.note}' if key.note else ''}"
