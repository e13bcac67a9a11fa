"""Scores continuations by likelihood and generates greedy answers with a build's own attention and precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from preheat.core import Batch, Build, MaskSpec, Tag
from preheat.data.tokenizer import Encoder
from preheat.engine.evaluate import find_likeliest, score_tokens
from preheat.errors import DataError
from preheat.evaluation.metrics import cut_answer
from preheat.models.generation.generate import generate
from preheat.recipe import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["CLASSES", "Reader", "Score", "Scorer", "build_batch"]

CLASSES = Tag.CLASSIFICATION_HEAD
"""Tag of builds with a classification head in place of the language model head."""

MULTIPLE = 32
"""Lengths of batches are padded to a multiple: fewer distinct shapes need fewer compiled kernels."""


class Score(NamedTuple):
    """The score of a continuation.

    Attributes:
        loglikelihood: sum over its tokens, in nats.
        greedy: True if each of its tokens is the most likely one.
        tokens: number of its tokens.
    """

    loglikelihood: float
    greedy: bool
    tokens: int


class Reader:
    """Tokenizes texts and splits them into context and continuation.

    Args:
        length: tokens of a row.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, length: int):
        self.tokenizer, self.length = tokenizer, length
        self.encoder = Encoder(tokenizer)

    def encode(self, text: str, *, complete: bool = False) -> list[int]:
        """Tokenizes a text like the beginning of a document in training; `complete`: it already has its special
        tokens."""
        return [*([] if complete else self.encoder.begin), *self._plain(text)]

    def _plain(self, text: str) -> list[int]:
        return list(self.encoder.backend.encode(text, add_special_tokens=False).ids)

    def pair(self, context: str, continuation: str, *, complete: bool = False) -> tuple[list[int], list[int]]:
        """Tokenizes context and continuation together and splits the tokens; spaces between them belong to the
        continuation."""
        # Most tokenizers join a space to the word after it, so it is encoded with the continuation.
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        head = self.encode(context, complete=complete) if context else []
        if not head:  # scoring the first token needs a token before it
            return self.encoder.begin or [self.encoder.end], self._plain(continuation)
        # Encoded together, as the text would be in training, and cut after the context's tokens.
        return head, self.encode(context + continuation, complete=complete)[len(head) :]

    def require_room(self, continuation: Sequence[int], where: str) -> None:
        """Raises DataError if a continuation has no token, or more than a row."""
        if not continuation:
            raise DataError(f"{where}: the text to be scored has no token of its own")
        if len(continuation) > self.length:
            raise DataError(
                f"{where}: the text to be scored has {len(continuation)} tokens, a sequence only {self.length}; "
                "shorten it, leave such rows out (the task's `where`), or raise batch.seq_len (of a run) or --length"
            )


