"""Groups of parameters of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Required, TypeAlias, TypedDict

from torch import Tensor

__all__ = ["AdamSettings", "ParamGroup", "WeightSettings", "to_lists"]

ParamGroup: TypeAlias = dict[str, Any]
"""Parameters (`params`) and the settings that the optimizer uses for them, as in torch's `param_groups`.

`lr_scale`, if there, is the factor on the learning rate that a step sets."""


class AdamSettings(TypedDict, total=False):
    """The settings with which a build creates its optimizer: learning rate, betas and eps; groups have the rest."""

    lr: Required[float]
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class WeightSettings(NamedTuple):
    """Settings of one weight.

    Attributes:
        lr_scale: factor on the learning rate.
        weight_decay: None for the default of its kind.
    """

    lr_scale: float = 1.0
    weight_decay: float | None = None


def to_lists(params: Iterable[Any]) -> list[Any]:
    """Returns the parameters or groups that torch's optimizers accept, as lists that can be read several times.

    Names of (name, parameter) pairs are dropped. A group's `params` may be a generator, or a single parameter.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> [len(group["params"]) for group in to_lists([{"params": layer.parameters()}, {"params": layer.bias}])]
        [2, 1]
    """
    return [
        {**p, "params": [p["params"]] if isinstance(p["params"], Tensor) else to_lists(p["params"])}
        if isinstance(p, dict)
        else p[1]
        if isinstance(p, tuple)
        else p
        for p in params
    ]
