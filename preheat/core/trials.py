"""What the tests and benchmarks that try every technique must know of one. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Trials"]


@dataclass(frozen=True)
class Trials:
    """How a technique is tried: by the contract tests, the distributed tests and the check on a GPU.

    Attributes:
        settings: settings that take other code paths than the defaults, which are always tried.
        family: family of the small model that it needs; empty if any serves.
        recipe: what it needs of the rest of the recipe, as `--set` takes it. `{teacher}` is the folder of a small
            model.
        refused_on_cpu: the reason that its check gives on one CPU with a small Llama, as a regular expression; empty
            if it runs there at its defaults.
        first_loss: for another objective than next-token prediction, what the first loss is near to, by the setting
            `loss` or `classes` (None: the defaults); over a vocabulary of 96.
    """

    settings: tuple[Mapping[str, Any], ...] = ()
    family: str = ""
    recipe: tuple[str, ...] = ()
    refused_on_cpu: str = ""
    first_loss: Mapping[Any, float] = field(default_factory=dict)
