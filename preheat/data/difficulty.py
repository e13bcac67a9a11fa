"""Difficulty scores of rows, computed or read from a file, and the easy-to-hard order of a curriculum.

Scores have no unit: only the order of rows counts. Importing this imports no torch.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from preheat.data.packing import IGNORED, Rows
from preheat.data.rows.file_readers import display_path, expand_path, parse_json, read_lines
from preheat.errors import DataError
from preheat.sanitize import quote_value

__all__ = ["score_by_length", "score_by_rarity", "read_scores", "order_growing_pool"]


def order_growing_pool(ranked: np.ndarray, pool: Callable[[int], int], seed: int) -> Iterator[int]:
    """Yields rows without end, in passes over a growing pool; each pass reads every row of the pool once in a random
    order.

    Rows that enter the pool join the current pass. With a pool of all rows from the beginning, this is the order of
    `loader.sample_order`.

    Args:
        ranked: [rows] row numbers, the easiest first.
        pool: sample, from 0 -> size of the pool; at least 1 and never decreasing.
        seed: seed of the order.

    Example:
        >>> order = order_growing_pool(np.array([4, 2, 0, 1, 3]), lambda n: 2 if n < 4 else 5, seed=0)
        >>> first = [next(order) for _ in range(4)]
        >>> sorted(first[:2]), sorted(first[2:]), sorted(next(order) for _ in range(3))
        ([2, 4], [2, 4], [0, 1, 3])
    """
    heap: list[tuple[int, int]] = []
    keys, entered, turn = _compute_keys(len(ranked), seed, 0), 0, 0
    for n in itertools.count():
        size = min(max(pool(n), 1), len(ranked))
        while entered < size:
            row = int(ranked[entered])
            # In the current pass even if its key is smaller than those already read: then it comes next.
            heapq.heappush(heap, (int(keys[row]), row))
            entered += 1
        # Every row of the pool was read: the next pass begins, in an order of its own.
        if not heap:
            turn += 1
            keys = _compute_keys(len(ranked), seed, turn)
            heap = [(int(keys[row]), row) for row in ranked[:entered].tolist()]
            heapq.heapify(heap)
        yield heapq.heappop(heap)[1]


def _compute_keys(count: int, seed: int, turn: int) -> np.ndarray:
    """Returns the keys that `packing.permutation` sorts by."""
    return np.random.Philox(np.random.SeedSequence((seed, turn))).random_raw(count)


def score_by_length(rows: Rows) -> np.ndarray:
    """Returns [rows], the mean over a row's tokens of the length of their document, in tokens."""
    return _average_documents(rows, np.diff(rows.tokens.offsets, prepend=0).astype(np.float64))


def score_by_rarity(rows: Rows) -> np.ndarray:
    """Returns [rows], the mean unigram surprisal of a row's labels in nats (Platanios et al. 2019)."""
    # surprise: [vocabulary], -log p(token) in nats by the training tokens' own frequencies.
    counts = np.bincount(np.asarray(rows.tokens.ids), minlength=1)
    surprise = -np.log(np.maximum(counts, 1) / max(counts.sum(), 1))
    scores: np.ndarray = np.zeros(len(rows))
    for n in range(len(rows)):
        labels = rows.row(n).labels
        # Prompts and padding do not count: only labels have a loss.
        trained = labels[labels != IGNORED]
        scores[n] = surprise[trained].mean() if len(trained) else 0.0
    return scores


def _average_documents(rows: Rows, scores: np.ndarray) -> np.ndarray:
    """Averages scores of sequences (of pairs two per document) over the tokens of each row, without padding."""
    row_scores: np.ndarray = np.zeros(len(rows))
    for n in range(len(rows)):
        documents, sizes = rows.contents(n)
        # A document that is cut over several rows counts in each by its tokens there.
        row_scores[n] = float(np.average(scores[documents], weights=sizes)) if len(documents) else 0.0
    return row_scores


def read_scores(path: Path, rows: Rows) -> np.ndarray:
    """Reads [rows] scores from a file with one number per training document or per row, low for easy.

    Args:
        path: .npy ([n]), .txt (one number per line) or .jsonl (one number, or object with "score", per line).

    Raises:
        DataError: the file cannot be read, holds a value that is not a finite number, or its length is neither the
            number of documents nor that of rows.
    """
    path = expand_path("techniques.difficulty_curriculum.scores", path)
    try:
        scores = _read(path)
    except OSError as error:
        raise DataError(
            f"techniques.difficulty_curriculum.scores: {path}: cannot be read ({error.strerror or error})"
        ) from None
    if scores.ndim != 1 or not np.isfinite(scores).all():
        problem = (
            f"line {int(np.argmin(np.isfinite(scores))) + 1} is not a finite number"
            if scores.ndim == 1
            else f"has shape {scores.shape}"
        )
        raise DataError(
            f"techniques.difficulty_curriculum.scores: {path}: {problem}; write one finite number for each "
            "document or sequence"
        )
    # A pair of answers is one document of two sequences.
    documents = len(rows.tokens.offsets) // rows.tokens.group
    # If there are as many rows as documents, the scores are those of documents.
    if len(scores) == documents:
        return _average_documents(rows, np.repeat(scores, rows.tokens.group))
    # Those that a run counts: documents without room for an answer are in no row, so any score does for them.
    used = rows.examples_used()
    if len(scores) == used.sum():
        every = np.zeros(documents)
        every[used] = scores
        return _average_documents(rows, np.repeat(every, rows.tokens.group))
    if len(scores) == len(rows):
        return scores
    raise DataError(
        f"techniques.difficulty_curriculum.scores: {path}: holds {len(scores):,} numbers, but there are "
        f"{documents:,} training documents ({used.sum():,} of them in sequences; those held out for validation "
        f"and those left out are not counted: see data.json of a run) and {len(rows):,} sequences; write one "
        "for each of either"
    )


def _read(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        try:
            # Loading a pickle would run its code.
            return np.asarray(np.load(path, allow_pickle=False), np.float64)
        except (ValueError, EOFError) as error:
            raise DataError(
                f"techniques.difficulty_curriculum.scores: {path}: not a NumPy array of numbers "
                f"({str(error).splitlines()[0]})"
            ) from None
    if path.suffix not in (".txt", ".jsonl"):
        raise DataError(
            f"techniques.difficulty_curriculum.scores: {path}: preheat reads .npy, .txt and .jsonl; rename "
            "or convert the file"
        )
    scores = []
    for number, line in read_lines(path):
        if not line.strip():
            continue
        where = f"techniques.difficulty_curriculum.scores: {display_path(path)}:{number}"
        value = parse_json(line.strip(), where) if path.suffix == ".jsonl" else line
        try:
            scores.append(float(value["score"] if isinstance(value, dict) else value))
        except (ValueError, KeyError, TypeError, OverflowError):
            raise DataError(
                f"{where}: {quote_value(line.strip(), 60)} is not a score; write a number or an object with a score"
            ) from None
    return np.array(scores, np.float64)
