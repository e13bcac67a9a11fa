"""Applies the recipe's `data.clean` to sources: decides once for every row, cached, or row by row for a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from preheat.core.data_record import IN_EVALUATION_DATA
from preheat.core.schema import Clean
from preheat.data.cache import open_entry
from preheat.data.cleaning.duplicates import Duplicates, hash_context, hash_example
from preheat.data.cleaning.overlap import FEWEST, OverlapIndex, open_evaluation_texts
from preheat.data.cleaning.personal import Occurrence, find_personal_data, mask_personal_data
from preheat.data.cleaning.quality import Threshold, choose_thresholds, find_failed_rule
from preheat.data.document import Document
from preheat.data.preflight import Findings
from preheat.data.sources import Source, compute_digest
from preheat.data.split import Split, hash_content
from preheat.errors import DataError
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from collections.abc import Callable

    from preheat.core.data_record import CleaningRecord, OverlapRecord, PersonalRecord
    from preheat.data.tokenize_corpus import Stream

    Progress = Callable[[str, int, int | None], None]

__all__ = ["DUPLICATE", "NEAR_DUPLICATE", "PERSONAL", "RowCleaner", "clean_sources", "find_overlaps"]

VERSION = 2
"""Version of the decisions: raised when equal rows and settings give other ones."""
DUPLICATE, NEAR_DUPLICATE, PERSONAL = "duplicate", "near duplicate", "personal data"
_EXAMPLES = 3
"""Rows of each reason that are recorded."""
_LONGEST = 200
"""Maximum length of their messages in characters."""


class Removal(NamedTuple):
    """The reason to leave out a row, and a message about this row."""

    reason: str
    message: str


@dataclass(frozen=True)
class RowCleaner:
    """Cleans one row at a time; all of it can be pickled.

    Attributes:
        thresholds: rule -> threshold of the quality rules.
        overlaps: the words of the evaluation data; None without any.
        known: content hashes of a stream's validation source; rows with these are duplicates wherever they occur.
    """

    settings: Clean
    thresholds: Mapping[str, Threshold]
    overlaps: OverlapIndex | None
    known: frozenset[str] = frozenset()

    @classmethod
    def of(cls, settings: Clean) -> RowCleaner:
        """Returns the cleaner of these settings; reads the evaluation data.

        Raises:
            DataError, RecipeError: a file of `against` does not exist.
        """
        overlaps = None
        if settings.against:
            overlaps = read_overlap_index(settings.against, settings.overlap_words, knob="data.clean.against")
        return cls(settings, choose_thresholds(settings), overlaps)

    def find_personal(self, document: Document) -> list[list[Occurrence]]:
        """Returns the personal data of each span of text."""
        if self.settings.personal_data == "keep":
            return []
        spans = (span for sequence in document.sequences for span in sequence)
        return [find_personal_data(span.text, self.settings.personal_kinds) for span in spans]

    def mask(self, document: Document, personal: Sequence[Sequence[Occurrence]]) -> Document:
        """Returns the document with its personal data replaced, if the settings say so."""
        if self.settings.personal_data != "mask" or not any(personal):
            return document
        left = iter(personal)
        sequences = (
            tuple(span._replace(text=mask_personal_data(span.text, next(left))) for span in sequence)
            for sequence in document.sequences
        )
        return document._replace(sequences=tuple(sequences))

    def inspect(self, document: Document, personal: Sequence[Sequence[Occurrence]]) -> Removal | None:
        """Returns the reason to leave out a document, duplicates aside."""
        for sequence in document.sequences if self.thresholds else ():
            # Quality is that of the text that the model learns to write; documents of classes have only text to read.
            # Each answer of a pair counts for itself, since what they share is no repetition.
            text = "".join(span.text for span in sequence if span.trained) or "".join(span.text for span in sequence)
            if failure := find_failed_rule(text, self.thresholds):
                return Removal(failure.rule, failure.message)
        if self.settings.personal_data == "drop" and any(personal):
            counts = Counter(occurrence.kind for part in personal for occurrence in part)
            # The values are not repeated in messages, which the run's folder keeps.
            return Removal(PERSONAL, "holds " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
        if self.overlaps is not None and (overlap := self.overlaps.find(document.text)):
            return Removal(IN_EVALUATION_DATA, f"shares “{shorten(overlap.sequence, 120)}” with {overlap.where}")
        return None

    def stream(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents of a streamed source; with duplicates: exact, the first of equal ones."""
        seen: set[str] = set()
        for document in documents:
            if not document.sequences or not document.has_target:
                yield document
                continue
            personal = self.find_personal(document)
            document, removal = self.mask(document, personal), self.inspect(document, personal)
            if removal is None and self.settings.duplicates != "keep":
                if (example := hash_example(document)) in seen or hash_content(document) in self.known:
                    removal = Removal(DUPLICATE, "")
                seen.add(example)
            yield document if removal is None else remove(document, removal.reason)

    def key(self) -> str:
        """Returns a hash of everything that decides about a row on its own."""
        names = self.settings.against
        texts = [open_evaluation_texts(name, knob="data.clean.against").key() for name in names]
        return compute_digest(VERSION, replace(self.settings, against=()), self.thresholds, texts)


