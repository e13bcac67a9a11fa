"""What the checks find once all is read: in the template, in the tokens, and between the sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from preheat.data.packing import Rows
from preheat.data.preflight import Findings
from preheat.data.sources import Source
from preheat.data.split import chunks
from preheat.data.templates import Template
from preheat.data.tokenizer import Encoder
from preheat.data.tokenizing import Stream
from preheat.errors import DataError

__all__ = ["cut_answers", "longer_than_a_row", "look_at_template", "look_at_tokens", "refuse_longer"]


def look_at_template(sources: Sequence[Source], template: Template | None, found: Findings) -> None:
    """What is wrong with a template in itself, where conversations are rendered with it."""
    chats = [
        s
        for s in sources
        if s.layout.template is not None and (s.layout.kind in ("alpaca", "sharegpt", "messages") or s.layout.wraps)
    ]
    if not chats or template is None:
        return
    if not template.answers:
        found.add("template", template.name, "leaves out what the assistant says", of=1)
    elif template.end_of_turn is None:
        found.add("template_end", template.name, "ends the assistant's turn with no special token of this tokenizer", of=1)


def look_at_tokens(
    values: Mapping[str, Any],
    found: Findings,
    encoder: Encoder,
    streams: Sequence[Stream],
    sources: Sequence[Source],
    folder: Path,
    cut: np.ndarray,
    embedding: int | None,
    length: int,
) -> None:
    """What shows when all is read."""
    documents, words = values["documents"], sources[0].words
    kind = sources[0].layout.kind
    if not values["labels"] and values["dropped"].get("untrained"):
        found.found.pop("untrained", None)
        found.add("masked", words, "not one token of all rows is trained on", of=1)
    elif not values["ends"] and values["labels"] and kind not in ("classes",):
        if encoder.pad == encoder.end:
            found.add(
                "pad_is_end", words, f"token {encoder.end} is padding and end of text at once, and never trained on", of=1
            )
        else:
            found.add("end_token", words, "no end of a text or turn is among what is trained on", of=1)
    if embedding is not None and values["largest"] >= embedding:
        where, token = _first_beyond(streams, encoder, embedding)
        found.add("embedding", where, f"holds token {token:,}, the model's embedding has {embedding:,} rows", of=1)
    if values["near_count"]:
        for where in _wheres(streams, {int(mark) for mark in values["near"]}, held=True):
            found.add("near_validation", where, "stands in the training data, but for case, punctuation or spaces", count=0)
        entry_ = found.found.get("near_validation")
        if entry_:
            entry_ |= {"count": values["near_count"], "of": documents["validation"]}
    if len(cut):
        marks = np.load(folder / "train-marks.npy")
        for where in _wheres(streams, {int(mark) for mark in marks[cut[:5]]}, held=False):
            found.add("truncated", where, f"is longer than a row of {length} tokens, so that its answer is cut", count=0)
        entry_ = found.found.get("truncated")
        if entry_:
            entry_ |= {"count": len(cut), "of": documents["train"]}


def _wheres(streams: Sequence[Stream], marks: set[int], *, held: bool) -> Iterator[str]:
    """File and row of the documents with these content hashes (64 bits), found by reading again."""
    for stream in streams:
        for side, mark, document in stream.read(Counter(), Findings()):
            if (side == "validation") == held and int(mark[:16], 16) in marks:
                marks.discard(int(mark[:16], 16))
                yield document.where
            if not marks:
                return


def _first_beyond(streams: Sequence[Stream], encoder: Encoder, embedding: int) -> tuple[str, int]:
    """File and row of the first document with a token that the embedding has no row for, and the token."""
    for stream in streams:
        for portion in chunks(stream.read(Counter(), Findings())):
            documents = [document for _, _, document in portion]
            for document, sequences in zip(documents, encoder(documents), strict=True):
                beyond = [token for e in sequences for token in e.tokens if token >= embedding]
                if beyond:
                    return document.where, beyond[0]
    raise AssertionError("the largest token stands in no document")


def refuse_longer(rows: Mapping[str, Rows], folder: Path, streams: Sequence[Stream]) -> None:
    """Raises DataError where a document is longer than a row, with the first of them and how many there are.

    Args:
        rows: train and validation.
        folder: where their tokens are stored.
    """
    for side, of in rows.items():
        longer = longer_than_a_row(of)
        if len(longer):
            sizes, marks = np.diff(of.tokens.ends, prepend=0), np.load(folder / f"{side}-marks.npy")
            (where,) = _wheres(streams, {int(marks[longer[0] // of.tokens.group])}, held=side == "validation")
            raise DataError(
                f"{where}: has {int(sizes[longer[0]]):,} tokens and batch.length is {of.length:,} ({len(longer):,} of {len(sizes):,} documents are longer; "
                "data.longer: refuse); raise batch.length, shorten them, or set data.longer: split"
            )


def longer_than_a_row(rows: Rows) -> np.ndarray:
    """Numbers of the sequences that have more tokens than a row."""
    return np.flatnonzero(np.diff(rows.tokens.ends, prepend=0) > rows.length)


def cut_answers(rows: Rows) -> np.ndarray:
    """Numbers of the examples that lose a part of what is trained on, since they are longer than a row (`whole`)."""
    tokens = rows.tokens
    if rows.packing == "stream" or not len(tokens.ends) or tokens.labels is not None:
        return np.zeros(0, np.int64)
    starts = tokens.starts()
    all_, used = tokens.targets(starts, tokens.ends), tokens.targets(starts, starts + rows._used)
    return np.flatnonzero((all_ > used).reshape(-1, tokens.group).any(axis=1))
