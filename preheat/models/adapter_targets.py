"""Finds the projections of a model that adapters go onto, by kind of layer.

The kinds come from the model's own modules: attention and recurrent mixers as in `token_mixers`, feed-forward blocks by
the names of their classes, and experts whose matrices are stacked in one parameter.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from preheat.errors import SettingError
from preheat.models.moe import experts_of, routers
from preheat.models.token_mixers import find_attentions, find_recurrent_mixers
from preheat.models.vision import find_tower, is_clipped
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn

__all__ = ["ALL", "EXPERTS", "KINDS", "describe", "require_adaptable", "resolve"]

ALL = "all-linear"
EXPERTS = "experts"
_ATTENTION, _RECURRENT, _FEED_FORWARD = "attention", "recurrent", "feed-forward"
KINDS = (_ATTENTION, _RECURRENT, _FEED_FORWARD, EXPERTS)
"""Names in `target_modules` that select all projections of a kind of layer."""
_TOWER, _OTHER = "vision tower", "other"
_BLOCK = re.compile(r"mlp|feedforward|ffn|moe|expert|dense", re.IGNORECASE)
"""Part of the class names of feed-forward blocks in transformers."""
_LEAF = re.compile(r"fc\d|ffn\w*")
"""Names of feed-forward projections that a layer holds without a block around them (OPT)."""


def resolve(model: nn.Module, targets: str | Sequence[str]) -> tuple[str | tuple[str, ...], bool]:
    """Replaces `all-linear` and the kinds of `KINDS` in the targets of an adapter by names of modules.

    `all-linear` means what it means in peft, every linear layer but the head, without two exceptions: routers, which
    stay frozen, and projections whose weight the layer's own code multiplies by (`require_adaptable`).

    Returns:
        Names of modules (or a regular expression, unchanged), and True if the targets name the experts.

    Raises:
        SettingError: the model has no layer of a named kind, or the targets are no regular expression.
    """
    if isinstance(targets, str) and targets != ALL and targets not in KINDS:
        try:
            re.compile(targets)
        except re.error as error:
            raise SettingError(
                "target_modules", f"{quote_value(targets)} is not a regular expression ({error})"
            ) from None
        return targets, False
    named = (targets,) if isinstance(targets, str) else tuple(targets)
    clipped = [f".{name}" for name, module in model.named_modules() if is_clipped(module)]
    named += tuple(f"{target}.linear" for target in named if any(name.endswith(f".{target}") for name in clipped))
    if ALL not in named and not set(KINDS) & {*named}:
        return named, False
    kinds = _classify_modules(model, _find_linear_names(model))
    present = {*kinds.values()} | ({EXPERTS} if experts_of(model) else set())
    names: list[str] = []
    for target in named:
        if target in KINDS and target not in present:
            there = [kind for kind in KINDS if kind in present]
            raise SettingError(
                "target_modules",
                f"{quote_value(target)}: the model has no such layers that adapters can go onto; it has "
                f"{_format_names(there)}",
            )
        if target == ALL:
            names += kinds
        elif target in KINDS:
            names += [name for name, kind in kinds.items() if kind == target]
        else:
            names.append(target)
    if not names:
        raise SettingError(
            "target_modules", "experts: adapters on experts alone are not supported; write [attention, experts]"
        )
    return tuple(dict.fromkeys(names)), EXPERTS in named


def describe(model: nn.Module, names: Sequence[str]) -> str:
    """Returns the number of adapted modules by kind of layer: '24 attention and 48 feed-forward projections'."""
    counts = Counter(_classify_modules(model, names).values())
    order = (_ATTENTION, _RECURRENT, _FEED_FORWARD, _TOWER, _OTHER)
    text = _format_names([f"{counts[kind]} {kind}" for kind in order if counts[kind]])
    return f"{text} projection{'' if counts.total() == 1 else 's'}"


def require_adaptable(model: nn.Module, config: PeftConfig) -> None:
    """Raises SettingError for targets whose weight their layer reads itself, so that it would skip an adapter.

    Mamba's kernels fuse the last projection with the scan, and all recurrent mixers convolve by a kernel of their own.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    if odd := [name for name in sorted(_read_by_mixers(model)) if check_target_module_exists(config, name)]:
        owner, _, leaf = odd[0].rpartition(".")
        raise SettingError(
            "target_modules",
            f"{leaf}: {type(model.get_submodule(owner)).__name__} computes with the weight of {odd[0]} itself, past "
            f"any adapter; leave {leaf} out of the targets, or write {ALL}",
        )


