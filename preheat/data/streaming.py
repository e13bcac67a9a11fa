"""Packs rows while the source is read, for data too large or too remote to tokenize first.

As for stored data, the order is a pure function of the seed and the committed samples, but there is no global shuffle:
documents are read in the source's order, packed in blocks of at least `BLOCK` rows, and shuffled within the block. To
resume, the source is read again from its beginning and the committed samples are skipped.

The sizes of streamed sources are unknown, so weights cannot count the readings of an epoch as for stored data. They are
the sources' shares of the rows instead: each source is packed by itself, and begins again at its end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from preheat.data.cleaning.corpus import RowCleaner
from preheat.data.document import Document
from preheat.data.packing import RowData, Rows, Tokens, permutation
from preheat.data.preflight import CHECKS
from preheat.data.rows.formats import Layout
from preheat.data.sources import open_source
from preheat.data.split import Side, Split, iterate_chunks
from preheat.data.tokenizer import Encoded, Encoder
from preheat.errors import DataError
from preheat.recipe import Data

__all__ = ["StreamRows", "StreamedSource", "encode_all", "interleave"]

BLOCK = 1024
"""Rows that are shuffled together, in memory as tokens. Tokens at the end of a block that fill no row are dropped."""
HELD_OUT, HELD_OUT_DOCUMENTS = 256, 100_000
"""Number of validation rows taken from the beginning of each source, and the documents read for them at most."""


@dataclass(frozen=True)
class StreamedSource:
    """A source that is opened where it is read.

    Attributes:
        data: settings that name the source.
        layout: layout of its rows.
        weight: its share of the rows, relative to the other sources.
        cleaner: cleans its rows; None: they stay as they are.
    """

    data: Data
    layout: Layout
    weight: float = 1.0
    cleaner: RowCleaner | None = None


@dataclass(frozen=True)
class StreamRows:
    """Training rows in the order of the sources; a worker process that receives it opens the sources itself.

    Attributes:
        sources: the sources, whose rows are interleaved by weight.
        split: train/validation split.
        encoder: tokenizes documents.
        length: tokens in a row.
        packing: `stream` or `whole`, within a block.
        seed: seed of the order within a block.
    """

    sources: tuple[StreamedSource, ...]
    split: Split
    encoder: Encoder
    length: int
    packing: Literal["stream", "whole"]
    seed: int

    def read(self, committed: int = 0) -> Iterator[tuple[int, RowData]]:
        """Yields (sample number, row) without end, from sample `committed` on."""
        order = interleave([source.weight for source in self.sources])
        skipped = Counter(itertools.islice(order, committed))
        streams = [self._read_source(source, skipped[n]) for n, source in enumerate(self.sources)]
        for number, source in enumerate(order, committed):
            row = next(streams[source])
            if len(streams) > 1:
                row = row._replace(sources=np.full(self.length, source, np.int16))
            yield number, row

    def held_out(self) -> Tokens:
        """Returns the tokens of the validation documents at the beginning of each source."""
        encoded: list[list[Encoded]] = []
        ends = []
        for source in self.sources:
            first = itertools.islice(
                # Bounds the wait for a small share, which may lack documents for 256 rows.
                self.split.apply(_iterate_documents(source), Counter()),
                HELD_OUT_DOCUMENTS if self.split.share else 0,
            )
            portions = iterate_chunks(d for d in first if d[0] == "validation")
            encoded += _encode(portions, self.encoder, enough=HELD_OUT * self.length)
            ends.append(sum(map(len, encoded)))
        return replace(_join(encoded), source_ends=tuple(ends) if len(ends) > 1 else ())

    def _read_source(self, source: StreamedSource, committed: int) -> Iterator[RowData]:
        """Yields the rows of a source without end, epoch after epoch, from its own row `committed` on."""
        number = 0
        for epoch in itertools.count():
            began = number
            for block, tokens in enumerate(self._iterate_blocks(source)):
                rows = Rows(tokens, self.length, self.packing, self.encoder.pad)
                # The key has the block's number and no state, so that a resumed run shuffles alike.
                for index in permutation(len(rows), self.seed, epoch, block).tolist():
                    # Skipped rows were packed too, since a block begins at the document after the block before it.
                    if number >= committed:
                        yield rows.row(index)
                    number += 1
            # An epoch without a row: the next ones would have none either, and this would never return.
            if number == began:
                raise DataError(
                    f"data.source {source.data.source}: the training documents do not fill one sequence of "
                    f"{self.length}; add documents or lower batch.seq_len"
                )

    def _iterate_blocks(self, source: StreamedSource) -> Iterator[Tokens]:
        documents = self.split.apply(_iterate_documents(source), Counter())
        portions = iterate_chunks(d for d in documents if d[0] == "train")
        # `portions` is one iterator: each block continues after the one before it.
        while len((block := encode_all(portions, self.encoder, enough=BLOCK * self.length)).offsets):
            yield block


def interleave(weights: Sequence[float]) -> Iterator[int]:
    """Yields the source of each sample without end: the one whose number of samples is furthest below its share.

    Example:
        >>> list(itertools.islice(interleave([2, 1]), 6))
        [0, 1, 0, 0, 1, 0]
    """
    shares = [weight / sum(weights) for weight in weights]
    counts = [0] * len(shares)
    for number in itertools.count(1):
        source = max(range(len(shares)), key=lambda n: shares[n] * number - counts[n])
        counts[source] += 1
        yield source


def _iterate_documents(source: StreamedSource) -> Iterator[Document]:
    """Yields the documents; a row that fails a check ends the run, unless the recipe sets the check to warn."""
    # Opened anew in each epoch and each worker.
    documents = open_source(source.data, layout=source.layout).read()
    for document in documents if source.cleaner is None else source.cleaner.stream(documents):
        for check, message in document.notes:
            # Checks with a tolerated fraction need the number of all rows, which a stream does not have.
            if not CHECKS[check].above and source.data.preflight.get(check) != "warn":
                raise DataError(
                    f"{document.where}: {message} (check {check}); {CHECKS[check].fix}, or data.preflight.{check}: warn"
                )
        yield document


def encode_all(
    portions: Iterable[list[tuple[Side, str, Document]]], encoder: Encoder, *, enough: int | None = None
) -> Tokens:
    """Encodes chunks of documents into memory, until there are `enough` tokens."""
    return _join(_encode(portions, encoder, enough=enough))


def _encode(
    portions: Iterable[list[tuple[Side, str, Document]]], encoder: Encoder, *, enough: int | None
) -> list[list[Encoded]]:
    """Returns the sequences of each document, until there are `enough` tokens."""
    encoded: list[list[Encoded]] = []
    size = 0
    for portion in portions:
        for sequences in encoder([document for _, _, document in portion]):
            encoded.append(sequences)
            size += sum(len(e.tokens) for e in sequences)
        # Only after a whole chunk, so that the borders of blocks depend on the documents alone.
        if enough is not None and size >= enough:
            break
    return encoded


def _join(documents: Sequence[list[Encoded]]) -> Tokens:
    """Returns the tokens of encoded documents, all with equally many sequences."""
    encoded = list(itertools.chain.from_iterable(documents))
    group = len(documents[0]) if documents else 1
    # [tokens] and [sequences], as in `Tokens`.
    sizes = [len(e.tokens) for e in encoded]
    ids = np.fromiter(itertools.chain.from_iterable(e.tokens for e in encoded), np.uint32, sum(sizes))
    ends = np.cumsum(sizes, dtype=np.int64)
    trained = labels = None
    if any(e.loss_mask is not None for e in encoded):
        trained = np.frombuffer(b"".join(e.loss_mask or b"\1" * len(e.tokens) for e in encoded), np.uint8)
    if any(e.label is not None for e in encoded):
        labels = np.array([e.label for e in encoded], np.int64)
    return Tokens(ids, ends, trained, labels, group)
