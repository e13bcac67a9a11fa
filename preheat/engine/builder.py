"""Builds a recipe: model, loss and optimizer on a device, then its techniques in the order of their stages."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from preheat.core import (
    DATA,
    Build,
    Change,
    Context,
    Device,
    Mesh,
    ModelFacts,
    Order,
    Problem,
    ProblemCode,
    Slot,
    Stage,
    Tag,
    Technique,
    TechniqueError,
    conflicts_of,
    single_device,
    sizes_of,
)
from preheat.engine.moe_aux_loss import add_balance_loss, wrap_metrics
from preheat.engine.optimizer_groups import resolve_weight_settings
from preheat.engine.step import install_defaults
from preheat.engine.transfer import Transfer
from preheat.errors import RecipeError
from preheat.hardware.connectivity import is_hub_offline
from preheat.model_folder import DEQUANTIZED, PACKED, STORED, describe_missing_weights
from preheat.models import configs, encoder_decoder, hf, presets, size_dial, text_part
from preheat.models.hub_config import find_hub_folder
from preheat.models.quantized_folders import packed_method, stored_quantization
from preheat.models.token_mixers import find_recurrent_mixers, kernel_packages, missing_kernels
from preheat.models.weights import WeightSource, materialize, resize_rows
from preheat.ops.attention.multihead import attend_in_chunks
from preheat.recipe import Parallel, Recipe, check
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.core.json_types import JsonObject
    from preheat.ops.optim.param_groups import WeightSettings

__all__ = [
    "to_single_device",
    "build",
    "build_context",
    "find_peak_learning_rate",
    "require_model",
    "list_techniques",
    "find_world_size",
]


def find_world_size(recipe: Recipe) -> int:
    """World size of the run: of the process group if one is initialized, otherwise what the recipe names."""
    import torch.distributed as dist

    # A plan has no process group and believes the recipe; a real run counts the processes that it has.
    return dist.get_world_size() if dist.is_initialized() else recipe.parallel.devices or 1


def to_single_device(recipe: Recipe) -> Recipe:
    """The recipe for a single device: without the parallelism techniques, which change no result.

    Example:
        >>> from preheat.recipe import parse
        >>> dict(to_single_device(parse("stop: {max_steps: 1}\\ntechniques: {fsdp: {}}")).techniques)
        {}
    """
    return replace(recipe, techniques=single_device(recipe.techniques), parallel=Parallel())


def list_techniques(recipe: Recipe) -> list[Technique]:
    """The recipe's techniques, and the engine it selects, in the order in which they apply."""
    chosen = list(recipe.techniques.values())
    if recipe.parallel.engine == "deepspeed":
        from preheat.engine.deepspeed import DeepSpeed

        chosen.append(DeepSpeed(zero=recipe.parallel.zero_stage))
    # The name breaks ties, so that the order does not depend on that of the recipe's keys.
    return sorted(chosen, key=lambda t: (t.stage, t.name()))


def build_context(
    recipe: Recipe,
    config: PretrainedConfig,
    device: Device,
    world: int | None = None,
    *,
    facts: ModelFacts | None = None,
) -> Context:
    """Returns the context that the techniques' checks read.

    Args:
        world: number of devices; `find_world_size(recipe)` by default.
        facts: `hf.read_facts(config)`, for a caller that checks many recipes of one model; read here by default.

    Raises:
        RecipeError: the mesh axes do not multiply to the number of devices.
    """
    techniques = list_techniques(recipe)
    # All tags before the first check: a technique's `check` may ask for a tag that a later one provides.
    tags = frozenset(tag for t in techniques for tag in t.provided()) | {Tag(device.kind)}
    try:
        sizes = sizes_of(techniques, world or find_world_size(recipe))
    except ValueError as error:
        raise RecipeError(f"techniques: {error}") from None
    # A device without rows would leave its peers waiting in the reduction.
    if (devices := math.prod(sizes[axis] for axis in DATA)) > recipe.batch.size:
        raise RecipeError(
            f"batch.size: {recipe.batch.size} sequences cannot be split across {devices} devices; use {devices} or "
            "more, or fewer devices"
        )
    facts = facts or hf.read_facts(config)
    # A sink is a token at the start of each document that all of it sees (models/sinks.py).
    tags |= {Tag.GLOBAL_TOKENS} if facts.sinks else set()
    return Context(recipe, facts, device, tags | facts.storage_tags, sizes)