def remove(document: Document, reason: str) -> Document:
    """Returns the document of a row that is left out."""
    return Document((), where=document.where, removed=reason)


def read_overlap_index(names: Sequence[str], size: int, *, knob: str) -> OverlapIndex:
    """Reads evaluation data.

    Raises:
        DataError: no such file, or all of its texts are too short to be found.
    """
    index = OverlapIndex(size)
    for name in names:
        texts, short = index.texts, index.short
        for where, text in open_evaluation_texts(name, knob=knob).read():
            index.add(where, text)
        if index.texts - texts == index.short - short:
            raise DataError(
                f"{knob} {name}: none of its {index.texts - texts:,} texts has {FEWEST} words or more, so that no "
                "overlap can be found; name the rows with their questions"
            )
    return index


@dataclass
class _Candidate:
    """A row that only duplicates can still remove."""

    source: int
    number: int
    where: str
    content: str
    context: int
    signature: np.ndarray | None


@dataclass
class _Decisions:
    """Decisions about the rows, and their counts, while they are made."""

    reasons: list[str]
    codes: list[list[int]] = field(default_factory=list)
    """[sources][rows]: 0, or the position of the reason from 1."""
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[list[str]]] = field(default_factory=dict)
    personal: dict[str, PersonalRecord] = field(default_factory=dict)

    def remove(self, source: int, number: int, where: str, removal: Removal) -> None:
        self.codes[source][number] = self.reasons.index(removal.reason) + 1
        self.counts[removal.reason] += 1
        shown = self.examples.setdefault(removal.reason, [])
        if len(shown) < _EXAMPLES:
            shown.append([where, shorten(removal.message, _LONGEST)])

    def count_personal(self, where: str, personal: Sequence[Sequence[Occurrence]]) -> None:
        for kind, count in Counter(occurrence.kind for part in personal for occurrence in part).items():
            entry = self.personal.setdefault(kind, {"rows": 0, "count": 0, "examples": []})
            entry["rows"] += 1
            entry["count"] += count
            if len(entry["examples"]) < _EXAMPLES:
                entry["examples"].append(where)


@dataclass(frozen=True)
class _Decided:
    """Applies stored decisions to the documents of a source."""

    codes: np.ndarray
    reasons: Sequence[str]
    cleaner: RowCleaner

    def __call__(self, number: int, document: Document) -> Document:
        if code := int(self.codes[number]):
            return remove(document, self.reasons[code - 1])
        return self.cleaner.mask(document, self.cleaner.find_personal(document))


def clean_sources(
    sources: Sequence[Source],
    validation: Source | None,
    share: float,
    settings: Clean,
    root: Path,
    say: Progress,
) -> tuple[list[Source], CleaningRecord]:
    """Decides which rows to leave out, or finds the decisions in the cache, and returns the sources without them.

    The first of several duplicates stays, in the order of the sources; those of validation come before those of
    training. A validation source stays as it is.

    Args:
        share: fraction of the documents that is held out.
        root: folder of the cache.

    Raises:
        DataError, RecipeError: a file of `against` does not exist, or `datasketch` is not installed.
    """
    cleaner = RowCleaner.of(settings)
    keys = [source.key() for source in sources]
    name = f"clean-{compute_digest(cleaner.key(), keys, share, validation.key() if validation else '')}"

    def build(folder: Path) -> CleaningRecord:
        decisions = _decide(sources, validation, share, cleaner, say)
        for number, codes in enumerate(decisions.codes):
            np.save(folder / f"source-{number}.npy", np.array(codes, np.uint8))
        return _record(decisions, cleaner)

    folder, entry = open_entry(root, name, build)
    reasons = [removed["reason"] for removed in entry["values"]["removed"]]
    # Cached decisions do not need the evaluation data, which may be large.
    masking = replace(cleaner, overlaps=None)
    cleaned = [
        # The decisions about a source depend on the other sources, and so does its key.
        replace(
            source,
            key=lambda key=key: compute_digest(key, name),  # type: ignore[misc]
            clean=_Decided(np.load(folder / f"source-{number}.npy"), reasons, masking),
        )
        for number, (source, key) in enumerate(zip(sources, keys, strict=True))
    ]
    return cleaned, entry["values"]


