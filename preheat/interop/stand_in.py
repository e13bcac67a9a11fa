"""Stand-ins in plans of another trainer's configuration: for models that are not here, and kernels of families."""

from __future__ import annotations

from dataclasses import replace

from preheat.errors import RecipeError
from preheat.interop.reading import ForeignConfig
from preheat.models import configs, presets
from preheat.recipe import Recipe

__all__ = ["drop_missing_kernels", "find_preset", "shorten_assumed_length"]


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

    family = _find_in_model(recipe, "model_type")
    if family is None or family in KERNEL_FAMILIES:
        return config
    techniques = {name: t for name, t in recipe.techniques.items() if name != "fused_operators"}
    text = f"the fused norms and gates of {family} are planned as separate operators, which take more memory and time"
    return replace(
        config,
        recipe=replace(recipe, techniques=techniques),
        reading=replace(reading, assumptions=(*reading.assumptions, text)),
    )


def shorten_assumed_length(config: ForeignConfig) -> ForeignConfig:
    """Returns the configuration with sequences of at most the model's positions, if the file states no length."""
    recipe, reading = config.recipe, config.reading
    length = recipe.batch.seq_len
    assumed = any(f"batch.seq_len: {length}" in default.ours for default in reading.defaults)
    positions = _find_in_model(recipe, "max_position_embeddings") if assumed else None
    if not isinstance(positions, int) or length <= positions:
        return config
    text = f"the model has {positions:,} positions: sequences of that length are planned, not of {length:,} tokens"
    return replace(
        config,
        recipe=replace(recipe, batch=replace(recipe.batch, seq_len=positions)),
        reading=replace(reading, assumptions=(*reading.assumptions, text)),
    )


def _find_in_model(recipe: Recipe, key: str) -> object:
    """Returns a value of the configuration of the model's text part; None if the model is not known or lacks it."""
    path = recipe.model.path
    if path is None:
        return None
    try:
        return getattr(configs.read(path, recipe.model.trust_remote_code).get_text_config(), key, None)
    except RecipeError:
        preset = find_preset(path)
        return None if preset is None else presets.find(preset).text.get(key)