def build(
    recipe: Recipe,
    *,
    vocabulary: int | None,
    device: Device,
    source_config: PretrainedConfig | None = None,
    dry: AbstractContextManager[object] | None = None,
    reading: bool = False,
) -> Build:
    """Builds the recipe's model, optimizer and slots on a device.

    Args:
        vocabulary: size of the tokenizer's vocabulary; None when `model` decides.
        device: the device to build on.
        source_config: the model's configuration as `configs.source_config` read it; read here when not given.
        dry: a context manager (fake tensors) to allocate under; parameters then get no values. Until then everything is
            on the meta device.
        reading: the build is for inference: weights keep their dtype on disk (training starts from fp32 unless the
            recipe says otherwise), and the model may be one that `preheat compress` wrote.

    Raises:
        RecipeError: the model is not available, or techniques cannot be applied; all reasons are listed.

    Example:
        >>> from preheat.hardware.probe import probe
        >>> from preheat.recipe import parse
        >>> tiny = parse("model: {num_layers: 2, hidden_size: 32, num_heads: 2}\\nstop: {max_steps: 1}")
        >>> b = build(tiny, vocabulary=64, device=probe("cpu"))
        >>> b.slots()["over_logits"]
        'plain'
    """
    # The recipe before everything else: what follows takes its settings as valid.
    check(recipe)
    # Not in a dry run, which needs no values: a plan of a model whose weights are not here is possible.
    if dry is None:
        presets.require_weights(recipe)
    # Conflicts before the model: all reasons are listed at once, and no technique has changed anything yet.
    source = configs.source_config(recipe) if source_config is None else source_config
    config = hf.configure(recipe, vocabulary, source)
    context = build_context(recipe, config, device)
    techniques = list_techniques(recipe)
    if problems := conflicts_of(techniques, context):
        raise TechniqueError(problems)
    if not reading:
        _require_frozen(recipe, context.tags, context.model.quantized)
    # DeepSpeed cannot run on fake tensors: what is planned is the same recipe with torch's own means.
    if dry is not None and recipe.parallel.engine == "deepspeed":
        from preheat.recipe.native import to_native_engine

        return build(to_native_engine(recipe), vocabulary=vocabulary, device=device, source_config=source, dry=dry)
    # The whole model on the meta device: techniques can change a model of any size before it takes memory.
    model_build = _build_on_meta(recipe, config, context, dry=dry is not None, reading=reading)
    if dry is None and not reading:
        _record_dropout(model_build, vocabulary, source)
        if (wrapper := configs.wrapper_config(recipe)) is not None:
            model_build.changes["text_part"] = [Change(text_part.describe(wrapper.model_type), 1)]
    # Defaults before techniques: these replace or wrap the function that a slot has.
    _install_defaults(model_build, config, dry=dry is not None)
    # On the meta device, where replacing modules costs no memory:
    # STRUCTURE first: it decides which modules there are, and every later stage works on these.
    # COMPRESS before ADAPT: adapters wrap the quantized layers of the base.
    # ADAPT before FAKE_QUANTIZE: the weights that training updates are the ones to fake-quantize.
    # FAKE_QUANTIZE before KERNEL: a kernel may replace a module only in its final numeric form.
    # KERNEL before SPLIT: kernels are swapped in the whole model, before stages are cut out of it.
    # SPLIT before PARALLEL: pipeline stages are cut and teachers added while every layer is still complete.
    # PARALLEL before CHECKPOINT: recomputation includes the collectives of the sharded layers.
    # CHECKPOINT before COMPILE: the compiler must see the recomputed regions.
    # COMPILE before SHARD: each compiled layer is then one unit of FSDP, whose hooks stay outside of the graph.
    # SHARD last on meta: only then is it known which part of each parameter a rank allocates.
    _apply(techniques, model_build, Stage.STRUCTURE, Stage.KERNEL)
    # While the model is complete: a pattern that matches nothing may still match in another stage of a pipeline.
    weight_settings = resolve_weight_settings(model_build)
    _apply(techniques, model_build, Stage.PIPELINE_SPLIT, Stage.SHARD)
    # After SHARD: the rules for new rows name the parameters as they will be filled.
    if recipe.model.add_tokens:
        _add_rows(model_build, len(recipe.model.add_tokens), vocabulary or context.model.vocabulary)
    # From here on memory is allocated, which a dry run records.
    with dry or nullcontext():
        _materialize(model_build, dry=dry is not None)
        # MATERIALIZE needs values on the device; OPTIMIZER needs to know which parameters exist and are trained.
        _apply(techniques, model_build, Stage.MATERIALIZE, Stage.OPTIMIZER)
        if not model_build.parameters():
            raise RecipeError("techniques: nothing is left to train: every parameter is frozen")
        model_build.optimizer = _build_optimizer(model_build, weight_settings)
    # LOADER last: how batches are read depends on the finished build, and allocates nothing on the device.
    _apply(techniques, model_build, Stage.LOADER, Stage.LOADER)
    # After all techniques: the load of experts is added to the metrics of whichever objective was installed.
    if context.model.experts:
        model_build.loss.scores = wrap_metrics(model_build.loss.scores)
    return model_build