def _format_names(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _layers_with_weights(model: nn.Module) -> list[nn.Module]:
    from torch import nn

    return [layer for stack in model.modules() if isinstance(stack, nn.ModuleList) for layer in stack]


def _find_linear_names(model: nn.Module) -> list[str]:
    """Names of the linear layers, without the head, routers and those that would leave an adapter out."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    frozen = {id(module) for router in routers(model) for module in router.modules()} | {id(head)}
    skipped = _read_by_mixers(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and id(module) not in frozen and name not in skipped
    ]


def _classify_modules(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Returns the kind of layer that each of the named modules belongs to."""
    layers = _layers_with_weights(model)
    marks: dict[int, str] = {}
    for layer in layers:
        marks |= {id(mixer): _ATTENTION for mixer in find_attentions(layer)}
        # The attention of encoder-decoders takes a cache too, and calls no function of the registry.
        if not model.config.is_encoder_decoder:  # type: ignore[union-attr]
            marks |= {id(mixer): _RECURRENT for mixer in find_recurrent_mixers(layer)}
    if (vision_tower := find_tower(model)) is not None:  # type: ignore[arg-type]
        marks[id(vision_tower)] = _TOWER
    ends = {id(layer) for layer in layers}
    modules = dict(model.named_modules())
    return {name: _classify_module(name, modules, marks, ends) for name in names}


def _classify_module(name: str, modules: dict[str, nn.Module], marks: dict[int, str], ends: set[int]) -> str:
    owners = [modules[owner] for owner in _iterate_owners(name)]
    if (marked := next((marks[id(owner)] for owner in owners if id(owner) in marks), None)) is not None:
        return marked
    for owner in owners:
        if type(owner).__name__.lower().endswith("attention"):
            return _ATTENTION
        if id(owner) in ends:
            return _FEED_FORWARD if _LEAF.fullmatch(name.rpartition(".")[2]) else _OTHER
        if _BLOCK.search(type(owner).__name__):
            return _FEED_FORWARD
    return _OTHER


def _iterate_owners(name: str) -> Iterator[str]:
    """Yields the names of the modules around a module, from the inside; not the model itself."""
    while name := name.rpartition(".")[0]:
        yield name


def _read_by_mixers(model: nn.Module) -> set[str]:
    """Names of the modules in recurrent mixers whose weight the mixer's own code reads to compute with it."""
    if model.config.is_encoder_decoder:  # type: ignore[union-attr]
        return set()
    mixers = {id(mixer): type(mixer) for layer in _layers_with_weights(model) for mixer in find_recurrent_mixers(layer)}
    read = {kind: _find_weights_read(kind) for kind in {*mixers.values()}}
    named = ((name, mixers[id(module)]) for name, module in model.named_modules() if id(module) in mixers)
    return {f"{name}.{leaf}" for name, kind in named for leaf in read[kind]}


def _find_weights_read(kind: type) -> set[str]:
    """Names of the attributes whose `.weight` the methods of a class read, for more than its device or dtype."""
    owners = set()
    for method in (f for f in vars(kind).values() if inspect.isfunction(f) and f.__name__ != "__init__"):
        steps = [step for step in dis.get_instructions(inspect.unwrap(method)) if step.opname != "CACHE"]
        for owner, weight, then in zip(steps, steps[1:], [*steps[2:], None], strict=False):
            loads = owner.opname == weight.opname == "LOAD_ATTR" and weight.argval == "weight"
            if loads and (then is None or then.argval not in ("device", "dtype")):
                owners.add(owner.argval)
    return owners