def _list_reasons(cleaner: RowCleaner) -> list[str]:
    """Returns every reason for which the settings may leave out a row, in the order in which they are examined."""
    settings = cleaner.settings
    return [
        *cleaner.thresholds,
        *([PERSONAL] if settings.personal_data == "drop" else []),
        *([IN_EVALUATION_DATA] if cleaner.overlaps is not None else []),
        *([DUPLICATE] if settings.duplicates != "keep" else []),
        *([NEAR_DUPLICATE] if settings.duplicates == "near" else []),
    ]


def _decide(
    sources: Sequence[Source], validation: Source | None, share: float, cleaner: RowCleaner, say: Progress
) -> _Decisions:
    decisions, split, settings = _Decisions(_list_reasons(cleaner)), Split(share), cleaner.settings
    duplicates = None
    if settings.duplicates != "keep":
        duplicates = Duplicates(settings.similarity if settings.duplicates == "near" else None)
    held_out: list[_Candidate] = []
    trained: list[_Candidate] = []
    for source_number, source in enumerate(sources):
        codes: list[int] = []
        decisions.codes.append(codes)
        for number, document in enumerate(source.read()):
            if number % 1000 == 0:
                say("cleaning", number, source.count)
            codes.append(0)
            # Those are left out for a reason of their own.
            if not document.sequences or not document.has_target:
                continue
            personal = cleaner.find_personal(document)
            decisions.count_personal(document.where, personal)
            document = cleaner.mask(document, personal)
            if removal := cleaner.inspect(document, personal):
                decisions.remove(source_number, number, document.where, removal)
            elif duplicates is not None:
                candidate = _describe(document, duplicates, source_number, number)
                side = split.choose_side(hash_content(document))
                (held_out if side == "validation" else trained).append(candidate)
    if duplicates is None:
        return decisions
    for document in validation.read() if validation else ():
        if document.sequences and document.has_target:
            row = _describe(document, duplicates, -1, -1)
            duplicates.add(row.content, row.context, row.signature, row.where)
    # Validation rows first, so that of two duplicates the one in training is left out.
    for done, row in enumerate([*held_out, *trained]):
        if done % 1000 == 0:
            say("comparing rows", done, len(held_out) + len(trained))
        if duplicate := duplicates.add(row.content, row.context, row.signature, row.where):
            reason = DUPLICATE if duplicate.similarity is None else NEAR_DUPLICATE
            decisions.remove(row.source, row.number, row.where, Removal(reason, str(duplicate)))
    return decisions


def _describe(document: Document, duplicates: Duplicates, source: int, number: int) -> _Candidate:
    return _Candidate(
        source,
        number,
        document.where,
        hash_example(document),
        hash_context(document),
        duplicates.sign(document),
    )


def _record(decisions: _Decisions, cleaner: RowCleaner) -> CleaningRecord:
    settings, overlaps = cleaner.settings, cleaner.overlaps
    limits: dict[str, object] = {
        **cleaner.thresholds,
        NEAR_DUPLICATE: settings.similarity,
        IN_EVALUATION_DATA: f"{settings.overlap_words} words",
    }
    return {
        "read": sum(map(len, decisions.codes)),
        "removed": [
            {
                "reason": reason,
                "threshold": _format_threshold(limits.get(reason)),
                "rows": decisions.counts[reason],
                "examples": decisions.examples.get(reason, []),
            }
            for reason in decisions.reasons
        ],
        "personal": decisions.personal if settings.personal_data != "keep" else None,
        "personal_data": settings.personal_data,
        "short_texts": overlaps.short if overlaps is not None else 0,
        "evaluation_texts": overlaps.texts if overlaps is not None else 0,
    }


def _format_threshold(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    return f"{value:,g}" if isinstance(value, int | float) else str(value or "")


def find_overlaps(streams: Sequence[Stream], names: Sequence[str], size: int, *, knob: str) -> list[OverlapRecord]:
    """Counts the training rows that share `size` consecutive words with evaluation data.

    Args:
        names: of the evaluation data, one record each.
        knob: option that names them, for messages.
    """
    indices = [read_overlap_index([name], size, knob=knob) for name in names]
    records: list[OverlapRecord] = [
        {"name": name, "texts": index.texts, "short": index.short, "read": 0, "rows": 0, "examples": []}
        for name, index in zip(names, indices, strict=True)
    ]
    for stream in streams:
        for side, _, document in stream.read(Counter(), Findings()) if not stream.held else ():
            for index, record in zip(indices, records, strict=True) if side == "train" else ():
                record["read"] += 1
                if overlap := index.find(document.text):
                    record["rows"] += 1
                    if len(record["examples"]) < _EXAMPLES:
                        record["examples"].append([document.where, overlap.where, shorten(overlap.sequence, _LONGEST)])
    return records
