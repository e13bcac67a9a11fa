"""Long-context evaluation: loss by position, needles, key-value recall, and loss with more or less context.

A loss that stops falling shows that distant context is not used. But it can fall while single facts far back, above all
in the middle, are not found (Liu et al. 2023, arXiv:2307.03172), so both are measured. Single and multiple needles:
RULER, Hsieh et al. 2024 (arXiv:2404.06654); key-value recall: Arora et al. 2023 (arXiv:2312.04927). The hidden phrases
are random words of the tokenizer, so no model can know them beforehand.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from preheat.core import Build, Slot
from preheat.data.packing import Tokens, permutation
from preheat.data.sources import compute_digest
from preheat.engine.evaluate import score_tokens
from preheat.errors import DataError, RecipeError
from preheat.evaluation import bootstrap
from preheat.evaluation.needle import RetrievalQuestion, draw_key_value_prompt, draw_phrase_prompt, find_word_tokens
from preheat.evaluation.results import Part, Result
from preheat.evaluation.scoring import CLASSES, Reader, Scorer, build_batch
from preheat.evaluation.tasks import LengthTask
from preheat.models.conversions import architecture

if TYPE_CHECKING:
    from preheat.evaluation.scoring import Score

__all__ = ["Questions", "measure_length", "draw_questions", "reach_of"]

SHARES = {"none": 0.0, "quarter": 0.25, "half": 0.5, "all": 1.0}
LEAST = 8  # shortest default length in tokens; needles need more
FIRST = 16  # minimum tokens of the first range of positions


@dataclass(frozen=True)
class Questions:
    """A task's questions in tokens, grouped in cells.

    Attributes:
        subsets: for each cell, its length and depth, or its length and share of context.
        questions: for each cell, its questions.
        longest: tokens of the longest row.
    """

    task: LengthTask
    subsets: tuple[dict[str, float], ...]
    questions: tuple[tuple[RetrievalQuestion, ...], ...]
    longest: int


def draw_questions(
    task: LengthTask,
    reader: Reader,
    *,
    longest: int,
    reach: int,
    texts: Callable[[str, str], Tokens],
    limit: int | None = None,
) -> Questions:
    """Draws a task's questions.

    Args:
        longest: tokens of the longest row if the task sets no lengths.
        reach: maximum length in tokens.
        texts: (source, option name for messages) -> its documents in tokens.
        limit: maximum questions per cell.

    Raises:
        RecipeError: a length is beyond `reach` or too short for a question.
        DataError: the text has no document that is long enough.
    """
    lengths = task.lengths or _choose_lengths(task, longest)
    if max(lengths) > reach:
        raise RecipeError(
            f"task {task.name}: lengths: {max(lengths):,} is beyond the {reach:,} tokens that are read here; "
            "lower it, or raise batch.seq_len (of a run) or --length"
        )
    # Needles and recall have a cell per depth as well, so they need fewer questions in each.
    default = 4 if task.kind in ("needle", "recall") else 16
    each = min(task.each or default, limit or task.each or default)
    text = texts(task.data, f"task {task.name}: data") if task.data is not None else None
    begin: list[int] = reader.encoder.begin
    if task.kind == "continuation" and not begin:
        begin = [reader.encoder.end]  # scoring the first token needs a token before it
    places, cells = list[dict[str, float]](), list[tuple[RetrievalQuestion, ...]]()
    pieces = find_word_tokens(reader.tokenizer) if task.kind in ("needle", "recall") else []
    for length in lengths:
        passages = _draw_passages(task, text, length - len(begin), each) if text is not None else []
        depths = [n / (task.depths - 1) for n in range(task.depths)] if pieces else [0.0]
        for number, depth in enumerate(depths):
            # One generator per cell: its questions do not depend on the other lengths and depths.
            generator = np.random.default_rng((task.seed, length, number))
            try:
                if task.kind == "recall":
                    cell = [draw_key_value_prompt(pieces, length, depth, generator, begin) for _ in range(each)]
                elif task.kind == "needle":
                    cell = [
                        draw_phrase_prompt(p, pieces, depth, generator, needles=task.needles, begin=begin)
                        for p in passages
                    ]
                else:
                    cell = [RetrievalQuestion([*begin, *p], []) for p in passages]
            except ValueError as error:
                raise RecipeError(f"task {task.name}: lengths: {error}") from None
            if task.kind != "continuation":
                places.append({"length": length, "depth": depth})
                cells.append(tuple(cell))
                continue
            # The tokens that are scored: the same ones for every share of context.
            last = max(1, min(64, length // 8))
            for share in SHARES.values():
                # Tokens of context directly before them.
                read = round((length - last - len(begin)) * share)
                places.append({"length": length, "share": share})
                cells.append(
                    tuple(
                        RetrievalQuestion([*begin, *q.context[-last - read : -last]], q.context[-last:]) for q in cell
                    )
                )
    return Questions(task, tuple(places), tuple(cells), max(lengths))


def reach_of(build: Build) -> int:
    """Returns the longest row in tokens that a model can read: unlimited with rotary positions."""
    positions = build.model.positions
    return positions if positions and not architecture.has_rotary(build.trained[0]) else sys.maxsize


def _choose_lengths(task: LengthTask, longest: int) -> list[int]:
    if task.kind == "positions":
        return [longest]
    if task.kind == "continuation":
        return sorted({longest // n for n in (8, 4, 2, 1)} - {*range(2 * LEAST)} or {longest})
    # Room for each phrase and for the question.
    least = LEAST * (task.needles + 1 if task.kind == "needle" else 1)
    return sorted({n for n in (longest * k // 8 for k in range(1, 9)) if n >= least} or {longest})


def _draw_passages(task: LengthTask, text: Tokens, length: int, each: int) -> list[list[int]]:
    """Draws up to `each` passages by the task's seed, which do not overlap and lie within one document each."""
    ends = np.asarray(text.offsets)
    sizes = np.diff(ends, prepend=0)
    # Every multiple of `length` within a document, so that passages cannot overlap.
    starts = [(end - size) + n * length for end, size in zip(ends, sizes, strict=True) for n in range(size // length)]
    if not starts:
        raise DataError(
            f"task {task.name}: no document of {task.data} has {length:,} tokens, the longest has "
            f"{max(sizes, default=0):,}; name longer texts, or shorter lengths"
        )
    chosen = permutation(len(starts), task.seed, length)[:each]
    return [np.asarray(text.ids[starts[n] : starts[n] + length]).tolist() for n in chosen]


def measure_length(questions: Questions, scorer: Scorer) -> Result:
    """Measures a task: scores its questions by likelihood, in rows as long as the questions.

    Memory is linear in the length: attention is computed in blocks (`_use_linear_memory`), logits for some rows.
    """
    task = questions.task
    # Keep the tokens per batch of the scorer, but read at least one row.
    scorer, own = copy(scorer), scorer.length
    scorer.length, scorer.micro = questions.longest, max(1, scorer.micro * own // max(own, questions.longest))
    if CLASSES in scorer.build.tags:
        raise RecipeError(
            f"task {task.name}: this run has a classification head instead of a language model head, so no token has "
            "a loss"
        )
    identity = compute_digest([[(q.context, q.answer) for q in cell] for cell in questions.questions])
    with _use_linear_memory(scorer.build):
        if task.kind == "positions":
            return _average_by_position(questions, scorer, identity)
        # All cells at once, since equal lengths share batches; regrouped below in the same order.
        flat = [q for cell in questions.questions for q in cell]
        scores = iter(scorer.score(flat))
    cells = [[next(scores) for _ in cell] for cell in questions.questions]

    def compute_loss(cell: Sequence[Score]) -> bootstrap.Metric:
        return bootstrap.ratio_metric([-s.loglikelihood for s in cell], [float(s.tokens) for s in cell], higher=False)

    if task.kind == "continuation":
        # The metrics are those of the longest texts, the parts those of all.
        top = max(place["length"] for place in questions.subsets)
        metrics = {
            f"loss_{name}": compute_loss(cell)
            for name, share in SHARES.items()
            for place, cell in zip(questions.subsets, cells, strict=True)
            if (place["length"], place["share"]) == (top, share)
        }
        parts = [Part(place, compute_loss(cell)) for place, cell in zip(questions.subsets, cells, strict=True)]
    else:
        every = [s for cell in cells for s in cell]
        metrics = {"accuracy": bootstrap.mean_metric([float(s.greedy) for s in every]), "loss": compute_loss(every)}
        parts = [
            Part(place, bootstrap.mean_metric([float(s.greedy) for s in cell]))
            for place, cell in zip(questions.subsets, cells, strict=True)
        ]
    return Result(metrics, len(flat), identity, parts=tuple(parts))


def _average_by_position(questions: Questions, scorer: Scorer, identity: str) -> Result:
    rows = [q.context for cell in questions.questions for q in cell]
    # The last token is only predicted.
    length = len(rows[0]) - 1
    # Ranges that double in length: [0, 16), [16, 32), [32, 64), ...
    edges = [0]
    while 8 * max(edges[-1], FIRST // 2) <= 3 * length:  # the last range has at least a quarter of all positions
        edges.append(2 * max(edges[-1], FIRST // 2))
    edges.append(length)
    batch_losses = []
    for first in range(0, len(rows), scorer.micro):
        chunk = rows[first : first + scorer.micro]
        batch = build_batch([row[:-1] for row in chunk], length, scorer.encoder.pad)
        targets = torch.tensor([row[1:] for row in chunk])
        # Every position is scored: [rows * length].
        scores, _ = score_tokens(scorer.build, batch, torch.arange(targets.numel()), targets.flatten())
        batch_losses.append(-scores.view(len(chunk), length).double().numpy())
        scorer.say("reading passages", min(first + scorer.micro, len(rows)), len(rows))
    # [passages, length], in nats.
    losses = np.concatenate(batch_losses)

    def compute_mean(start: int, end: int) -> bootstrap.Metric:
        # A passage is the unit of the bootstrap: its positions are not independent.
        return bootstrap.ratio_metric(
            losses[:, start:end].sum(axis=1), [float(end - start)] * len(losses), higher=False
        )

    parts = [Part({"start": a, "end": b}, compute_mean(a, b)) for a, b in itertools.pairwise(edges)]
    loss, last = compute_mean(0, length), parts[-1].metric
    metrics = {"loss": loss, "perplexity": bootstrap.Metric(loss.rows, "perplexity", higher=False), "loss_at_end": last}
    return Result(metrics, len(rows), identity, tokens=losses.size, parts=tuple(parts))


@contextmanager
def _use_linear_memory(build: Build) -> Iterator[None]:
    """Context manager that replaces the plain attention kernel by blockwise attention, whose memory is linear.

    The scores of a row of 32,000 tokens would need 4 GiB per head.
    """
    from preheat.ops.attention.blockwise import attend_blockwise

    plain = build.slot(Slot.ATTENTION_KERNEL)
    # A technique's own kernel is part of the model and stays.
    is_plain = build.owner(Slot.ATTENTION_KERNEL) == "plain"
    if is_plain:
        build.claim(Slot.ATTENTION_KERNEL, attend_blockwise, "plain")
    try:
        yield
    finally:
        if is_plain:
            build.claim(Slot.ATTENTION_KERNEL, plain, "plain")
