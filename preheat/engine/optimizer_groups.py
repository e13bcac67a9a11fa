"""Learning rates and weight decay of single weights: `optimizer.groups` and `optimizer.layer_decay`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.core import Build, Change
from preheat.errors import RecipeError
from preheat.models.parameter_selection import find_layer_names, select_parameters
from preheat.ops.optim.param_groups import WeightSettings
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["resolve_weight_settings"]


def resolve_weight_settings(model_build: Build) -> dict[str, WeightSettings]:
    """Returns the settings of the weights that have others than the rest, by name, and records them as a change.

    The build's model must be complete: not cut into the stages of a pipeline.

    Raises:
        RecipeError: a group matches no trained weight, or all of them; two groups match one weight.
    """
    optimizer = model_build.recipe.optimizer
    if not optimizer.groups and optimizer.layer_decay == 1:
        return {}
    (model,) = model_build.trained
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    scales = _find_layer_scales(model, optimizer.layer_decay)  # type: ignore[arg-type]
    settings = {name: WeightSettings(scales[name]) for name in trained if scales[name] != 1}
    owners: dict[str, str] = {}
    changes = []
    if settings:
        lowest = min(scales[name] for name in trained)
        changes.append(
            Change(f"learning rates fall by {optimizer.layer_decay:g} a layer, to {lowest:.2g}", len(settings))
        )
    for pattern, values in optimizer.groups.items():
        names = _select_trained(model, pattern, trained)  # type: ignore[arg-type]
        for name in sorted(names):
            if name in owners:
                raise RecipeError(
                    f"optimizer.groups: {name} is in two groups, {quote_value(owners[name])} and "
                    f"{quote_value(pattern)}; make one of the patterns narrower"
                )
            owners[name] = pattern
            scale = values.get("lr_scale", 1.0) * scales[name]
            settings[name] = WeightSettings(scale, values.get("weight_decay"))
        text = ", ".join(f"{key} {value:g}" for key, value in values.items())
        changes.append(Change(f"{pattern}: {text}", len(names)))
    model_build.changes["optimizer.groups"] = changes
    return settings


def _select_trained(model: PreTrainedModel, pattern: str, trained: set[str]) -> set[str]:
    """Returns the trained weights of a group."""
    try:
        selected = select_parameters(model, pattern)
    except ValueError as error:
        raise RecipeError(f"optimizer.groups: {quote_value(pattern)} {error}") from None
    # A tied weight may be named by either of its names; the optimizer has it under the first.
    first: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(p), name)
    names = {first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if name in selected}
    if not names & trained:
        problem = (
            "matches only frozen weights"
            if names
            else f"matches no weight of the model and its techniques; names are such as {sorted(trained)[-1]}"
        )
        raise RecipeError(f"optimizer.groups: {quote_value(pattern)} {problem}")
    if names >= trained:
        raise RecipeError(
            f"optimizer.groups: {quote_value(pattern)} matches all trained weights; set optimizer.lr and weight_decay"
        )
    return names & trained


def _find_layer_scales(model: PreTrainedModel, decay: float) -> dict[str, float]:
    """Returns the factor on the learning rate of each weight by its depth: 1 above the layers, `decay` in the last.

    A tied head has the rate of the embeddings.
    """
    layers = find_layer_names(model)
    scales = {name: 1.0 for name, _ in model.named_parameters()}
    for depth, names in enumerate(reversed(layers), start=1):
        scales.update(dict.fromkeys(names & scales.keys(), decay**depth))
    embeddings = select_parameters(model, "embeddings") & scales.keys()
    return scales | dict.fromkeys(embeddings, decay ** (len(layers) + 1))
