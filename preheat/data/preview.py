"""Statistics and decoded examples of prepared data, with the trained spans marked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from preheat.data.packing import IGNORED, Rows, permutation
from preheat.data.preflight_corpus import locate_documents
from preheat.data.preparation import PreparedData
from preheat.errors import DataError
from preheat.files import to_plain_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from preheat.core.data_record import DataPreview, ExampleDocument, ExampleSequence, Lengths

__all__ = ["build_preview"]

BINS = 12
_ORDERS = 100
"""Ratio of the longest to the shortest example from which the bars are logarithmic."""


def build_preview(prepared: PreparedData, name: str, *, rows: int, seed: int) -> DataPreview:
    """Returns the output of `preheat data`.

    Args:
        name: of the recipe.
        rows: number of packed rows to show, in the order in which the run reads them.
        seed: seed of the recipe, which decides that order.

    Raises:
        DataError: the source is streamed.
    """
    train = prepared.train
    if not isinstance(train, Rows):
        raise DataError(
            "data.streaming: a streamed source is not read before training; set data.streaming: false to preview it"
        )
    # The order of epoch 0 in `loader.sample_order`.
    order = permutation(len(train), seed, 0)[:rows].tolist()
    group = train.tokens.group
    wheres = _locate_documents(prepared, train, order)
    return to_plain_data(prepared.record()) | {
        "blocked": prepared.blocked,
        "lengths": _summarize_lengths(
            np.diff(train.tokens.offsets, prepend=0).reshape(-1, group).sum(axis=1), train.length
        ),
        "packing": {"how": train.packing, "length": train.length, **prepared.counts["train"]},
        "examples": [_build_example(prepared, train, n, wheres) for n in order],
        "name": name,
    }


def _summarize_lengths(sizes: np.ndarray, length: int) -> Lengths:
    """Returns statistics of tokens per example, and a histogram whose last bar holds all longer than 1.5 rows."""
    top = min(int(sizes.max()), round(1.5 * length))
    least = min(max(int(sizes.min()), 1), top)
    # With bars of equal width nearly all examples would fall into the first one.
    spread = np.geomspace if top >= _ORDERS * least else np.linspace
    # Rounding short lengths gives equal edges, which count once.
    edges = np.unique(np.append(spread(least, top, BINS + 1)[1:].round().astype(int), min(int(sizes.min()), top) - 1))
    # Bars hold the lengths above the one edge up to the next; np.histogram's bins begin at their first edge.
    counts, _ = np.histogram(np.minimum(sizes, top), edges + 1)
    return {
        "examples": len(sizes),
        "mean": float(sizes.mean()),
        "median": float(np.median(sizes)),
        "p95": float(np.percentile(sizes, 95)),
        "longest": int(sizes.max()),
        "longer_than_a_row": int((sizes > length).sum()),
        "bars": [
            {"from": int(a) + 1, "to": int(b) if b < top or top == sizes.max() else None, "count": int(n)}
            for a, b, n in zip(edges, edges[1:], counts, strict=False)
        ],
    }


def _locate_documents(prepared: PreparedData, rows: Rows, order: list[int]) -> dict[int, str]:
    """Returns document number -> file and row, for all documents in these packed rows."""
    assert rows.tokens.folder is not None, "prepared data is stored"
    # Content hashes of the documents, from which their file and row are found again.
    marks = np.load(rows.tokens.folder / f"{rows.tokens.side}-marks.npy")
    numbers = sorted({int(n) // rows.tokens.group for index in order for n in rows.contents(index)[0]})
    # (hash, number of earlier documents of that hash), as `locate_documents` reads it.
    wanted = [(int(marks[n]), int((marks[:n] == marks[n]).sum())) for n in numbers]
    by_place = locate_documents(prepared.streams, wanted, held=False)
    return {n: by_place[place] for n, place in zip(numbers, wanted, strict=True)}


def _build_example(prepared: PreparedData, rows: Rows, index: int, wheres: dict[int, str]) -> ExampleSequence:
    row, numbers = rows.row(index), rows.contents(index)[0].tolist()
    documents: list[ExampleDocument] = []
    at = 0
    for number, size in zip(numbers, row.documents, strict=False):  # not strict: the last length may be padding
        tokens, labels = row.tokens[at : at + size].tolist(), row.labels[at : at + size]
        classes = rows.tokens.labels
        label = None if classes is None else int(classes[number])
        # The label of a position is the next token; with classes only the last position is trained, on no text.
        marks = [False, *(labels[:-1] != IGNORED).tolist()] if label is None else [False] * size
        named = prepared.classes[label] if label is not None and label < len(prepared.classes) else label
        documents.append(
            {
                "where": wheres[number // rows.tokens.group],
                "spans": [
                    (_shorten_images(text, rows), is_trained, count)
                    for text, is_trained, count in _split_spans(prepared.tokenizer, tokens, marks)
                ],
                "tokens": size,
                "trained": sum(marks) if label is None else 1,
                "label": named,
            }
        )
        at += size
    return {"row": index, "documents": documents, "padding": rows.length - at, "compared": rows.tokens.group == 2}


def _shorten_images(text: str, rows: Rows) -> str:
    """Returns the text with each image's tokens replaced by their number."""
    if rows.tokens.images is None:
        return text
    # An image has hundreds of equal tokens.
    mark = rows.tokens.images.eye.marks[0]
    return re.sub(f"(?:{re.escape(mark)})+", lambda match: f"[image: {len(match[0]) // len(mark)} tokens]", text)


def _split_spans(
    tokenizer: PreTrainedTokenizerFast, tokens: list[int], marks: list[bool]
) -> list[tuple[str, bool, int]]:
    """Returns [text, trained, tokens] of each run of equal marks; the text is what the run adds when decoded."""
    spans: list[tuple[str, bool, int]] = []
    borders = [n for n in range(1, len(tokens)) if marks[n] != marks[n - 1]]
    before, start = "", 0
    for stop in [*borders, len(tokens)]:
        # Decoded from the beginning each time, since the text of a token may depend on those before it.
        text = tokenizer.decode(tokens[:stop])
        # A character may span tokens of both runs: it goes to the later one.
        text = text if stop == len(tokens) else text.rstrip("\ufffd")
        spans.append((text[len(before) :], marks[start], stop - start))
        before, start = text, stop
    return spans
