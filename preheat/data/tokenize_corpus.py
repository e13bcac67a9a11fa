"""Tokenizes documents into files and counts them; an interrupted start is resumed by the next one.

The work folder lies next to the cache's entries and holds append-only files and a journal, which is written after them
every few seconds with their sizes. To resume, the files are truncated to those sizes, and rows already read are
skipped.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, NotRequired, TypedDict

import numpy as np

from preheat.cache_folder import make_private
from preheat.data.document import Document
from preheat.data.preflight import Findings, merge_findings
from preheat.data.row_account import LeftOut
from preheat.data.sources import Source
from preheat.data.split import Side, Split, hash_letters, iterate_chunks
from preheat.data.tokenizer import Encoded, Encoder
from preheat.data.vision_inputs import ImageProcessor, ImageTable
from preheat.errors import PreheatError
from preheat.files import lock_file, to_json, write_atomic

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from preheat.data.preflight import Finding

__all__ = ["SIDES", "Progress", "Stream", "copies_file", "choose_streams", "tokenize"]

SIDES: tuple[Side, Side] = ("train", "validation")
JOURNAL_EVERY = 5.0
"""Seconds between writes of the journal, and so the work at most that a kill loses."""

Progress = Callable[[str, int, int | None], None]


class Stream(NamedTuple):
    """A source and its split; `held`: all of its documents are for validation."""

    source: Source
    held: bool
    split: Split

    def read(
        self, dropped: Counter[str], findings: Findings, documents: Iterable[Document] | None = None
    ) -> Iterator[tuple[Side, str, Document]]:
        """Yields each document that is not dropped, with its side and content hash."""
        for side, mark, document in self.split.apply(
            self.source.read() if documents is None else documents, dropped, findings
        ):
            yield "validation" if self.held else side, mark, document


def choose_streams(sources: Sequence[Source], validation: Source | None, split: Split) -> list[Stream]:
    """Returns the streams to read, in order: the validation source first."""
    return [
        *([Stream(validation, True, Split())] if validation else []),
        *(Stream(source, False, split) for source in sources),
    ]


class SourceTally(TypedDict):
    """Counts of a source; `sides`: its documents by side, before the weight repeats them."""

    source: str
    layout: str
    weight: float
    side: Side
    read: int
    dropped: dict[str, int]
    untrained: NotRequired[int]
    sides: dict[Side, int]
    documents: int
    tokens: int


class TokenCounts(TypedDict):
    """Counts of all documents, stored with their tokens.

    `near`: content hashes of the first validation documents that also occur in training, of `near_count`; `ends`:
    trained tokens that end a text or a turn; `labels`: all trained tokens; `largest`: the largest token.
    """

    read: int
    dropped: dict[str, int]
    documents: dict[Side, int]
    duplicates: dict[Side, int]
    sources: list[SourceTally]
    group: int
    found: dict[str, Finding]
    near: list[str]
    near_count: int
    ends: int
    labels: int
    largest: int


@dataclass
class _Tally:
    """Counts and progress so far, as plain values for the journal."""

    stream: int = 0
    rows: int = 0
    """Rows read of this stream."""
    sources: list[SourceTally] = field(default_factory=list)
    findings: dict[str, Finding] = field(default_factory=dict)
    """Findings of the checks in rows."""
    shown: dict[str, Finding] = field(default_factory=dict)
    """Findings of the checks in tokens."""
    group: int = 1
    masked: bool = False
    ends: int = 0
    """Number of trained tokens that end a text or a turn."""
    labels: int = 0
    """Number of trained tokens."""
    tokens: int = 0
    largest: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of the files in bytes."""


class _Portion(NamedTuple):
    """Documents that are being encoded, and the counts to record once they are written."""

    documents: list[tuple[Side, str, Document]]
    encoded: Future[list[list[Encoded]]]
    rows: int
    dropped: Counter[str]
    findings: dict[str, Finding]


