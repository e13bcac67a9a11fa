"""Decides what is planned, once: from the user's arguments to a recipe, and from a recipe to the planner's `Request`.

`subject_of` finds the recipe (a recipe, model name, folder or size), without importing torch; `request_of` adds the
device with its rates, the vocabulary, the number of rows and the model's configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat import recipe as recipes
from preheat import remote_code
from preheat.core import Device
from preheat.core.plan import Plan
from preheat.errors import RecipeError
from preheat.hardware.catalogue import named_or_described
from preheat.hardware.probe import parse_memory
from preheat.hardware.rates import Rates
from preheat.hardware.segments import grows
from preheat.model_folder import read_object, vocabulary_size
from preheat.models import configs, presets
from preheat.models.hub_config import folder_on_hub
from preheat.recipe import Recipe
from preheat.recipe.yaml_io import write
from preheat.sanitize import shorten
from preheat.training.image_counts import assumed_pixels

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from preheat.core.json_types import JsonObject
    from preheat.data import PreparedData
    from preheat.hardware.benchmark_rates import Grid, Progress
    from preheat.planning.request import Request
    from preheat.planning.speed.roofline import Roofline

__all__ = [
    "METHODS",
    "Subject",
    "data_of",
    "hardware",
    "in_use",
    "lacks_tokenizer",
    "plan_here",
    "rates_of_run",
    "rates_of_step",
    "request_of",
    "row_count",
    "rows_of",
    "subject_of",
    "vocabulary_of",
]

METHODS: Mapping[str, JsonObject] = {
    "full": {},
    "lora": {"techniques": {"lora": {}}, "optimizer": {"lr": 2e-4, "weight_decay": 0.0}},
    "qlora": {"techniques": {"lora": {}, "nf4": {}}, "optimizer": {"lr": 2e-4, "weight_decay": 0.0}},
}
"""Ways to train a named model: full fine-tuning, LoRA, or LoRA on a 4-bit base. LoRA needs about ten times the learning
rate of full fine-tuning."""
_ROWS, _LENGTH = 16, 2048  # default rows and tokens per row of a global batch


@dataclass(frozen=True)
class Subject:
    """The recipe that a command plans.

    Attributes:
        from_user: True for a recipe of the user, which is planned as it is.
        checkpoint: hub checkpoint with the weights of a model given by name.
        absent: `model.path` of a given recipe, if it is the preset's checkpoint and cannot be read here: the preset is
            planned, and the recipe lacks the path.
    """

    recipe: Recipe
    from_user: bool
    checkpoint: str | None = None
    absent: str | None = None


def subject_of(
    what: str | None,
    overrides: Sequence[str] = (),
    *,
    method: str = "full",
    length: int | None = None,
    batch_tokens: int | None = None,
    devices: int = 1,
) -> Subject:
    """Returns the recipe that the arguments name.

    Args:
        what: a recipe (a file, or the name of a built-in one), a model's name, a folder or its config.json, or a size
            such as 15M; None if `overrides` name the model.
        overrides: `key=value` each.
        method: key of `METHODS`, for a model.
        length: tokens per row.
        batch_tokens: tokens per global batch.

    Raises:
        RecipeError: `what` is unknown, or the numbers contradict each other.
    """
    batch = _batch(length, batch_tokens)
    more = [*(f"batch.{key}={value}" for key, value in batch.items()), f"parallel.devices={devices}"]
    if what is not None and _is_recipe(what):
        # The last override is `parallel.devices`, which a recipe keeps unless the user asks for more than one device.
        values_set = [*overrides, *more] if devices > 1 else [*overrides, *more[:-1]]
        return _user_recipe(_check_batch_tokens(recipes.load(what, values_set), batch_tokens))
    # A model instead of a recipe: invent the rest of a recipe around it.
    model, positions, checkpoint = _model(what)
    # Rows are no longer than the model's context: the explicit keys of `batch` override that.
    batch = {"seq_len": min(length or _LENGTH, positions or _LENGTH), **batch}
    # Rounded up to a multiple of the devices, because each data-parallel rank takes equally many rows.
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
    return Subject(_check_batch_tokens(named, batch_tokens), False, checkpoint)


def _user_recipe(recipe: Recipe) -> Subject:
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


def _is_recipe(what: str) -> bool:
    file = Path(what)
    try:
        if file.exists() and not file.is_dir():
            # A config.json is a model's, every other file a recipe's, even if it is no valid one: its errors are then
            # shown.
            return file.name != "config.json"
    except (OSError, ValueError):
        raise RecipeError(f"{shorten(what)}: is not a file name (it is too long, or holds a NUL character)") from None
    return what in recipes.built_in() or file.suffix in (".yaml", ".yml")


def _model(what: str | None) -> tuple[JsonObject, int | None, str | None]:
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
        return {"path": str(file)}, _positions(file / "config.json"), None
    if re.fullmatch(r"\d+(\.\d+)?[KMB]", what):
        return {"size": what}, None, None
    try:
        name, checkpoint = presets.on_hub(what)
    except RecipeError:
        # The configuration alone: a plan downloads no weights.
        if (folder := folder_on_hub(what)) is None:
            raise
        return {"path": str(folder)}, _positions(folder / "config.json"), what
    return {"preset": name}, presets.find(name).text.get("max_position_embeddings"), checkpoint


def _positions(config: Path) -> int | None:
    values = read_object(config, "model.path")
    # Models that read images keep the context length of their language model one level down.
    text = values.get("text_config")
    positions = (text if isinstance(text, dict) else values).get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def _batch(length: int | None, tokens: int | None) -> dict[str, int]:
    batch = {} if length is None else {"seq_len": length}
    if tokens is None:
        return batch
    row = length or _LENGTH
    if tokens < 1 or tokens % row:
        near = max(1, round(tokens / row)) * row
        raise RecipeError(
            f"--batch-tokens: {tokens:,} is no multiple of rows of {row:,} tokens; use {near}, or another --length"
        )
    return {**batch, "seq_len": row, "size": tokens // row}


def _check_batch_tokens(recipe: Recipe, tokens: int | None) -> Recipe:
    if tokens is not None and recipe.batch.size * recipe.batch.seq_len != tokens:
        raise RecipeError(f"--batch-tokens: {tokens:,} and --set batch contradict each other; leave one out")
    return recipe


def _name(what: str) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(what).name) or "model"


def request_of(
    recipe: Recipe, gpu: str | None = None, *, world: int | None = None, per_host: int = 1, count_rows: bool = True
) -> Request:
    """Returns the request for a recipe on this machine, or on `gpu`.

    Args:
        gpu: a device of the catalogue, or one that the user describes.
        world: number of devices; the recipe's own number by default.
        per_host: devices per host; on CPUs they share this machine's cores and memory.
        count_rows: read the data if the length of the run depends on it. False: the model alone is planned, which
            needs no tokenizer.

    Raises:
        RecipeError: there is no such device or model, or the two do not match the recipe.
    """
    import preheat.planning.plan  # noqa: F401  # count its memory as in use, as a run does
    from preheat.planning.request import Request
    from preheat.planning.speed.roofline import Roofline

    # A missing model or tokenizer is reported before this machine is benchmarked, which takes a minute.
    source_config = configs.source(recipe)
    vocabulary: int | None = None  # the model decides
    if count_rows or source_config is None or recipe.model.add_tokens or not lacks_tokenizer(recipe):
        vocabulary = vocabulary_of(recipe, source_config)
    device, rates, used = hardware(gpu, recipe, per_host)
    if isinstance(rates, Roofline):
        rates = replace(rates, alone=world == 1)
    return Request(
        recipe,
        device=device,
        vocabulary=vocabulary,
        world=world,
        per_host=per_host,
        rates=rates,
        rows=rows_of(recipe, source_config, device=device, world=world) if count_rows else None,
        in_use=used,
        image_pixels=assumed_pixels(recipe, vocabulary, source_config),
        source_config=source_config,
    )


def plan_here(recipe: Recipe, *, trust_remote_code: bool = False) -> Plan:
    """Returns the plan of a recipe on this machine, which is benchmarked first if it was not yet.

    Args:
        trust_remote_code: as in `train`.
    """
    from preheat.planning.plan import plan, resolve_auto

    with remote_code.trusting(trust_remote_code):
        recipes.check(recipe)  # one that was made in Python: before this machine is benchmarked
        request = resolve_auto(request_of(recipe))
        return replace(plan(request), recipe=recipes.as_values(request.recipe))


def rows_of(recipe: Recipe, source_config: PretrainedConfig | None = None, **options: Any) -> int | None:
    """Returns the number of training rows if `stop.epochs` needs it, reading (and caching) the data; else None.

    Presets that can only be planned have no tokenizer to read the data with.

    Args:
        options: of `data_of`.
    """
    # Counting rows means tokenizing and packing the data, so it is done only if the number of steps needs it.
    if not recipe.stop.epochs or presets.only_planned(recipe):
        return None
    return row_count(data_of(recipe, source_config, **options))


def row_count(data: PreparedData) -> int | None:
    """Returns the number of training rows, or None if the data is streamed."""
    return len(data.train) if hasattr(data.train, "__len__") else None


def data_of(
    recipe: Recipe,
    source_config: PretrainedConfig | None = None,
    *,
    device: Device | None = None,
    world: int | None = None,
    **options: Any,
) -> PreparedData:
    """Reads the data of a recipe with its model's tokenizer, and checks it against the size of the embedding.

    Args:
        source_config: what `configs.source` gave for this model; it is read when not given.
        device: the device that the recipe is for: before the data is read, which may take minutes, its techniques are
            tried on the model without values. None: they are not.
        world: number of devices; the recipe's own number by default.
        options: `progress` and `refuse` of `prepare`.
    """
    from preheat.data import prepare
    from preheat.models import hf
    from preheat.models.vision import reading

    # Reports a missing model before the data is read.
    source_config = configs.source(recipe) if source_config is None else source_config
    vocabulary = vocabulary_of(recipe, source_config)
    config = hf.configure(recipe, vocabulary, source_config)
    if device is not None:
        from preheat.planning.layer_extrapolation import require_buildable
        from preheat.planning.request import Request

        require_buildable(Request(recipe, device, vocabulary=vocabulary, world=world, source_config=source_config))
    return prepare(
        recipe.data,
        length=recipe.batch.seq_len,
        seed=recipe.seed,
        tokenizer=configs.tokenizer_folder(recipe),
        add_tokens=recipe.model.add_tokens,
        embedding=hf.facts(config).vocabulary,
        **reading(config, recipe.model.path),
        **options,
    )


def lacks_tokenizer(recipe: Recipe) -> bool:
    """True if neither the recipe nor the folder of its model has a tokenizer."""
    folder = recipe.model.path
    return (
        recipe.data.tokenizer is None
        and folder is not None
        and Path(folder).is_dir()
        and not configs.has_tokenizer(Path(folder))
    )


def vocabulary_of(recipe: Recipe, source_config: PretrainedConfig | None = None) -> int:
    """Returns the tokenizer's vocabulary size for a plan, without reading the data.

    A tokenizer that is still to be trained will have `data.vocab_size` tokens (fewer only if the text is tiny).

    Args:
        source_config: what `configs.source` gave for this model; it is read when not given.
    """
    # Order: the recipe's own tokenizer, then the model's; without either, one is trained on the data.
    folder = recipe.data.tokenizer or configs.tokenizer_folder(recipe)
    if folder is None:
        return recipe.data.vocab_size
    from preheat.data.tokenizer import load_tokenizer
    from preheat.models import hf

    if recipe.data.tokenizer is None:
        hf.configure(recipe, None, source_config)  # reports a missing model as such, not as a missing tokenizer
    if recipe.model.add_tokens:
        # An existing token may be added only if the embedding has no row for it: adding it would reset a trained row.
        # Rows of the embedding before the tokens are added; `vocab_size` may exceed the tokenizer's length by padding.
        plain = replace(recipe, model=replace(recipe.model, add_tokens=()))
        rows = hf.configure(plain, None, source_config).get_text_config().vocab_size
        known = load_tokenizer(folder).get_vocab()
        if existing := [token for token in recipe.model.add_tokens if known.get(token, rows) < rows]:
            raise RecipeError(
                f"model.add_tokens: {existing[0]!r} is already in the tokenizer and in the embedding; leave it out"
            )
    return vocabulary_size(load_tokenizer(folder, add_tokens=recipe.model.add_tokens))


def in_use(device: Device) -> int:
    """Returns the bytes of a device in use before a run: on a CPU by this process, on a GPU by other processes."""
    from preheat.hardware.gpu_memory import other_processes_bytes
    from preheat.hardware.probe import resident_bytes

    return resident_bytes() if device.kind == "cpu" else other_processes_bytes(device)


def rates_of_step(request: Request, threads: int, progress: Progress | None = None) -> tuple[Rates, bool]:
    """Returns the rates that a plan of this request needs on this machine, and whether some were measured now.

    Only sizes that are not stored are measured (`benchmark_rates.rates_for`).

    Args:
        request: its device is this machine's; without rates.

    Raises:
        DoesNotFit: other processes leave too little of a GPU's memory to measure.
        RunError: measuring failed.
    """
    from preheat.hardware.benchmark_rates import rates_for, with_room
    from preheat.models import hf
    from preheat.planning.observation_cache import observe_cached
    from preheat.planning.speed.step_time import grids_of_step

    def sizes() -> list[Grid]:
        facts = hf.facts(request.config)
        vocabulary = request.vocabulary or facts.vocabulary
        return grids_of_step(
            observe_cached(request), with_room(request.device), width=facts.width, vocabulary=vocabulary
        )

    return rates_for(request.device, threads, sizes, progress)


def rates_of_run(request: Request, threads: int, progress: Progress | None = None) -> Rates:
    """Returns the rates to plan a run with: of a CPU those of all sizes, of a GPU those of its step (`rates_of_step`).

    A CPU's are measured at all sizes, because `preheat plan` compares them with its speed at present.
    """
    from preheat.hardware.benchmark_rates import rates

    if request.device.kind == "cpu":
        return rates(request.device, threads, progress=progress)
    return rates_of_step(request, threads, progress)[0]


def hardware(gpu: str | None, recipe: Recipe, per_host: int) -> tuple[Device, Rates | Roofline, int]:
    """Returns the device to plan for, its rates, and the bytes of its memory in use.

    Without `gpu` this is the current machine, measured; otherwise a device of the catalogue or one that the user
    describes.

    Args:
        per_host: devices per host; on CPUs they share this machine's cores and memory.

    Raises:
        RecipeError: there is no such device.
    """
    if gpu is None:
        from preheat.engine.device import resolve_device
        from preheat.hardware.rate_probe import checked_rates

        # This machine, which is measured once.
        device, threads = resolve_device(recipe, per_host)
        used = in_use(device)  # before the probe, whose memory a run does not have
        return device, checked_rates(device, threads), used
    from preheat.planning.speed.roofline import Roofline  # imports torch; recipe errors should appear before that

    # A described device has no generation, so the rates of unknown generations apply to it.
    entry = named_or_described(gpu)
    roofline = Roofline(entry, per_host)
    device = replace(roofline.as_device, expandable=grows(recipe.hardware.segments, amd=entry.generation == "cdna"))
    limit = recipe.hardware.memory
    # Nothing is in use on a device that is not here.
    return replace(device, memory=parse_memory(limit)) if limit else device, roofline, 0
