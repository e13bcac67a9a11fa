"""Train/validation split by content hash, so that equal documents never land on both sides."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from preheat.data.document import Document
from preheat.data.preflight import Findings
from preheat.data.row_account import LeftOut

__all__ = ["Side", "Split", "iterate_chunks", "hash_content", "hash_letters", "hash_letters_of"]

Side = Literal["train", "validation"]

CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 1024, 2_000_000

_BETWEEN_WORDS = re.compile(r"[\W_]+")


def hash_content(document: Document) -> str:
    """Returns a hash of the text with white space collapsed, so that copies with other indentation count as equal."""
    # NUL as the separator keeps ("a", "bc") and ("ab", "c") apart.
    texts = (" ".join(piece.text.split()) for sequence in document.sequences for piece in sequence)
    content = "\0".join((*texts, *(image.path for image in document.images)))
    return hashlib.blake2b(content.encode("utf-8"), digest_size=16).hexdigest()


def hash_letters(document: Document) -> int:
    """Returns a 64-bit hash of the letters and digits, ignoring case."""
    return _hash_64("\0".join((_strip_to_letters(document.text), *(image.path for image in document.images))))


def hash_letters_of(text: str) -> int:
    """Returns a 64-bit hash of the letters and digits of a text, ignoring case."""
    return _hash_64(_strip_to_letters(text))


def _strip_to_letters(text: str) -> str:
    return _BETWEEN_WORDS.sub("", text).casefold()


def _hash_64(letters: str) -> int:
    return int.from_bytes(hashlib.blake2b(letters.encode("utf-8"), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Split:
    """Train/validation split. It is independent of the seed, so that runs with other seeds are measured on the same
    text.

    Attributes:
        share: fraction of the documents to validate on.
        validation_hashes: content hashes of the validation documents, if these have a source of their own.
    """

    share: float = 0.0
    validation_hashes: frozenset[str] = frozenset()

    def apply(
        self, documents: Iterable[Document], dropped: Counter[str], findings: Findings | None = None
    ) -> Iterator[tuple[Side, str, Document]]:
        """Yields each document with its side and content hash, and counts the omitted ones by reason in `dropped`."""
        findings = Findings() if findings is None else findings
        for document in documents:
            if document.removed:
                dropped[document.removed] += 1
                continue
            for check, message in document.notes:
                findings.add(check, document.where, message)
            if not document.sequences:
                # An unreadable row has a single note: the check that it failed.
                dropped[document.notes[-1][0]] += 1
                continue
            if not document.has_target:
                if document.complete:
                    findings.add("untrained", document.where, "nothing in it is trained on")
                dropped[LeftOut.UNTRAINED if document.complete else LeftOut.EMPTY] += 1
                continue
            mark = hash_content(document)
            # Before the split: validation documents must not be trained on, whatever their hash.
            if mark in self.validation_hashes:
                findings.add("validation", document.where, "is in the validation data too")
                dropped[LeftOut.IN_VALIDATION] += 1
                continue
            yield self.choose_side(mark), mark, document

    def choose_side(self, mark: str) -> Side:
        """Returns the side of a document with this content hash."""
        # The first 64 bits of a hash are a uniform number, so a document's side is independent of all others.
        return "validation" if int(mark[:16], 16) < self.share * 2**64 else "train"


def iterate_chunks(documents: Iterable[tuple[Side, str, Document]]) -> Iterator[list[tuple[Side, str, Document]]]:
    """Yields documents in chunks, large enough to keep all tokenizer threads busy and small enough for memory."""
    chunk: list[tuple[Side, str, Document]] = []
    size = 0
    for each in documents:
        chunk.append(each)
        size += len(each[2].text)
        if len(chunk) >= CHUNK_DOCUMENTS or size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
