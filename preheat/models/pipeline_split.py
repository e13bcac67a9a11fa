"""Splits a transformers model into pipeline stages. A stage is the model without the layers (and ends) of other stages.

Parameter names, including layer numbers, are those of the full model, so that a stage reads, initializes and saves what
the full model would.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from preheat.core import MaskSpec
from preheat.models import hf, moe
from preheat.models.conversions.modules import Passthrough
from preheat.models.layer_kinds import layer_kinds
from preheat.models.shallow_copy import copy_shallow

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["ModelProfile", "balance_stages", "cut", "observe"]

LayerOutput = Tensor | tuple[Tensor | None, ...]
"""Result of a layer: hidden states, or a tuple of them and None for each further entry."""


class _OtherLayer(Passthrough):
    """Placeholder for a layer of another stage, which the model reads and calls as it would the layer.

    Args:
        layer: the layer, whose plain attributes, such as its kind in Nemotron-H, it has too.
        further: entries of the tuple that it returns after the hidden states; None: it returns no tuple.
    """

    def __init__(self, layer: nn.Module, further: int | None):
        super().__init__()
        self.__dict__ |= {
            key: value
            for key, value in vars(layer).items()
            if not key.startswith("_") and isinstance(value, str | int | float | None)
        }
        self._further = further

    def forward(self, hidden: Tensor, *_: object, **__: object) -> LayerOutput:  # type: ignore[override]
        return _layer_output(hidden, self._further)


def _layer_output(hidden: Tensor, further: int | None) -> LayerOutput:
    """Returns the result of a layer: hidden states, or a tuple of them and `further` times None."""
    return hidden if further is None else (hidden, *(None,) * further)


class _ZeroModule(nn.Module):
    """Replaces a lookup of the first stage that is added to the embeddings, such as GPT-2's positions."""

    def forward(self, *_: object, **__: object) -> Tensor:
        return torch.zeros(())


@dataclass
class ModelProfile:
    """Execution profile of a model from a dry run.

    Attributes:
        layers: name of the list of layers.
        entry: names of the modules that create and change hidden states before the layers.
        exit: names of the modules after the layers, including the head.
        before: FLOPs of a row's forward pass before the layers; `each`: of each layer; `after`: after them, including
            the head.
        weights: parameters of each layer.
        further: entries of the tuple that a layer returns after its hidden states, all None; None: it returns a tensor.
    """

    layers: str = ""
    entry: list[str] = field(default_factory=list)
    exit: list[str] = field(default_factory=list)
    before: float = 0
    each: list[float] = field(default_factory=list)
    after: float = 0
    weights: list[int] = field(default_factory=list)
    further: int | None = None


def _attend_mean_length(query: Tensor, key: Tensor, value: Tensor, mask: MaskSpec, scale: float, **_: object) -> Tensor:
    """Attention over the mean number of keys per token that a kernel with block skipping reads."""
    length = key.shape[2]
    # Chunks and sinks are documents of one row; all rows have the same.
    pairs = 0.0
    for n in mask.documents[0] if mask.documents else (length,):
        # The first w queries see 1 to w keys, all later ones w.
        window = min(mask.window or n, n)
        pairs += n * window - window * (window - 1) / 2
    reach = max(1, round(pairs / length))
    repeat = query.shape[1] // key.shape[1]  # query heads per key-value head
    key, value = (t[:, :, :reach].repeat_interleave(repeat, dim=1) for t in (key, value))
    return (query @ key.transpose(-1, -2)).softmax(dim=-1) @ value