def require_model(recipe: Recipe, source_config: PretrainedConfig | None) -> None:
    """Raises for a model that cannot be built, or not be read from its folder, before a run reads its data.

    The model is built on the meta device, without the recipe's techniques; of the folder the headers are read.

    Args:
        source_config: the model's configuration as `configs.source_config` read it; None for a new model.

    Raises:
        RecipeError: preheat cannot train this kind of model, or the folder's weights are not those of its config.json.
    """
    # A new model's vocabulary follows from its tokenizer, which may not exist yet.
    if source_config is None:
        return
    config = copy.deepcopy(source_config)
    configs.apply_changes(config, recipe.model.config)
    model = hf.build_on_meta(config, trust=recipe.model.trust_remote_code)
    folder = _find_weights_folder(recipe)
    if folder is None:
        return
    stored = stored_quantization(config)
    if stored.get("quant_method") == STORED:
        _require_trainable(recipe, stored)
    _require_frozen(recipe, _provided_tags(recipe), packed_method(config))
    layers = hf.find_anatomy(model).layers
    weights = WeightSource(folder)
    _prepare_quantized_layers(weights, model, config, recipe)
    weights.require_model(
        model,
        next((name for name, module in model.named_modules() if module is layers), ""),
        cut="num_hidden_layers" in recipe.model.config,
        headless="classification" in recipe.techniques,
    )


def _build_on_meta(recipe: Recipe, config: PretrainedConfig, context: Context, *, dry: bool, reading: bool) -> Build:
    """Returns a build with the recipe's mesh and its model on the meta device; no slot is filled yet."""
    import torch

    device = context.device
    # A dry run allocates its fake tensors on the CPU, even if there is a GPU; kernels are still chosen by `device`.
    where = torch.device("cpu" if dry else device.kind)
    model_build = Build(recipe=recipe, device=device, model=context.model, tags=context.tags, torch_device=where)
    model_build.mesh = Mesh.create_mesh(context.sizes, where.type)
    model = hf.build_on_meta(config, trust=recipe.model.trust_remote_code, as_stored=reading)
    # One part; pipeline_parallel replaces it with the rank's stages.
    model_build.parts["trained"] = [model]
    if not config.is_encoder_decoder:
        _record_recurrent(model_build, model)
    model_build.weights = WeightSource(_find_weights_folder(recipe, dry=dry), required=not dry)
    # The modules must match the folder's tensors before any technique sees the model.
    if model_build.weights.folder is not None:
        if stored_quantization(config).get("quant_method") == STORED:
            _load_stored_quantization(model_build, stored_quantization(config), reading)
        elif change := _prepare_quantized_layers(model_build.weights, model, config, recipe):
            model_build.changes["quantized_weights"] = [change]
    return model_build


