"""The images per row and their size that a plan counts: those of the data, or those that the recipe assumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.model_folder import count_embedding_rows
from preheat.models import hf
from preheat.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from preheat.data.preparation import PreparedData

__all__ = ["find_assumed_pixels", "add_image_counts"]


def find_assumed_pixels(
    recipe: Recipe, vocabulary: int | None, source_config: PretrainedConfig | None = None
) -> int | None:
    """Returns the pixels that the model's image processor makes of a square image of `data.image_pixels` pixels, for a
    plan without data; None for text-only models.

    Args:
        source_config: what `configs.source_config` gave for the recipe's model; it is read when not given.
    """
    from preheat.data.vision_inputs import ImageProcessor
    from preheat.models.vision import vision_arguments

    config = hf.configure(recipe, vocabulary, source_config)
    # Of a model on the hub the family's own settings are assumed: a plan downloads no more than config.json.
    folder = recipe.model.path if recipe.model.path and Path(recipe.model.path).is_dir() else None
    settings = vision_arguments(config, folder)
    return ImageProcessor.planned(**settings, pixels=recipe.data.image_pixels) if settings else None


def add_image_counts(recipe: Recipe, data: PreparedData, source_config: PretrainedConfig | None = None) -> Recipe:
    """Returns the recipe with the image counts of the training rows, for planning; unchanged for text-only models.

    Args:
        source_config: what `configs.source_config` gave for the recipe's model; it is read when not given.
    """
    vision = hf.read_facts(hf.configure(recipe, count_embedding_rows(data.tokenizer), source_config)).vision
    if vision is None:
        return recipe
    assert hasattr(data.train, "most_images"), "a model that reads images does not stream its data"
    # The maximum, because the row with the most patches sets the peak of memory.
    count, patches = data.train.most_images()
    # Pixels per image, averaged over the images of that row; without images, the recipe's own limit.
    each = patches * vision.patch**2 // count if count else recipe.data.image_pixels
    return replace(recipe, data=replace(recipe.data, images=float(count), image_pixels=each))
