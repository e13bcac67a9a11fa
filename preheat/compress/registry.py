"""A way to make a trained model smaller, and the registry of them. No torch."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from preheat.core import Change, ModelFacts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Method", "methods"]


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """One way to make a trained model smaller: one file in `preheat/compress/methods/`, found by its name.

    A subclass's fields are its settings (`--set key=value`); the text under each field is its help. The module's docstring says what it
    does, when it helps, when it hurts, and its source.
    """

    reads_rows: ClassVar[bool] = False
    """Whether it looks at rows of the recipe's data."""

    @classmethod
    def name(cls) -> str:
        """What `--method` calls it: the module's name."""
        return cls.__module__.rpartition(".")[2]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _REGISTRY[cls.name()] = cls

    def check(self, model: ModelFacts) -> list[str]:
        """Why this cannot serve for the model, in words that begin with the knob; empty when it can."""
        return []

    @abstractmethod
    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        """Changes the model in place by the plain functions of the module.

        Args:
            model: with all its weights in fp32, adapters merged.
            rows: calibration rows, [1, length] tokens each; empty where the method reads none.

        Raises:
            RecipeError: a layer that it cannot serve for, by name, with what would.
        """


_REGISTRY: dict[str, type[Method]] = {}


@functools.cache
def _load() -> None:
    import importlib

    importlib.import_module("preheat.compress.methods")


def methods() -> Mapping[str, type[Method]]:
    """Every method by name, in alphabetical order."""
    _load()
    return {name: _REGISTRY[name] for name in sorted(_REGISTRY)}
