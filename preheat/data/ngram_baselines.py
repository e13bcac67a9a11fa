"""Unigram and bigram baselines: their losses on the validation rows, to compare a trained model with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from preheat.data.packing import IGNORED, Rows
from preheat.data.preparation import PreparedData
from preheat.model_folder import count_embedding_rows

__all__ = ["compute_baselines"]

STRENGTHS = (4, 16, 64, 256, 1024)
"""Pseudo-counts of the unigram prior that the bigram baseline tries."""


def compute_baselines(prepared: PreparedData, numbers: Sequence[int], max_tokens: int = 4_000_000) -> dict[str, float]:
    """Returns the losses on the trained labels of the validation rows, in nats per token.

    `unigram` counts the labels of the training rows with add-one smoothing. `bigram` smooths the counts of successors
    with the unigram as a Dirichlet prior (MacKay and Peto, 1995); of five strengths the best on the validation rows is
    taken, in the baseline's favour.

    Args:
        prepared: data with validation rows, not streamed.
        numbers: the validation rows that the model is evaluated on.
        max_tokens: maximum number of training tokens to count.
    """
    assert isinstance(prepared.train, Rows), "a streamed source cannot be counted before training"
    assert len(prepared.validation), "no validation rows"
    first = range(min(len(prepared.train), max(1, max_tokens // prepared.train.length)))
    # (token, next token) of the training and validation rows.
    before, after = _collect_pairs(prepared.train, first)
    given, wanted = _collect_pairs(prepared.validation, numbers)
    size = int(max(before.max(), after.max(), given.max(), wanted.max())) + 1
    # Tokens that never occur take a share of the probability too, as in the model's softmax.
    size = max(size, count_embedding_rows(prepared.tokenizer))
    # [vocabulary], p(b) with add-one smoothing.
    unigram = (np.bincount(after, minlength=size) + 1) / (len(after) + size)
    context_counts = np.bincount(before, minlength=size)[given]
    # A pair (a, b) as the number a * size + b, so that sorted unique pairs can be searched.
    pairs, counts = np.unique(before * size + after, return_counts=True)
    wanted_pairs = given * size + wanted
    at = np.minimum(np.searchsorted(pairs, wanted_pairs), len(pairs) - 1)
    together = np.where(pairs[at] == wanted_pairs, counts[at], 0)
    expected = unigram[wanted]
    # p(b | a) = (count(a, b) + k p(b)) / (count(a) + k).
    bigram = min(float(-np.log((together + k * expected) / (context_counts + k)).mean()) for k in STRENGTHS)
    return {"unigram": float(-np.log(expected).mean()), "bigram": bigram}


def _collect_pairs(rows: Rows, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens, labels) of all trained positions of these rows."""
    read = [rows.row(n) for n in numbers]
    tokens, labels = np.concatenate([r.tokens for r in read]), np.concatenate([r.labels for r in read])
    trained = labels != IGNORED
    return tokens[trained], labels[trained]
