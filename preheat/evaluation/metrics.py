"""Scores of one answer against references, from 0 to 1: exact match, token F1, numeric match and numeric F1.

Sources: normalisation, exact match and token F1 of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250); matching of numbers
and alignment of spans of DROP (Dua et al. 2019, arXiv:1903.00161); scales and percents of TAT-QA (Zhu et al. 2021,
arXiv:2105.07624).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

__all__ = [
    "cut_answer",
    "score_exact_match",
    "normalize_answer",
    "parse_number",
    "score_numeric_f1",
    "score_numeric_match",
    "canonicalize",
    "split_spans",
    "score_token_f1",
]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

SCALES = {"": 1.0, "percent": 0.01, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_WORDS = {
    "%": "percent",
    "k": "thousand",
    "thousands": "thousand",
    "mn": "million",
    "m": "million",
    "millions": "million",
}
_WORDS |= {"bn": "billion", "b": "billion", "billions": "billion", "trillions": "trillion", "percentage": "percent"}
# Sign or accounting parentheses, a currency, digits with thousands separators, a percent sign, a word of scale.
_NUMBER = re.compile(
    r"(?P<open>\()?\s*(?P<sign>[-+−–])?\s*(?:us)?[$€£¥]?\s*(?P<inner>[-−–])?(?P<digits>\d[\d,]*(?:\.\d+)?|\.\d+)\s*"
    r"(?P<percent>%)?\s*(?P<close>\))?\s*(?P<after>%)?\s*(?P<word>[a-z]+)?\s*\.?",
    re.IGNORECASE,
)


def cut_answer(text: str, stop: Sequence[str]) -> str:
    """Returns a generated text up to the first of `stop`.

    Example:
        >>> cut_answer("a cat\\nQuestion:", ["\\n"])
        'a cat'
    """
    for end in filter(None, stop):
        text = text.split(end, 1)[0]
    return text


def normalize_answer(text: str) -> str:
    """Returns the text in lower case, without punctuation, articles and repeated spaces.

    Example:
        >>> normalize_answer("The  Cat's  hat.")
        'cats hat'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def score_exact_match(answer: str, golds: Sequence[str]) -> float:
    """Returns 1 if the normalised answer equals one of the normalised golds, else 0.

    Example:
        >>> score_exact_match("the Eiffel Tower.", ["Eiffel tower"])
        1.0
    """
    return float(normalize_answer(answer) in {normalize_answer(gold) for gold in golds})


def score_token_f1(answer: str, golds: Sequence[str]) -> float:
    """Returns the best F1 over the golds between the bags of words of the answer and of the gold.

    Example:
        >>> round(score_token_f1("a small red hat", ["red hat", "blue"]), 4)  # 2 of 3 words right, 2 of 2 found
        0.8
    """
    return max(
        (_score_bags(normalize_answer(answer).split(), normalize_answer(gold).split()) for gold in golds), default=0.0
    )


