"""Solves a plan for a key: the largest value with which it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.cli.views.output import print_progress
from preheat.core.plan import LargestValue, Plan
from preheat.core.units import format_memory
from preheat.errors import DoesNotFit, RecipeError, suggest_nearest
from preheat.interop.keys import Entry, iterate_entries
from preheat.recipe.differences import flatten_leaves, list_overrides
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from preheat.cli.options.subject import Subject
    from preheat.interop.reading import ForeignFile
    from preheat.planning.request import Request

__all__ = ["Solution", "find_key", "solve"]

_MULTIPLES: Mapping[str, int] = {
    "batch.seq_len": 64,
    "model.hidden_size": 64,
    "model.intermediate_size": 64,
    "model.vocab_size": 64,
}
"""Sizes whose kernels are fast at multiples: of these only multiples are tried, or of their greatest common divisor
with the value in the recipe."""

SubjectOf = Callable[[tuple[str, ...], Mapping[tuple[str, ...], object]], "Subject"]
"""Returns the subject with overrides of its recipe, and with changes of another trainer's file."""


@dataclass(frozen=True)
class Key:
    """A numeric key to solve for. Its values are the multiples of a quantum.

    Attributes:
        path: of a key of another trainer's file; empty for a key of the recipe.
        start: its present value.
    """

    name: str
    path: tuple[str, ...]
    start: float
    quantum: float

    @property
    def first(self) -> int:
        """The multiple to start from."""
        return max(round(self.start / self.quantum), 1)

    def value(self, multiple: int) -> int | float:
        """Returns a multiple of the quantum, without the noise of binary fractions."""
        return multiple * self.quantum if isinstance(self.quantum, int) else float(f"{multiple * self.quantum:.12g}")

    def apply(self, subject_of: SubjectOf, multiple: int) -> Subject:
        """Returns the subject with a value."""
        value = self.value(multiple)
        return subject_of((), {self.path: value}) if self.path else subject_of((f"{self.name}={value}",), {})


@dataclass(frozen=True)
class Solution:
    """The largest value, and the subject with it."""

    subject: Subject
    largest: LargestValue


def find_key(name: str, subject: Subject, subject_of: SubjectOf) -> Key:
    """Returns a key of another trainer's file or of the recipe.

    Raises:
        RecipeError: there is none of that name, or it is not numeric.
    """
    file = subject.config.file if subject.config else None
    if file and (path := _find_foreign_path(file, name)):
        return _read_foreign_key(name, path, subject, file, subject_of)
    values = flatten_leaves(recipes.to_values(subject.recipe))
    if name not in values:
        known = [key for key, value in values.items() if _is_number(value)]
        known += [] if file is None else [key for key in file.format.table if "*" not in key]
        raise RecipeError(
            f"--solve: {shorten(name)}: is no key of the recipe{' or the file' if file else ''}; "
            f"{suggest_nearest(name, known)}"
        )
    return _build_key(name, (), values[name], values[name])


def _build_key(name: str, path: tuple[str, ...], value: object, shown: object, multiple: int | None = None) -> Key:
    if value is None:
        raise RecipeError(f"--solve: {name}: has no number to start from; if it is numeric, --set {name}=N")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RecipeError(f"--solve: {name}: is {quote_value(shown)}, not a number")
    if isinstance(value, int):
        return Key(name, path, value, math.gcd(value, multiple or _MULTIPLES.get(name, 1)) or 1)
    # Two digits of the value.
    return Key(name, path, value, 10.0 ** (math.floor(math.log10(value)) - 1) if value > 0 else 0.01)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _find_foreign_path(file: ForeignFile, name: str) -> tuple[str, ...] | None:
    """Returns the path of a key of the file by its dotted name, or the end of it if only one key ends so."""
    paths = [entry.path for entry in iterate_entries(file.values, {}, "")]
    exact = [path for path in paths if ".".join(path) == name]
    ending = exact or [path for path in paths if ".".join(path).endswith(f".{name}")]
    if len(ending) == 1:
        return ending[0]
    # A key that the file leaves to the trainer's default.
    return tuple(name.split(".")) if name in file.format.table and "*" not in name else None


def _look_up(values: object, path: tuple[str, ...]) -> object:
    """Returns the value at a path of nested values; None if there is none."""
    for step in path:
        if isinstance(values, list):
            values = values[int(step)]
        else:
            values = values.get(step) if isinstance(values, Mapping) else None
    return values