def _record_recurrent(model_build: Build, model: PreTrainedModel) -> None:
    """Records how recurrent layers are computed."""
    layers = list(hf.find_anatomy(model).layers)
    count = sum(len(find_recurrent_mixers(layer)) for layer in layers)
    if not count:
        return
    device = model_build.device
    kernels = ""
    if device.kind == "cuda" and not device.at_hand:
        kernels = f"; planned with the kernels of {' and '.join(kernel_packages(layers))}, which it needs installed"
    elif device.kind == "cuda" and (missing := missing_kernels(layers)):
        cost = (
            f"{' and '.join(missing)} not installed, so PyTorch's operators compute the recurrent layers: slower, and "
            f"with several times their activations; pip install {' '.join(missing)}"
        )
        model_build.changes["recurrent_kernels"] = [Change(cost, count)]
    message = f"{count} recurrent mixers run each document of a packed sequence apart, exact{kernels}"
    model_build.changes["recurrent_layers"] = [Change(message, count)]


def _record_dropout(model_build: Build, vocabulary: int | None, source: PretrainedConfig | None) -> None:
    """Records which dropout is off: pretraining configurations often carry some that the recipe did not ask for."""
    recipe = model_build.recipe
    off = configs.disable_dropout(configs.of(recipe, vocabulary) if source is None else copy.deepcopy(source))
    # A key that the recipe sets itself is no surprise to the user.
    off = {key: value for key, value in off.items() if key not in recipe.model.config}
    if off:
        keys = ", ".join(f"{key} {value:g}" for key, value in sorted(off.items()))
        model_build.changes["dropout"] = [
            Change(f"dropout is off: the model's configuration has {keys}, and training uses none", len(off))
        ]


def _install_defaults(model_build: Build, config: PretrainedConfig, *, dry: bool) -> None:
    """Fills every slot, adds the balancing loss of experts, and moves batches to the device."""
    install_defaults(model_build)
    add_balance_loss(model_build, config.get_text_config())
    if model_build.model.encoder:
        # The scores have a learnt bias: attend in chunks of queries, and recompute them in the backward pass.
        model_build.claim(Slot.ATTENTION_KERNEL, attend_in_chunks, "plain")
        model_build.hooks.transforms.append(
            (Order.PACK, encoder_decoder.split_documents_evenly if dry else encoder_decoder.split_documents)
        )
    # `torch_device`, not `device`: a dry run of a GPU keeps its fake tensors on the CPU and moves nothing.
    if model_build.torch_device.type != "cpu":
        model_build.hooks.transfer = transfer = Transfer(model_build.torch_device)
        model_build.hooks.transforms.append((Order.MOVE, transfer))


def _apply(techniques: Sequence[Technique], model_build: Build, first: Stage, last: Stage) -> None:
    """Applies the techniques of the stages `first` to `last`, both included."""
    for t in techniques:
        if first <= t.stage <= last:
            # Sorted: a set of strings has another order in each process, and ranks must create groups in one order.
            for role in sorted(t.roles & model_build.parts.keys()):
                for part in model_build.parts[role]:
                    model_build.changes.setdefault(t.name(), []).append(_apply_technique(t, model_build, part))


def _materialize(model_build: Build, *, dry: bool) -> None:
    """Allocates all parameters on the device, and outside of a dry run gives them their values."""
    for role, parts in model_build.parts.items():
        for part in parts:
            materialize(
                part,
                model_build.torch_device,
                home=model_build.storage_device,
                placed=_mark_on_host if dry and model_build.storage_device else None,
            )
            if not dry:
                source = model_build.sources.get(role, model_build.weights)
                # The seed of the recipe on every rank: shards are cut from the same full values.
                source.fill(part, seed=model_build.recipe.seed)
                if source.notes:
                    model_build.changes.setdefault("weights", []).extend(Change(note, 1) for note in source.notes)


def _apply_technique(t: Technique, model_build: Build, part: nn.Module) -> Change:
    """Applies a technique; an error that it raises is reported as a build problem of that technique."""
    try:
        return t.apply(model_build, part)
    except RecipeError as error:
        raise TechniqueError([Problem(t.name(), ProblemCode.BUILD, str(error))], str(error)) from error


