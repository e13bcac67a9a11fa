"""Personal data by pattern and checksum: e-mail addresses, telephone numbers, IP addresses, card numbers and IBANs.

Patterns find neither names nor postal addresses, and some of their matches are other numbers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["KINDS", "Occurrence", "find_personal_data", "is_luhn_valid", "mask_personal_data"]


class Occurrence(NamedTuple):
    """Personal data in a text: its kind, and its first and last character + 1."""

    kind: str
    start: int
    end: int


# Each pattern begins where no word or number continues, so that a search is linear in the text. ASCII: in Chinese and
# Japanese, the letters of other words follow without a space.
_EMAIL = re.compile(
    r"(?<![\w.%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])", re.ASCII
)
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?= ?[A-Z0-9])", re.ASCII)
# One number, or groups as on cards: other numbers, such as a date, may stand before and after.
_CARD = re.compile(r"(?<![\w.+-])(?:\d{13,19}|\d{4}([ -])(?:\d{4}\1\d{4}\1\d{4}|\d{6}\1\d{4,5}))(?![\w-])", re.ASCII)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\w)", re.ASCII)
_IPV6 = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}(?![\w:])", re.ASCII)
_PHONE = re.compile(
    r"(?<![\w.+-])"
    r"(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d(?:[ .-]?\d){5,12}"  # international: +49 30 1234567
    r"|(?:\(\d{3}\) ?|\d{3}[.-])\d{3}[.-]\d{4})"  # North America: (212) 555-0187
    r"(?![\w-])",
    re.ASCII,
)
_IBAN_LENGTHS = {
    country: int(length)
    for country, length in re.findall(
        r"([A-Z]{2})(\d\d)",
        "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 ES24 "
        "FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 "
        "LI21 LT20 LU20 LV21 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 "
        "SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 ",
    )
}
"""Characters of an IBAN by country, from the registry of SWIFT (ISO 13616)."""


def is_luhn_valid(digits: str) -> bool:
    """Returns True if the last digit is the check digit of the others by Luhn's formula (ISO/IEC 7812-1).

    Example:
        >>> is_luhn_valid("79927398713"), is_luhn_valid("79927398714")
        (True, False)
    """
    # Every second digit from the right counts double, as the sum of the digits of its double.
    doubled = [int(digit) * (1 + n % 2) for n, digit in enumerate(reversed(digits))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


def _iterate_matches(pattern: re.Pattern[str], is_valid: Callable[[str], bool]) -> Callable[[str], Iterator[re.Match]]:
    return lambda text: (match for match in pattern.finditer(text) if is_valid(match[0]))


def _is_card(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    # The first digit is that of a payment scheme; equal digits pass the check, too.
    return digits[0] in "23456" and len(set(digits)) > 1 and is_luhn_valid(digits)


def _is_public_address(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _is_phone(text: str) -> bool:
    return 8 <= len(re.sub(r"\D", "", text)) <= 15


def _find_ibans(text: str) -> Iterator[tuple[int, int]]:
    for match in _IBAN.finditer(text):
        length, start = _IBAN_LENGTHS.get(match[0][:2]), match.start()
        if length is None:
            continue
        # Groups are separated by at most one space; the country decides the length.
        compact, end = "", start
        while end < len(text) and len(compact) < length:
            character = text[end]
            if character.isascii() and character.isalnum():
                compact += character
            elif character != " " or text[end - 1] == " ":
                break
            end += 1
        is_whole = len(compact) == length and not (text[end : end + 1].isascii() and text[end : end + 1].isalnum())
        # ISO 7064: the country and check digits go to the end, letters count from 10, and the remainder of 97 is 1.
        if is_whole and int("".join(str(int(c, 36)) for c in compact[4:] + compact[:4])) % 97 == 1:
            yield start, end


def _iterate_spans(find: Callable[[str], Iterator[re.Match]]) -> Callable[[str], Iterator[tuple[int, int]]]:
    return lambda text: (match.span() for match in find(text))


KINDS: dict[str, tuple[Callable[[str], Iterator[tuple[int, int]]], ...]] = {
    "email": (_iterate_spans(_iterate_matches(_EMAIL, lambda text: True)),),
    "iban": (_find_ibans,),
    "card": (_iterate_spans(_iterate_matches(_CARD, _is_card)),),
    "ip": (
        _iterate_spans(_iterate_matches(_IPV4, _is_public_address)),
        _iterate_spans(_iterate_matches(_IPV6, _is_public_address)),
    ),
    "phone": (_iterate_spans(_iterate_matches(_PHONE, _is_phone)),),
}
"""Searches by kind, those with a checksum before the others."""


def find_personal_data(text: str, kinds: Sequence[str] = tuple(KINDS)) -> list[Occurrence]:
    """Returns the personal data in a text, in order; of overlapping kinds the first of `KINDS`.

    Private and reserved IP addresses are not among it.

    Example:
        >>> [text[o.start:o.end] for text in ["write to a.b@example.org"] for o in find_personal_data(text)]
        ['a.b@example.org']
    """
    occurrences: list[Occurrence] = []
    covered = bytearray(len(text))
    for kind, searches in KINDS.items():
        for search in searches if kind in kinds else ():
            for start, end in search(text):
                if not any(covered[start:end]):
                    covered[start:end] = b"\1" * (end - start)
                    occurrences.append(Occurrence(kind, start, end))
    return sorted(occurrences, key=lambda occurrence: occurrence.start)


def mask_personal_data(text: str, occurrences: Sequence[Occurrence]) -> str:
    """Returns the text with each occurrence replaced by its kind.

    Example:
        >>> mask_personal_data("to a@example.org now", [Occurrence("email", 3, 16)])
        'to <EMAIL> now'
    """
    parts, position = [], 0
    for occurrence in occurrences:
        parts += [text[position : occurrence.start], f"<{occurrence.kind.upper()}>"]
        position = occurrence.end
    return "".join([*parts, text[position:]])
