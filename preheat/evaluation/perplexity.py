"""Loss of a text: nats per token, perplexity, and bits per byte, which does not depend on the tokenizer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from preheat.core import Batch, Build, LossSum, Slot
from preheat.data import Rows, evaluation_batches, prepare
from preheat.data.packing import Tokens
from preheat.data.rows.file_readers import TEXT, expand_path
from preheat.data.sources import compute_digest
from preheat.data.tokenizer import token_bytes
from preheat.engine.evaluate import iterate_losses, score_tokens, sum_metrics, sum_parts
from preheat.engine.step import split_sources
from preheat.errors import RecipeError
from preheat.evaluation import bootstrap
from preheat.evaluation.results import Result
from preheat.evaluation.scoring import CLASSES
from preheat.recipe import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from preheat.core.json_types import JsonObject
    from preheat.data.packing import EvaluationRows

__all__ = ["count_token_bytes", "measure_text", "read_text_rows", "tokenize_text"]

UNITS = 64
"""Minimum number of batches of a text, if it has enough rows: the bootstrap resamples batches."""


def read_text_rows(
    data: Data, source: str, *, knob: str, length: int, seed: int, tokenizer: str, partial: bool = False
) -> Rows:
    """Reads another text into rows, packed like those of the run.

    Args:
        data: the run's settings, which select the fields of a source with fields.
        knob: option or key that names the source, for messages.
        tokenizer: folder of the run's tokenizer.
        partial: keep a shorter last row, so that each token is evaluated.

    Raises:
        DataError: no such text, it is empty, or (not `partial`) it is shorter than a row.
    """
    path = expand_path(knob, source)
    # Plain text has no fields, so the recipe's layout and columns do not apply to it.
    plain = path.suffix in TEXT or path.is_dir()
    fields: JsonObject = (
        {"layout": "text", "columns": {}, "prompt": None, "completion": None, "classes": ()} if plain else {}
    )
    # Evaluation texts are read as they are; `preheat data` reports their problems.
    fields["preflight"] = {**data.preflight, "encoding": "warn", "truncated": "warn"}
    settings = replace(
        # All of the text is read, whatever the recipe says about its own data.
        data,
        source=source,
        validation=0.0,
        limit=None,
        clean={},
        streaming=False,
        tokenizer=tokenizer,
        packing="auto",
        **fields,
    )
    rows = prepare(settings, length=length, seed=seed, partial=partial, knob=knob).train
    assert isinstance(rows, Rows), "only a stream is not packed beforehand"
    return rows


def tokenize_text(data: Data, source: str, knob: str, *, seed: int, tokenizer: str) -> Tokens:
    """Returns another text's documents in tokens, one per file; arguments and errors as in `read_text_rows`."""
    return read_text_rows(
        # Only the documents are used: rows of 2 tokens exist for any text.
        replace(data, text_files="whole"),
        source,
        knob=knob,
        length=2,
        seed=seed,
        tokenizer=tokenizer,
    ).tokens


def count_token_bytes(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Returns the number of bytes of text of each token, [vocabulary]; 0 for special tokens.

    Example:
        >>> count_token_bytes(AutoTokenizer.from_pretrained("gpt2"))[[464, 50256]]  # doctest: +SKIP
        array([3, 0])
    """
    return np.array([len(piece) for piece in token_bytes(tokenizer)], np.int64)


def measure_text(
    build: Build, rows: EvaluationRows, *, micro: int, limit: int, sizes: np.ndarray, objective: bool = False
) -> Result:
    """Measures the loss of rows of text; for next-token prediction also perplexity and bits per byte.

    Other objectives report their own scores instead.

    Args:
        micro: maximum rows per batch.
        limit: maximum number of rows.
        sizes: result of `count_token_bytes`.
        objective: use the build's own objective, as in the run's validation; else the next-token loss.
    """
    # Small batches if there are few rows, since each batch is one unit of the bootstrap.
    count = min(limit, len(rows))
    micro = max(1, min(micro, count // UNITS))
    own = objective and build.owner(Slot.OBJECTIVE) != "plain"
    if CLASSES in build.tags and not own:
        raise RecipeError(
            "--data: this run has a classification head instead of a language model head, so a text has no loss"
        )
    losses, weights, bytes_ = [], [], []
    sums: list[LossSum] = []
    batches = list(evaluation_batches(rows, micro=micro, limit=limit))
    if objective or build.owner(Slot.OBJECTIVE) == "plain":
        # The build's own objective gives the wanted loss: it was asked for, or it is next-token prediction.
        sums = list(iterate_losses(build, batches))
    for number, batch in enumerate(batches):
        total, weight = (float(sums[number].total), sums[number].weight) if sums else _score_next_tokens(build, batch)
        losses.append(total)
        weights.append(float(weight))
        # Bytes of the predicted tokens; special tokens have none.
        bytes_.append(0.0 if own else float(sizes[batch.labels[batch.labels != -100].numpy()].sum()))
    metrics = {"loss": bootstrap.ratio_metric(losses, weights, higher=False)}
    if not own:
        metrics["perplexity"] = bootstrap.perplexity_metric(losses, weights)
        if sum(bytes_):
            # loss [nats] / ln 2 / bytes of text: independent of how many tokens the tokenizer makes of it.
            metrics["bits_per_byte"] = bootstrap.ratio_metric(
                [loss / math.log(2) for loss in losses], bytes_, higher=False
            )
    scores = sum_parts(build, sums).scores if own else {}
    # Labels and bytes per batch identify the text under its tokenizer.
    identity, left = compute_digest(weights, bytes_, count), len(rows) - count
    return Result(
        metrics,
        count,
        identity,
        tokens=int(sum(weights)),
        truncated=rows.truncated,
        no_room=rows.no_room,
        unread_rows=left,
        alone=scores,
        by_source=split_sources(build, sum_metrics(sums)),
    )


def _score_next_tokens(build: Build, batch: Batch) -> tuple[float, int]:
    labels = batch.labels.flatten()
    positions = torch.nonzero(labels != -100)[:, 0]
    scores, _ = score_tokens(build, batch, positions, labels[positions])
    return -float(scores.double().sum()), len(positions)
