"""Exact duplicates by hash, and near duplicates by MinHash (Broder 1997) with locality-sensitive hashing.

The similarity of two rows is that of their sets of 5-word sequences (Jaccard: intersection by union). It is estimated
from 128 hashes, with a standard deviation of at most 0.045. Candidates come from the index of `datasketch`, and a row
is left out only if the estimate of its similarity to an earlier row reaches the threshold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from preheat.data.cleaning.overlap import split_words
from preheat.data.split import hash_content, hash_letters_of
from preheat.errors import RecipeError

if TYPE_CHECKING:
    from datasketch import LeanMinHash

    from preheat.data.document import Document

__all__ = ["Duplicate", "Duplicates", "hash_context", "hash_example", "make_shingles"]

SHINGLE = 5
"""Words of a shingle."""
PERMUTATIONS, SEED, SCHEME = 128, 1, "affine32"
"""Parameters of datasketch's MinHash, which decide its hashes."""
_WEIGHTS = (0.1, 0.9)
"""Weights of false positives and false negatives in the choice of bands: candidates are compared afterwards."""


def make_shingles(text: str) -> set[str]:
    """Returns the sequences of five words of a text; a shorter text is one sequence.

    Example:
        >>> sorted(make_shingles("A b c, d e f."))
        ['a b c d e', 'b c d e f']
    """
    word_list = split_words(text)
    return {" ".join(word_list[start : start + SHINGLE]) for start in range(max(len(word_list) - SHINGLE, 0) + 1)}


class Duplicate(NamedTuple):
    """The earlier row that a row repeats, and their estimated similarity; None: they are equal."""

    where: str
    similarity: float | None

    def __str__(self) -> str:
        if self.similarity is None:
            return f"equals {self.where}"
        return f"is similar to {self.where} (estimated similarity {self.similarity:.2f})"


class Duplicates:
    """Rows so far, in which duplicates of the next one are searched for.

    Args:
        similarity: threshold for near duplicates; None: only equal rows.

    Raises:
        RecipeError: near duplicates need `datasketch`, which is not installed.
    """

    def __init__(self, similarity: float | None):
        self.similarity = similarity
        self._equal: dict[str, str] = {}
        # (place, hash of the context, signature) of the rows in the index.
        self._rows: list[tuple[str, int, np.ndarray]] = []
        if similarity is None:
            return
        try:
            from datasketch import LeanMinHash, MinHash, MinHashLSH
        except ModuleNotFoundError as error:
            if error.name != "datasketch":
                raise
            raise RecipeError(
                "data.clean.duplicates: near needs datasketch, which is not installed: pip install 'preheat[clean]', "
                "or use exact"
            ) from None
        self._lean, self._empty = LeanMinHash, MinHash(PERMUTATIONS, seed=SEED, scheme=SCHEME)
        self._index = MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS, weights=_WEIGHTS)

    def sign(self, document: Document) -> np.ndarray | None:
        """Returns the signature of the trained text, [128] uint32; None if only equal rows are duplicates.

        Documents with images, and classes, have none, since their text alone does not tell them apart.
        """
        if self.similarity is None or document.images or not document.trained_text:
            return None
        sketch = self._empty.copy()
        sketch.update_batch([shingle.encode() for shingle in make_shingles(document.trained_text)])
        return np.asarray(sketch.hashvalues, np.uint32)

    def add(self, content: str, context: int, signature: np.ndarray | None, where: str) -> Duplicate | None:
        """Returns the row that this one repeats; if there is none, adds this one.

        Args:
            content: by `hash_example`.
            context: by `hash_context`: rows of different prompts or labels are no near duplicates.
        """
        if (earlier := self._equal.get(content)) is not None:
            return Duplicate(earlier, None)
        if signature is not None:
            sketch = self._lean(seed=SEED, hashvalues=signature, scheme=SCHEME)
            similar = max(self._compare(sketch, context, signature), default=None)
            if similar is not None:
                return Duplicate(self._rows[-similar[1]][0], similar[0])
            self._index.insert(len(self._rows), sketch, check_duplication=False)
            self._rows.append((where, context, signature))
        self._equal[content] = where
        return None

    def _compare(self, sketch: LeanMinHash, context: int, signature: np.ndarray) -> Iterator[tuple[float, int]]:
        """Yields (similarity, -number) of similar rows, so that the first of the most similar ones is the maximum."""
        assert self.similarity is not None
        for number in self._index.query(sketch):
            _, other_context, other = self._rows[number]
            estimate = float((other == signature).mean())
            if other_context == context and estimate >= self.similarity:
                yield estimate, -number


def hash_example(document: Document) -> str:
    """Returns the content hash together with the label: an answer that was liked and disliked is no duplicate."""
    return f"{hash_content(document)} {document.label}"


def hash_context(document: Document) -> int:
    """Returns a hash of the label and of the letters and digits that are only read: the prompt, or the user's turns."""
    read = (span.text for sequence in document.sequences for span in sequence if not span.trained)
    return hash_letters_of("\0".join((str(document.label), *read)))