def _read_foreign_key(
    name: str, path: tuple[str, ...], subject: Subject, file: ForeignFile, subject_of: SubjectOf
) -> Key:
    stated = _look_up(file.values, path)
    value = stated
    if isinstance(stated, str):
        # YAML 1.1, which other trainers read, has numbers that YAML 1.2 takes as text.
        number = Entry(path, stated, file.path.name, 1).number() if stated[:1].isdigit() else None
        value = number if number is None or number != int(number) else int(number)
        if value is None:
            return _build_key(name, path, stated, stated)
    if value is not None and not _is_number(value):
        return _build_key(name, path, value, stated)
    # Reading the file with another value shows which keys of the recipe this one sets.
    probe = 2 * value if isinstance(value, int | float) and value else 2
    changed = [item.partition("=")[0] for item in list_overrides(subject.recipe, subject_of((), {path: probe}).recipe)]
    if not changed:
        raise RecipeError(f"--solve: {name}: the plan does not depend on it")
    ours = next((key for key in changed if key in _MULTIPLES), None)
    if value is None and ours:
        value = flatten_leaves(recipes.to_values(subject.recipe))[ours]
    return _build_key(name, path, 1 if value is None else value, stated, _MULTIPLES[ours] if ours else None)


def solve(
    name: str,
    subject: Subject,
    subject_of: SubjectOf,
    request: Request,
    plan_of: Callable[[Request], Plan],
    *,
    quiet: bool,
) -> Solution:
    """Finds the largest value of a key with which the recipe fits.

    Args:
        request: of the subject as it is.
        plan_of: plans a request, or searches for its best plan.
        quiet: do not print progress.

    Raises:
        RecipeError: the key is not numeric, or the plan's memory does not grow with it.
        DoesNotFit: not even the smallest value fits.
    """
    from preheat.planning.search.largest_value import Attempt, find_largest, judge

    key = find_key(name, subject, subject_of)
    # Rows are dealt to the micro-batches of all ranks alike.
    if key.name == "batch.size":
        key = replace(key, quantum=math.gcd(int(key.start), _count_parts(request)))
    plans: dict[int, Plan] = {}

    def attempt(multiple: int) -> Attempt[tuple[Subject, Plan]]:
        value = key.value(multiple)
        if not quiet:
            print_progress(f"dry run: {key.name} {_format(value)}")
        try:
            other = key.apply(subject_of, multiple)
            planned = plan_of(replace(request, recipe=other.recipe))
        except RecipeError as error:
            if not plans:  # the recipe itself is wrong
                raise
            return Attempt(None, reason=str(error).splitlines()[0])
        plans[multiple] = planned
        if len(plans) == 2:
            _require_growth(key, plans)
        return judge(planned, (other, planned))

    largest = find_largest(attempt, key.first)
    if largest.largest is None:
        assert largest.too_large is not None, "a value was tried"
        smallest, refused = largest.too_large
        raise DoesNotFit(f"--solve: not even {key.name} {_format(key.value(smallest))} fits; it {refused.reason}")
    multiple, fitting = largest.largest
    assert fitting.result is not None, "a value that fits has a plan"
    solved = fitting.result[0]
    beyond, limit = None, f"larger values than {_format(key.value(multiple))} were not tried"
    if largest.too_large is not None:
        beyond, limit = largest.too_large[0], largest.too_large[1].reason
    value = key.value(multiple)
    return Solution(
        solved,
        LargestValue(
            key=key.name,
            value=value,
            next_value=None if beyond is None else key.value(beyond),
            next_peak_gib=plans[beyond].peak_gib if beyond in plans else None,
            limit=limit,
            overrides=tuple(list_overrides(subject.recipe, solved.recipe)),
            line=f"{key.path[-1]}: {value}" if key.path else None,
        ),
    )


def _require_growth(key: Key, plans: Mapping[int, Plan]) -> None:
    """Raises RecipeError if a larger value does not need more memory than a smaller one."""
    low, high = sorted(plans)
    values = f"{_format(key.value(low))} and {_format(key.value(high))}"
    # Of tensors: the allocator's memory comes in steps.
    less, more = plans[low].allocated_gib, plans[high].allocated_gib
    if math.isclose(less, more, rel_tol=1e-6):
        raise RecipeError(
            f"--solve: {key.name}: memory does not depend on it; {values} need the same "
            f"{format_memory(plans[low].peak_gib)}"
        )
    if more < less:
        raise RecipeError(
            f"--solve: {key.name}: a larger value needs less memory: {values} need "
            f"{format_memory(plans[low].peak_gib)} and {format_memory(plans[high].peak_gib)}; solve for a key that "
            "memory grows with, such as batch.size"
        )


def _count_parts(request: Request) -> int:
    """Returns the micro-batches of a step over all data-parallel ranks."""
    from preheat.core import DATA

    techniques = request.recipe.techniques.values()
    ranks = math.prod(request.context.sizes[axis] for axis in DATA)
    return ranks * math.prod(t.micro_batch_count() for t in techniques)


def _format(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