def tokenize(
    folder: Path,
    work: Path,
    streams: Sequence[Stream],
    encoder: Encoder,
    ends: Sequence[int],
    say: Progress,
    eye: ImageProcessor | None = None,
) -> TokenCounts:
    """Writes the tokens of both sides into `folder` for `Tokens.open`, and returns the counts.

    Args:
        work: folder of unfinished work; removed when this returns or when the data is rejected.
        ends: tokens that end a text or a turn.
        eye: image processor, for models that read images.
    """
    make_private(work)
    with (work / "lock").open("a") as lock:
        try:
            # The kernel releases the lock with the process, however it ends, so a killed one blocks nobody.
            lock_file(lock)
        except OSError:  # another process holds the work folder: use one of our own
            work = folder.parent / "work"
            work.mkdir()
        try:
            writer = _Writer(work, encoder, ends)
            try:
                writer.run(streams, say)
            finally:
                writer.close()
            values = _finish(folder, work, writer.tally, writer.dtype, eye)
        # Of all failures only these remove the work: after a kill or Ctrl-C the next start resumes it.
        except (PreheatError, OSError):  # rejected data, or a full disk, which needs the space
            shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work, ignore_errors=True)
    return values


class _Writer:
    def __init__(self, work: Path, encoder: Encoder, ends: Sequence[int]):
        self.work, self.encoder = work, encoder
        self.ends = np.array(sorted(set(ends)), np.uint32)
        # Half of the disk space for vocabularies of at most 65,536 tokens.
        self.dtype = "uint16" if encoder.pieces <= 2**16 else "uint32"
        self.tally, self.files = _Tally(), dict[str, BinaryIO]()
        names = [
            f"{side}.{kind}"
            for side in SIDES
            for kind in ("ids", "trained", "sizes", "labels", "marks", "seen", "near", "images", "copies")
        ]
        with contextlib.suppress(OSError, ValueError, TypeError):  # no journal, or one of another version
            self.tally = _Tally(**json.loads((work / "journal.json").read_text(encoding="utf-8")))
        # Files shorter than the journal says (after a power cut, say): begin again.
        if any(not (work / n).exists() or (work / n).stat().st_size < self.tally.sizes.get(n, 0) for n in names):
            self.tally = _Tally()
        for name in names:
            # Whatever was written after the journal is not counted in it: truncate it.
            self.files[name] = (work / name).open("ab")
            self.files[name].truncate(self.tally.sizes.get(name, 0))
        self.saved = time.monotonic()

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def run(self, streams: Sequence[Stream], say: Progress) -> None:
        for number in range(self.tally.stream, len(streams)):
            # A stream after the one that the journal is in: its rows are read from the first on.
            if number > self.tally.stream:
                self.tally.stream, self.tally.rows = number, 0
            # Not begun before the interruption.
            if number == len(self.tally.sources):
                source = streams[number].source
                about: SourceTally = {
                    "source": source.description,
                    "layout": source.layout.description,
                    "weight": source.weight,
                    "side": "validation" if streams[number].held else "train",
                    "read": 0,
                    "dropped": {},
                    "untrained": 0,
                    "sides": dict.fromkeys(SIDES, 0),
                    "documents": 0,
                    "tokens": 0,
                }
                self.tally.sources.append(about)
            self._stream(streams[number], say)

    def _stream(self, stream: Stream, say: Progress) -> None:
        about, waiting = self.tally.sources[-1], None
        # Reading runs ahead of writing: these count what is read, and the tally only what is written.
        dropped, findings, rows = (
            Counter[str](about["dropped"]),
            Findings(copy.deepcopy(self.tally.findings)),
            self.tally.rows,
        )

        def counted() -> Iterator[Document]:
            nonlocal rows
            for document in stream.source.read(rows):
                rows += 1
                yield document

        # The tokenizer releases the GIL, so the next chunk is rendered meanwhile.
        with ThreadPoolExecutor(1) as pool:
            for portion in iterate_chunks(stream.read(dropped, findings, counted())):
                say("tokenizing", rows, stream.source.count)
                encoded = pool.submit(self.encoder, [document for _, _, document in portion])
                # With copies of the counts: they belong to the rows up to this portion.
                submitted = _Portion(portion, encoded, rows, Counter(dropped), copy.deepcopy(findings.by_check))
                if waiting is not None:
                    self._write(stream, waiting, about)
                waiting = submitted
            if waiting is not None:
                self._write(stream, waiting, about)
        self._count(about, rows, dropped, findings.by_check)
        say("tokenizing", rows, rows)

    def _count(self, about: SourceTally, rows: int, dropped: Counter[str], findings: dict[str, Finding]) -> None:
        self.tally.rows, about["read"], about["dropped"], self.tally.findings = rows, rows, dict(dropped), findings

    def _write(self, stream: Stream, portion: _Portion, about: SourceTally) -> None:
        documents = portion.documents
        # All sequences of the portion, `group` per document.
        flat = [e for sequences in portion.encoded.result() for e in sequences]
        tally, group = self.tally, len(flat) // len(documents)
        tally.group = group
        sizes = np.array([len(e.tokens) for e in flat], np.int64)
        # [sequences + 1]: sequence n has the tokens bounds[n] to bounds[n + 1] of `ids`, which is [tokens].
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        ids = np.fromiter(itertools.chain.from_iterable(e.tokens for e in flat), np.uint32, int(bounds[-1]))
        # [tokens] uint8. A sequence without a mask is trained on as a whole.
        marks = np.frombuffer(b"".join(e.loss_mask or b"\1" * len(e.tokens) for e in flat), np.uint8)
        tally.masked = tally.masked or any(e.loss_mask is not None for e in flat)
        trained = marks.copy()
        trained[bounds[:-1][sizes > 0]] = 0  # the first token of a sequence is never a label
        # [documents, group], the number of labels: one for a class or a judgement, else one per trained token.
        labels = np.where([e.label is not None for e in flat], 1, _sum_spans(trained, bounds)).reshape(-1, group)
        # [documents]. Both sequences of a pair need labels to be compared.
        usable = (labels > 0).all(axis=1)
        shown = Findings(tally.shown)
        for n in np.flatnonzero(~usable):
            about["untrained"] += 1
            shown.add("untrained", documents[n][2].where, "nothing in it is trained on")
        if self.encoder.unknown is not None:
            lost, of = (
                _sum_spans(x, bounds).reshape(-1, group).sum(axis=1)
                for x in (ids == self.encoder.unknown, np.ones_like(ids))
            )
            for n in np.flatnonzero(lost):
                message = f"{lost[n]:,} of its {of[n]:,} tokens are unknown to the tokenizer"
                shown.add("unknown_tokens", documents[n][2].where, message, count=int(lost[n]))
        tally.ends += int((np.isin(ids, self.ends) & (trained > 0)).sum())
        tally.labels += int(labels[usable].sum())
        tally.largest = max(tally.largest, int(ids.max(initial=0)))
        tally.tokens += len(ids)
        for side in SIDES:
            wanted = [n for n, (s, _, _) in enumerate(documents) if s == side and usable[n]]
            if not wanted:
                continue
            # The first 64 bits of the content hash, which `locate_documents` searches for.
            content = [int(documents[n][1][:16], 16) for n in wanted]
            # Before the weight repeats documents: duplicates and overlaps count each document once.
            self._append(side, "seen", np.array(content, np.uint64))
            self._append(side, "near", np.array([hash_letters(documents[n][2]) for n in wanted], np.uint64))
            about["sides"][side] += len(wanted)
            weight = stream.source.weight if side == "train" else 1.0
            copies = [_count_repeats(weight, documents[n][1]) for n in wanted]
            self._append(side, "copies", np.array(copies, np.uint32))
            wanted = [n for n, count in zip(wanted, copies, strict=True) for _ in range(count)]
            if not wanted:
                continue
            # The sequences of these documents, in order.
            chosen = (np.array(wanted)[:, None] * group + np.arange(group)).ravel()
            spans = [(bounds[n], bounds[n + 1]) for n in chosen]
            self._append(side, "ids", np.concatenate([ids[a:b] for a, b in spans]).astype(self.dtype))
            self._append(side, "trained", np.concatenate([marks[a:b] for a, b in spans]))
            self._append(side, "sizes", sizes[chosen])
            self._append(side, "marks", np.array([int(documents[n][1][:16], 16) for n in wanted], np.uint64))
            lines = "".join(to_json(documents[n][2].images) + "\n" for n in wanted)
            self._append(side, "images", np.frombuffer(lines.encode(), np.uint8))
            if flat[0].label is not None:
                self._append(side, "labels", np.array([flat[n].label for n in chosen], np.int64))
            about["documents"] += len(wanted)
            about["tokens"] += int(sizes[chosen].sum())
        # After the files: the journal must not count a document that they lack.
        self._count(about, portion.rows, portion.dropped, portion.findings)
        if time.monotonic() - self.saved > JOURNAL_EVERY:
            self._write_journal()

    def _append(self, side: Side, kind: str, values: np.ndarray) -> None:
        self.files[f"{side}.{kind}"].write(values.tobytes())

    def _write_journal(self) -> None:
        # On disk before the journal, whose sizes must never exceed those of the files.
        for name, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            self.tally.sizes[name] = file.tell()
        write_atomic(self.work / "journal.json", to_json(asdict(self.tally)))
        os.utime(self.work)  # the cache removes partial folders that are not touched for a day
        self.saved = time.monotonic()