class Scorer(Reader):
    """Scores and generates texts with a build.

    Args:
        micro: rows per batch; at most as in training, so that a run needs no more memory than planned.
        length: tokens of a row; longer contexts are cut at their beginning, which `truncated` counts.
        classes: names of a head's classes, in the order of its rows, if known.
        compiles: allow compiling the model for generation if it pays off (`sample.compile: auto`); not within a run,
            whose plan does not include the memory that compiling keeps.
        say: progress callback of (what, done, total).
    """

    def __init__(
        self,
        build: Build,
        tokenizer: PreTrainedTokenizerFast,
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
        """Scores each pair of context and continuation, given in tokens. Pairs with equal inputs share a row.

        Raises:
            DataError: a continuation without a token, or longer than a row.
        """
        rows: dict[tuple[int, ...], list[int]] = {}
        for n, (context, continuation) in enumerate(pairs):
            self.require_room(continuation, where[n] if where else f"pair {n}")
            # One token more than a row: the last one is predicted and not read.
            sequence = (*context, *continuation)[-(self.length + 1) :]
            self.truncated += len(sequence) < len(context) + len(continuation)
            # Choices that differ in their last token alone read the same inputs.
            rows.setdefault(sequence[:-1], []).append(n)
        results: list[Score | None] = [None] * len(pairs)
        order = sorted(rows, key=len, reverse=True)  # similar lengths share a batch: less padding
        for first in range(0, len(order), self.micro):
            chunk = order[first : first + self.micro]
            length = min(self.length, -(-len(chunk[0]) // MULTIPLE) * MULTIPLE)
            positions: list[int] = []
            targets: list[int] = []
            owners: list[tuple[int, int]] = []  # (pair, tokens)
            for row, inputs in enumerate(chunk):
                for n in rows[inputs]:
                    continuation = pairs[n][1]
                    # The token at position t + 1 is predicted at t, hence the
                    # positions one before the continuation's tokens.
                    positions += range(row * length + len(inputs) - len(continuation), row * length + len(inputs))
                    targets += continuation
                    owners.append((n, len(continuation)))
            scores, best = score_tokens(
                self.build, build_batch(chunk, length, self.encoder.pad), torch.tensor(positions), torch.tensor(targets)
            )
            sizes = [count for _, count in owners]
            # Sums in fp64: long continuations add hundreds of terms.
            for (n, count), s, g in zip(owners, scores.double().split(sizes), best.split(sizes), strict=True):
                results[n] = Score(float(s.sum()), bool(g.all()), count)
            self.say("scoring", min(first + self.micro, len(order)), len(order))
        return [score for score in results if score is not None]

    def predict_classes(self, contexts: Sequence[Sequence[int]]) -> list[int]:
        """Predicts the class of each text with a classification head at the end-of-text token, as in training."""
        predicted = [0] * len(contexts)
        rows = [[*context, self.encoder.end][-self.length :] for context in contexts]
        self.truncated += sum(len(row) < len(context) + 1 for row, context in zip(rows, contexts, strict=True))
        # Similar lengths share a batch, as in `score`.
        order = sorted(range(len(rows)), key=lambda n: len(rows[n]), reverse=True)
        for first in range(0, len(order), self.micro):
            chunk = order[first : first + self.micro]
            length = min(self.length, -(-len(rows[chunk[0]]) // MULTIPLE) * MULTIPLE)
            # The last token of each row, indexed in the flattened batch.
            positions = torch.tensor([row * length + len(rows[n]) - 1 for row, n in enumerate(chunk)])
            batch = build_batch([rows[n] for n in chunk], length, self.encoder.pad)
            for n, number in zip(chunk, find_likeliest(self.build, batch, positions).tolist(), strict=True):
                predicted[n] = number
            self.say("classifying", first + len(chunk), len(order))
        return predicted

    def write(
        self,
        contexts: Sequence[Sequence[int]],
        *,
        tokens: int,
        stop: Sequence[str],
        strip: bool = True,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """Generates an answer of at most `tokens` tokens for each context, cut before the first of `stop`.

        Args:
            strip: remove white space at the beginning, before `stop` is searched, and at the end.
            temperature, top_p, seed: of sampling; greedy by default.
        """
        limit = self.build.model.positions
        # With a limited number of positions, the prompt leaves room for the answer.
        room = max(1, min(self.length, limit - tokens)) if limit else self.length
        # Cut at the beginning: the question is at the end.
        prompts = [list(context)[-room:] for context in contexts]
        self.truncated += sum(len(prompt) < len(context) for prompt, context in zip(prompts, contexts, strict=True))
        order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]), reverse=True)
        answers = [""] * len(prompts)
        ended = 0

        def count(row: int, text: str | None) -> None:
            nonlocal ended
            if text is None:
                ended += 1
                self.say("writing", ended, len(order))

        written = generate(
            self.build.trained[0],  # type: ignore[arg-type]
            self.tokenizer,
            [prompts[n] for n in order],
            Sample(
                max_new_tokens=tokens,
                compile="auto" if self.compiles else False,
                temperature=temperature,
                top_p=top_p,
            ),
            stop=frozenset({self.encoder.end}),
            seed=seed,
            positions=limit,
            batch=self.micro,
            on_text=count,
        )
        for n, answer in zip(order, written, strict=True):
            # A leading line break must not match `stop`.
            text = cut_answer(answer.text.lstrip() if strip else answer.text, stop)
            answers[n] = text.rstrip() if strip else text
        return answers


def build_batch(rows: Sequence[Sequence[int]], length: int, pad: int) -> Batch:
    """Returns a batch of rows, each one document, right-padded to `length` tokens, without labels."""
    tokens = torch.full((len(rows), length), pad, dtype=torch.int64)
    for row, inputs in enumerate(rows):
        tokens[row, : len(inputs)] = torch.tensor(inputs)
    positions = torch.arange(length).expand(len(rows), length)
    # Padding needs no mask: it follows the tokens, which attend only backwards.
    return Batch(tokens, torch.full_like(tokens, -100), positions, MaskSpec(), 0, tuple(range(len(rows))))
