"""The loss of a text: in nats a token, as perplexity, and in bits a byte, which does not depend on the tokenizer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from preheat.core import Batch, Build, LossSum, Slot
from preheat.data import Rows, evaluation_batches, prepare
from preheat.data.packing import Tokens
from preheat.data.rows.file_readers import TEXT, expanded
from preheat.data.sources import digest
from preheat.data.tokenizer import pieces_of
from preheat.engine.evaluate import parts, summed, token_scores
from preheat.errors import RecipeError
from preheat.evaluation import bootstrap
from preheat.evaluation.results import Result
from preheat.evaluation.scoring import CLASSES
from preheat.recipe import Data

__all__ = ["bytes_of_tokens", "measure_text", "rows_of_text", "tokens_of_text"]

UNITS = 64
"""Batches that a text is read in at least, where it has the rows: they are what the bootstrap draws."""


def rows_of_text(
    data: Data, source: str, *, knob: str, length: int, seed: int, tokenizer: str, partial: bool = False
) -> Rows:
    """A second text as rows, cut as the run's own are.

    Args:
        data: the run's settings: which fields are read, where the source has fields.
        knob: what names the source, for messages.
        tokenizer: the folder of the run's tokenizer.
        partial: what does not fill a last row is one too, so that each token is evaluated.

    Raises:
        DataError: no such text, it is empty, or (not `partial`) it is shorter than a row.
    """
    path = expanded(knob, source)
    plain = path.suffix in TEXT or path.is_dir()
    fields: dict[str, Any] = (
        {"layout": "text", "columns": {}, "prompt": None, "completion": None, "classes": ()} if plain else {}
    )
    # What is measured and not trained on is read as it is; `preheat data` says what is wrong with it.
    fields["preflight"] = {**data.preflight, "encoding": "warn", "truncated": "warn"}
    settings = replace(
        data, source=source, validation=0.0, limit=None, streaming=False, tokenizer=tokenizer, packing="auto", **fields
    )
    rows = prepare(settings, length=length, seed=seed, partial=partial, knob=knob).train
    assert isinstance(rows, Rows), "only a stream is not packed beforehand"
    return rows


def tokens_of_text(data: Data, source: str, knob: str, *, seed: int, tokenizer: str) -> Tokens:
    """A second text's documents in tokens, each file whole; arguments and errors as of `rows_of_text`."""
    return rows_of_text(
        replace(data, text_files="whole"), source, knob=knob, length=2, seed=seed, tokenizer=tokenizer
    ).tokens


def bytes_of_tokens(tokenizer: Any) -> np.ndarray:
    """How many bytes of text each token stands for, [vocabulary]; special tokens stand for none.

    Example:
        >>> bytes_of_tokens(AutoTokenizer.from_pretrained("gpt2"))[[464, 50256]]  # doctest: +SKIP
        array([3, 0])
    """
    return np.array([len(piece) for piece in pieces_of(tokenizer)], np.int64)


def measure_text(
    build: Build, rows: Rows, *, micro: int, limit: int, sizes: np.ndarray, objective: bool = False
) -> Result:
    """The loss of rows of text and, where it is that of the next token, perplexity and bits a byte; else what the objective scores.

    Args:
        micro: rows at once, at most.
        limit: the first so many rows.
        sizes: of `bytes_of_tokens`.
        objective: take the build's own objective, as the run's validation does, whatever it is; else the next token's loss.
    """
    count = min(limit, len(rows))
    micro = max(1, min(micro, count // UNITS))
    own = objective and build.owner(Slot.OBJECTIVE) != "plain"
    if CLASSES in build.tags and not own:
        raise RecipeError(
            "--data: this run has a head over classes in place of the vocabulary's: a text has no loss under it"
        )
    losses, weights, bytes_ = [], [], []
    judged: list[LossSum] = []
    batches = list(evaluation_batches(rows, micro=micro, limit=limit))
    if objective or build.owner(Slot.OBJECTIVE) == "plain":
        judged = list(parts(build, batches))
    for number, batch in enumerate(batches):
        total, weight = (float(judged[number].total), judged[number].weight) if judged else _next_tokens(build, batch)
        losses.append(total)
        weights.append(float(weight))
        bytes_.append(0.0 if own else float(sizes[batch.labels[batch.labels != -100].numpy()].sum()))
    made = {"loss": bootstrap.ratio(losses, weights, higher=False)}
    if not own:
        made["perplexity"] = bootstrap.perplexity(losses, weights)
        if sum(bytes_):
            made["bits_per_byte"] = bootstrap.ratio([loss / math.log(2) for loss in losses], bytes_, higher=False)
    scores = summed(build, judged).scores if own else {}
    identity, left = digest(weights, bytes_, count), len(rows) - count
    return Result(made, count, identity, tokens=int(sum(weights)), truncated=rows.truncated, left=left, alone=scores)


def _next_tokens(build: Build, batch: Batch) -> tuple[float, int]:
    labels = batch.labels.flatten()
    places = torch.nonzero(labels != -100)[:, 0]
    scores, _ = token_scores(build, batch, places, labels[places])
    return -float(scores.double().sum()), len(places)