def _sum_spans(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Returns [spans], the sum of each span of values."""
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
    return total[bounds[1:]] - total[bounds[:-1]]


def _count_repeats(weight: float, mark: str) -> int:
    """Returns how often a document is read in an epoch; its content hash decides the fractional part of the weight."""
    # Not the first 64 bits: they decide the side of the split (`Split.apply`).
    return int(weight) + (int(mark[16:32], 16) / 2**64 < weight % 1)


def copies_file(side: Side) -> str:
    """Returns the name of the file with the number of copies of each row, [rows] uint32; only with weights."""
    return f"{side}-copies.npy"


def _finish(folder: Path, work: Path, tally: _Tally, dtype: str, eye: ImageProcessor | None) -> TokenCounts:
    """Moves the files into `folder` in the form of `Tokens.open`, and returns the values of the cache entry."""

    def read(side: Side, kind: str, of: DTypeLike) -> np.ndarray:
        return np.fromfile(work / f"{side}.{kind}", of)

    findings, documents, duplicates = merge_findings(tally.findings, tally.shown), {}, {}
    for side in SIDES:
        (work / f"{side}.ids").rename(folder / f"{side}.{dtype}")
        np.save(folder / f"{side}-ends.npy", np.cumsum(read(side, "sizes", np.int64)))
        np.save(folder / f"{side}-marks.npy", marks := read(side, "marks", np.uint64))
        if len(labels := read(side, "labels", np.int64)):
            np.save(folder / f"{side}-labels.npy", labels)
        # Without a mask in any document all tokens are trained on, and `Tokens.open` expects no file.
        if tally.masked:
            (work / f"{side}.trained").rename(folder / f"{side}.trained")
        if eye is not None:
            ImageTable.write(folder, side, eye, (work / f"{side}.images").read_text(encoding="utf-8").splitlines())
        if any(source["weight"] != 1 for source in tally.sources):
            np.save(folder / copies_file(side), read(side, "copies", np.uint32))
        documents[side] = len(marks)
        hashes = read(side, "seen", np.uint64)
        duplicates[side] = len(hashes) - len(np.unique(hashes))
    # Validation documents whose letters and digits also occur as a training document.
    near, known = read("validation", "near", np.uint64), read("train", "near", np.uint64)
    both = np.flatnonzero(np.isin(near, known))
    if "unknown_tokens" in findings:
        findings["unknown_tokens"]["of"] = tally.tokens
    dropped: Counter[str] = Counter()
    for source in tally.sources:
        source["dropped"] = Counter(source["dropped"]) + Counter({LeftOut.UNTRAINED: source.pop("untrained")})
        dropped.update(source["dropped"])
    return {
        "read": sum(source["read"] for source in tally.sources),
        "dropped": dict(dropped),
        "documents": documents,
        "duplicates": duplicates,
        "sources": tally.sources,
        "group": tally.group,
        "found": findings,
        "near": [str(mark) for mark in read("validation", "seen", np.uint64)[both[:5]]],
        "near_count": len(both),
        "ends": tally.ends,
        "labels": tally.labels,
        "largest": tally.largest,
    }
