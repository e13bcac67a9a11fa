"""What `preheat plan` is asked about: a recipe, or a model by name, folder or size, on this machine or on a device of the catalogue."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat import recipe as recipes
from preheat.core import Device
from preheat.errors import RecipeError
from preheat.hardware.catalogue import accelerator, stated
from preheat.hardware.probe import parse_memory
from preheat.hardware.rates import Rates
from preheat.hardware.segments import grows
from preheat.model_folder import read_object
from preheat.models import configs, presets
from preheat.recipe import Recipe
from preheat.recipe.yaml_io import write
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from preheat.planning.speed.roofline import Roofline

__all__ = ["METHODS", "Question", "asked", "hardware"]

METHODS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "lora": {"techniques": {"lora": {}}, "optimizer": {"lr": 2e-4, "weight_decay": 0.0}},
    "qlora": {"techniques": {"lora": {}, "nf4": {}}, "optimizer": {"lr": 2e-4, "weight_decay": 0.0}},
}
"""Ways to train a model that is named: all of it, an adapter, an adapter on a base in 4 bits. LoRA wants about ten times the rate of full tuning."""
_ROWS, _LENGTH = 16, 2048  # of a global batch, where nobody says


@dataclass(frozen=True)
class Question:
    """A recipe to plan.

    Attributes:
        given: the user's own, to be planned as it is.
        checkpoint: where the weights of a model by name are to be had.
        absent: `model.path` of a given recipe, the checkpoint of its preset, that cannot be read here: the preset is planned, and the recipe lacks the path.
    """

    recipe: Recipe
    given: bool
    checkpoint: str | None = None
    absent: str | None = None


def asked(
    what: str | None,
    overrides: Sequence[str] = (),
    *,
    method: str = "full",
    length: int | None = None,
    batch_tokens: int | None = None,
    devices: int = 1,
) -> Question:
    """The recipe that is meant.

    Args:
        what: a recipe (a file, or a built-in one's name), a model's name, a folder or its config.json, a size as 15M; None where `overrides` say it.
        overrides: `key=value` each.
        method: of `METHODS`, for a model.
        length: tokens of a row. batch_tokens: of a global batch.

    Raises:
        RecipeError: it cannot be made out, or the numbers do not go together.
    """
    batch = _batch(length, batch_tokens, devices)
    more = [*(f"batch.{key}={value}" for key, value in batch.items()), f"parallel.devices={devices}"]
    if what is not None and _is_recipe(what):
        stated = [*overrides, *more] if devices > 1 else [*overrides, *more[:-1]]
        return _given(_shared_out(recipes.load(what, stated), devices, batch_tokens))
    model, positions, checkpoint = _model(what)
    batch = {"length": min(length or _LENGTH, positions or _LENGTH), **batch}
    batch.setdefault("size", math.ceil(_ROWS / devices) * devices)
    values = {
        "name": _name(what or "model"),
        "model": model,
        "batch": batch,
        "stop": {"epochs": 1},
        "parallel": {"devices": devices},
        **METHODS[method],
    }
    named = recipes.parse(write(values), where=what or "the model", overrides=overrides, warn=True)
    return Question(_shared_out(named, devices, batch_tokens), False, checkpoint)


def _given(recipe: Recipe) -> Question:
    model = recipe.model
    known = presets.find(model.preset) if model.preset else None
    if known is None or model.path not in (known.hub, known.chat) or Path(model.path).is_dir():
        return Question(recipe, True)
    try:
        configs.read(model.path, model.trust_remote_code)
    except RecipeError:
        return Question(replace(recipe, model=replace(model, path=None)), True, absent=model.path)
    return Question(recipe, True)


def _is_recipe(what: str) -> bool:
    file = Path(what)
    try:
        if file.exists() and not file.is_dir():
            return file.name != "config.json"
    except (OSError, ValueError):
        raise RecipeError(f"{shorten(what)}: names no file (it is too long, or holds a NUL character)") from None
    return what in recipes.built_in() or file.suffix in (".yaml", ".yml")


def _model(what: str | None) -> tuple[dict[str, Any], int | None, str | None]:
    """Keys of `model`, the positions of the model where they are known, and a checkpoint on the hub."""
    if what is None:
        return {}, None, None
    file = Path(what)
    if file.name == "config.json" and file.is_file():
        file = file.parent
    if file.is_dir():
        if not (file / "config.json").is_file():
            raise RecipeError(
                f"{what}: is a folder without a config.json; name a Hugging Face model's folder, or a recipe file"
            )
        return {"path": str(file)}, _positions(file / "config.json"), None
    if re.fullmatch(r"\d+(\.\d+)?[KMB]", what):
        return {"size": what}, None, None
    name, checkpoint = presets.on_hub(what)
    return {"preset": name}, presets.find(name).text.get("max_position_embeddings"), checkpoint


def _positions(config: Path) -> int | None:
    stated = read_object(config, "model.path")
    text = stated.get("text_config")
    found = (text if isinstance(text, dict) else stated).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _batch(length: int | None, tokens: int | None, devices: int) -> dict[str, int]:
    made = {} if length is None else {"length": length}
    if tokens is None:
        return made
    row = length or _LENGTH
    if tokens < 1 or tokens % row:
        near = max(1, round(tokens / row)) * row
        raise RecipeError(
            f"--batch-tokens: {tokens:,} is no multiple of rows of {row:,} tokens; use {near}, or another --length"
        )
    return {**made, "length": row, "size": tokens // row}


def _shared_out(recipe: Recipe, devices: int, tokens: int | None) -> Recipe:
    if tokens is not None and recipe.batch.size * recipe.batch.length != tokens:
        raise RecipeError(f"--batch-tokens: {tokens:,} and --set batch say different things; leave one out")
    return recipe


def _name(what: str) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(what).name) or "model"


def hardware(gpu: str | None, recipe: Recipe, per_host: int) -> tuple[Device, Rates | Roofline, int]:
    """The device to plan for, how fast it is, and bytes of it that are taken: this machine, measured, or one that the catalogue knows or the user states.

    Args:
        per_host: devices of a host; on CPUs they share this machine's cores and memory.

    Raises:
        RecipeError: there is no such device.
    """
    if gpu is None:
        from preheat.engine.device import resolve_device
        from preheat.hardware.benchmark_rates import rates
        from preheat.training.session import in_use

        device, threads = resolve_device(recipe, per_host)
        return device, rates(device, threads), in_use(device)
    from preheat.planning.speed.roofline import Roofline  # it imports torch, and a recipe that is wrong is told before

    found = stated(gpu) if "=" in gpu else _known(gpu)
    if found.memory is None or found.bandwidth is None:
        raise RecipeError(f"--gpu: the catalogue has no memory or bandwidth of {found.name}; {_STATE}")
    roofline = Roofline(found, per_host)
    if not roofline.peak_matrix_rate:
        raise RecipeError(f"--gpu: {found.name} has no matrix rate; {_STATE}")
    device = replace(roofline.as_device, expandable=grows(recipe.hardware.segments, amd=found.generation == "cdna"))
    limit = recipe.hardware.memory
    return replace(device, memory=parse_memory(limit)) if limit else device, roofline, 0


_STATE = "state a device as in --gpu name=X,memory=24GiB,bandwidth=1008,bf16=165 (GB/s, TFLOP/s)"


def _known(name: str) -> Any:
    try:
        return accelerator(name)
    except RecipeError as error:
        raise RecipeError(f"--gpu: {error} Or {_STATE}") from None
