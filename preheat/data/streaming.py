"""Packs rows while the source is read, for data too large or too remote to tokenize first.

As for stored data, the order is a pure function of the seed and the committed samples, but there is no global shuffle:
documents are read in the source's order, packed in blocks of at least `BLOCK` rows, and shuffled within the block. To
resume, the source is read again from its beginning and the committed samples are skipped.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from preheat.data.document import Document
from preheat.data.packing import RowData, Rows, Tokens, permutation
from preheat.data.preflight import CHECKS
from preheat.data.rows.formats import Layout
from preheat.data.sources import open_source
from preheat.data.split import Side, Split, iterate_chunks
from preheat.data.tokenizer import Encoded, Encoder
from preheat.errors import DataError
from preheat.recipe import Data

__all__ = ["StreamRows", "encode_all"]

BLOCK = 1024
"""Rows that are shuffled together, in memory as tokens. Tokens at the end of a block that fill no row are dropped."""
HELD_OUT, HELD_OUT_DOCUMENTS = 256, 100_000
"""Number of validation rows taken from the beginning of the stream, and the documents read for them at most."""


@dataclass(frozen=True)
class StreamRows:
    """Training rows in the order of the source; a worker process that receives it opens the source itself.

    Attributes:
        data: settings that name the source.
        layout: layout of its rows.
        split: train/validation split.
        encoder: tokenizes documents.
        length: tokens in a row.
        packing: `stream` or `whole`, within a block.
        seed: seed of the order within a block.
    """

    data: Data
    layout: Layout
    split: Split
    encoder: Encoder
    length: int
    packing: Literal["stream", "whole"]
    seed: int

    def read(self, committed: int = 0) -> Iterator[tuple[int, RowData]]:
        """Yields (sample number, row) without end, from sample `committed` on, epoch after epoch."""
        number = 0
        for epoch in itertools.count():
            began = number
            for block, tokens in enumerate(self._iterate_blocks()):
                rows = Rows(tokens, self.length, self.packing, self.encoder.pad)
                # The key has the block's number and no state, so that a resumed run shuffles alike.
                for index in permutation(len(rows), self.seed, epoch, block).tolist():
                    # Skipped rows were packed too, since a block begins at the document after the block before it.
                    if number >= committed:
                        yield number, rows.row(index)
                    number += 1
            # An epoch without a row: the next ones would have none either, and this would never return.
            if number == began:
                raise DataError(
                    f"data.source {self.data.source}: the training documents do not fill one sequence of "
                    f"{self.length}; add documents or lower batch.seq_len"
                )

    def held_out(self) -> Tokens:
        """Returns the tokens of the validation documents at the beginning of the stream."""
        first = itertools.islice(
            # Bounds the wait for a small share, which may lack documents for 256 rows.
            self.split.apply(self._iterate_documents(), Counter()),
            HELD_OUT_DOCUMENTS if self.split.share else 0,
        )
        portions = iterate_chunks(d for d in first if d[0] == "validation")
        return encode_all(portions, self.encoder, enough=HELD_OUT * self.length)

    def _iterate_documents(self) -> Iterator[Document]:
        """Yields the documents; a row that fails a check ends the run, unless the recipe sets the check to warn."""
        # Opened anew in each epoch and each worker.
        for document in open_source(self.data, layout=self.layout).read():
            for check, message in document.notes:
                # Checks with a tolerated fraction need the number of all rows, which a stream does not have.
                if not CHECKS[check].above and self.data.preflight.get(check) != "warn":
                    raise DataError(
                        f"{document.where}: {message} (check {check}); {CHECKS[check].fix}, or "
                        f"data.preflight.{check}: warn"
                    )
            yield document

    def _iterate_blocks(self) -> Iterator[Tokens]:
        documents = self.split.apply(self._iterate_documents(), Counter())
        portions = iterate_chunks(d for d in documents if d[0] == "train")
        # `portions` is one iterator: each block continues after the one before it.
        while len((block := encode_all(portions, self.encoder, enough=BLOCK * self.length)).offsets):
            yield block


def encode_all(
    portions: Iterable[list[tuple[Side, str, Document]]], encoder: Encoder, *, enough: int | None = None
) -> Tokens:
    """Encodes chunks of documents into memory, until there are `enough` tokens."""
    encoded: list[Encoded] = []
    size, group = 0, 1
    for portion in portions:
        for sequences in encoder([document for _, _, document in portion]):
            encoded += sequences
            group = len(sequences)
            size += sum(len(e.tokens) for e in sequences)
        # Only after a whole chunk, so that the borders of blocks depend on the documents alone.
        if enough is not None and size >= enough:
            break
    # [tokens] and [sequences], as in `Tokens`.
    ids = np.fromiter(itertools.chain.from_iterable(e.tokens for e in encoded), np.uint32, size)
    ends = np.cumsum([len(e.tokens) for e in encoded], dtype=np.int64)
    trained = labels = None
    if any(e.loss_mask is not None for e in encoded):
        trained = np.frombuffer(b"".join(e.loss_mask or b"\1" * len(e.tokens) for e in encoded), np.uint8)
    if any(e.label is not None for e in encoded):
        labels = np.array([e.label for e in encoded], np.int64)
    return Tokens(ids, ends, trained, labels, group)
