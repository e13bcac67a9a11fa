"""Quality rules for text: Gopher's (Rae et al. 2021, arXiv:2112.11446, A.1 and table A1) and C4's (Raffel et al. 2020).

A rule is a measure of a text with a threshold. The rules only leave out whole rows: C4's removal of single lines is not
among them. Lines and paragraphs are those that are not blank, and words are separated by white space.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from preheat.core.schema import Clean

__all__ = ["FILTERS", "Failure", "TextMeasures", "choose_thresholds", "find_failed_rule"]

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_BULLETS = ("•", "‣", "▶", "◀", "◦", "■", "□", "▪", "▫", "–", "-", "*")
_ELLIPSES = ("...", "…")
# Possessive, so that a search is linear in the text.
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]]*+(?=\s|$)|[。！？]")
_BLANK_LINES = re.compile(r"\n\s*\n")

Threshold = float | tuple[str, ...]

FILTERS: dict[str, dict[str, Threshold]] = {
    "gopher": {
        "min_words": 50,
        "max_words": 100_000,
        "min_mean_word_length": 3.0,
        "max_mean_word_length": 10.0,
        "max_symbols": 0.1,
        "max_bullet_lines": 0.9,
        "max_ellipsis_lines": 0.3,
        "min_alphabetic_words": 0.8,
        "min_stop_words": 2,
    },
    "gopher_repetition": {
        "max_repeated_lines": 0.3,
        "max_repeated_line_chars": 0.2,
        "max_repeated_paragraphs": 0.3,
        "max_repeated_paragraph_chars": 0.2,
        "max_top_2gram": 0.2,
        "max_top_3gram": 0.18,
        "max_top_4gram": 0.16,
        "max_repeated_5gram": 0.15,
        "max_repeated_6gram": 0.14,
        "max_repeated_7gram": 0.13,
        "max_repeated_8gram": 0.12,
        "max_repeated_9gram": 0.11,
        "max_repeated_10gram": 0.1,
    },
    "c4": {"min_sentences": 3, "banned_texts": ("lorem ipsum", "{")},
}
"""The published thresholds by name of `data.clean.filters`."""


def choose_thresholds(settings: Clean) -> dict[str, Threshold]:
    """Returns rule -> threshold: those of `filters`, overridden by the keys that are set, in the order of the keys.

    Example:
        >>> choose_thresholds(Clean(filters=("c4",), min_sentences=5, min_words=3))
        {'min_words': 3, 'min_sentences': 5, 'banned_texts': ('lorem ipsum', '{')}
    """
    published = {rule: value for name in settings.filters for rule, value in FILTERS[name].items()}
    rules = (rule for part in FILTERS.values() for rule in part)
    values = {rule: getattr(settings, rule) for rule in rules}
    chosen = {rule: published.get(rule) if value is None else value for rule, value in values.items()}
    return {rule: value for rule, value in chosen.items() if value is not None}


class Failure(NamedTuple):
    """A rule that a text fails, and a message with the measured value."""

    rule: str
    message: str


def find_failed_rule(text: str, thresholds: Mapping[str, Threshold]) -> Failure | None:
    """Returns the first rule that a text fails, or None.

    Example:
        >>> find_failed_rule("too short", {"min_words": 50})
        Failure(rule='min_words', message='words: 2 is below 50')
    """
    measures = TextMeasures(text)
    for rule, threshold in thresholds.items():
        if isinstance(threshold, tuple):
            lower = text.lower()
            if banned := next((item for item in threshold if item.lower() in lower), None):
                return Failure(rule, f"holds the banned text {banned!r}")
            continue
        bound, _, name = rule.partition("_")
        value = measures.measure(name)
        if value < threshold if bound == "min" else value > threshold:
            side = "below" if bound == "min" else "above"
            return Failure(rule, f"{name.replace('_', ' ')}: {value:,.4g} is {side} {threshold:,g}")
    return None


class TextMeasures:
    """The measures of a text, each computed when it is first needed.

    Example:
        >>> TextMeasures("a b c a b d").measure("top_2gram")  # "a b" twice: four of six characters
        0.6666666666666666
    """

    def __init__(self, text: str):
        self.text = text

    def measure(self, name: str) -> float:
        """Returns the value of a rule's measure, the rule's name without `min_` or `max_`."""
        kind, _, size = name.rpartition("_")
        if size.endswith("gram"):
            length = int(size.removesuffix("gram"))
            return self._top_gram(length) if kind == "top" else self._repeated_grams(length)
        return _MEASURES[name](self)

    @functools.cached_property
    def word_list(self) -> list[str]:
        return self.text.split()

    @functools.cached_property
    def lines(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if line.strip()]

    @functools.cached_property
    def paragraphs(self) -> list[str]:
        return [part.strip() for part in _BLANK_LINES.split(self.text) if part.strip()]

    @functools.cached_property
    def lengths(self) -> list[int]:
        return [len(word) for word in self.word_list]

    def ratio_of_symbols(self) -> float:
        """Returns the larger of hash signs and ellipses per word."""
        ellipses = self.text.count("...") + self.text.count("…")
        return max(self.text.count("#"), ellipses) / max(len(self.word_list), 1)

    def share_of_lines(self, is_counted: Callable[[str], bool]) -> float:
        """Returns the fraction of lines for which `is_counted` is true."""
        return sum(map(is_counted, self.lines)) / max(len(self.lines), 1)

    @functools.cached_property
    def _repeated_fives(self) -> float:
        return self._cover_repeated(5)

    def _repeated_grams(self, size: int) -> float:
        # Words that repeat a longer sequence repeat one of five words, too.
        return self._repeated_fives if size == 5 or not self._repeated_fives else self._cover_repeated(size)

    def _cover_repeated(self, size: int) -> float:
        """Returns the fraction of characters in sequences of `size` words that occurred before; overlaps count once."""
        seen: set[tuple[str, ...]] = set()
        covered = bytearray(len(self.word_list))
        for start in range(len(self.word_list) - size + 1):
            gram = tuple(self.word_list[start : start + size])
            if gram in seen:
                covered[start : start + size] = b"\1" * size
            seen.add(gram)
        return self._share_of_characters(covered)

    def _top_gram(self, size: int) -> float:
        """Returns the fraction of characters in the most frequent sequence of `size` words; 0 if none repeats."""
        grams = [tuple(self.word_list[start : start + size]) for start in range(len(self.word_list) - size + 1)]
        counts = Counter(grams)
        most = max(counts.values(), default=0)
        if most < 2:
            return 0.0
        # Of equally frequent ones the longest, as the rule is about characters.
        top = max((gram for gram, count in counts.items() if count == most), key=lambda gram: sum(map(len, gram)))
        covered = bytearray(len(self.word_list))
        for start, gram in enumerate(grams):
            if gram == top:
                covered[start : start + size] = b"\1" * size
        return self._share_of_characters(covered)

    def _share_of_characters(self, covered: Sequence[int]) -> float:
        part = sum(length for length, is_covered in zip(self.lengths, covered, strict=True) if is_covered)
        return part / max(sum(self.lengths), 1)


def _share_repeated(parts: Iterable[str], weigh: Callable[[str], int]) -> float:
    """Returns the weight of the parts that occurred before, as a fraction of all."""
    seen: set[str] = set()
    total = repeated = 0
    for part in parts:
        total += weigh(part)
        repeated += weigh(part) if part in seen else 0
        seen.add(part)
    return repeated / max(total, 1)


def _one(_: str) -> int:
    return 1


def _has_letter(word: str) -> bool:
    return any(map(str.isalpha, word))


_MEASURES: dict[str, Callable[[TextMeasures], float]] = {
    "words": lambda text: len(text.word_list),
    "mean_word_length": lambda text: sum(text.lengths) / max(len(text.word_list), 1),
    "symbols": TextMeasures.ratio_of_symbols,
    "bullet_lines": lambda text: text.share_of_lines(lambda line: line.startswith(_BULLETS)),
    "ellipsis_lines": lambda text: text.share_of_lines(lambda line: line.endswith(_ELLIPSES)),
    "alphabetic_words": lambda text: sum(map(_has_letter, text.word_list)) / max(len(text.word_list), 1),
    "stop_words": lambda text: len(STOP_WORDS.intersection(word.lower() for word in text.word_list)),
    "repeated_lines": lambda text: _share_repeated(text.lines, _one),
    "repeated_line_chars": lambda text: _share_repeated(text.lines, len),
    "repeated_paragraphs": lambda text: _share_repeated(text.paragraphs, _one),
    "repeated_paragraph_chars": lambda text: _share_repeated(text.paragraphs, len),
    "sentences": lambda text: len(_SENTENCE_END.findall(text.text)),
}
