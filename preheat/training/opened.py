"""A trained model to read from: the newest whole checkpoint of a run, or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preheat import recipe as recipes
from preheat.engine import checkpoint
from preheat.engine.build import build
from preheat.errors import RunError
from preheat.recipe import Model, Recipe, Stop
from preheat.technique import Build
from preheat.training.session import resolve

__all__ = ["Opened", "open_model"]


@dataclass
class Opened:
    recipe: Recipe
    build: Build
    tokenizer: Any
    step: int | None
    """Of the checkpoint; None for a model folder."""


def open_model(path: str | Path, *, at_start: bool = False) -> Opened:
    """Builds a run's model with its newest whole checkpoint, or the model of a Hugging Face folder, for reading.

    Args:
        at_start: of a run, the model that it began from: its base with its techniques, before the first step.

    Raises:
        RunError: neither a run nor a model, or no whole checkpoint.
    """
    from preheat.data.tokenizer import load_tokenizer

    path = Path(path)
    if (path / "recipe.yaml").is_file():
        recipe = recipes.load(path / "recipe.yaml")
        tokenizer = load_tokenizer(str(path / "tokenizer"))
        if at_start:
            device, _ = resolve(recipe)
            return Opened(recipe, build(recipe, vocabulary=len(tokenizer), device=device), tokenizer, 0)
        found, damaged = checkpoint.find(path / "checkpoints")
        if found is None:
            raise RunError(
                f"{path}: "
                + (f"no checkpoint is whole ({damaged[0][0].name}: {damaged[0][1]})" if damaged else "has no checkpoint yet")
            )
        device, _ = resolve(recipe)
        made = build(recipe, vocabulary=len(tokenizer), device=device)
        checkpoint.load_weights(made, found)
        return Opened(recipe, made, tokenizer, checkpoint.read_progress(found).step)
    if at_start:
        raise RunError(f"{path}: is no run, so nothing is known of a model before it; name two models to compare them")
    if not (path / "config.json").is_file():
        raise RunError(f"{path}: is neither a run (no recipe.yaml) nor a Hugging Face model folder (no config.json)")
    recipe = Recipe(name="opened", model=Model(path=str(path)), stop=Stop(steps=1))
    tokenizer = load_tokenizer(str(path))
    from preheat.models.adapter import configure, facts

    positions = facts(configure(replace(recipe, batch=replace(recipe.batch, length=2)))).positions
    recipe = replace(recipe, batch=replace(recipe.batch, size=8, length=min(512, positions or 512)))
    device, _ = resolve(recipe)
    return Opened(recipe, build(recipe, vocabulary=len(tokenizer), device=device), tokenizer, None)
