"""Copies the maximum number of images per row from the data into the recipe, for planning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from preheat.models import hf
from preheat.recipe import Recipe

__all__ = ["with_images"]


def with_images(recipe: Recipe, data: Any, source_config: Any = None) -> Recipe:
    """Returns the recipe with the image counts of the training rows, for planning; unchanged for text-only models.

    Args:
        data: data.PreparedData.
        source_config: what `configs.source` gave for the recipe's model; it is read when not given.
    """
    vision = hf.facts(hf.configure(recipe, len(data.tokenizer), source_config)).vision
    if vision is None:
        return recipe
    count, patches = data.train.most_images()
    each = patches * vision.patch**2 // count if count else recipe.data.image_pixels
    return replace(recipe, data=replace(recipe.data, images=float(count), image_pixels=each))
