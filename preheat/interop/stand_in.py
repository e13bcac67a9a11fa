"""Stand-ins in plans of another trainer's configuration: for models that are not here, and kernels of families."""

from __future__ import annotations

from dataclasses import replace

from preheat.errors import RecipeError
from preheat.interop.reading import ForeignConfig
from preheat.models import configs, presets
from preheat.recipe import Recipe

__all__ = ["drop_missing_kernels", "find_preset"]


def find_preset(name: str) -> str | None:
    """Returns the preset with the sizes of a checkpoint of the hub, by its name; None if there is none.

    Example:
        >>> find_preset("Qwen/Qwen3-8B"), find_preset("owner/llama-3-70b-fp16"), find_preset("owner/something-7B")
        ('qwen3-8b', 'llama-3-70b', None)
    """
    try:
        return presets.resolve_hub_name(name)[0]
    except RecipeError:
        return presets.find_variant(name)


def drop_missing_kernels(config: ForeignConfig) -> ForeignConfig:
    """Returns the configuration without fused operators if preheat has none for the model's family, and says so."""
    recipe, reading = config.recipe, config.reading
    if "fused_operators" not in recipe.techniques:
        return config
    from preheat.models.kernel_swap import KERNEL_FAMILIES  # imports torch

    family = _find_family(recipe)
    if family is None or family in KERNEL_FAMILIES:
        return config
    techniques = {name: t for name, t in recipe.techniques.items() if name != "fused_operators"}
    text = f"the fused norms and gates of {family} are planned as separate operators, which take more memory and time"
    return replace(
        config,
        recipe=replace(recipe, techniques=techniques),
        reading=replace(reading, assumptions=(*reading.assumptions, text)),
    )


def _find_family(recipe: Recipe) -> str | None:
    """Returns the family of the text part of the recipe's model; None if the model is not known."""
    path = recipe.model.path
    if path is None:
        return None
    try:
        return str(configs.read(path, recipe.model.trust_remote_code).get_text_config().model_type)
    except RecipeError:
        preset = find_preset(path)
        return None if preset is None else str(presets.find(preset).text["model_type"])
