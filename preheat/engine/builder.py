"""A recipe made concrete: model, loss, optimizer on a device, changed by the techniques in the order of their stages."""

from __future__ import annotations

import math
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.core import (
    DATA,
    Build,
    Change,
    Context,
    Device,
    Mesh,
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
from preheat.engine.moe_aux_loss import balance, scores
from preheat.engine.step import install_defaults
from preheat.engine.transfer import Transfer
from preheat.errors import RecipeError
from preheat.models import configs, encoder_decoder, hf, presets, size_dial
from preheat.models.weights import WeightSource, materialize, mean_rows
from preheat.ops.attention.multihead import attention_in_chunks
from preheat.recipe import Parallel, Recipe, check
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from torch import nn

__all__ = ["alone", "build", "context_of", "peak_learning_rate", "techniques_of", "world_of"]


def world_of(recipe: Recipe) -> int:
    """Devices of the run: the processes that stand together already, or those that the recipe names."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else recipe.parallel.devices or 1


def alone(recipe: Recipe) -> Recipe:
    """The recipe for one device: without the techniques that spread it over several, which change no number.

    Example:
        >>> from preheat.recipe import parse
        >>> dict(alone(parse("stop: {steps: 1}\ntechniques: {fsdp: {}}")).techniques)
        {}
    """
    return replace(recipe, techniques=single_device(recipe.techniques), parallel=Parallel())


def techniques_of(recipe: Recipe) -> list[Technique]:
    """The recipe's techniques, and the engine that it asks for, in the order in which they apply."""
    chosen = list(recipe.techniques.values())
    if recipe.parallel.engine == "deepspeed":
        from preheat.engine.deepspeed import DeepSpeed

        chosen.append(DeepSpeed(zero=recipe.parallel.zero))
    return sorted(chosen, key=lambda t: (t.stage, t.name()))


def context_of(recipe: Recipe, config: Any, device: Device, world: int | None = None) -> Context:
    """What techniques' checks may look at.

    Args:
        world: devices; `world_of` the recipe when not given.

    Raises:
        RecipeError: the axes of the mesh do not multiply to the number of devices.
    """
    techniques = techniques_of(recipe)
    tags = frozenset(tag for t in techniques for tag in t.provided()) | {Tag(device.kind)}
    try:
        sizes = sizes_of(techniques, world or world_of(recipe))
    except ValueError as error:
        raise RecipeError(f"techniques: {error}") from None
    if (devices := math.prod(sizes[axis] for axis in DATA)) > recipe.batch.size:
        raise RecipeError(
            f"batch.size: {recipe.batch.size} rows cannot be shared out among {devices} devices; use {devices} or more, or fewer devices"
        )
    return Context(recipe, hf.facts(config), device, tags, sizes)


def build(
    recipe: Recipe,
    *,
    vocabulary: int | None,
    device: Device,
    dry: AbstractContextManager[Any] | None = None,
    reading: bool = False,
) -> Build:
    """Builds the recipe's model, optimizer and slots on a device.

    Args:
        vocabulary: pieces of the tokenizer; None when `model` decides.
        device: where to.
        dry: a mode (fake tensors) to allocate under; parameters then get no values. Everything before stays on meta.
        reading: the build is not trained: its weights have the dtype that they stand in on disk, where training begins with fp32 unless the recipe
            says otherwise, and its model may be one that `preheat compress` made.

    Raises:
        RecipeError: the model cannot be had, or techniques cannot serve here; all reasons are named.

    Example:
        >>> from preheat.hardware.probe import probe
        >>> from preheat.recipe import parse
        >>> b = build(parse("model: {layers: 2, width: 32, heads: 2}\\nstop: {steps: 1}"), vocabulary=64, device=probe("cpu"))
        >>> b.slots()["over_logits"]
        'plain'
    """
    import torch

    check(recipe)
    if dry is None:
        presets.require_weights(recipe)
    config = hf.configure(recipe, vocabulary)
    off = configs.without_dropout(configs.of(recipe, vocabulary)) if dry is None and not reading else {}
    off = {key: value for key, value in off.items() if key not in recipe.model.config}
    context = context_of(recipe, config, device)
    techniques = techniques_of(recipe)
    problems = conflicts_of(techniques, context)
    if problems:
        raise TechniqueError(problems)
    if dry is not None and recipe.parallel.engine == "deepspeed":
        from preheat.recipe.native import native

        return build(native(recipe), vocabulary=vocabulary, device=device, dry=dry)
    # A dry run has its fake tensors on the CPU, also where there is a GPU; kernels are chosen by `device` all the same.
    where = torch.device(device.kind if dry is None else "cpu")
    made = Build(recipe=recipe, device=device, model=context.model, tags=context.tags, torch_device=where)
    made.mesh = Mesh.form(context.sizes, where.type)
    made.parts["trained"] = [hf.build_on_meta(config, trust=recipe.model.trust_remote_code, as_stored=reading)]
    made.weights = WeightSource(_weights_folder(recipe))
    if made.weights.folder and (stored := getattr(config, "quantization_config", None)):
        _stored_quantized(made, stored, reading)
    if off:
        keys = ", ".join(f"{key} {value:g}" for key, value in sorted(off.items()))
        made.changes["dropout"] = [
            Change(f"dropout is off, where the model's configuration has {keys}: trained without", len(off))
        ]
    install_defaults(made)
    balance(made, config.get_text_config())
    if (
        context.model.encoder
    ):  # whose scores have a learnt bias: made for some queries at a time, and again in the backward pass
        made.own(Slot.ATTENTION_KERNEL, attention_in_chunks, "plain")
        made.hooks.transforms.append(
            (Order.PACK, encoder_decoder.divided if dry is None else encoder_decoder.divided_evenly)
        )
    if where.type != "cpu":
        made.hooks.transfer = transfer = Transfer(made.torch_device)
        made.hooks.transforms.append((Order.MOVE, transfer))

    def apply(first: Stage, last: Stage) -> None:
        for t in techniques:
            if first <= t.stage <= last:
                for role in sorted(t.roles & made.parts.keys()):
                    for part in made.parts[role]:
                        made.changes.setdefault(t.name(), []).append(_applied(t, made, part))

    apply(Stage.STRUCTURE, Stage.SHARD)
    if recipe.model.add_tokens:
        _add_rows(made, len(recipe.model.add_tokens), vocabulary or context.model.vocabulary)
    with dry or nullcontext():
        for role, parts in made.parts.items():
            for part in parts:
                materialize(
                    part,
                    made.torch_device,
                    home=made.storage_device,
                    placed=_lies_on_host if dry and made.storage_device else None,
                )
                if dry is None:
                    source = made.sources.get(role, made.weights)
                    source.fill(part, seed=recipe.seed)
                    if source.notes:
                        made.changes.setdefault("weights", []).extend(Change(words, 1) for words in source.notes)
        apply(Stage.MATERIALIZE, Stage.OPTIMIZER)
        if not made.parameters():
            raise RecipeError("techniques: nothing is left to train: every parameter is frozen")
        made.optimizer = _optimizer(made)
    apply(Stage.LOADER, Stage.LOADER)
    if context.model.experts:
        made.loss.scores = scores(made.loss.scores)
    return made


def _applied(t: Technique, made: Build, part: nn.Module) -> Change:
    """Applies a technique; what it refuses then is a problem of its own."""
    try:
        return t.apply(made, part)
    except RecipeError as error:
        raise TechniqueError([Problem(t.name(), ProblemCode.BUILD, str(error))], str(error)) from error


def _stored_quantized(made: Build, stored: Any, reading: bool) -> None:
    """Gives the model on meta the modules of a folder that `preheat compress` wrote; any other quantized folder is refused."""
    from preheat.ops.quantization import serialization as ours

    path, told = made.recipe.model.path, stored if isinstance(stored, dict) else stored.to_dict()
    kind = told.get("quant_method")
    if kind != ours.STORED:
        raise RecipeError(
            f"model.path: {path} is stored quantized ({kind}), which preheat does not read; name the model it was made from, and add techniques.nf4 for a base in 4 bits"
        )
    if not reading:
        raise RecipeError(
            f"model.path: {path} is compressed ({told.get('method')}): what is rounded is not trained, nor does it carry adapters; name the model it was made from, "
            "and add techniques.quantization_aware to train towards few bits, or techniques.nf4 for a base in 4 bits"
        )
    (part,) = made.trained
    try:
        names = ours.open_on_meta(part, told)
    except (
        KeyError,
        AttributeError,
        ValueError,
        TypeError,
        ZeroDivisionError,
    ) as error:  # of a damaged or foreign file
        raise RecipeError(
            f"model.path: {path}: its config.json does not say how its weights stand ({shorten(str(error))}); compress it again"
        ) from None
    made.weights.fresh(r"(?!)", names, ours.tables_of)  # no parameter is fresh, only the tables


def _lies_on_host(parameter: Any) -> None:
    """Tells a dry run, in which all tensors are of one fake device, where a parameter and its gradient are."""
    from preheat.ops.distributed.dtensor_utils import local
    from preheat.ops.memory.host_transfer import lies_on_host

    lies_on_host(local(parameter))
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(lambda p: lies_on_host(local(p.grad)))


def _add_rows(made: Build, count: int, vocabulary: int) -> None:
    """Rows of embedding and head for tokens that the tokenizer was given: the last `count` of its `vocabulary`."""
    held = [
        (name, m) for part in made.trained for name, m in (("embedding", hf.embedding(part)), ("head", hf.head(part)))
    ]
    ends: dict[str, Any] = {
        name: m.weight for name, m in held if m is not None
    }  # a stage of a pipeline may have neither
    frozen = [name for name, weight in ends.items() if not weight.requires_grad]
    if frozen:
        raise RecipeError(
            f"model.add_tokens: the {frozen[0]} is frozen under an adapter, so the new tokens would never be learnt; train all weights, or use a template of tokens that the model knows"
        )
    if made.weights.folder is None:
        return  # drawn like all others
    names = [
        re.escape(name)
        for part in made.trained
        for name, p in part.named_parameters()
        if any(p is weight for weight in ends.values())
    ]
    if not names:
        return
    first = vocabulary - count
    made.weights.map(
        rf"^({'|'.join(names)})$", lambda name, value: mean_rows(value, made.model.vocabulary, first, vocabulary)
    )
    words = f"{count} tokens added: rows {first:,} to {vocabulary - 1:,} of {' and '.join(sorted(ends))} begin as the mean of those before, and are trained"
    made.changes.setdefault("add_tokens", []).append(Change(words, count))


def peak_learning_rate(made: Build) -> float:
    """`optimizer.lr`, or for `auto` the rule of models/size_dial.py by the parameters outside embedding and head."""
    lr = made.recipe.optimizer.lr
    if lr != "auto":
        return float(lr)
    model = hf.whole(made.trained[0])  # type: ignore[arg-type]
    ends = {id(p) for p in hf.ends(model)}
    return size_dial.learning_rate(sum(p.numel() for p in model.parameters() if id(p) not in ends))


def _optimizer(made: Build) -> Any:
    from preheat.ops.optim.optimizers import decay_groups

    settings = made.recipe.optimizer
    groups = decay_groups(made.parameters(), settings.weight_decay)
    make = made.slot(Slot.OPTIMIZER)
    for around in made.hooks.around_optimizer:
        make = around(make)
    return make(groups, lr=peak_learning_rate(made), betas=settings.betas, eps=settings.eps)


def _weights_folder(recipe: Recipe) -> Path | None:
    path = recipe.model.path
    if path is None or recipe.model.weights == "random":
        return None
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise RecipeError(
            f"model.path: {path}: its weights cannot be had from the hub ({str(error).splitlines()[0][:160]}); download them and name the folder"
        ) from None
