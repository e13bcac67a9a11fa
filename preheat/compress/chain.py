"""Chains of compress, train and export steps: their YAML, and what a kind of model must provide to run them.

    name: edge
    chain:
      - {compress: width, settings: {parameters: 0.7}}
      - {train: 0.1, techniques: {distillation: {teacher: $start}}}
      - {compress: int8}

`pipeline.run_chain` runs a chain. The steps of language models are in `text_steps`, those of image classifiers in
`vision.steps`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

from preheat import recipe as recipes
from preheat.errors import RecipeError, suggest_nearest
from preheat.recipe import Bound
from preheat.recipe.consistency import find_folder_name_problem
from preheat.recipe.validate import RecipeReader
from preheat.recipe.yaml_io import read

if TYPE_CHECKING:
    from preheat.core.compression import CompressionResult, ImageResult

__all__ = ["START", "Chain", "Step", "Steps", "load_chain", "add_location"]

Subject = TypeVar("Subject")
"""The object that a chain measures and times: the model itself, or the function that runs it."""

START = "$start"
"""A teacher in a chain file: the model that the chain begins with."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: exactly one of compress, train and export."""

    compress: str | None = None
    """A method of `preheat compress`."""
    train: Annotated[float, Bound(0, open_low=True)] | None = None
    """Continues training on this fraction of the run's tokens; for a model's folder, of one epoch over the data."""
    rate: Annotated[float, Bound(0, open_low=True)] = 0.25
    """train: peak learning rate, as a fraction of the run's: a modified trained model needs less than a new one."""
    export: str | None = None
    """A format of `preheat export`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """compress: the method's; train: keys of the recipe, `optimizer.lr: 1e-4`; export: `dtype`."""
    techniques: Mapping[str, Any] = field(default_factory=dict)
    """train: techniques with their settings, in addition to the run's. `$start` is the folder of the original model."""
    where_possible: tuple[str, ...] = ()
    """train: those of the techniques that are skipped, with a note, if this model does not support them."""

    def __post_init__(self) -> None:
        # Zero is not None: `train: 0` reaches the bound's own error.
        kinds = [kind for kind in ("compress", "train", "export") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"a step is one of compress, train, export; this one states {' and '.join(kinds) or 'none'}"
            )
        if self.train is None and (self.techniques or self.where_possible):
            raise ValueError("techniques and where_possible are for a step that trains")
        if strange := [name for name in self.where_possible if name not in self.techniques]:
            raise ValueError(f"where_possible: {strange[0]} is not among the step's techniques")


@dataclass(frozen=True)
class Chain:
    """A named sequence of steps.

    Attributes:
        locations: location of each step for error messages: FILE:LINE: chain.N.
    """

    name: str
    steps: tuple[Step, ...]
    locations: tuple[str, ...]


def load_chain(path: str | Path) -> Chain:
    """Reads a chain from a YAML file, or by the name of a built-in or installed one.

    Raises:
        RecipeError: no such file; or all errors in it, including settings of the steps' techniques, one per line.

    Example:
        >>> kinds = ("compress", "train", "export")
        >>> [next(kind for kind in kinds if getattr(step, kind)) for step in load_chain("inference-speed").steps]
        ['train', 'compress']
    """
    file = Path(path)
    if not file.is_file():
        known = {name: named.path for name, named in recipes.named_recipes().items() if named.is_chain}
        if str(path) not in known:
            raise RecipeError(
                f"--recipe {path}: no such file, and no chain of that name; {suggest_nearest(str(path), list(known))}"
            )
        file = known[str(path)]
    values, lines = read(file, str(path))
    if not isinstance(values, Mapping) or not isinstance(values.get("chain"), list) or not values["chain"]:
        raise RecipeError(
            f"{path}: is not a chain: it has no list of steps under `chain`; preheat recipes show edge shows one"
        )
    reader = RecipeReader(str(path), lines, hints={})
    # Errors are collected, so that the user sees all of them at once.
    for key in values:
        if key not in ("name", "chain"):
            reader.report((key,), f"unknown key '{key}'; a chain has a name and its steps")
    steps, locations = [], []
    for n, settings in enumerate(values["chain"]):
        at = ("chain", str(n))
        steps.append(step := reader.flat(Step, settings, at))
        locations.append(f"{path}:{lines[at]}: chain.{n}")
        # None: the step is invalid, and has been reported.
        if step is not None:
            reader.techniques(step.techniques, (*at, "techniques"))
    name = str(values.get("name", file.stem))
    if "name" in values and (problem := find_folder_name_problem(name)):
        reader.report(("name",), f"name: {problem}")
    # Raises if anything was reported, so every step is a `Step` afterwards.
    reader.refuse()
    return Chain(name, tuple(steps), tuple(locations))


@contextlib.contextmanager
def add_location(place: str) -> Iterator[None]:
    """Context manager that adds a step's location to RecipeErrors."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}") from None


class Steps(ABC, Generic[Subject]):
    """Runs and measures the steps of a chain for one kind of model.

    The constructor opens the model and checks every step, so that most errors appear before any work is done. The
    input of each step is the output of the one before; exports leave it as it is.
    """

    measures_exports: ClassVar[bool]
    """True if an exported file is measured as models are; False if its writer compares it with its model."""

    @abstractmethod
    def begin(self) -> Subject:
        """Measures the model that the chain begins with, and returns it for `time`."""

    @abstractmethod
    def label(self, step: Step) -> str:
        """Returns a step's name in results."""

    def take(self, step: Step, number: int) -> tuple[str, str]:
        """Runs a step; returns the name of the folder that it wrote, and a description."""
        if step.compress is not None:
            return self.compress(step, number)
        return self.export(step, number) if step.export is not None else self.train(step, number)

    @abstractmethod
    def compress(self, step: Step, number: int) -> tuple[str, str]: ...

    @abstractmethod
    def train(self, step: Step, number: int) -> tuple[str, str]: ...

    @abstractmethod
    def export(self, step: Step, number: int) -> tuple[str, str]: ...

    @abstractmethod
    def measure(self, step: Step, name: str, what: str) -> Subject:
        """Compares what the last step wrote with the model that the chain began with; returns the model, for `time`.

        Args:
            name: of the folder that the step wrote.
            what: the step's description.
        """

    @abstractmethod
    def summarize(self, models: Mapping[str, Subject], turns: int) -> CompressionResult | ImageResult:
        """Times the models and writes the model cards that need the figures of all steps; returns all figures.

        Args:
            models: "before" and those that `measure` returned, by name.
            turns: timed turns per model.
        """