def _score_bags(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    if not predicted or not wanted:
        return float(not predicted and not wanted)
    # F1 = 2 |A & B| / (|A| + |B|) of multisets, equal to the harmonic mean of precision and recall.
    common = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * common / (len(predicted) + len(wanted))


def parse_number(text: str, scale: str = "") -> float | None:
    """Parses a text as a number and multiplies it by its scale; None if the text is not exactly one number.

    Args:
        text: such as `$1,452.4`, `(12.6)` (negative, in accounting notation), `-3 %`, `2 million`.
        scale: scale of a number without one: `thousand`, `million`, `billion`, `percent`.

    Example:
        >>> parse_number("$1,452.4 million"), parse_number("(12.6)"), parse_number("12.5%")
        (1452400000.0, -12.6, 0.125)
        >>> parse_number("5", "thousand"), parse_number("in 2019")
        (5000.0, None)
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    word = (match["word"] or "").lower()
    # `12 %`, and `(12) %` with the sign after the parentheses.
    if match["percent"] or match["after"]:
        unit = "percent"
        if word:
            return None
    else:
        unit = _WORDS.get(word, word)
    if unit not in SCALES:
        return None
    value = float(match["digits"].replace(",", ""))
    # One parenthesis alone is no accounting notation, so this is no number.
    if bool(match["open"]) != bool(match["close"]):
        return None
    negative = bool(match["open"] or match["inner"]) or match["sign"] in ("-", "−", "–")
    # The number's own unit takes precedence over the scale of its table.
    return (-value if negative else value) * SCALES[unit or scale]


def canonicalize(text: str, scale: str = "") -> str:
    """Returns the canonical form of an answer for comparison: the scaled value of a number, or the normalised text.

    Example:
        >>> canonicalize("$1.5 billion") == canonicalize("1,500", "million"), canonicalize("The fixed-price type")
        (True, 'fixedprice type')
    """
    value = parse_number(text, scale)
    # `#` marks a number, which no normalised text contains; `+ 0.0` makes -0.0 equal to 0.0.
    return normalize_answer(text) if value is None else f"#{round(value, 4) + 0.0:.10g}"


def split_spans(text: str) -> list[str]:
    """Splits an answer into its spans, which `;` or line breaks separate.

    Example:
        >>> split_spans("fixed-price; cost-plus ;")
        ['fixed-price', 'cost-plus']
    """
    return [part.strip() for part in re.split(r"[;\n]", text) if part.strip()]


def score_numeric_match(answer: str, golds: Sequence[str], scale: str = "") -> float:
    """Returns 1 if the answer's spans equal the gold spans in any order, else 0; numbers are compared by scaled value.

    Args:
        answer: spans separated by `;`; its numbers include their scale.
        golds: the spans of the one right answer.
        scale: scale of the gold's numbers.

    Example:
        >>> score_numeric_match("1,496.5 million", ["$1,496.5"], "million")
        1.0
        >>> score_numeric_match("1,496.5", ["$1,496.5"], "million")
        0.0
    """
    wanted = [span for gold in golds for span in split_spans(gold)]  # published golds contain `;` and line breaks, too
    return float(sorted(map(canonicalize, split_spans(answer))) == sorted(canonicalize(span, scale) for span in wanted))


def score_numeric_f1(answer: str, golds: Sequence[str], scale: str = "") -> float:
    """Returns the mean score over spans matched one to one: equality for numbers, F1 of words for text.

    A pair of text spans scores 0 if the gold has numbers and the answer has none of them. Spans are matched greedily,
    best pair first; unmatched spans on either side count as wrong.

    Example:
        >>> score_numeric_f1("-12.6 million", ["-12.6"], "million"), score_numeric_f1("red hat; 5", ["hat", "6"])
        (1.0, 0.3333333333333333)
    """
    spans, wanted = split_spans(answer), [span for gold in golds for span in split_spans(gold)]
    if not spans or not wanted:
        return float(not spans and not wanted)
    pairs = sorted(
        # The negative numbers resolve ties: in reverse order, earlier spans come first.
        ((_score_spans(s, w, scale), -i, -j) for i, s in enumerate(spans) for j, w in enumerate(wanted)),
        reverse=True,
    )
    total, used_spans, used_gold = 0.0, set[int](), set[int]()
    for score, i, j in pairs:
        if i not in used_spans and j not in used_gold:
            used_spans.add(i)
            used_gold.add(j)
            total += score
    # Unmatched spans of the longer side count 0.
    return total / max(len(spans), len(wanted))


def _score_spans(span: str, gold: str, scale: str) -> float:
    if parse_number(gold, scale) is not None or parse_number(span) is not None:
        return float(canonicalize(span) == canonicalize(gold, scale))
    # Numbers within text compare by value, so that 1,000 and 1000 are one word.
    a, b = _split_words(span), _split_words(gold)
    # As in DROP: a text span without any of the gold's numbers is wrong, whatever words it shares.
    numbers = {w for w in b if w.startswith("#")}
    if numbers and not numbers & set(a):
        return 0.0
    return _score_bags(a, b)


def _split_words(text: str) -> list[str]:
    tokens = []
    for word in text.split():
        value = parse_number(word.strip("()[],;:"))
        tokens += [f"#{round(value, 4) + 0.0:.10g}"] if value is not None else normalize_answer(word).split()
    return tokens
