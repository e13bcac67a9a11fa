"""Finds sequences of words that rows share with evaluation data (contamination).

Words are letters and digits in lower case; punctuation and spaces do not count. A shared sequence has 13 words in GPT-3
(Brown et al. 2020, arXiv:2005.14165, appendix C), and fewer for shorter texts, but at least 8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from preheat.data.rows.file_readers import describe_missing_path, expand_path, find_files, read_file
from preheat.data.sources import hash_files
from preheat.errors import RecipeError
from preheat.recipe.yaml_io import read as read_yaml
from preheat.sanitize import quote_value

__all__ = ["FEWEST", "EvaluationTexts", "Overlap", "OverlapIndex", "open_evaluation_texts", "split_words"]

FEWEST = 8
"""Words of the shortest text that is searched for: shorter ones are phrases that any text may have."""

_WORD = re.compile(r"\w+")


def split_words(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


class Overlap(NamedTuple):
    """Words that a row shares with evaluation data, and the place of the latter."""

    sequence: str
    where: str


@dataclass
class OverlapIndex:
    """The sequences of words of evaluation data.

    Attributes:
        size: words of a sequence.
        texts, short: number of texts, and of those with fewer than `FEWEST` words, which cannot be found.

    Example:
        >>> index = OverlapIndex(size=8)
        >>> index.add("q.jsonl:1", "One two three four five six seven eight, nine.")
        >>> index.find("He said: two three four five six seven eight nine!")
        Overlap(sequence='two three four five six seven eight nine', where='q.jsonl:1')
    """

    size: int
    texts: int = 0
    short: int = 0
    _sequences: dict[int, dict[str, str]] = field(default_factory=dict, repr=False)
    _vocabulary: set[str] = field(default_factory=set, repr=False)

    def add(self, where: str, text: str) -> None:
        """Adds a text of the evaluation data."""
        word_list = split_words(text)
        self.texts += 1
        if len(word_list) < FEWEST:
            self.short += 1
            return
        size = min(self.size, len(word_list))
        sequences = self._sequences.setdefault(size, {})
        for start in range(len(word_list) - size + 1):
            sequences.setdefault(" ".join(word_list[start : start + size]), where)
        self._vocabulary.update(word_list)

    def find(self, text: str) -> Overlap | None:
        """Returns the first sequence of a row that evaluation data has, too; None if there is none."""
        word_list, known = split_words(text), 0
        for stop, word in enumerate(word_list, 1):
            # Only as many consecutive words of the evaluation data can be one of its sequences.
            known = known + 1 if word in self._vocabulary else 0
            for size, sequences in self._sequences.items():
                if known >= size and (sequence := " ".join(word_list[stop - size : stop])) in sequences:
                    return Overlap(sequence, sequences[sequence])
        return None


@dataclass(frozen=True)
class EvaluationTexts:
    """Files of evaluation data.

    Attributes:
        name: name as the user wrote it.
        files: the files, in order.
    """

    name: str
    files: tuple[Path, ...]

    def key(self) -> str:
        """Returns the content hash of the files."""
        return hash_files(self.files)

    def read(self) -> Iterator[tuple[str, str]]:
        """Yields every text of the rows with its place."""
        for path in self.files:
            for where, row in read_file(path, keyed=True):
                yield from ((where, text) for text in _iterate_texts(row))


def _iterate_texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _iterate_all(value.values())
    elif isinstance(value, Sequence):
        yield from _iterate_all(value)


def _iterate_all(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        yield from _iterate_texts(value)


def open_evaluation_texts(name: str, *, knob: str) -> EvaluationTexts:
    """Finds the rows of `data.clean.against` or `preheat data --against`.

    Args:
        name: a file or folder, NAME=FILE, or a task's FILE.yaml, as in `preheat eval --tasks`.
        knob: the key or option, for messages.

    Raises:
        RecipeError: a name without a file.
        DataError: no such file.
    """
    task, equals, rows = name.partition(",")[0].partition("=")
    if equals and not rows.strip():
        raise RecipeError(f"{knob} {quote_value(name)}: names no file; write {task or 'NAME'}=FILE")
    path = expand_path(knob, rows if equals else task)
    if not equals and path.suffix in (".yaml", ".yml") and path.is_file():
        values, _ = read_yaml(path)
        data = values.get("data") if isinstance(values, Mapping) else None
        if not isinstance(data, str):
            raise RecipeError(f"{knob} {quote_value(name)}: the task names no file of rows (data); write {path}=FILE")
        path = path.parent / data
    if not path.exists() and not path.suffix and "/" not in str(path):
        raise RecipeError(f"{knob} {quote_value(name)}: is no file; name the file of its rows: {task}=FILE")
    if not path.exists():
        raise describe_missing_path(knob, path)
    return EvaluationTexts(name, tuple(find_files(knob, path)[0]))