def _prepare_quantized_layers(
    weights: WeightSource, model: PreTrainedModel, config: PretrainedConfig, recipe: Recipe
) -> Change | None:
    """Packs the linear layers of a meta model as its published folder has them, or lets them be dequantized when read.

    Returns:
        A description of the packed layers; None without such.

    Raises:
        RecipeError: the folder's quantization is not supported.
    """
    from torch import nn

    from preheat.ops.adapters.peft_layers import count_parameters
    from preheat.ops.quantization.folder_formats import read_folder_format

    stored = stored_quantization(config)
    # With `dequantized` the configuration does not have it any more; transformers' rules dequantize FP8 and MXFP4.
    stays_packed, read = bool(stored), stored or weights.quantization
    if not read or (not stays_packed and read.get("quant_method") in DEQUANTIZED):
        return None
    folder = read_folder_format(recipe.model.path, read)
    layers = weights.find_layers(model, folder)
    modules: dict[str, Any] = {name: model.get_submodule(name) for name in layers}
    shapes = {
        name: (module.out_features, module.in_features)
        for name, module in modules.items()
        if isinstance(module, nn.Linear)
    }
    # Runs and exports of this build are not stored in that quantization format.
    for part in {id(part): part for part in (model.config, model.config.get_text_config())}.values():
        vars(part).pop("quantization_config", None)
    # The head's weight is read by losses and samplers, also in chunks.
    full = {name for name, module in modules.items() if not stays_packed or module is hf.head(model)}
    weights.dequantize({name: layers[name] for name in full}, shapes)
    packed = {stored_as.pack_(modules[name]): stored_as for name, stored_as in layers.items() if name not in full}
    weights.keep_packed(packed.items())
    if not packed:
        return None
    count = sum(module.count_packed()[0] for module in packed)
    size = sum(module.count_packed_bytes() for module in packed) / count
    rest = count_parameters(model)[1] - count
    note = f"; {folder.note}" if folder.note else ""
    kinds = f"{len(packed)} linear maps" if folder.experts is None else f"the experts of {len(packed)} layers"
    return Change(
        f"{kinds} stay in {folder.method} ({folder.label}), frozen: {count:,} weights at {size:.3f} "
        f"bytes; {rest:,} are not quantized{note}",
        len(packed),
    )


def _provided_tags(recipe: Recipe) -> frozenset[Tag]:
    return frozenset(tag for t in list_techniques(recipe) for tag in t.provided())


def _require_frozen(recipe: Recipe, tags: frozenset[Tag], method: str) -> None:
    """Raises RecipeError if a recipe trains weights that stay packed in the format `method` ("": none do)."""
    if method in PACKED and Tag.FROZEN_BASE not in tags:
        raise RecipeError(
            f"model.path: {recipe.model.path} is stored in {method}, and packed weights cannot be trained; add "
            "techniques.lora, or set model.quantized_weights: dequantized to train all weights in full precision"
        )


def _load_stored_quantization(model_build: Build, stored_config: JsonObject, reading: bool) -> None:
    """Gives the meta model the modules of a folder that `preheat compress` wrote."""
    from preheat.ops.quantization import serialization as ours

    path = model_build.recipe.model.path
    if not reading:
        _require_trainable(model_build.recipe, stored_config)
    (part,) = model_build.trained
    try:
        names = ours.open_on_meta(part, stored_config)
    except (KeyError, AttributeError, ValueError, TypeError, ZeroDivisionError) as error:  # damaged or foreign config
        raise RecipeError(
            f"model.path: {path}: its config.json does not describe how its weights are stored "
            f"({shorten(str(error))}); compress it again"
        ) from None
    model_build.weights.fresh(r"(?!)", names, ours.register_tables)  # no parameter is fresh, only the tables


def _require_trainable(recipe: Recipe, stored: JsonObject) -> NoReturn:
    """Raises RecipeError for a folder that `preheat compress` wrote."""
    raise RecipeError(
        f"model.path: {recipe.model.path} is compressed ({stored.get('method')}): quantized weights cannot be trained "
        "or take adapters; name the original model, and add techniques.quantization_aware to train towards few "
        "bits, or techniques.nf4 for a base in 4 bits"
    )


def _mark_on_host(parameter: Tensor) -> None:
    """Marks a parameter and its gradient as host memory: in a dry run all tensors are on one fake device."""
    from preheat.ops.distributed.dtensor_utils import local
    from preheat.ops.memory.host_transfer import lies_on_host

    lies_on_host(local(parameter))
    if parameter.requires_grad:
        # The gradient does not exist before the first backward pass, so a hook marks it when it does.
        parameter.register_post_accumulate_grad_hook(lambda p: lies_on_host(local(p.grad)))


