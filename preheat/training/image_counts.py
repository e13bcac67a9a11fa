"""Copies the maximum number of images per row from the data into the recipe, for planning."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from preheat.model_folder import vocabulary_size
from preheat.models import hf
from preheat.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from preheat.data.preparation import PreparedData

__all__ = ["with_images"]


def with_images(recipe: Recipe, data: PreparedData, source_config: PretrainedConfig | None = None) -> Recipe:
    """Returns the recipe with the image counts of the training rows, for planning; unchanged for text-only models.

    Args:
        source_config: what `configs.source` gave for the recipe's model; it is read when not given.
    """
    vision = hf.facts(hf.configure(recipe, vocabulary_size(data.tokenizer), source_config)).vision
    if vision is None:
        return recipe
    assert hasattr(data.train, "most_images"), "a model that reads images does not stream its rows"
    # The maximum, because the row with the most patches sets the peak of memory.
    count, patches = data.train.most_images()
    # Pixels per image, averaged over the images of that row; without images, the recipe's own limit.
    each = patches * vision.patch**2 // count if count else recipe.data.image_pixels
    return replace(recipe, data=replace(recipe.data, images=float(count), image_pixels=each))
