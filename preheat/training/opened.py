"""A trained model to read from: the newest whole checkpoint of a run, or a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preheat import recipe as recipes
from preheat.engine import checkpoint
from preheat.engine.build import build
from preheat.errors import RunError
from preheat.models.generate import Written
from preheat.recipe import Model, Recipe, Sample, Stop
from preheat.technique import Build
from preheat.training.session import resolve
from preheat.training.texts import Prompt, write_texts

__all__ = ["Opened", "open_model"]


@dataclass
class Opened:
    recipe: Recipe
    build: Build
    tokenizer: Any
    step: int | None
    """Of the checkpoint; None for a model folder."""

    def write(self, prompts: Sequence[Prompt], settings: Sample | None = None, **how: Any) -> list[Written]:
        """Continues texts, and answers chats: `write_texts` with this model; `how` is its template, seed, batch, on_text and kept.

        Example:
            >>> open_model("runs/demo").write(["import os\\n"])[0].text                                 # doctest: +SKIP
        """
        return write_texts(self.build, self.tokenizer, prompts, settings, **how)


def open_model(path: str | Path, *, step: int | None = None) -> Opened:
    """Builds a run's model with a whole checkpoint, or the model of a Hugging Face folder, for reading.

    Args:
        path: a run, one of its checkpoints (`runs/x/checkpoints/step-N`), or a model folder.
        step: of a run's checkpoint; the newest whole one when not given.

    Raises:
        RunError: neither a run nor a model, or no whole checkpoint (of that step).
    """
    from preheat.data.tokenizer import load_tokenizer

    path = Path(path)
    if re.fullmatch(r"step-\d+", path.name) and (path.parent.parent / "recipe.yaml").is_file():
        own = int(path.name.removeprefix("step-"))
        if step not in (None, own):
            raise RunError(f"{path}: is the checkpoint of step {own}, and step {step} was asked for; name the run")
        path, step = path.parent.parent, own
    if (path / "recipe.yaml").is_file():
        recipe = recipes.load(path / "recipe.yaml")
        tokenizer = load_tokenizer(str(path / "tokenizer"))
        found, damaged = checkpoint.find(path / "checkpoints", step)
        if found is None:
            raise RunError(
                f"{path}: "
                + (f"no checkpoint is whole ({damaged[0][0].name}: {damaged[0][1]})" if damaged else "has no checkpoint yet")
            )
        device, _ = resolve(recipe)
        made = build(recipe, vocabulary=len(tokenizer), device=device)
        checkpoint.load_weights(made, found)
        return Opened(recipe, made, tokenizer, checkpoint.read_progress(found).step)
    if step is not None:
        raise RunError(f"{path}: is no run, so it has no checkpoint of step {step}; leave --step out")
    if not (path / "config.json").is_file():
        raise RunError(f"{path}: is neither a run (no recipe.yaml) nor a Hugging Face model folder (no config.json)")
    recipe = Recipe(name="opened", model=Model(path=str(path)), stop=Stop(steps=1))
    tokenizer = load_tokenizer(str(path))
    from preheat.models.adapter import configure, facts

    positions = facts(configure(replace(recipe, batch=replace(recipe.batch, length=2)))).positions
    recipe = replace(recipe, batch=replace(recipe.batch, size=8, length=min(512, positions or 512)))
    device, _ = resolve(recipe)
    return Opened(recipe, build(recipe, vocabulary=len(tokenizer), device=device), tokenizer, None)
