"""The settings of a recipe in terms that all trainers share: the way back of `settings.build_values`.

Torch is imported only to name the layers of a kind, or the parameters of experts.

What these settings cannot express is not in them; `writing.compare` finds it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.core import registry
from preheat.core.schema import Data
from preheat.errors import RecipeError, SettingError
from preheat.interop.settings import Settings, has_experts
from preheat.models import presets
from preheat.recipe import Recipe
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["SOURCE_KEYS", "list_expert_stacks", "name_layers", "read_recipe", "resolve_recipe"]

SOURCE_KEYS = ("source", "layout", "columns", "text", "prompt", "completion", "subset", "split", "limit", "text_files")
"""Keys of the `data` section that each source has of its own."""
_OPTIMIZERS = {"adafactor": "adafactor", "lion": "lion_32bit", "muon": "muon"}
_DEGREES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
_ZERO = {1: "optimizer", 2: "gradients", 3: "full"}


def resolve_recipe(recipe: Recipe) -> Recipe:
    """Returns the recipe with the values that preheat would find by itself, as far as files on this machine tell.

    That is the checkpoint of a preset, the layout and packing of the rows, and the steps that a number of tokens takes.
    `mixed_precision: {mode: auto}` becomes bf16, as on a GPU: no other trainer's file has a counterpart.

    Raises:
        DataError: the rows of a file have no known layout.

    Example:
        >>> from preheat.recipe import parse
        >>> resolve_recipe(parse("{model: {preset: qwen3-0.6b}, stop: {tokens: 65536}}")).stop.max_steps
        8
    """
    model, stop, batch = recipe.model, recipe.stop, recipe.batch
    if model.path is None and model.preset is not None and (preset := presets.find(model.preset)).hub:
        model = replace(model, path=preset.hub)
    if stop.tokens is not None:
        steps = math.ceil(stop.tokens / (batch.size * batch.seq_len))
        stop = replace(stop, tokens=None, max_steps=min(steps, stop.max_steps or steps))
    techniques = dict(recipe.techniques)
    precision = techniques.get("mixed_precision")
    if precision is not None and vars(precision)["mode"] == "auto":
        techniques["mixed_precision"] = replace(precision, mode="bf16")  # type: ignore[call-arg]
    return replace(recipe, model=model, stop=stop, data=_resolve_data(recipe.data), techniques=techniques)


def name_layers(recipe: Recipe) -> Recipe:
    """Names the layers that lora's `target_modules` selects by their kind, which is preheat's own vocabulary.

    The names are those of the model, which is built without weights if there is a kind.

    Raises:
        RecipeError: the model's sizes are not known on this machine, or it has no such layers.
    """
    from preheat.models.adapter_targets import KINDS, resolve

    if (lora := recipe.techniques.get("lora")) is None:
        return recipe
    values = vars(lora)
    targets = values["target_modules"]
    if not ({targets} if isinstance(targets, str) else {*targets}) & {*KINDS}:
        return recipe
    try:
        sizes = _read_sizes(recipe)
    except RecipeError as error:
        kinds = targets if isinstance(targets, str) else ", ".join(targets)
        raise RecipeError(
            f"techniques.lora.target_modules: {quote_value(kinds)}: each model has other names for the layers of a "
            f"kind, and this one's are not known ({error}); name them, like [q_proj, v_proj]"
        ) from None
    part = _build_model(recipe, sizes)
    try:
        names, experts = resolve(part, targets)
    except SettingError as error:
        raise RecipeError(f"techniques.lora.{error}") from None
    last = dict.fromkeys(name.rpartition(".")[2] for name in names)
    modules = [name for name, _ in part.named_modules()]
    selected = {name for name in modules if any(f".{name}".endswith(f".{target}") for target in names)}
    is_short = selected == {name for name in modules if name.rpartition(".")[2] in last}
    rank = values["expert_rank"] or (values["rank"] if experts else 0)
    named = replace(lora, target_modules=tuple(last) if is_short else names, expert_rank=rank)  # type: ignore[call-arg]
    return replace(recipe, techniques={**recipe.techniques, "lora": named})


def list_expert_stacks(recipe: Recipe) -> list[str]:
    """Returns peft's names of the experts' parameters; those of most families if the model's sizes are not known."""
    from preheat.models.moe import experts_of
    from preheat.ops.grouped_mm import stacks_of

    try:
        model = _build_model(recipe, _read_sizes(recipe))
    except RecipeError:
        stacks: tuple[str, ...] = ()
    else:
        stacks = next((stacks_of(experts) for experts in experts_of(model)), ())
    return [f"experts.{name}" for name in stacks or ("gate_up_proj", "down_proj")]


