"""On-policy distillation data: the student generates answers in place of those of the data, for its teacher to judge.

In the selected rows, each document keeps its beginning: a conversation up to its first answer, plain text up to its
middle. From there on the student samples from its own distribution, as many tokens as there were, or until it ends. The
document keeps its length and positions in the row, so nothing else of the batch changes. Generated tokens get the
weight of the tokens that they replace.
Sampling is a pure function of the seed, the step and the rows: a resumed run, and a retried step, generate the same. A
step that is retried with a smaller micro-batch samples differently.
Source: Agarwal et al. 2023 (arXiv:2306.13649), algorithm 1: no gradient flows through the sampling.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from preheat.core import Batch, Build
from preheat.recipe import Sample

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

__all__ = ["Answer", "OnPolicy", "read_answers", "replace_answers"]


@dataclass(frozen=True)
class Answer:
    """The position of a document's answer in a row.

    Attributes:
        row: of the batch.
        start, end: the document's first position, and the one after its last.
        first, last: the first token of the answer and the one after its last.
        trained: number of trained labels in the document.
    """

    row: int
    start: int
    end: int
    first: int
    last: int
    trained: int


def read_answers(labels: Tensor, documents: Sequence[Sequence[int]], rows: Sequence[int]) -> list[Answer]:
    """The first answer of each document of these rows, or its second half if all of it is trained.

    Args:
        labels: [rows, length] on the host, as in `Batch`: the label of a position is the next token, -100 is not
            trained.
        documents: lengths of the documents, by row.
        rows: of the batch.

    Example:
        >>> import torch
        >>> read_answers(torch.tensor([[-100, 5, 6, -100, 1, 2, 3, 4]]), [[4, 4]], [0])[0]
        Answer(row=0, start=0, end=4, first=2, last=4, trained=2)
    """
    answers = []
    for row in rows:
        begin = 0
        for length in documents[row]:
            end = begin + length
            trained = (labels[row, begin:end] != -100).tolist()
            if True in trained:
                # The first answer reaches to the next untrained position; a label names the
                # next token, so its tokens begin one later.
                at = trained.index(True)
                ends = trained.index(False, at) if False in trained[at:] else length
                at = at or length // 2 - 1  # trained from its first position: plain text
                first, last = begin + at + 1, min(begin + ends + 1, end)
                if at >= 0 and last > first:
                    answers.append(Answer(row, begin, end, first, last, sum(trained)))
            begin = end
    return answers


def replace_answers(batch: Batch, answers: Sequence[Answer], written: Sequence[Sequence[int]]) -> Batch:
    """Replaces the answers of a batch by generated ones; tensors on the host.

    Returns:
        A batch of the same shape and weight. `aligned` gets [rows, length] fp32: 0 at positions of the data; at those
        whose next token was generated, a weight that keeps the document's total; other positions of the document are
        not trained.

    Example:
        >>> import torch
        >>> from preheat.core import MaskSpec
        >>> row = torch.arange(6)[None]
        >>> old = Batch(row, row + 1, row, MaskSpec(documents=((6,),)), 6)
        >>> new = replace_answers(old, [Answer(0, 0, 6, 3, 6, 6)], [[8, 9]])
        >>> new.tokens.tolist(), new.labels.tolist(), new.aligned[0].tolist()
        ([[0, 1, 2, 8, 9, 5]], [[-100, -100, 8, 9, -100, -100]], [[0.0, 0.0, 3.0, 3.0, 0.0, 0.0]])
    """
    import torch

    tokens, labels = batch.tokens.clone(), batch.labels.clone()
    counts = torch.zeros(tokens.shape, dtype=torch.float32)
    for a, drawn in zip(answers, written, strict=True):
        # A batch generates as many tokens as its longest answer needs, so other rows are cut to their own room.
        ids = torch.tensor(list(drawn)[: a.last - a.first])
        upto = a.first + len(ids)
        tokens[a.row, a.first : upto] = ids
        # Later answers of the document follow a text that is gone, so only the generated one is trained.
        labels[a.row, a.start : a.end] = -100
        labels[a.row, a.first - 1 : upto - 1] = ids
        # The document's total weight stays what it was, however many tokens the student generated.
        counts[a.row, a.first - 1 : upto - 1] = a.trained / len(ids)
    return replace(batch, tokens=tokens, labels=labels, aligned=(*batch.aligned, counts))


@dataclass
class OnPolicy:
    """A transform of batches: in a share of the rows, the student generates the answers.

    Attributes:
        part: the student.
        share: of the rows.
        stop: end-of-text tokens.
    """

    build: Build
    part: nn.Module
    tokenizer: PreTrainedTokenizerBase
    share: float
    stop: frozenset[int]

    def __call__(self, batch: Batch) -> Batch:
        """Only for training: evaluations read the data. A dry run, whose rows are empty, generates nothing."""
        import torch
        from torch.utils._python_dispatch import is_in_torch_dispatch_mode

        if not self.part.training:
            return batch
        # The extra tensor of weights is part of every batch, so a dry run has to see it as well.
        if is_in_torch_dispatch_mode():
            return replace(
                batch, aligned=(*batch.aligned, batch.tokens.new_zeros(batch.tokens.shape, dtype=torch.float32))
            )
        device = batch.tokens.device
        host = replace(batch, tokens=batch.tokens.cpu(), labels=batch.labels.cpu())
        assert host.mask.documents is not None, "rows of the data have the lengths of their documents beside them"
        answers = read_answers(host.labels, host.mask.documents, self._draw_rows(host.rows))
        filled = replace_answers(host, answers, self._write(host, answers) if answers else [])
        return replace(
            filled,
            tokens=filled.tokens.to(device),
            labels=filled.labels.to(device),
            aligned=tuple(t.to(device) for t in filled.aligned),
        )

    def _seed_generator(self, rows: Sequence[int]) -> random.Random:
        # A generator of its own: the process's generators advance as if nothing had been sampled.
        return random.Random(f"{self.build.recipe.seed} {self.build.state.step} {' '.join(map(str, rows))}")

    def _draw_rows(self, rows: Sequence[int]) -> list[int]:
        """Rows of the batch in which the student generates."""
        # One draw per row, so that the choice does not depend on how rows are divided over devices and micro-batches.
        return [n for n, row in enumerate(rows) if self._seed_generator([row]).random() < self.share]

    def _write(self, batch: Batch, answers: Sequence[Answer]) -> list[list[int]]:
        """Generates the student's answers."""
        import torch

        from preheat.models.generation.generate import generate

        prompts = [batch.tokens[a.row, a.start : a.first].tolist() for a in answers]
        # A special token that ends an answer of the data also ends one of the student's.
        special = self.tokenizer.added_tokens_decoder.keys()
        # labels[last - 2] is the answer's last token.
        ends = {int(batch.labels[a.row, a.last - 2]) for a in answers} & special
        settings = Sample(max_new_tokens=max(a.last - a.first for a in answers), temperature=1.0, compile=False)

        # Each length occurs once: compiled layers would recompile for each.
        with torch.compiler.set_stance("force_eager"):
            written = generate(
                self.part,
                self.tokenizer,
                prompts,
                settings,
                stop=self.stop | ends,
                positions=self.build.model.positions,
                batch=len(prompts),
                seed=self._seed_generator(batch.rows).getrandbits(62),
            )
        return [one.tokens for one in written]
