"""Makes the `Request` of a recipe, once: the device with its rates, the vocabulary, the rows, the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat import recipe as recipes
from preheat import remote_code
from preheat.core import Device
from preheat.core.plan import Plan
from preheat.errors import RecipeError
from preheat.hardware.probe import parse_memory
from preheat.hardware.rates import Rates
from preheat.hardware.segments import grows_segments
from preheat.model_folder import count_embedding_rows
from preheat.models import configs, presets
from preheat.planning.image_counts import find_assumed_pixels
from preheat.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from preheat.data import PreparedData
    from preheat.hardware.benchmark_rates import Grid, Progress
    from preheat.hardware.catalogue import Accelerator
    from preheat.planning.request import Request
    from preheat.planning.speed.roofline import Roofline

__all__ = [
    "data_of",
    "choose_hardware",
    "read_bytes_in_use",
    "lacks_tokenizer",
    "plan_on_this_machine",
    "choose_run_rates",
    "choose_step_rates",
    "request_of",
    "count_rows",
    "count_rows_if_needed",
    "find_vocabulary_size",
]


def request_of(
    recipe: Recipe,
    gpu: Accelerator | None = None,
    *,
    world: int | None = None,
    per_host: int = 1,
    count_rows: bool = True,
) -> Request:
    """Returns the request for a recipe on a GPU.

    Args:
        gpu: None: the device of this machine.
        world: number of devices; the recipe's own number by default.
        per_host: devices per host; on CPUs they share this machine's cores and memory.
        count_rows: read the data if the length of the run depends on it. False: the model alone is planned, which
            needs no tokenizer.

    Raises:
        RecipeError: there is no such model, or the device does not match the recipe.
    """
    import preheat.planning.plan  # noqa: F401  # count its memory as in use, as a run does
    from preheat.planning.request import Request
    from preheat.planning.speed.roofline import Roofline

    # A missing model or tokenizer is reported before this machine is benchmarked, which takes a minute.
    source_config = configs.source_config(recipe)
    vocabulary: int | None = None  # the model decides
    if count_rows or source_config is None or recipe.model.add_tokens or not lacks_tokenizer(recipe):
        vocabulary = find_vocabulary_size(recipe, source_config)
    device, rates, used = choose_hardware(gpu, recipe, per_host)
    if isinstance(rates, Roofline):
        rates = replace(rates, alone=world == 1)
    return Request(
        recipe,
        device=device,
        vocabulary=vocabulary,
        world=world,
        per_host=per_host,
        rates=rates,
        rows=count_rows_if_needed(recipe, source_config, device=device, world=world) if count_rows else None,
        in_use=used,
        image_pixels=find_assumed_pixels(recipe, vocabulary, source_config),
        source_config=source_config,
    )


def plan_on_this_machine(recipe: Recipe, *, trust_remote_code: bool = False) -> Plan:
    """Returns the plan of a recipe on this machine, which is benchmarked first if it was not yet.

    Args:
        trust_remote_code: as in `train`.
    """
    from preheat.planning.plan import plan, resolve_auto

    with remote_code.trust_remote_code(trust_remote_code):
        recipes.check(recipe)  # one that was made in Python: before this machine is benchmarked
        request = resolve_auto(request_of(recipe))
        return replace(plan(request), recipe=recipes.to_values(request.recipe))


def count_rows_if_needed(recipe: Recipe, source_config: PretrainedConfig | None = None, **options: Any) -> int | None:
    """Returns the number of training rows if `stop.epochs` needs it, reading (and caching) the data; else None.

    Presets that can only be planned have no tokenizer to read the data with.

    Args:
        options: of `data_of`.
    """
    # Counting rows means tokenizing and packing the data, so it is done only if the number of steps needs it.
    if not recipe.stop.epochs or presets.is_plan_only(recipe):
        return None
    return count_rows(data_of(recipe, source_config, **options))


def count_rows(data: PreparedData) -> int | None:
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
        source_config: what `configs.source_config` gave for this model; it is read when not given.
        device: the device that the recipe is for: before the data is read, which may take minutes, its techniques are
            tried on the model without values. None: they are not.
        world: number of devices; the recipe's own number by default.
        options: `progress` and `refuse` of `prepare`.
    """
    from preheat.data import prepare
    from preheat.models import hf
    from preheat.models.vision import vision_arguments

    # Reports a missing model before the data is read.
    source_config = configs.source_config(recipe) if source_config is None else source_config
    vocabulary = find_vocabulary_size(recipe, source_config)
    config = hf.configure(recipe, vocabulary, source_config)
    if device is not None:
        from preheat.planning.layer_extrapolation import require_buildable
        from preheat.planning.request import Request

        require_buildable(Request(recipe, device, vocabulary=vocabulary, world=world, source_config=source_config))
    return prepare(
        recipe.data,
        length=recipe.batch.seq_len,
        seed=recipe.seed,
        tokenizer=configs.find_tokenizer_folder(recipe),
        add_tokens=recipe.model.add_tokens,
        embedding=hf.read_facts(config).vocabulary,
        **vision_arguments(config, recipe.model.path),
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


def find_vocabulary_size(recipe: Recipe, source_config: PretrainedConfig | None = None) -> int:
    """Returns the tokenizer's vocabulary size for a plan, without reading the data.

    A tokenizer that is still to be trained will have `data.vocab_size` tokens (fewer only if the text is tiny).

    Args:
        source_config: what `configs.source_config` gave for this model; it is read when not given.
    """
    # Order: the recipe's own tokenizer, then the model's; without either, one is trained on the data.
    folder = recipe.data.tokenizer or configs.find_tokenizer_folder(recipe)
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
    return count_embedding_rows(load_tokenizer(folder, add_tokens=recipe.model.add_tokens))


def read_bytes_in_use(device: Device) -> int:
    """Returns the bytes of a device in use before a run: on a CPU by this process, on a GPU by other processes."""
    from preheat.hardware.gpu_memory import other_processes_bytes
    from preheat.hardware.probe import resident_bytes

    return resident_bytes() if device.kind == "cpu" else other_processes_bytes(device)


def choose_step_rates(request: Request, threads: int, progress: Progress | None = None) -> tuple[Rates, bool]:
    """Returns the rates that a plan of this request needs on this machine, and whether some were measured now.

    Only sizes that are not stored are measured (`benchmark_rates.rates_for`).

    Args:
        request: its device is this machine's; without rates.

    Raises:
        DoesNotFit: other processes leave too little of a GPU's memory to measure.
        RunError: measuring failed.
    """
    from preheat.hardware.benchmark_rates import limit_to_free_memory, rates_for
    from preheat.models import hf
    from preheat.planning.observation_cache import observe_cached
    from preheat.planning.speed.step_time import collect_grids

    def find_grids() -> list[Grid]:
        facts = hf.read_facts(request.config)
        vocabulary = request.vocabulary or facts.vocabulary
        return collect_grids(
            observe_cached(request), limit_to_free_memory(request.device), width=facts.width, vocabulary=vocabulary
        )

    return rates_for(request.device, threads, find_grids, progress)


def choose_run_rates(request: Request, threads: int, progress: Progress | None = None) -> Rates:
    """Returns the rates to plan a run: of a CPU those of all sizes, of a GPU those of its step (`choose_step_rates`).

    A CPU's are measured at all sizes, because `preheat plan` compares them with its speed at present.
    """
    from preheat.hardware.benchmark_rates import rates

    if request.device.kind == "cpu":
        return rates(request.device, threads, progress=progress)
    return choose_step_rates(request, threads, progress)[0]


def choose_hardware(gpu: Accelerator | None, recipe: Recipe, per_host: int) -> tuple[Device, Rates | Roofline, int]:
    """Returns the device to plan for, its rates, and the bytes of its memory in use.

    Args:
        gpu: None: the device of this machine, which is measured.
        per_host: devices per host; on CPUs they share this machine's cores and memory.
    """
    if gpu is None:
        from preheat.engine.device import resolve_device
        from preheat.hardware.rate_probe import measure_checked_rates

        # This machine, which is measured once.
        device, threads = resolve_device(recipe, per_host)
        used = read_bytes_in_use(device)  # before the probe, whose memory a run does not have
        return device, measure_checked_rates(device, threads), used
    from preheat.planning.speed.roofline import Roofline  # imports torch; recipe errors should appear before that

    # A described device has no generation, so the rates of unknown generations apply to it.
    roofline = Roofline(gpu, per_host)
    device = replace(
        roofline.as_device, expandable=grows_segments(recipe.hardware.segments, amd=gpu.generation == "cdna")
    )
    limit = recipe.hardware.memory
    # Nothing is in use on a device that is not here.
    return replace(device, memory=parse_memory(limit)) if limit else device, roofline, 0
