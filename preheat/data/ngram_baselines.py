"""What counting reaches: losses of a unigram and a bigram model on the same split, to set a trained model's loss beside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from preheat.data.packing import IGNORED, Rows
from preheat.data.preparation import PreparedData

__all__ = ["baselines"]

STRENGTHS = (4, 16, 64, 256, 1024)


def baselines(prepared: PreparedData, numbers: Sequence[int], max_tokens: int = 4_000_000) -> dict[str, float]:
    """Losses on the trained labels of the validation rows, in nats a token.

    `unigram` counts the labels of the training rows, plus one each. `bigram` mixes the counts after the token at hand with the
    unigram, as if that had been seen so many times more (MacKay and Peto, 1995); of five such strengths the one that is best on
    the validation rows is taken, in the baseline's favour.

    Args:
        prepared: data with validation rows, not streamed.
        numbers: of the validation rows that the model is measured on: both read the same.
        max_tokens: count at most so many training tokens.
    """
    assert isinstance(prepared.train, Rows), "a streamed source cannot be counted before training"
    assert len(prepared.validation), "no validation rows"
    first = range(min(len(prepared.train), max(1, max_tokens // prepared.train.length)))
    before, after = _pairs(prepared.train, first)
    given, wanted = _pairs(prepared.validation, numbers)
    size = int(max(before.max(), after.max(), given.max(), wanted.max())) + 1
    size = max(size, len(prepared.tokenizer))
    unigram = (np.bincount(after, minlength=size) + 1) / (len(after) + size)
    context_counts = np.bincount(before, minlength=size)[given]
    pairs, counts = np.unique(before * size + after, return_counts=True)
    wanted_pairs = given * size + wanted
    at = np.minimum(np.searchsorted(pairs, wanted_pairs), len(pairs) - 1)
    together = np.where(pairs[at] == wanted_pairs, counts[at], 0)
    expected = unigram[wanted]
    bigram = min(float(-np.log((together + k * expected) / (context_counts + k)).mean()) for k in STRENGTHS)
    return {"unigram": float(-np.log(expected).mean()), "bigram": bigram}


def _pairs(rows: Rows, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(token, its label) over all trained places of these rows."""
    read = [rows.row(n) for n in numbers]
    tokens, labels = np.concatenate([r.tokens for r in read]), np.concatenate([r.labels for r in read])
    trained = labels != IGNORED
    return tokens[trained], labels[trained]
