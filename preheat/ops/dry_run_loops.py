"""Loops whose turns are all the same: a dry run takes a few of them and counts the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

__all__ = ["TurnCounter", "fold_identical", "counting"]

T = TypeVar("T")


class TurnCounter(Protocol):
    """Whoever writes down what operators run."""

    def mark(self) -> object:
        """What was counted so far."""

    def again(self, since: object, times: int) -> None:
        """Counts so many times more what was counted since the mark."""


_counters: ContextVar[tuple[TurnCounter, ...]] = ContextVar("counters", default=())


@contextmanager
def counting(counter: TurnCounter) -> Iterator[None]:
    """Within, `fold_identical` takes few turns and has `counter` count the others."""
    token = _counters.set((*_counters.get(), counter))
    try:
        yield
    finally:
        _counters.reset(token)


def fold_identical(turns: Sequence[T], *, wholly: bool = False) -> Iterator[T]:
    """The turns of a loop that all run the same operators on the same sizes, but for the first and the last.

    All of them; in a dry run, whose tensors hold nothing, the first, the second in the name of those like it, and the last.

    Args:
        wholly: the first and the last are like the others: a dry run takes one for all.

    Example:
        >>> list(alike(range(0, 10, 2)))
        [0, 2, 4, 6, 8]
    """
    counters = _counters.get()
    if not counters or len(turns) < (2 if wholly else 4):
        yield from turns
        return
    if wholly:
        before = counters[-1].mark()
        yield turns[0]
        counters[-1].again(before, len(turns) - 1)
        return
    yield turns[0]
    before = counters[-1].mark()
    yield turns[1]
    counters[-1].again(before, len(turns) - 3)
    yield turns[-1]
