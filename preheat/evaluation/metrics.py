"""Scores of an answer against right ones: text in, a number from 0 to 1 out. Means over rows are taken elsewhere.

Sources: SQuAD's normalisation, exact match and token F1 (Rajpurkar et al. 2016, arXiv:1606.05250); numbers that must agree and
spans matched one to one, DROP (Dua et al. 2019, arXiv:1903.00161); scales and percents, TAT-QA (Zhu et al. 2021, arXiv:2105.07624).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

__all__ = [
    "exact_match",
    "normalised",
    "number_in",
    "numeric_f1",
    "numeric_match",
    "scaled",
    "spans_of",
    "token_f1",
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
_NUMBER = re.compile(
    r"(?P<open>\()?\s*(?P<sign>[-+−–])?\s*(?:us)?[$€£¥]?\s*(?P<inner>[-−–])?(?P<digits>\d[\d,]*(?:\.\d+)?|\.\d+)\s*"
    r"(?P<percent>%)?\s*(?P<close>\))?\s*(?P<after>%)?\s*(?P<word>[a-z]+)?\s*\.?",
    re.IGNORECASE,
)


def normalised(text: str) -> str:
    """Lower case without punctuation, articles and double blanks.

    Example:
        >>> normalised("The  Cat's  hat.")
        'cats hat'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1 where the normalised answer is one of the normalised golds.

    Example:
        >>> exact_match("the Eiffel Tower.", ["Eiffel tower"])
        1.0
    """
    return float(normalised(answer) in {normalised(gold) for gold in golds})


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """The best F1 over the golds between the words of the answer and the gold's, each as often as it stands.

    Example:
        >>> round(token_f1("a small red hat", ["red hat", "blue"]), 4)  # 2 of 3 words right, 2 of 2 found
        0.8
    """
    return max((_bag_f1(normalised(answer).split(), normalised(gold).split()) for gold in golds), default=0.0)


def _bag_f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    if not found or not wanted:
        return float(not found and not wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))


def number_in(text: str, scale: str = "") -> float | None:
    """The number that a text is, with its scale counted in; None where the text is more or other than a number.

    Args:
        text: such as `$1,452.4`, `(12.6)` (negative, as accountants write), `-3 %`, `2 million`.
        scale: of a number that states none itself: `thousand`, `million`, `billion`, `percent`.

    Example:
        >>> number_in("$1,452.4 million"), number_in("(12.6)"), number_in("12.5%"), number_in("5", "thousand"), number_in("in 2019")
        (1452400000.0, -12.6, 0.125, 5000.0, None)
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    word = (match["word"] or "").lower()
    if match["percent"] or match["after"]:
        stated = "percent"
        if word:
            return None
    else:
        stated = _WORDS.get(word, word)
    if stated not in SCALES:
        return None
    value = float(match["digits"].replace(",", ""))
    if bool(match["open"]) != bool(match["close"]):
        return None
    negative = bool(match["open"] or match["inner"]) or match["sign"] in ("-", "−", "–")
    return (-value if negative else value) * SCALES[stated or scale]


def scaled(text: str, scale: str = "") -> str:
    """An answer in the form in which two are compared: a number as its value with the scale, other text normalised.

    Example:
        >>> scaled("$1.5 billion") == scaled("1,500", "million"), scaled("The fixed-price type")
        (True, 'fixedprice type')
    """
    value = number_in(text, scale)
    return normalised(text) if value is None else f"#{round(value, 4) + 0.0:.10g}"


def spans_of(text: str) -> list[str]:
    """The spans of an answer that lists several, with `;` or line ends between them.

    Example:
        >>> spans_of("fixed-price; cost-plus ;")
        ['fixed-price', 'cost-plus']
    """
    return [part.strip() for part in re.split(r"[;\n]", text) if part.strip()]


def numeric_match(answer: str, golds: Sequence[str], scale: str = "") -> float:
    """1 where the answer's spans are the gold ones, in any order; numbers by value, scale and percent counted in.

    Args:
        answer: with spans apart by `;`. Its numbers state their scale themselves.
        golds: the spans of the one right answer.
        scale: of the gold's numbers.

    Example:
        >>> numeric_match("1,496.5 million", ["$1,496.5"], "million"), numeric_match("1,496.5", ["$1,496.5"], "million")
        (1.0, 0.0)
    """
    wanted = [span for gold in golds for span in spans_of(gold)]  # published ones hold `;` and line ends too
    return float(sorted(map(scaled, spans_of(answer))) == sorted(scaled(span, scale) for span in wanted))


def numeric_f1(answer: str, golds: Sequence[str], scale: str = "") -> float:
    """F1 of words where both are text and equality where the gold is a number, over spans matched one to one.

    A span of words whose numbers share none with the other's counts nothing. Spans are matched best pair first; what is left
    over on either side counts as wrong.

    Example:
        >>> numeric_f1("-12.6 million", ["-12.6"], "million"), numeric_f1("red hat; 5", ["hat", "6"])
        (1.0, 0.3333333333333333)
    """
    found, wanted = spans_of(answer), [span for gold in golds for span in spans_of(gold)]
    if not found or not wanted:
        return float(not found and not wanted)
    pairs = sorted(
        ((_span_f1(f, w, scale), -i, -j) for i, f in enumerate(found) for j, w in enumerate(wanted)), reverse=True
    )
    total, used_found, used_gold = 0.0, set[int](), set[int]()
    for score, i, j in pairs:
        if i not in used_found and j not in used_gold:
            used_found.add(i)
            used_gold.add(j)
            total += score
    return total / max(len(found), len(wanted))


def _span_f1(found: str, gold: str, scale: str) -> float:
    if number_in(gold, scale) is not None or number_in(found) is not None:
        return float(scaled(found) == scaled(gold, scale))
    a, b = _words_and_numbers(found), _words_and_numbers(gold)
    numbers = {w for w in b if w.startswith("#")}
    if numbers and not numbers & set(a):
        return 0.0
    return _bag_f1(a, b)


def _words_and_numbers(text: str) -> list[str]:
    made = []
    for word in text.split():
        value = number_in(word.strip("()[],;:"))
        made += [f"#{round(value, 4) + 0.0:.10g}"] if value is not None else normalised(word).split()
    return made