def _read_sizes(recipe: Recipe) -> PretrainedConfig:
    """Returns the configuration of the recipe's model, from its folder or from the presets, without the hub.

    Raises:
        RecipeError: it is not known on this machine.
    """
    from preheat.models import configs

    model = recipe.model
    if model.path is not None and not Path(model.path).is_dir() and (known := presets.find_variant(model.path)):
        model = replace(model, path=None, preset=known)
    return configs.of(replace(recipe, model=model), None)


def _build_model(recipe: Recipe, sizes: PretrainedConfig) -> PreTrainedModel:
    """Builds the recipe's model without weights."""
    from preheat.models.hf import build_on_meta, configure

    return build_on_meta(configure(recipe, source=sizes), trust=recipe.model.trust_remote_code)


def _resolve_data(data: Data) -> Data:
    parts = [part for part, _ in data.parts()]
    recognized = [_recognize_rows(part) for part in parts]
    if isinstance(data.source, str):
        data = replace(data, **recognized[0])
    else:
        listed = [dict(item) if isinstance(item, Mapping) else {"source": item} for item in data.source]
        data = replace(data, source=tuple(item | keys for item, keys in zip(listed, recognized, strict=True)))
    layouts = {part.layout for part, _ in data.parts()}
    if data.packing == "auto" and "auto" not in layouts:
        data = replace(data, packing="stream" if layouts == {"text"} else "whole")
    return data


def _recognize_rows(data: Data) -> dict[str, Any]:
    """Returns the layout and the columns of a source, if it states none and its rows tell them."""
    if data.layout != "auto":
        return {}
    if data.prompt is not None:
        return {"layout": "prompt"}
    if not isinstance(data.source, str) or not Path(data.source).exists():
        return {}
    from preheat.data.sources import open_source  # imports transformers

    layout = open_source(data).layout
    if layout.strange:  # the first row has none of the known fields
        return {}
    columns = {field: name for field, name in layout.columns.items() if field != name and field != "text"}
    return {"layout": layout.kind} | ({"columns": columns} if columns else {})


def read_recipe(recipe: Recipe) -> Settings:
    """Returns the settings of a resolved recipe (`resolve_recipe`).

    Example:
        >>> from preheat.recipe import parse
        >>> recipe = parse("{model: {path: a}, batch: {size: 8}, stop: {epochs: 1}, techniques: {lora: {}}}")
        >>> settings = read_recipe(recipe)
        >>> settings.micro_batch, settings.adapter, settings.lora_targets
        (8, 'lora', 'all-linear')
    """
    optimizer, schedule, model, data = recipe.optimizer, recipe.schedule, recipe.model, recipe.data
    values = _values_of(recipe)
    settings = Settings(
        name=recipe.name,
        seed=recipe.seed,
        devices=recipe.parallel.devices,
        model=model.path,
        random_weights=model.weights == "random",
        architecture=dict(model.config),
        part=model.part,
        tokenizer=data.tokenizer,
        add_tokens=list(model.add_tokens),
        sources=[_read_source(part) for part, _ in data.parts()],
        streaming=data.streaming,
        template=data.template,
        train_on=data.train_on,
        validation=data.validation,
        workers=data.workers,
        length=recipe.batch.seq_len,
        learning_rate=5e-5 if optimizer.lr == "auto" else optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        schedule=_read_schedule(recipe),
        warmup_ratio=schedule.warmup_ratio,
        min_lr_ratio=schedule.min_lr_ratio if schedule.kind != "constant" else 0.0,
        decay_steps=_count_decay_steps(recipe),
        epochs=recipe.stop.epochs,
        max_steps=recipe.stop.max_steps,
        eval_steps=recipe.evaluate.every or None,
        save_steps=recipe.checkpoint.every,
        save_limit=recipe.checkpoint.keep,
    )
    _read_techniques(settings, values)
    _read_parallelism(settings, recipe, values)
    # Chats are packed whole; plain text that is not split at the ends of sequences is one padded row each.
    texts = all(source.get("layout") == "text" for source in settings.sources)
    settings.packing = not settings.preference and (not texts or data.packing != "whole")
    settings.accumulation = int(values.get("gradient_accumulation", {}).get("steps", 1))
    settings.micro_batch = count_micro_batch(settings, recipe.batch.size)
    return settings


