"""Retrieval questions over long contexts, built from random tokens of a tokenizer, for any vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RetrievalQuestion", "draw_key_value_prompt", "draw_phrase_prompt", "find_word_tokens"]

CUE, HIDDEN = 4, 2
"""Tokens of a needle that are repeated at the end as the cue, and tokens that must follow it."""
FEWEST = 64
"""Minimum number of word tokens; with fewer, all tokens that are not special are used."""


class RetrievalQuestion(NamedTuple):
    """One question in tokens.

    Attributes:
        context: tokens that the model reads.
        answer: tokens that must follow.
    """

    context: list[int]
    answer: list[int]


def find_word_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the IDs of tokens that consist of letters and digits, most of them after a space.

    Example:
        >>> find_word_tokens(AutoTokenizer.from_pretrained("gpt2"))[:3]  # doctest: +SKIP
        [15, 16, 17]
    """
    special = set(tokenizer.all_special_ids)
    every = sorted((number, piece) for piece, number in tokenizer.get_vocab().items() if number not in special)
    word_ids = [number for number, piece in every if piece.lstrip("▁Ġ").isalnum()]
    return word_ids if len(word_ids) >= FEWEST else [number for number, _ in every]


def draw_key_value_prompt(
    pieces: Sequence[int], length: int, depth: float, generator: np.random.Generator, begin: Sequence[int] = ()
) -> RetrievalQuestion:
    """Draws a list of key-value pairs that fills the length, followed by one of the keys; the answer is its value.

    Every second token of `pieces` is used in keys, the others as values. Keys have several tokens if there are too few.

    Args:
        length: maximum tokens of list, key and value together.
        depth: position of the queried pair: 0 first, 1 last.
        begin: tokens before the list; they count towards `length`.

    Raises:
        ValueError: the length is too short for two pairs.

    Example:
        >>> question = draw_key_value_prompt(range(10, 20), 9, 0.0, np.random.default_rng(0))
        >>> len(question.context), question.context[:2] == question.context[-2:]  # keys of two tokens
        (8, True)
        >>> question.answer == question.context[2:3]
        True
    """
    # Disjoint halves, so that no value can be taken for a key.
    keys, values = np.asarray(pieces)[::2], np.asarray(pieces)[1::2]
    size = 1
    while True:
        # Pairs of `size` key tokens and a value. One less: the question repeats a key, and its value must fit too.
        count = (length - len(begin)) // (size + 1) - 1
        # Use at most half of all possible keys, so that drawing is fast and keys differ.
        if len(keys) ** size >= 2 * count or count < 2:
            break
        size += 1
    if count < 2:
        raise ValueError(
            f"{length} tokens have no room for two pairs of {size + 1} tokens and the question; use "
            f"{3 * (size + 1) + len(begin)} or more"
        )
    # Without replacement, since a repeated key would have two values.
    drawn = generator.choice(len(keys) ** size, count, replace=False)
    # The digits of a drawn number to the base len(keys) select the tokens of its key: [count, size].
    key = np.stack([keys[drawn // len(keys) ** n % len(keys)] for n in range(size)], axis=1)
    value = values[generator.integers(len(values), size=count)]
    # [count * (size + 1)]: key, value, key, value, ...
    pairs = np.concatenate([key, value[:, None]], axis=1).ravel()
    queried = round(depth * (count - 1))
    return RetrievalQuestion([*begin, *pairs.tolist(), *key[queried].tolist()], [int(value[queried])])


def draw_phrase_prompt(
    hay: Sequence[int],
    pieces: Sequence[int],
    depth: float,
    generator: np.random.Generator,
    *,
    needles: int = 1,
    begin: Sequence[int] = (),
) -> RetrievalQuestion:
    """Hides phrases of random words in a text and repeats the beginning of one at the end; the answer is its rest.

    Args:
        hay: tokens of the text. Its end is cut by the tokens of the phrases, so that context and answer together have
            len(begin) + len(hay) tokens.
        depth: position of the queried phrase: 0 at the beginning, 1 at the end; the others are spread evenly.
        needles: number of phrases; they have no word in common.

    Raises:
        ValueError: too few tokens, or the text is too short.
    """
    size = CUE + HIDDEN
    # Tokens of the text that remain with the phrases, the cue at the end and the answer.
    room = len(hay) - needles * size - size
    if room < needles:
        raise ValueError(
            f"{len(hay)} tokens have no room for {needles} phrases of {size} and the question; use "
            f"{needles * (size + 1) + size} or more"
        )
    if len(pieces) < needles * size:
        raise ValueError(
            f"{needles} phrases of {size} words need {needles * size} word tokens, and the tokenizer has "
            f"{len(pieces)}; use fewer needles"
        )
    # [needles, size] of a permutation: no token occurs twice, so each cue has one continuation.
    phrases = np.asarray(pieces)[generator.permutation(len(pieces))[: needles * size]].reshape(needles, size)
    # The queried phrase first, then the others in the middle of equal parts.
    depths = [depth, *((n + 0.5) / max(1, needles - 1) for n in range(needles - 1))]
    text, start = [*begin], 0
    # Insert from the front, with positions counted in the text without phrases.
    for at, phrase in sorted(zip((round(d * room) for d in depths), phrases.tolist(), strict=True)):
        text += [*hay[start:at], *phrase]
        start = at
    text += hay[start:room]
    needle = phrases[0].tolist()
    return RetrievalQuestion([*map(int, text), *needle[:CUE]], needle[CUE:])
