"""Whether the data holds what the recipe's objective reads: text, pairs of answers, liked answers or classes."""

from __future__ import annotations

from preheat.data.packing import Rows
from preheat.data.preparing import Prepared
from preheat.errors import DataError, RecipeError
from preheat.recipe import Recipe
from preheat.technique import Examples, examples_of

__all__ = ["require_examples"]

_HOLDS = {
    "text": "text to continue",
    "pairs": "pairs of answers, of which one is preferred",
    "liked": "single answers that were liked or not",
    "classes": "documents of a class each",
}
_FIX = {
    "text": "leave {technique} out",
    "pairs": "add techniques.preference (loss: dpo, say)",
    "liked": "set techniques.preference.loss: unpaired",
    "classes": "add techniques.classification",
}


def require_examples(recipe: Recipe, data: Prepared) -> None:
    """Refuses data of another kind than the objective reads, and more classes than it has.

    Raises:
        DataError: rows of another kind; RecipeError: too few classes in the recipe.
    """
    asked = examples_of(recipe)
    owner = next(
        (f"techniques.{t.name()}" for t in recipe.techniques.values() if t.examples() is not None), "next-token training"
    )
    for side in (data.train, data.validation):
        if isinstance(side, Rows) and len(side.tokens.ends):
            _compare(asked, side.tokens.examples, owner, data.source)


def _compare(asked: Examples, held: Examples, owner: str, source: str) -> None:
    if held.kind != asked.kind:
        raise DataError(
            f"{source}: holds {_HOLDS[held.kind]}, but {owner} reads {_HOLDS[asked.kind]}; "
            f"{_FIX[held.kind].format(technique=owner)}, or name other data"
        )
    if held.classes > asked.classes:
        raise RecipeError(
            f"{owner}.classes: {asked.classes}, but the data has class {held.classes - 1} (they are numbered from 0); set it to {held.classes}"
        )