def count_micro_batch(settings: Settings, size: int) -> int:
    """Returns the sequences (or pairs) per device and micro-batch of a global batch, rounded down to at least one."""
    return max(size // (settings.accumulation * settings.ranks * (2 if settings.pairs else 1)), 1)


def _values_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    return {name: dataclasses.asdict(technique) for name, technique in recipe.techniques.items()}  # type: ignore[call-overload]


def _read_source(part: Data) -> dict[str, object]:
    """Returns a source in the terms of `Settings`: without defaults."""
    plain = Data()
    return {
        key: getattr(part, key) for key in SOURCE_KEYS if key == "source" or getattr(part, key) != getattr(plain, key)
    }


def _read_schedule(recipe: Recipe) -> str:
    schedule = recipe.schedule
    # The rate falls from the end of the warmup to the end of the run.
    falls = math.isclose(schedule.warmup_ratio + schedule.decay_ratio, 1) and schedule.min_lr_ratio == 0
    if schedule.kind == "wsd":
        return "linear" if falls else "wsd"
    return schedule.kind


def _count_decay_steps(recipe: Recipe) -> int | None:
    """Returns the steps of the decay of a wsd schedule; None if there is none, or they are no whole number."""
    ratio, steps = recipe.schedule.decay_ratio, recipe.stop.max_steps
    if _read_schedule(recipe) != "wsd" or not steps or not math.isclose(round(ratio * steps) / steps, ratio):
        return None
    return round(ratio * steps)


def _read_techniques(settings: Settings, values: Mapping[str, dict[str, Any]]) -> None:
    mode = values["mixed_precision"]["mode"] if "mixed_precision" in values else "fp32"
    settings.precision = mode.partition("_")[0]
    settings.half_weights = mode in ("bf16_pure", "fp16_master")
    settings.frozen = values.get("mixed_precision", {}).get("frozen", "auto")
    if lora := values.get("lora"):
        settings.adapter = "lora"
        settings.lora_rank, settings.lora_alpha, settings.lora_dropout = lora["rank"], lora["alpha"], lora["dropout"]
        targets = lora["target_modules"]
        settings.lora_targets = targets if isinstance(targets, str) else list(targets)
        settings.lora_variant, settings.pissa_iterations = lora["variant"], lora["pissa_iterations"]
        settings.lora_experts = lora["expert_rank"] > 0
    if nf4 := values.get("nf4"):
        settings.quantized, settings.double_quantization = True, nf4["double_quantization"]
        settings.quantized_experts = nf4["experts"] and has_experts(settings)
    if checkpointing := values.get("activation_checkpointing"):
        settings.checkpointing = checkpointing["mode"] != "none"
        settings.checkpointing_mode = checkpointing["mode"] if settings.checkpointing else "full"
    for name, technique in _OPTIMIZERS.items():
        if name in values:
            settings.optimizer = technique
    if low_bit := values.get("low_bit_adamw"):
        settings.optimizer = f"adamw_torch_{low_bit['bits']}bit"
    if fused := values.get("fused_operators"):
        settings.fused_norm, settings.fused_gate, settings.adapter_kernels = (
            fused["norm"],
            fused["gate"],
            fused["adapters"],
        )
    if preference := values.get("preference"):
        plain = registry()["preference"]()
        settings.preference = {key: v for key, v in preference.items() if key == "loss" or v != getattr(plain, key)}
        settings.pairs = preference["loss"] not in ("kto", "apo_zero")
    settings.neftune = values.get("neftune", {}).get("alpha")
    settings.label_smoothing = values.get("regularized_loss", {}).get("label_smoothing", 0.0)
    settings.dft = "dft" in values
    settings.attention = "efficient_attention" in values
    settings.activation_offload = "activation_offload" in values
    settings.chunked_loss = "chunked_loss" in values
    # Compiled only if it pays, which a trainer does not decide.
    settings.compiled = values.get("compile", {}).get("when") == "always"
    settings.fp8 = "fp8" in values
    settings.qat = "quantization_aware" in values
    settings.apollo = "apollo" in values
    settings.shifted_groups = "shifted_groups" in values


def _read_parallelism(settings: Settings, recipe: Recipe, values: Mapping[str, dict[str, Any]]) -> None:
    for name in _DEGREES:
        if name in values:
            setattr(settings, name, values[name]["degree"])
    if settings.tensor_parallel == 0:  # all devices that the others leave
        settings.tensor_parallel = 1
        settings.tensor_parallel = settings.ranks
    if settings.expert_parallel == 0:
        settings.expert_parallel = settings.ranks
    settings.pipeline_schedule = values.get("pipeline_parallel", {}).get("schedule", "1f1b")
    settings.sequence_parallel = values.get("tensor_parallel", {}).get("sequence_parallel", False)
    if fsdp := values.get("fsdp"):
        settings.sharding = "full" if fsdp["reshard_after_forward"] else "gradients"
        settings.offload, settings.replicas = fsdp["offload"], fsdp["replicate"]
        settings.deferred_reduction = fsdp["reduce"] == "last"
        settings.half_reduction = fsdp["reduce_dtype"] == "bf16"
    elif recipe.parallel.engine == "deepspeed":
        settings.sharding = _ZERO[recipe.parallel.zero_stage]
    elif "zero1" in values:
        settings.sharding = "optimizer"
