"""Test and benchmark configurations of a technique. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Trials"]


@dataclass(frozen=True)
class Trials:
    """Configurations of a technique for the contract tests, the distributed tests and the check on a GPU.

    Attributes:
        settings: settings that exercise other code paths than the defaults, which are always tested.
        family: family of the small model that it needs; empty if any works.
        recipe: required settings in the rest of the recipe, in `--set` syntax. `{teacher}` is the folder of a small
            model.
        refused_on_cpu: the reason that its check gives on one CPU with a small Llama, as a regular expression; empty if
            it runs there with its defaults.
        first_loss: for an objective other than next-token prediction, the approximate first loss by the setting `loss`
            or `classes` (None: the defaults), for a vocabulary of 96.
    """

    settings: tuple[Mapping[str, object], ...] = ()
    family: str = ""
    recipe: tuple[str, ...] = ()
    refused_on_cpu: str = ""
    first_loss: Mapping[str | int | None, float] = field(default_factory=dict)
