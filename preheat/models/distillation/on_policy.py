"""Answers that the student writes itself, in the places of those of the data, for its teacher to judge.

Of the rows that are drawn, each document keeps its beginning: in a conversation what stands before its first answer, in plain text its first
half. From there on the student writes by its own probabilities, as many tokens as stood there, or until it ends. The document keeps its
length, its positions and its place in the row, so nothing else of the batch changes. What it wrote counts as much as what stood there.
Draws are a pure function of the seed, the step and the rows: a resumed run, and a step that is taken again, write the same. A step whose
micro-batch was made smaller draws others.
Source: Agarwal et al. 2023 (arXiv:2306.13649), algorithm 1: no gradient passes through the writing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from preheat.core import Batch, Build
from preheat.recipe import Sample

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Answer", "OnPolicy", "answers_of", "with_answers"]


@dataclass(frozen=True)
class Answer:
    """Where a document's answer stands in a row.

    Attributes:
        row: of the batch.
        begin, end: the document's first place, and the one after its last.
        first, last: the first token of the answer and the one after its last.
        trained: labels of the document that are trained.
    """

    row: int
    begin: int
    end: int
    first: int
    last: int
    trained: int


def answers_of(labels: Tensor, documents: Sequence[Sequence[int]], rows: Sequence[int]) -> list[Answer]:
    """The first answer of each document of these rows, or its second half where all of it is trained.

    Args:
        labels: [rows, length] on the host, as in `Batch`: that of a place is the next token, -100 is not trained.
        documents: their lengths, row by row.
        rows: of the batch.

    Example:
        >>> import torch
        >>> answers_of(torch.tensor([[-100, 5, 6, -100, 1, 2, 3, 4]]), [[4, 4]], [0])[0]
        Answer(row=0, begin=0, end=4, first=2, last=4, trained=2)
    """
    found = []
    for row in rows:
        begin = 0
        for length in documents[row]:
            end = begin + length
            trained = (labels[row, begin:end] != -100).tolist()
            if True in trained:
                at = trained.index(True)
                ends = trained.index(False, at) if False in trained[at:] else length
                at = at or length // 2 - 1  # all is trained from its first place on: plain text
                first, last = begin + at + 1, min(begin + ends + 1, end)
                if at >= 0 and last > first:
                    found.append(Answer(row, begin, end, first, last, sum(trained)))
            begin = end
    return found


def with_answers(batch: Batch, answers: Sequence[Answer], written: Sequence[Sequence[int]]) -> Batch:
    """The batch with what was written in the places of the answers; tensors on the host.

    Returns:
        A batch of the same shape and weight. Beside it stand [rows, length] fp32: 0 at the places of the data; at those whose next token was
        written how much each counts, so that a document counts as much as it did; places of its document that are neither are not trained.

    Example:
        >>> import torch
        >>> from preheat.core import MaskSpec
        >>> row = torch.arange(6)[None]
        >>> made = with_answers(Batch(row, row + 1, row, MaskSpec(documents=((6,),)), 6), [Answer(0, 0, 6, 3, 6, 6)], [[8, 9]])
        >>> made.tokens.tolist(), made.labels.tolist(), made.beside[0].tolist()
        ([[0, 1, 2, 8, 9, 5]], [[-100, -100, 8, 9, -100, -100]], [[0.0, 0.0, 3.0, 3.0, 0.0, 0.0]])
    """
    import torch

    tokens, labels = batch.tokens.clone(), batch.labels.clone()
    counts = torch.zeros(tokens.shape, dtype=torch.float32)
    for a, drawn in zip(answers, written, strict=True):
        ids = torch.tensor(list(drawn)[: a.last - a.first])
        upto = a.first + len(ids)
        tokens[a.row, a.first : upto] = ids
        labels[a.row, a.begin : a.end] = -100
        labels[a.row, a.first - 1 : upto - 1] = ids
        counts[a.row, a.first - 1 : upto - 1] = a.trained / len(ids)
    return replace(batch, tokens=tokens, labels=labels, beside=(*batch.beside, counts))


@dataclass
class OnPolicy:
    """A transform of batches: in some rows the student writes the answers.

    Attributes:
        part: the student.
        share: of the rows.
        stop: tokens that end a text.
    """

    build: Build
    part: Any
    tokenizer: Any
    share: float
    stop: frozenset[int]

    def __call__(self, batch: Batch) -> Batch:
        """For training alone: an evaluation reads the data. A dry run, whose rows hold nothing, writes nothing."""
        import torch
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        if not self.part.training:
            return batch
        if is_in_torch_dispatch_mode():
            return replace(
                batch, beside=(*batch.beside, batch.tokens.new_zeros(batch.tokens.shape, dtype=torch.float32))
            )
        device = batch.tokens.device
        host = replace(batch, tokens=batch.tokens.cpu(), labels=batch.labels.cpu())
        assert host.mask.documents is not None, "rows of the data have the lengths of their documents beside them"
        answers = answers_of(host.labels, host.mask.documents, self._drawn(host.rows))
        made = with_answers(host, answers, self._write(host, answers) if answers else [])
        return replace(
            made,
            tokens=made.tokens.to(device),
            labels=made.labels.to(device),
            beside=tuple(t.to(device) for t in made.beside),
        )

    def _seed(self, rows: Sequence[int]) -> random.Random:
        return random.Random(f"{self.build.recipe.seed} {self.build.state.step} {' '.join(map(str, rows))}")

    def _drawn(self, rows: Sequence[int]) -> list[int]:
        """Rows of the batch in which the student writes."""
        return [n for n, row in enumerate(rows) if self._seed([row]).random() < self.share]

    def _write(self, batch: Batch, answers: Sequence[Answer]) -> list[list[int]]:
        """What the student writes in the places of the answers."""
        import torch

        from preheat.models.generation.generate import generate

        prompts = [batch.tokens[a.row, a.begin : a.first].tolist() for a in answers]
        # What ends an answer of the data ends one of the student's, where it is a token that stands for nothing else.
        special = self.tokenizer.added_tokens_decoder.keys()
        ends = {int(batch.labels[a.row, a.last - 2]) for a in answers} & special
        settings = Sample(tokens=max(a.last - a.first for a in answers), temperature=1.0, compile=False)

        # Another length each time: compiled layers would be compiled for each.
        with torch.compiler.set_stance("force_eager"):
            written = generate(
                self.part,
                self.tokenizer,
                prompts,
                settings,
                stop=self.stop | ends,
                positions=self.build.model.positions,
                batch=len(prompts),
                seed=self._seed(batch.rows).getrandbits(62),
            )
        return [one.tokens for one in written]
