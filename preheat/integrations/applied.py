"""Changes that preheat made in models of other trainers, and functions to call on later ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import nn

    from preheat.core.run_records import Event

__all__ = ["Applied", "applied_to"]


@dataclass
class Applied:
    """The changes to a model.

    Attributes:
        settings: what was applied, as `key=value` of a recipe.
        drops_padding_masks: rows that are padded on the right are computed without a mask.
        narrow_tile: the buffer of TRL's loss is as wide as the vocabulary.
        listeners: called with events, such as that of a smaller micro-batch.
    """

    settings: list[str] = field(default_factory=list)
    drops_padding_masks: bool = False
    narrow_tile: bool = False
    listeners: list[Callable[[Event], None]] = field(default_factory=list)


_by_model: WeakKeyDictionary[nn.Module, Applied] = WeakKeyDictionary()


def applied_to(model: nn.Module) -> Applied:
    """Returns the record of a model; empty for one that nothing was applied to."""
    return _by_model.setdefault(model, Applied())
