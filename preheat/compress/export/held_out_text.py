"""Text for an export's perplexity: the run's own validation rows, as in its evaluations, or sample texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.compress.export.verify import Difference
from preheat.compress.unfinished_run import note_unfinished
from preheat.core import Tag
from preheat.core.export import HeldOutPerplexity, Perplexity
from preheat.errors import DataError, RecipeError
from preheat.inference.load import LoadedModel
from preheat.models.hf import compute_reference_logits
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["SAMPLES", "HeldOutText", "choose_held_out_text"]

SAMPLES = "the sample texts that logits are compared over (prose, code, arithmetic, JSON)"
Replay = Callable[[list[Tensor]], list[Tensor]]
"""Returns the logits [1, n, vocabulary] of rows of tokens [1, n]."""
_AT_ONCE = 2048
"""Tokens per call of `Replay`."""
_TOKENS = 1 << 16
"""Maximum number of validation tokens: 256 rows of 256, the default of evaluations."""


@dataclass
class HeldOutText:
    """Text to measure perplexity on.

    Attributes:
        words: a description of the text.
        before: the run's perplexity; None: report that of the compared texts.
        documents: tokens and labels, [1, n] each, unpacked.
        computes_in: precision that the run computes in, in which `before` was measured.
        unfinished: a note if the model is not the end of its run; else ''.
        step: of the run; None: the model is from a folder.
    """

    words: str
    before: float | None = None
    documents: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    computes_in: str = ""
    unfinished: str = ""
    step: int | None = None

    def perplexities(self, difference: Difference, replay: Replay | None, *, longest: int = 0) -> HeldOutPerplexity:
        """Returns the perplexities for a writer's result.

        `before` has `computes_in` if the run's own evaluation measured it; otherwise both are of the same precision.

        Args:
            difference: its perplexities are used if there are no documents.
            replay: computes logits with the exported file; None: the perplexity before is reported for both.
            longest: maximum sequence length of `replay`; 0: unlimited.
        """
        before, after = difference.perplexity or (None, None)
        computes_in = ""
        description = f"{SAMPLES if self.documents else self.words}: {difference.predicted:,} tokens"
        # One document longer than the file's limit would change the text, so the samples are used instead.
        if self.documents and not (longest and any(tokens.shape[1] > longest for tokens, _ in self.documents)):
            before, after, description = (
                self.before,
                self.before if replay is None else self._compute_perplexity(replay),
                self.words,
            )
            computes_in = self.computes_in
        own = computes_in if computes_in and replay is not None else None
        return HeldOutPerplexity(Perplexity(before, own), Perplexity(after), description, self.unfinished, self.step)

    def by(self, model: PreTrainedModel, difference: Difference) -> HeldOutPerplexity:
        """Returns `perplexities` for a transformers model."""
        return self.perplexities(difference, lambda rows: [compute_reference_logits(model, row) for row in rows])

    def _compute_perplexity(self, replay: Replay) -> float:
        total, count = 0.0, 0
        for documents in self._iterate_parts():
            for logits, (_, labels) in zip(replay([tokens for tokens, _ in documents]), documents, strict=True):
                total += float(
                    # Labels are already shifted: position n has the label of its next token, -100 for none.
                    torch.nn.functional.cross_entropy(
                        logits[0].float().cpu(), labels[0], ignore_index=-100, reduction="sum"
                    )
                )
                count += int((labels != -100).sum())
        return math.exp(total / count)

    def _iterate_parts(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yields a few documents at a time, since all logits together may be larger than the model."""
        part: list[tuple[Tensor, Tensor]] = []
        for document in self.documents:
            if part and sum(tokens.shape[1] for tokens, _ in (*part, document)) > _AT_ONCE:
                yield part
                part = []
            part.append(document)
        if part:
            yield part


def choose_held_out_text(opened: LoadedModel, source: str | Path) -> HeldOutText:
    """Returns the text for a model's perplexity, with a note if its run is unfinished."""
    return replace(_read_held_out_text(opened), unfinished=note_unfinished(source, opened.step), step=opened.step)


def _read_held_out_text(opened: LoadedModel) -> HeldOutText:
    """Returns the validation rows of a run with its perplexity on them; otherwise the sample texts.

    Sample texts are used for models without a run, runs without validation rows, and other objectives than next-token
    loss.
    """
    from preheat.core import Slot
    from preheat.data import Rows, prepare
    from preheat.data.loader import choose_evaluation_rows
    from preheat.evaluation.perplexity import count_token_bytes, measure_text

    recipe, build = opened.recipe, opened.build
    if opened.step is None:
        return HeldOutText(SAMPLES)
    plain = build.owner(Slot.OBJECTIVE) == "plain" and not opened.classes
    if (
        not plain
        # Exported files are replayed over tokens alone, without images or the inputs of an encoder.
        or build.model.vision is not None
        or build.trained[0].config.is_encoder_decoder  # type: ignore[union-attr]
    ):
        return HeldOutText(SAMPLES)
    try:
        data = replace(recipe.data, tokenizer=opened.tokenizer_folder)
        # The same split as in training, because it depends on the data's settings and the seed.
        rows = prepare(
            data, length=recipe.batch.seq_len, seed=recipe.seed, add_tokens=recipe.model.add_tokens
        ).validation
    except (DataError, RecipeError) as error:
        return HeldOutText(f"{SAMPLES}, since the run's data cannot be read here: {shorten(str(error), 160)}")
    if not isinstance(rows, Rows) or not len(rows):
        return HeldOutText(f"{SAMPLES}, since the run has no validation data")
    limit = min(recipe.evaluate.rows, max(1, _TOKENS // rows.length))
    sizes = count_token_bytes(opened.tokenizer)
    measured = measure_text(build, rows, micro=min(8, recipe.batch.size), limit=limit, sizes=sizes)
    documents = []
    # The rows of the run's evaluations, so that the perplexities can be compared with its own.
    for number in choose_evaluation_rows(len(rows), limit):
        row, start = rows.row(number), 0
        # Unpacked: other runtimes have no mask between the documents of a packed row.
        for length in row.documents:
            tokens, labels = (
                torch.from_numpy(values[start : start + length].copy())[None] for values in (row.tokens, row.labels)
            )
            start += length
            # A document whose labels are all masked has no loss.
            if bool((labels != -100).any()):
                documents.append((tokens, labels))
    rows_used = (
        f"{limit:,} of its {len(rows):,} validation sequences"
        if limit < len(rows)
        else f"all of its {len(rows):,} validation sequences"
    )
    return HeldOutText(
        f"the run's own data, {rows_used}: {measured.tokens:,} tokens",
        measured.metrics["perplexity"].value,
        documents,
        next((name for tag, name in _PRECISIONS.items() if tag in build.tags), "fp32"),
    )


_PRECISIONS = {Tag.FP8_COMPUTE: "fp8", Tag.BF16_COMPUTE: "bf16", Tag.FP16_COMPUTE: "fp16", Tag.TF32_PRODUCTS: "tf32"}
