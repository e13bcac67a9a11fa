"""Finds the recipe that MODEL|RECIPE names: a recipe of the user, or one made around a model. Does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.cli.options.foreign_options import RECOGNIZED, ForeignOptions
from preheat.cli.options.recipe_argument import read_foreign_config
from preheat.core.schema import TOKENIZER_FILES
from preheat.errors import RecipeError
from preheat.hardware.connectivity import find_cached_folder, is_hub_offline
from preheat.interop.stand_in import find_preset
from preheat.interop.torchtitan_registry import split_name
from preheat.model_folder import read_object
from preheat.models import configs, presets
from preheat.models.hub_config import find_hub_folder, is_hub_name
from preheat.recipe import Recipe
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from preheat.cli.options.plan_options import PlanOptions
    from preheat.core.config_reading import ConfigReading
    from preheat.core.json_types import JsonObject
    from preheat.interop.reading import ForeignConfig

__all__ = ["METHODS", "Subject", "count_devices", "find_subject"]

METHODS: Mapping[str, JsonObject] = {
    "full": {},
    "lora": {"techniques": {"lora": {}}, "optimizer": {"lr": 2e-4, "weight_decay": 0.0}},
    "qlora": {"techniques": {"lora": {}, "nf4": {}}, "optimizer": {"lr": 2e-4, "weight_decay": 0.0}},
}
"""Ways to train a named model: full fine-tuning, LoRA, or LoRA on a 4-bit base; each needs less memory than the one
before. LoRA needs about ten times the learning rate of full fine-tuning."""
_ROWS, _LENGTH = 16, 2048  # default rows and tokens per row of a global batch


@dataclass(frozen=True)
class Subject:
    """The recipe that a command plans.

    Attributes:
        from_user: True for a recipe of the user, which is planned as it is.
        checkpoint: hub checkpoint with the weights of a model given by name.
        absent: `model.path` of a given recipe, if it is the preset's checkpoint and cannot be read here: the preset is
            planned, and the recipe lacks the path.
        reading: how the recipe was read from another trainer's configuration; None if it was not.
        reads_data: False if another trainer's configuration names data that is not on this machine.
        config: the configuration of another trainer that the recipe was read from; None if it was not.
    """

    recipe: Recipe
    from_user: bool
    checkpoint: str | None = None
    absent: str | None = None
    reading: ConfigReading | None = None
    reads_data: bool = True
    config: ForeignConfig | None = None


def find_subject(
    what: str | None,
    overrides: Sequence[str] = (),
    *,
    method: str = "full",
    length: int | None = None,
    batch_tokens: int | None = None,
    devices: int = 1,
    foreign: ForeignOptions = RECOGNIZED,
) -> Subject:
    """Returns the recipe that the arguments name.

    Args:
        what: a recipe (a file, or the name of a built-in one), a model's name, a folder or its config.json, or a size
            such as 15M; None if `overrides` name the model.
        overrides: `key=value` each.
        method: key of `METHODS`, for a model.
        length: tokens per row.
        batch_tokens: tokens per global batch.
        foreign: how another trainer's file is read.

    Raises:
        RecipeError: `what` is unknown, or the numbers contradict each other.
    """
    batch = _build_batch(length, batch_tokens)
    more = [*(f"batch.{key}={value}" for key, value in batch.items()), f"parallel.devices={devices}"]
    if what is not None and _is_recipe(what):
        # The last override is `parallel.devices`, which a recipe keeps unless the user asks for more than one device.
        values_set = [*overrides, *more] if devices > 1 else [*overrides, *more[:-1]]
        world = devices if devices > 1 else None
        if config := read_foreign_config(what, values_set, foreign=foreign, devices=world, warn=False):
            recipe = _check_batch_tokens(config.recipe, batch_tokens)
            subject = _load_foreign_recipe(recipe, config.reading)
            return replace(subject, reads_data=config.reads_data, config=config)
        return _load_user_recipe(_check_batch_tokens(recipes.load(what, values_set), batch_tokens))
    foreign.require_none(what)
    # A model instead of a recipe: invent the rest of a recipe around it.
    model, positions, checkpoint = _find_model(what)
    # Rows are no longer than the model's context: the explicit keys of `batch` override that.
    batch = {"seq_len": min(length or _LENGTH, positions or _LENGTH), **batch}
    # Rounded up to a multiple of the devices, because each data-parallel rank takes equally many rows.
    batch.setdefault("size", math.ceil(_ROWS / devices) * devices)
    values = {
        "name": _choose_name(what or "model"),
        "model": model,
        "batch": batch,
        "stop": {"epochs": 1},
        "parallel": {"devices": devices},
        **METHODS[method],
    }
    # The user has not seen this recipe: errors name the option in place of a line.
    sources: dict[tuple[str, ...], str] = {("batch", "seq_len"): f"--length {length}"} if length else {}
    named = recipes.read_values(values, where=what or "the model", sources=sources, overrides=overrides, warn=True)
    return Subject(_check_batch_tokens(named, batch_tokens), False, checkpoint)


def count_devices(options: PlanOptions, subject: Subject) -> tuple[int, int]:
    """Returns the number of devices of a plan, and of one host.

    Raises:
        RecipeError: the recipe is for another number of devices.
    """
    count, nodes, devices = options.count, options.nodes, options.devices
    # --count is per host if --nodes is given.
    per_host = count if nodes > 1 and count else min(devices, 8)
    stated = subject.recipe.parallel.devices or 1
    # A recipe may state its devices itself: the options must not contradict it.
    if subject.from_user and nodes == 1 and stated > 1:
        if count == 1:
            raise RecipeError(
                f"--count: 1: the recipe is for parallel.devices: {stated}; leave --count out, or set both alike"
            )
        if count is None and options.gpu is not None:  # the recipe says how many
            return stated, min(stated, 8)
    return devices, per_host


def _load_user_recipe(recipe: Recipe) -> Subject:
    model = recipe.model
    known = presets.find(model.preset) if model.preset else None
    # Only the preset's own checkpoint may be missing: the preset describes the same architecture.
    if known is None or model.path not in (known.hub, known.chat) or Path(model.path).is_dir():
        return Subject(recipe, True)
    try:
        configs.read(model.path, model.trust_remote_code)
    except RecipeError:
        return Subject(replace(recipe, model=replace(model, path=None)), True, absent=model.path)
    return Subject(recipe, True)


def _load_foreign_recipe(recipe: Recipe, reading: ConfigReading) -> Subject:
    """Returns a recipe that was read from another trainer's configuration, with a preset for a model that is not here.

    A tokenizer that is not here is left out of the plan.

    Raises:
        RecipeError: the model is not here, and no preset has its sizes.
    """
    if (tokenizer := recipe.data.tokenizer) is not None and _is_tokenizer_absent(tokenizer):
        text = f"the tokenizer {shorten(tokenizer)} is not on this machine: the model's own vocabulary is planned"
        reading = replace(reading, assumptions=(*reading.assumptions, text))
        recipe = replace(recipe, data=replace(recipe.data, tokenizer=None))
    model, absent = recipe.model, recipe.model.path
    if absent is None:  # an override names another model
        return replace(_load_user_recipe(recipe), reading=reading)
    try:
        configs.read(absent, model.trust_remote_code)
        return Subject(recipe, True, reading=reading)
    except RecipeError as error:
        name = find_preset(absent)
        if name is None:
            key = next((key for key in reading.taken if f'model.path: "{absent}"' in key.ours), None)
            place = f"{key.file or reading.file}:{key.line}: {key.key}" if key else reading.file
            raise RecipeError(f"{place}: {error}") from None
    sizes = f"{absent} is planned with the sizes of {name}, by its name"
    exact = absent in presets.find(name).checkpoints
    reading = reading if exact else replace(reading, assumptions=(*reading.assumptions, sizes))
    planned = replace(recipe, model=replace(model, path=None, preset=name, add_tokens=()))
    return Subject(planned, True, absent=absent, reading=reading)


def _is_tokenizer_absent(name: str) -> bool:
    """Returns True if a tokenizer is neither a folder nor in the hub's cache, with no network to look for it."""
    if Path(name).exists() or not is_hub_offline():
        return False
    return not is_hub_name(name) or find_cached_folder(name, TOKENIZER_FILES) is None