def _add_rows(model_build: Build, count: int, vocabulary: int) -> None:
    """Sets the embedding and head rows of added tokens, the last `count` of `vocabulary`, to the mean of the others."""
    modules = [
        (name, m)
        for part in model_build.trained
        for name, m in (("embedding", hf.embedding(part)), ("head", hf.head(part)))
    ]
    # A pipeline stage may have neither.
    ends: dict[str, Any] = {name: m.weight for name, m in modules if m is not None}
    frozen = [name for name, weight in ends.items() if not weight.requires_grad]
    if frozen:
        raise RecipeError(
            f"model.add_tokens: the {frozen[0]} is frozen, so the new tokens would not be trained; train all weights, "
            "or use a template whose tokens the model has"
        )
    if model_build.weights.folder is None:
        return  # a new model: these rows are initialized like all others
    # The bias of a head has an entry per token too.
    grown = [*ends.values(), *(getattr(m, "bias", None) for _, m in modules)]
    names = [
        re.escape(name)
        for part in model_build.trained
        for name, p in part.named_parameters()
        if any(p is weight for weight in grown)
    ]
    if not names:
        return
    # The tokenizer numbers added tokens after all others.
    first = vocabulary - count
    # A rule for reading, because the parameters have no values before MATERIALIZE.
    model_build.weights.map(
        rf"^({'|'.join(names)})$",
        lambda name, value: resize_rows(value, model_build.model.vocabulary, first, vocabulary),
    )
    message = (
        f"{count} tokens added: rows {first:,} to {vocabulary - 1:,} of {' and '.join(sorted(ends))} start as the "
        "mean of the others, and are trained"
    )
    model_build.changes.setdefault("add_tokens", []).append(Change(message, count))


def find_peak_learning_rate(model_build: Build) -> float:
    """`optimizer.lr`, or for `auto` the rule of models/size_dial.py by the number of parameters without the ends."""
    lr = model_build.recipe.optimizer.lr
    if lr != "auto":
        return float(lr)
    model = hf.full_model(model_build.trained[0])  # type: ignore[arg-type]
    # The rule's N leaves out the embedding and the head (Kaplan et al. 2020).
    ends = {id(p) for p in hf.end_weights(model)}
    return size_dial.learning_rate(sum(p.numel() for p in model.parameters() if id(p) not in ends))


def _build_optimizer(model_build: Build, weight_settings: Mapping[str, WeightSettings]) -> Any:
    from preheat.ops.optim.optimizers import group_by_decay

    settings = model_build.recipe.optimizer
    groups = group_by_decay(model_build.parameters(), settings.weight_decay, weight_settings)
    make = model_build.slot(Slot.OPTIMIZER)
    # Wrappers get the function, not its result: zero1 must create the inner optimizer over shards of the parameters.
    for around in model_build.hooks.around_optimizer:
        make = around(make)
    return make(groups, lr=find_peak_learning_rate(model_build), betas=settings.betas, eps=settings.eps)


def _find_weights_folder(recipe: Recipe, *, dry: bool = False) -> Path | None:
    """The folder of the model's files, downloaded from the hub if necessary: all, or for a dry run config.json."""
    path = recipe.model.path
    if path is None or recipe.model.weights == "random":
        return None
    if Path(path).is_dir():
        return Path(path)
    if dry and (folder := find_hub_folder(path)) is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # Without a network from the cache: the hub's client would wait for one.
    offline = is_hub_offline()
    try:
        # No .bin files: they are pickles, which preheat does not load.
        folder = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"], local_files_only=offline))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise RecipeError(
            f"model.path: {path}: its weights cannot be loaded from the hub ({str(error).splitlines()[0][:160]}); "
            "download them and name the folder"
        ) from None
    # The cache may hold the config.json alone, as a plan leaves it, or a download that was interrupted.
    if offline and (missing := describe_missing_weights(folder)):
        raise RecipeError(
            f"model.path: {path}: the hub's cache holds its config.json but not {missing}, and there is no network; "
            f"run: hf download {path} with a network, or set model.weights: random for a new model of that shape"
        )
    return folder
