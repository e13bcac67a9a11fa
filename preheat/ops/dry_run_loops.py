"""Lets a dry run execute a few iterations of a uniform loop and multiply the counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

__all__ = ["TurnCounter", "fold_identical", "count_turns"]

T = TypeVar("T")


class TurnCounter(Protocol):
    """A recorder of operator calls."""

    def mark(self) -> object:
        """Returns a marker of the current counts."""

    def repeat_kernels(self, since: object, times: int) -> None:
        """Adds `times` more copies of the counts since the marker."""


_counters: ContextVar[tuple[TurnCounter, ...]] = ContextVar("counters", default=())


@contextmanager
def count_turns(counter: TurnCounter) -> Iterator[None]:
    """Context manager in which `fold_identical` runs few iterations and `counter` multiplies their counts."""
    token = _counters.set((*_counters.get(), counter))
    try:
        yield
    finally:
        _counters.reset(token)


def fold_identical(turns: Sequence[T], *, wholly: bool = False) -> Iterator[T]:
    """Iterates over a loop whose iterations run the same operators on the same sizes, except the first and the last.

    Normally yields every item. In a dry run, whose tensors hold no data, it yields the first, the second (counted for
    all the middle ones) and the last.

    Args:
        wholly: all iterations are alike, so a dry run executes only one.

    Example:
        >>> list(fold_identical(range(0, 10, 2)))
        [0, 2, 4, 6, 8]
    """
    counters = _counters.get()
    # Three iterations run for real (one if `wholly`): with no more than those there is nothing to fold.
    if not counters or len(turns) < (2 if wholly else 4):
        yield from turns
        return
    if wholly:
        before = counters[-1].mark()
        yield turns[0]
        counters[-1].repeat_kernels(before, len(turns) - 1)
        return
    # The first may allocate what later ones reuse, and the last may be shorter.
    yield turns[0]
    # The generator resumes after the caller's loop body: the counts since the mark are those of one iteration.
    before = counters[-1].mark()
    yield turns[1]
    counters[-1].repeat_kernels(before, len(turns) - 3)
    yield turns[-1]