def _is_recipe(what: str) -> bool:
    name, configuration = split_name(what)  # of a Python file that has several
    if configuration is not None:
        return True
    file = Path(name)
    try:
        if file.exists() and not file.is_dir():
            # A config.json is a model's, every other file a recipe's, even if it is no valid one: its errors are then
            # shown.
            return file.name != "config.json"
    except (OSError, ValueError):
        raise RecipeError(f"{shorten(what)}: is not a file name (it is too long, or holds a NUL character)") from None
    named = recipes.named_recipes().get(what)
    if named is not None and named.package and what in presets.PRESETS:
        raise RecipeError(
            f"{what}: is a model, and a recipe of the package {named.package}; name the file: {named.path}, or the "
            f"model by its checkpoint: {presets.PRESETS[what].hub}"
        )
    return named is not None or file.suffix in (".yaml", ".yml")


def _find_model(what: str | None) -> tuple[JsonObject, int | None, str | None]:
    """Returns the keys of `model`, the model's context length if known, and its checkpoint on the hub."""
    if what is None:
        return {}, None, None
    file = Path(what)
    if file.name == "config.json" and file.is_file():
        file = file.parent
    # Folders come before sizes and presets, so that a folder called 15M is still found.
    if file.is_dir():
        if not (file / "config.json").is_file():
            raise RecipeError(
                f"{what}: is a folder without a config.json; name a Hugging Face model's folder, or a recipe file"
            )
        return {"path": str(file)}, _find_positions(file / "config.json"), None
    if re.fullmatch(r"\d+(\.\d+)?[KMB]", what):
        return {"size": what}, None, None
    try:
        name, checkpoint = presets.resolve_hub_name(what)
    except RecipeError:
        # The configuration alone: a plan downloads no weights.
        if (folder := find_hub_folder(what)) is None:
            raise
        return {"path": str(folder)}, _find_positions(folder / "config.json"), what
    return {"preset": name}, presets.find(name).text.get("max_position_embeddings"), checkpoint


def _find_positions(config: Path) -> int | None:
    values = read_object(config, "model.path")
    # Models that read images keep the context length of their language model one level down.
    text = values.get("text_config")
    positions = (text if isinstance(text, dict) else values).get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def _build_batch(length: int | None, tokens: int | None) -> dict[str, int]:
    batch = {} if length is None else {"seq_len": length}
    if tokens is None:
        return batch
    row = length or _LENGTH
    if tokens < 1 or tokens % row:
        near = max(1, round(tokens / row)) * row
        raise RecipeError(
            f"--batch-tokens: {tokens:,} is no multiple of sequences of {row:,} tokens; use {near}, or another --length"
        )
    return {**batch, "seq_len": row, "size": tokens // row}


def _check_batch_tokens(recipe: Recipe, tokens: int | None) -> Recipe:
    if tokens is not None and recipe.batch.size * recipe.batch.seq_len != tokens:
        raise RecipeError(f"--batch-tokens: {tokens:,} and --set batch contradict each other; leave one out")
    return recipe


def _choose_name(what: str) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(what).name) or "model"
