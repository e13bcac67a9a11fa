"""Likelihoods of continuations and greedy answers, through a build: its attention, its precision, its micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from preheat.core import Batch, Build, MaskSpec, Tag
from preheat.data.tokenizer import Encoder
from preheat.engine.evaluate import likeliest, token_scores
from preheat.errors import DataError
from preheat.models.generation.generate import generate
from preheat.recipe import Sample

__all__ = ["CLASSES", "Reader", "Score", "Scorer", "batch_of"]

CLASSES = Tag.CLASSIFICATION_HEAD
"""Of a build whose head is over classes in place of the vocabulary."""

MULTIPLE = 32
"""Batches are padded to a multiple: few distinct shapes are few kernels to generate."""


class Score(NamedTuple):
    """Of a continuation.

    Attributes:
        loglikelihood: the sum over its tokens, nats.
        greedy: each of its tokens is the likeliest one.
        tokens: how many it has.
    """

    loglikelihood: float
    greedy: bool
    tokens: int


class Reader:
    """Text as tokens, cut into what is read and what is scored.

    Args:
        length: tokens of a row.
    """

    def __init__(self, tokenizer: Any, length: int):
        self.tokenizer, self.length = tokenizer, length
        self.encoder = Encoder(tokenizer)

    def encode(self, text: str, *, complete: bool = False) -> list[int]:
        """A text's tokens as training has them at a document's beginning; `complete`: its special tokens stand in
        it."""
        return [*([] if complete else self.encoder.begin), *self._plain(text)]

    def _plain(self, text: str) -> list[int]:
        return list(self.encoder.backend.encode(text, add_special_tokens=False).ids)

    def pair(self, context: str, continuation: str, *, complete: bool = False) -> tuple[list[int], list[int]]:
        """The tokens of a context and of what follows it, cut from those of both together; blanks between belong to
        what follows."""
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        head = self.encode(context, complete=complete) if context else []
        if not head:  # something must be read before the first token can be scored
            return self.encoder.begin or [self.encoder.end], self._plain(continuation)
        return head, self.encode(context + continuation, complete=complete)[len(head) :]

    def require_room(self, continuation: Sequence[int], where: str) -> None:
        """Raises DataError where what is to be scored has no token, or more than a row."""
        if not continuation:
            raise DataError(f"{where}: what is to be scored has no token of its own")
        if len(continuation) > self.length:
            raise DataError(
                f"{where}: what is to be scored has {len(continuation)} tokens, a row only {self.length}; "
                "shorten it, leave such rows "
                "out (the task's `where`), or raise batch.length (of a run) or --length"
            )


class Scorer(Reader):
    """Reads with a build.

    Args:
        micro: rows at once, as in training at most, so that a run needs no more memory than was planned.
        length: tokens of a row; a longer context loses its beginning, which is counted in `truncated`.
        classes: names of a head's classes, in the order of its rows, where they are known.
        compiles: the model may be compiled for single tokens where that pays (`sample.compile: auto`): not within a
            run, whose plan does not know what that keeps of the device's memory.
        say: told (what, done, total) now and then.
    """

    def __init__(
        self,
        build: Build,
        tokenizer: Any,
        *,
        micro: int,
        length: int,
        classes: Sequence[str] = (),
        compiles: bool = False,
        say: Callable[[str, float, float | None], None] | None = None,
    ):
        super().__init__(tokenizer, length)
        self.compiles = compiles
        self.build, self.micro, self.classes = build, micro, tuple(classes)
        self.say = say or (lambda what, done, total: None)
        self.truncated = 0

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], where: Sequence[str] = ()) -> list[Score]:
        """The score of each (context, continuation) in tokens. Pairs that read the same tokens share a row.

        Raises:
            DataError: a continuation without a token, or longer than a row.
        """
        rows: dict[tuple[int, ...], list[int]] = {}
        for n, (context, continuation) in enumerate(pairs):
            self.require_room(continuation, where[n] if where else f"pair {n}")
            whole = (*context, *continuation)[-(self.length + 1) :]
            self.truncated += len(whole) < len(context) + len(continuation)
            rows.setdefault(whole[:-1], []).append(n)
        made: list[Score | None] = [None] * len(pairs)
        order = sorted(rows, key=len, reverse=True)
        for first in range(0, len(order), self.micro):
            some = order[first : first + self.micro]
            length = min(self.length, -(-len(some[0]) // MULTIPLE) * MULTIPLE)
            places: list[int] = []
            targets: list[int] = []
            owners: list[tuple[int, int]] = []  # (pair, tokens)
            for row, read in enumerate(some):
                for n in rows[read]:
                    continuation = pairs[n][1]
                    places += range(row * length + len(read) - len(continuation), row * length + len(read))
                    targets += continuation
                    owners.append((n, len(continuation)))
            scores, best = token_scores(
                self.build, batch_of(some, length, self.encoder.pad), torch.tensor(places), torch.tensor(targets)
            )
            sizes = [count for _, count in owners]
            for (n, count), s, g in zip(owners, scores.double().split(sizes), best.split(sizes), strict=True):
                made[n] = Score(float(s.sum()), bool(g.all()), count)
            self.say("scoring", min(first + self.micro, len(order)), len(order))
        return [score for score in made if score is not None]

    def classify(self, contexts: Sequence[Sequence[int]]) -> list[int]:
        """The class of each text by a head over classes, read at the end of text, as such a head is trained."""
        made = [0] * len(contexts)
        rows = [[*context, self.encoder.end][-self.length :] for context in contexts]
        self.truncated += sum(len(row) < len(context) + 1 for row, context in zip(rows, contexts, strict=True))
        order = sorted(range(len(rows)), key=lambda n: len(rows[n]), reverse=True)
        for first in range(0, len(order), self.micro):
            some = order[first : first + self.micro]
            length = min(self.length, -(-len(rows[some[0]]) // MULTIPLE) * MULTIPLE)
            places = torch.tensor([row * length + len(rows[n]) - 1 for row, n in enumerate(some)])
            batch = batch_of([rows[n] for n in some], length, self.encoder.pad)
            for n, found in zip(some, likeliest(self.build, batch, places).tolist(), strict=True):
                made[n] = found
            self.say("classifying", first + len(some), len(order))
        return made

    def write(
        self, contexts: Sequence[Sequence[int]], *, tokens: int, stop: Sequence[str], strip: bool = True
    ) -> list[str]:
        """What the model writes after each context, greedily: up to so many tokens, cut before the first of `stop`.

        Args:
            strip: leave out white space at the beginning, before `stop` is looked for, and at the end.
        """
        limit = self.build.model.positions
        room = max(1, min(self.length, limit - tokens)) if limit else self.length
        kept = [list(context)[-room:] for context in contexts]
        self.truncated += sum(len(some) < len(context) for some, context in zip(kept, contexts, strict=True))
        order = sorted(range(len(kept)), key=lambda n: len(kept[n]), reverse=True)
        answers = [""] * len(kept)
        ended = 0

        def count(row: int, text: str | None) -> None:
            nonlocal ended
            if text is None:
                ended += 1
                self.say("writing", ended, len(order))

        written = generate(
            self.build.trained[0],  # type: ignore[arg-type]
            self.tokenizer,
            [kept[n] for n in order],
            Sample(tokens=tokens, compile="auto" if self.compiles else False),
            stop=frozenset({self.encoder.end}),
            positions=limit,
            batch=self.micro,
            on_text=count,
        )
        for n, found in zip(order, written, strict=True):
            text = (
                found.text.lstrip() if strip else found.text
            )  # an answer may begin with a line end, which ends nothing yet
            for words in filter(None, stop):
                text = text.split(words, 1)[0]
            answers[n] = text.rstrip() if strip else text
        return answers


def batch_of(rows: Sequence[Sequence[int]], length: int, pad: int) -> Batch:
    """Rows that are read, each one document, padded at its end to `length` tokens; no label stands in them."""
    tokens = torch.full((len(rows), length), pad, dtype=torch.int64)
    for row, read in enumerate(rows):
        tokens[row, : len(read)] = torch.tensor(read)
    positions = torch.arange(length).expand(len(rows), length)
    # Padding stands after what counts, which never sees it: each row is one document.
    return Batch(tokens, torch.full_like(tokens, -100), positions, MaskSpec(), 0, tuple(range(len(rows))))
