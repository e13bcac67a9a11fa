"""Kinds of examples (text, pairs of answers, liked answers, classes), and the check that data fits the objective."""

from __future__ import annotations

from preheat.core import ExampleKind, Recipe
from preheat.data.packing import Rows
from preheat.data.preparation import PreparedData
from preheat.errors import DataError, RecipeError

__all__ = ["examples_of", "require_examples"]


def examples_of(recipe: Recipe) -> ExampleKind:
    """Returns the kind of examples that a recipe's objective requires."""
    # A technique with an objective of its own decides; without one it is next-token prediction on text.
    kinds = (t.examples() for t in recipe.techniques.values())
    return next((kind for kind in kinds if kind is not None), ExampleKind())


_HOLDS = {
    "text": "text to continue",
    "pairs": "pairs of answers, of which one is preferred",
    "desirable": "single answers that were liked or not",
    "classes": "documents of a class each",
}
_FIX = {
    "text": "leave {technique} out, or state data.layout and data.columns",
    "pairs": "add techniques.preference (loss: dpo, say)",
    "desirable": "set techniques.preference.loss: kto",
    "classes": "add techniques.classification",
}


def require_examples(recipe: Recipe, data: PreparedData, *, encoder: bool = False) -> None:
    """Checks that the data has the kind of examples, and the classes, that the objective reads.

    Args:
        encoder: the model has an encoder, which reads the untrained tokens.

    Raises:
        DataError: the rows are of another kind, or plain text for an encoder-decoder.
        RecipeError: the recipe has too few classes.
    """
    required = examples_of(recipe)
    owner = next(
        (f"techniques.{t.name()}" for t in recipe.techniques.values() if t.examples() is not None),
        "next-token training",
    )
    for side in (data.train, data.validation):
        # A streamed source and an empty side have no tokens to judge by.
        if isinstance(side, Rows) and len(side.tokens.offsets):
            _compare(required, side.tokens.examples, owner, data.source)
            # An encoder reads the prompt, the tokens that are not trained on: plain text has none.
            if encoder and side.tokens.loss_mask is None:
                raise DataError(
                    f"{data.source}: is text to continue, all of it trained on, and an encoder-decoder "
                    "reads a prompt and writes the answer; "
                    "name data of both (data.layout: prompt_completion, alpaca, messages), and leave "
                    "data.train_on: all out"
                )


def _compare(required: ExampleKind, actual: ExampleKind, owner: str, source: str) -> None:
    if actual.kind != required.kind:
        raise DataError(
            f"{source}: holds {_HOLDS[actual.kind]}, but {owner} reads {_HOLDS[required.kind]}; "
            f"{_FIX[actual.kind].format(technique=owner)}, or name other data"
        )
    # Fewer classes are fine: the data may lack some of them.
    if actual.classes > required.classes:
        raise RecipeError(
            f"{owner}.classes: {required.classes}, but the data has class {actual.classes - 1} (they are "
            f"numbered from 0); set it to {actual.classes}"
        )