def _compute_one_expert(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Passes each token through the first expert as often as it has experts: their FLOPs do not depend on which."""

    def multiply(name: str, rows: Tensor) -> Tensor:
        matrix = getattr(experts, name)[0]
        return rows @ (matrix if experts.is_transposed else matrix.T)

    rows = hidden.repeat_interleave(chosen.shape[1], dim=0)
    if experts.has_gate:
        inner = experts._apply_gate(multiply("gate_up_proj", rows))
    else:
        inner = experts.act_fn(multiply("up_proj", rows))
    return multiply("down_proj", inner).view(*chosen.shape, -1).sum(dim=1)


def _list_of_layers(model: PreTrainedModel) -> str:
    layers = hf.find_anatomy(model).layers
    return next(name for name, module in model.named_modules() if module is layers)


def _ancestor_names(name: str) -> list[str]:
    """Names of a module's ancestors: '' and 'model' for 'model.layers'."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))]


def _iterate_around(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules before and after the list of layers, with their names.

    Raises:
        ValueError: a module that holds the layers has parameters of its own.
    """
    # A holder is part of every stage, so a parameter of its own would be, too.
    holders = _ancestor_names(layers)
    for holder in holders:
        parent = model.get_submodule(holder)
        if any(True for _ in parent.parameters(recurse=False)):
            raise ValueError(f"{type(parent).__name__} has parameters of its own, which belong to no stage")
        for key, module in parent.named_children():
            name = f"{holder}.{key}".lstrip(".")
            if name != layers and name not in holders:
                yield name, module


def observe(config: PretrainedConfig, length: int, *, trust: bool = False) -> ModelProfile:
    """Profiles a model in a dry run on meta: modules before, in and after its layers, and their FLOPs.

    FLOPs rather than seconds: all devices must split at the same layers, and FLOPs are the same everywhere and known
    before anything is allocated. Matrix products and convolutions are counted, those of experts for as many rows as
    tokens have experts, however these are chosen. The elementwise scan of Mamba is not: 5 % of a layer of Nemotron 3
    Nano 4B, by the formula of `planning.recurrent_kernels`.

    Args:
        config: transformers' configuration; the plain model is run, whatever techniques change in its computation.
        length: tokens per row.

    Raises:
        ValueError: the model cannot be split between layers; the message says why.
    """
    from torch.utils.flop_counter import FlopCounterMode

    # On meta: a forward pass costs no memory and no arithmetic, and the counter sees every operator's shapes.
    model = hf.build_on_meta(copy.deepcopy(config), trust=trust)
    moe.compute_by(model, _compute_one_expert)
    course = ModelProfile(_list_of_layers(model))
    counter = FlopCounterMode(display=False)
    stream = (1, length, config.get_text_config().hidden_size)
    # `where` turns to "exit" at the first layer; modules called from then on belong to the last stage.
    where, started = "entry", 0

    def watch(name: str, module: nn.Module) -> None:
        def mark_done(_: nn.Module, __: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> None:
            acts = torch.is_tensor(out) and tuple(out.shape) == stream
            if acts or module is hf.head(model):
                (course.entry if where == "entry" else course.exit).append(name)
            # Rotary tables have no parameters, so that every stage can compute them by itself.
            elif any(True for _ in module.parameters()):
                raise ValueError(
                    f"{type(model).__name__}: {name} returns something other than hidden states, which all its stages "
                    "would need"
                )

        # Lists are not called themselves.
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters()):
            raise ValueError(
                f"{type(model).__name__}: {name} has parameters outside its layers, which belong to no stage"
            )
        module.register_forward_hook(mark_done)

    for name, module in _iterate_around(model, course.layers):
        watch(name, module)

    def enter(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal where, started
        if where == "entry":
            course.before = counter.get_total_flops()
        where, started = "exit", counter.get_total_flops()

    def leave(layer: nn.Module, _: tuple[Tensor, ...], out: Tensor | tuple[Tensor | None, ...]) -> None:
        nonlocal started
        # Some families return a tuple, whose further entries (attention weights) preheat's attention leaves None.
        hidden, *further = out if isinstance(out, tuple) else (out,)
        course.further = len(further) if isinstance(out, tuple) else None
        # Stages exchange one tensor of hidden states per micro-batch.
        is_hidden = torch.is_tensor(hidden) and tuple(hidden.shape) == stream
        if not is_hidden or any(entry is not None for entry in further):
            raise ValueError(
                f"{type(layer).__name__} passes more than hidden states to the next layer, which may be on another "
                "device"
            )
        course.each.append(counter.get_total_flops() - started)
        started = counter.get_total_flops()

    def repeat(number: int, hidden: Tensor, *_: object, **__: object) -> LayerOutput:
        course.each.append(course.each[number])
        return _layer_output(hidden, course.further)

    # Layers of a kind cost the same, so one of each runs: transformers' code for recurrent layers is slow loops.
    first: dict[str, int] = {}
    layers, kinds = hf.find_anatomy(model).layers, layer_kinds(config.get_text_config())
    if len(layers) != len(kinds):
        raise ValueError(f"{type(model).__name__} has {len(layers)} layers, and its configuration {len(kinds)}")
    for number, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        if first.setdefault(repr(kind), number) == number:
            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(leave)
        else:
            layer.forward = functools.partial(repeat, first[repr(kind)])
    # On meta only the shape counts, so positions also serve as tokens.
    places = torch.arange(length, device="meta")[None]
    with counter, torch.no_grad():
        hidden = hf.hidden_states(model, places, places, MaskSpec(), _attend_mean_length)
        hf.head(model)(hidden)
    course.after = counter.get_total_flops() - started
    course.weights = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    if config.num_hidden_layers != len(course.each):
        raise ValueError(f"{type(model).__name__} runs {len(course.each)} layers of {config.num_hidden_layers}")
    _require_nothing_between(model, course, stream)
    return course


def _require_nothing_between(model: PreTrainedModel, course: ModelProfile, stream: tuple[int, ...]) -> None:
    """Checks that a model without its modules returns its input: other operations would be repeated in each stage."""
    bare = _remove_layers(model, course, range(0), first=False, last=False)
    for holder in _ancestor_names(course.layers):
        parent = bare.get_submodule(holder)
        for key, module in parent.named_children():
            name = f"{holder}.{key}".lstrip(".")
            if isinstance(module, Passthrough) or name in (course.layers, *_ancestor_names(course.layers)):
                continue
            if isinstance(module, nn.ModuleList):
                # Rotary tables, one for each base frequency: they run with any values, since nothing reads them.
                setattr(parent, key, copy.deepcopy(module).to_empty(device="cpu"))
            else:
                # Modules that return no hidden states (rotary tables) are replaced too:
                # only the code between modules runs.
                setattr(parent, key, _ZeroModule())
    # Hidden states enter as from a previous stage; without modules they must leave unchanged.
    hidden = torch.randn(1, 2, stream[2], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = hf.hidden_states(
            bare, torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None], MaskSpec(), _attend_mean_length, hidden
        )
    if not torch.equal(out, hidden):
        raise ValueError(
            f"{type(model).__name__} changes hidden states outside its modules, which each stage would repeat"
        )


def balance_stages(
    costs: Sequence[float],
    stages: int,
    *,
    before: float = 0,
    after: float = 0,
    devices: Sequence[int] | None = None,
) -> list[range]:
    """Splits layers into stages with the lowest maximum cost; of these splits returns the most even one.

    Args:
        costs: of each layer, in any unit.
        before: cost of the first stage in addition to its layers (the embedding).
        after: cost of the last stage in addition (norm, head and loss).
        devices: the device of each stage. If some have several, the costs of the devices are evened out first, from the
            split with the lowest maximum of a stage on, by moving boundaries between stages as long as that helps.

    Returns:
        The layers of each stage, at least one.

    Raises:
        ValueError: fewer layers than stages.

    Example:
        >>> balance_stages([1, 1, 1, 1, 1, 1, 1], 2, after=3)
        [range(0, 5), range(5, 7)]
    """
    count = len(costs)
    if stages > count:
        raise ValueError(f"{count} layers cannot be split into {stages} stages; use at most {count}")
    # Prefix sums: the cost of any range of layers is one subtraction.
    sums = [0.0, *itertools.accumulate(costs)]

    def sum_costs(first: int, end: int) -> float:
        return sums[end] - sums[first] + (before if first == 0 else 0) + (after if end == count else 0)

    def measure(starts: tuple[int, ...]) -> tuple[float, float, float]:
        """Returns the highest cost of a device and of a stage, and the stages' sum of squares."""
        each = list(itertools.starmap(sum_costs, itertools.pairwise((*starts, count))))
        of_devices = dict.fromkeys(devices or (), 0.0)
        for device, cost in zip(devices or (), each, strict=True):
            of_devices[device] += cost
        return max(of_devices.values()), max(each), sum(cost * cost for cost in each)

    # best[end]: (highest cost of a stage, sum of squares, first layer of each stage) for the first `end` layers
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        extended: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        # Each remaining stage needs a layer of its own.
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            extended[end] = min(
                # Tuples compare the highest cost first; ties go to the lowest sum of squares, the most even split.
                (max(dearest, cost), squares + cost * cost, (*starts, first))
                for first, (dearest, squares, starts) in best.items()
                if first < end
                for cost in [sum_costs(first, end)]
            )
        best = extended
    starts = best[count][2]
    if devices is not None and len(set(devices)) < stages:
        while (other := min(_move_boundaries(starts, count), key=measure, default=starts)) != starts:
            if measure(other) >= measure(starts):
                break
            starts = other
    return [range(first, end) for first, end in itertools.pairwise((*starts, count))]


def _move_boundaries(starts: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Yields the splits of `count` layers in which one or two runs of boundaries between stages are moved by one."""
    stages = range(1, len(starts))
    runs = [(first, last) for first in stages for last in range(first, len(starts))]
    single = [((run, by),) for run in runs for by in (-1, 1)]
    # Two at once in small pipelines only: their number grows with the fourth power of the stages.
    double = itertools.combinations([move for (move,) in single], 2) if len(starts) <= 8 else ()
    for moves in itertools.chain(single, double):
        moved = list(starts)
        for (first, last), by in moves:
            moved[first : last + 1] = [start + by for start in moved[first : last + 1]]
        if all(first < end for first, end in itertools.pairwise((*moved, count))):
            yield tuple(moved)


def _remove_layers(
    model: PreTrainedModel, course: ModelProfile, layers: range, *, first: bool, last: bool
) -> PreTrainedModel:
    """The model with some of its layers and ends; modules that both have are shared."""
    bare = copy_shallow(model)
    # From the outside in: a holder must be a copy before one of its children is replaced.
    for name in _ancestor_names(course.layers)[1:]:
        holder, _, key = name.rpartition(".")
        setattr(bare.get_submodule(holder), key, copy_shallow(model.get_submodule(name)))
    stack: Any = model.get_submodule(course.layers)
    holder, _, key = course.layers.rpartition(".")
    # Placeholders keep the numbers of the layers, and with them the parameters' names.
    chosen = nn.ModuleList(
        layer if number in layers else _OtherLayer(layer, course.further) for number, layer in enumerate(stack)
    )
    setattr(bare.get_submodule(holder), key, chosen)
    ends = {"embedding": hf.embedding(model), "head": hf.head(model)}
    tied = ends["embedding"].weight is ends["head"].weight
    for name in (*(() if first else course.entry), *(() if last else course.exit)):
        holder, _, key = name.rpartition(".")
        there = model.get_submodule(name)
        if there is ends["embedding"] and tied and last:
            continue  # not called here, but its weight is the head's, under one name in all stages and files
        # None for embedding and head, by which `hf.embedding` and `hf.head` report that the stage has none.
        stand_in = (
            None if there in ends.values() else _ZeroModule() if isinstance(there, nn.Embedding) else Passthrough()
        )
        setattr(bare.get_submodule(holder), key, stand_in)
    return bare


def cut(model: PreTrainedModel, course: ModelProfile, stages: Sequence[range], number: int) -> PreTrainedModel:
    """Builds one stage: an ordinary transformers model without the other stages' modules, which it does not change.

    All stages but the first take hidden states from `Batch.hidden`; all but the last return theirs.

    Args:
        course: of the model, by `observe`.
        stages: the layers of each, by `balance_stages`.
        number: index of the stage.

    Example:
        >>> from transformers import LlamaConfig
        >>> sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
        >>> config = LlamaConfig(num_hidden_layers=3, **sizes)
        >>> model, course = hf.build_on_meta(config), observe(config, 16)
        >>> last = cut(model, course, balance_stages(course.each, 2, after=course.after), 1)
        >>> names = [name for name, _ in last.named_parameters() if ".layers." in name]
        >>> sorted({name.rpartition(".layers.")[2].split(".")[0] for name in names})
        ['2']
    """
    first, last = number == 0, number == len(stages) - 1
    part = _remove_layers(model, course, stages[number], first=first, last=last)
    full = model
    head: Any = hf.head(model)
    # A tied head has nothing to initialize but a bias.
    if hf.embedding(model).weight is head.weight and head.bias is None:
        full = copy_shallow(model)
        full.set_output_embeddings(None)
    setattr(part, hf.WHOLE, (full,))  # in a tuple: as a child, its parameters would count as this stage's
    return part
