"""Compression methods and their registry. Imports no torch."""

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
    """A compression method: one file in `preheat/compress/methods/`, found by its name.

    The fields of a subclass are its settings (`--set key=value`); the text under each field is its help. The module's
    docstring says what it does, when it helps, when it hurts, and its source.
    """

    reads_rows: ClassVar[bool] = False
    """True if it needs calibration sequences."""

    @classmethod
    def name(cls) -> str:
        """Returns the name for `--method`: the module's name."""
        return cls.__module__.rpartition(".")[2]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # A class registers itself when its module is imported.
        _REGISTRY[cls.name()] = cls

    def check(self, model: ModelFacts) -> list[str]:
        """Returns why the method cannot be applied to the model; each reason starts with the setting at fault."""
        return []

    def require(self, model: PreTrainedModel) -> None:
        """Checks what depends on the model's modules, such as names in `keep`, before any text is read.

        Raises:
            RecipeError: the model lacks a named module, or cannot be compressed like this.
        """
        return

    @abstractmethod
    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        """Compresses the model in place.

        Args:
            model: with all weights in fp32, adapters merged.
            rows: calibration sequences, [1, length] tokens each; empty if the method reads none.

        Raises:
            RecipeError: the method cannot be applied to a layer, which is named.
        """


_REGISTRY: dict[str, type[Method]] = {}


@functools.cache
def _load() -> None:
    import importlib

    importlib.import_module("preheat.compress.methods")


def methods() -> Mapping[str, type[Method]]:
    """Returns all methods by name, in alphabetical order."""
    _load()
    return {name: _REGISTRY[name] for name in sorted(_REGISTRY)}
