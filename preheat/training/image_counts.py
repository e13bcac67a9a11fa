"""What a plan of a run takes from the data that is read: the images of its fullest row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from preheat.models import hf
from preheat.recipe import Recipe

__all__ = ["with_images"]


def with_images(recipe: Recipe, data: Any) -> Recipe:
    """The recipe with the images of the training rows, to plan with; as it is where the model reads text alone.

    Args:
        data: data.PreparedData.
    """
    vision = hf.facts(hf.configure(recipe, len(data.tokenizer))).vision
    if vision is None:
        return recipe
    count, patches = data.train.most_images()
    each = patches * vision.patch**2 // count if count else recipe.data.image_pixels
    return replace(recipe, data=replace(recipe.data, images=float(count), image_pixels=each))
