"""The largest value that fits, against memory of a known form."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from preheat.planning.search.largest_value import Attempt, find_largest


@pytest.mark.parametrize(
    ("memory", "limit", "answer"),
    [
        (lambda n: 3 + 0.5 * n, 1000.25, 1994),
        (lambda n: n * n / 100, 1000.0, 316),
        (lambda n: 100 * math.sqrt(n), 1000.5, 100),
        (lambda n: 3 + 0.5 * n, 4.6, 3),
    ],
)
@pytest.mark.parametrize("start", [2, 40, 1500])
def test_the_largest_value_fits_and_the_next_does_not(
    memory: Callable[[int], float], limit: float, answer: int, start: int
) -> None:
    tried = []

    def attempt(n: int) -> Attempt[int]:
        tried.append(n)
        return Attempt(n, limit - memory(n), "" if memory(n) <= limit else "too large")

    found = find_largest(attempt, start)
    assert found.largest is not None
    assert found.too_large is not None
    assert (found.largest[0], found.too_large[0]) == (answer, answer + 1)
    assert len(tried) == len(set(tried)) <= 26


def test_values_that_are_refused_bound_it_too() -> None:
    found = find_largest(lambda n: Attempt(n, 9.0) if n <= 77 else Attempt(None, reason="more than 77"), 5)
    assert found.largest is not None
    assert found.too_large is not None
    assert (found.largest[0], found.too_large) == (77, (78, Attempt(None, reason="more than 77")))


def test_nothing_fits_or_everything_does() -> None:
    nothing = find_largest(lambda n: Attempt(n, -1.0, "too large"), 100, least=8)
    assert (nothing.largest, nothing.too_large and nothing.too_large[0]) == (None, 8)
    everything = find_largest(lambda n: Attempt(n, 1.0), 3, most=50)
    assert (everything.largest and everything.largest[0], everything.too_large) == (50, None)
