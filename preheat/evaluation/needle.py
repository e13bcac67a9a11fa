"""Questions whose answer stands far back, made of a tokenizer's own pieces: so they can be asked in any vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["RetrievalQuestion", "pairs_asked", "phrase_asked", "word_pieces"]

CUE, HIDDEN = 4, 2
"""Pieces of a needle that are shown again at the end, and those that must then follow."""
FEWEST = 64
"""Pieces that are words; with fewer, all that are not special are taken."""


class RetrievalQuestion(NamedTuple):
    """One question in tokens.

    Attributes:
        context: what is read.
        answer: what must follow.
    """

    context: list[int]
    answer: list[int]


def word_pieces(tokenizer: Any) -> list[int]:
    """Tokens of letters and digits only, by number; a blank before them is part of most.

    Example:
        >>> word_pieces(AutoTokenizer.from_pretrained("gpt2"))[:3]  # doctest: +SKIP
        [15, 16, 17]
    """
    special = set(tokenizer.all_special_ids)
    every = sorted((number, piece) for piece, number in tokenizer.get_vocab().items() if number not in special)
    words = [number for number, piece in every if piece.lstrip("▁Ġ").isalnum()]
    return words if len(words) >= FEWEST else [number for number, _ in every]


def pairs_asked(
    pieces: Sequence[int], length: int, depth: float, generator: np.random.Generator, begin: Sequence[int] = ()
) -> RetrievalQuestion:
    """A list of pairs, key and value, as long as there is room; then a key again, whose value is asked.

    Every second piece is for keys, the others are for values. Where there are too few for so many keys, a key is several of them.

    Args:
        length: tokens of list, key and value together, at most.
        depth: where the pair stands that is asked: 0 first, 1 last.
        begin: what stands before all, and counts.

    Raises:
        ValueError: no room for two pairs.

    Example:
        >>> asked = pairs_asked(range(10, 20), 9, 0.0, np.random.default_rng(0))
        >>> len(asked.context), asked.context[0] == asked.context[-1], asked.answer == asked.context[1:2]
        (8, True, True)
    """
    keys, values = np.asarray(pieces)[::2], np.asarray(pieces)[1::2]
    size = 1
    while True:
        count = (length - len(begin)) // (size + 1) - 1
        if len(keys) ** size >= 2 * count or count < 2:  # half of all keys at most: drawing stays quick and keys unlike
            break
        size += 1
    if count < 2:
        raise ValueError(
            f"{length} tokens have no room for two pairs of {size + 1} tokens and the question; use "
            f"{3 * (size + 1) + len(begin)} or more"
        )
    drawn = generator.choice(len(keys) ** size, count, replace=False)
    key = np.stack([keys[drawn // len(keys) ** n % len(keys)] for n in range(size)], axis=1)
    value = values[generator.integers(len(values), size=count)]
    told = np.concatenate([key, value[:, None]], axis=1).ravel()
    asked = round(depth * (count - 1))
    return RetrievalQuestion([*begin, *told.tolist(), *key[asked].tolist()], [int(value[asked])])


def phrase_asked(
    hay: Sequence[int],
    pieces: Sequence[int],
    depth: float,
    generator: np.random.Generator,
    *,
    needles: int = 1,
    begin: Sequence[int] = (),
) -> RetrievalQuestion:
    """Phrases of random words hidden in a text; the beginning of one stands again at the end, and its last words are asked.

    Args:
        hay: tokens of the text. It loses as many at its end as the phrases take, so that context and answer have
            len(begin) + len(hay) together.
        depth: where the phrase stands that is asked: 0 at the beginning, 1 at the end; the others are spread evenly over the text.
        needles: how many phrases; they share no word.

    Raises:
        ValueError: too few pieces or too short a text.
    """
    whole = CUE + HIDDEN
    room = len(hay) - needles * whole - whole
    if room < needles:
        raise ValueError(
            f"{len(hay)} tokens have no room for {needles} phrases of {whole} and the question; use "
            f"{needles * (whole + 1) + whole} or more"
        )
    if len(pieces) < needles * whole:
        raise ValueError(
            f"{needles} phrases of {whole} words need {needles * whole} pieces, and the tokenizer has "
            f"{len(pieces)}; use fewer needles"
        )
    words = np.asarray(pieces)[generator.permutation(len(pieces))[: needles * whole]].reshape(needles, whole)
    depths = [depth, *((n + 0.5) / max(1, needles - 1) for n in range(needles - 1))]
    text, start = [*begin], 0
    for at, phrase in sorted(zip((round(d * room) for d in depths), words.tolist(), strict=True)):
        text += [*hay[start:at], *phrase]
        start = at
    text += hay[start:room]
    asked = words[0].tolist()
    return RetrievalQuestion([*map(int, text), *asked[:CUE]], asked[CUE:])
