"""A transformers model cut into the stages of a pipeline. A stage is the model itself without the layers (and ends) that other stages have.

Names stay those of the whole model, layer numbers too, so that a stage reads, draws and saves what the whole model would.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from preheat.core import MaskSpec
from preheat.models import hf
from preheat.models.conversions.modules import Passthrough

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ModelProfile", "balance", "cut", "observe"]


class _ZeroModule(nn.Module):
    """Stands where the first stage looks something up that it adds to the embeddings, as GPT-2 its positions."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(())


@dataclass
class ModelProfile:
    """How a model runs, as a dry run saw it.

    Attributes:
        layers: name of the list of layers.
        entry: names of the modules that make and change hidden states before the layers.
        exit: and after them, the head included.
        before: FLOPs of a row's forward pass before the layers, `each` of each layer, `after` them, the head included.
    """

    layers: str = ""
    entry: list[str] = field(default_factory=list)
    exit: list[str] = field(default_factory=list)
    before: float = 0
    each: list[float] = field(default_factory=list)
    after: float = 0


def _meta_attention(query: Tensor, key: Tensor, value: Tensor, mask: MaskSpec, scale: float, **_: Any) -> Tensor:
    """Attention over as many keys as a kernel that leaves out what is masked reads for each token, in the mean."""
    length = key.shape[2]
    window = min(mask.window or length, length)
    seen = max(1, round(window - window * (window - 1) / (2 * length)))
    repeat = query.shape[1] // key.shape[1]
    key, value = (t[:, :, :seen].repeat_interleave(repeat, dim=1) for t in (key, value))
    return (query @ key.transpose(-1, -2)).softmax(dim=-1) @ value


def _list_of_layers(model: Any) -> str:
    layers = hf.anatomy(model).layers
    return next(name for name, module in model.named_modules() if module is layers)


def _above(name: str) -> list[str]:
    """The modules that hold a module: '' and 'model' of 'model.layers'."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))]


def observe(config: Any, length: int, *, trust: bool = False) -> ModelProfile:
    """Sees in a dry run on meta (no memory, no arithmetic) what a model calls before, between and after its layers, and its FLOPs.

    FLOPs, not seconds: they are the same on every device, which must all cut at the same places, and known before anything is allocated.

    Args:
        config: transformers' configuration; the plain model of it is run, whatever techniques change in how it is computed.
        length: tokens of a row.

    Raises:
        ValueError: the model cannot be cut between layers; the words say why.
    """
    from torch.utils.flop_counter import FlopCounterMode

    if any(
        getattr(config.get_text_config(), key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")
    ):
        raise ValueError(
            f"{config.model_type} has experts, whose cost a dry run cannot see and whose balancing loss stages do not hand on"
        )
    model = hf.build_on_meta(copy.deepcopy(config), trust=trust)
    course = ModelProfile(_list_of_layers(model))
    counter = FlopCounterMode(display=False)
    holders = _above(course.layers)
    stream = (1, length, config.get_text_config().hidden_size)
    where, started = "entry", 0

    def watch(name: str, module: nn.Module) -> None:
        def done(_: Any, __: Any, made: Any) -> None:
            acts = torch.is_tensor(made) and tuple(made.shape) == stream
            if acts or module is hf.head(model):
                (course.entry if where == "entry" else course.exit).append(name)
            elif any(True for _ in module.parameters()):
                raise ValueError(
                    f"{type(model).__name__}: {name} gives something else than hidden states, which its stages would all need"
                )

        module.register_forward_hook(done)

    for holder in holders:
        parent = model.get_submodule(holder)
        if any(True for _ in parent.parameters(recurse=False)):
            raise ValueError(f"{type(parent).__name__} has parameters of its own, which belong to no stage")
        for key, module in parent.named_children():
            name = f"{holder}.{key}".lstrip(".")
            if name != course.layers and name not in holders:
                watch(name, module)

    def enter(*_: Any) -> None:
        nonlocal where, started
        if where == "entry":
            course.before = counter.get_total_flops()
        where, started = "exit", counter.get_total_flops()

    def leave(layer: Any, _: Any, made: Any) -> None:
        if not (torch.is_tensor(made) and tuple(made.shape) == stream):
            raise ValueError(
                f"{type(layer).__name__} gives more than hidden states to the next layer, which may stand on another device"
            )
        course.each.append(counter.get_total_flops() - started)

    for layer in hf.anatomy(model).layers:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    places = torch.arange(length, device="meta")[None]
    with counter, torch.no_grad():
        hidden = hf.hidden_states(model, places, places, MaskSpec(), _meta_attention)
        hf.head(model)(hidden)
    course.after = counter.get_total_flops() - course.before - sum(course.each)
    if config.num_hidden_layers != len(course.each):
        raise ValueError(f"{type(model).__name__} runs {len(course.each)} layers of {config.num_hidden_layers}")
    _require_nothing_between(model, course, stream)
    return course


def _require_nothing_between(model: Any, course: ModelProfile, stream: tuple[int, ...]) -> None:
    """A model without its modules must give hidden states on as they are: what it does beside them would be done in each stage."""
    bare = _without(model, course, range(0), first=False, last=False)
    for holder in _above(course.layers):
        parent = bare.get_submodule(holder)
        for key, module in parent.named_children():
            if not isinstance(module, Passthrough | nn.ModuleList) and f"{holder}.{key}".lstrip(".") not in _above(
                course.layers
            ):
                setattr(parent, key, _ZeroModule())
    hidden = torch.randn(1, 2, stream[2], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = hf.hidden_states(
            bare, torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None], MaskSpec(), _meta_attention, hidden
        )
    if not torch.equal(out, hidden):
        raise ValueError(
            f"{type(model).__name__} changes hidden states outside its modules, which each stage would do again"
        )


def balance(costs: Sequence[float], stages: int, *, before: float = 0, after: float = 0) -> list[range]:
    """Cuts layers into stages so that the dearest stage costs as little as it can; among such cuts the most even one.

    Args:
        costs: of each layer, in any unit.
        before: what the first stage computes besides its layers (the embedding).
        after: and the last (norm, head and loss).

    Returns:
        The layers of each stage, at least one.

    Raises:
        ValueError: fewer layers than stages.

    Example:
        >>> balance([1, 1, 1, 1, 1, 1, 1], 2, after=3)
        [range(0, 5), range(5, 7)]
    """
    count = len(costs)
    if stages > count:
        raise ValueError(f"{count} layers cannot be cut into {stages} stages; use at most {count}")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(first: int, end: int) -> float:
        return sums[end] - sums[first] + (before if first == 0 else 0) + (after if end == count else 0)

    # best[end]: (dearest stage, sum of squares, where the stages before begin) with the first `end` layers in as many stages as were seen
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            found[end] = min(
                (max(dearest, cost), squares + cost * cost, (*starts, first))
                for first, (dearest, squares, starts) in best.items()
                if first < end
                for cost in [cost_of(first, end)]
            )
        best = found
    starts = (*best[count][2], count)
    return [range(first, end) for first, end in itertools.pairwise(starts)]


def _shell(module: Any) -> Any:
    """Another module with the same children, parameters and hooks, which can be exchanged without the first."""
    made = copy.copy(module)
    made.__dict__ = {
        key: copy.copy(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()
    }
    return made


def _without(model: Any, course: ModelProfile, layers: range, *, first: bool, last: bool) -> Any:
    """The model with some of its layers and ends; everything that both have is the same module."""
    made = _shell(model)
    for name in _above(course.layers)[1:]:
        holder, _, key = name.rpartition(".")
        setattr(made.get_submodule(holder), key, _shell(model.get_submodule(name)))
    stack: Any = model.get_submodule(course.layers)
    holder, _, key = course.layers.rpartition(".")
    chosen = nn.ModuleList(layer if number in layers else Passthrough() for number, layer in enumerate(stack))
    setattr(made.get_submodule(holder), key, chosen)
    ends = {"embedding": hf.embedding(model), "head": hf.head(model)}
    tied = ends["embedding"].weight is ends["head"].weight
    for name in (*(() if first else course.entry), *(() if last else course.exit)):
        holder, _, key = name.rpartition(".")
        there: Any = model.get_submodule(name)
        if there is ends["embedding"] and tied and last:
            continue  # not called, but what the head is tied to: under one name in all stages and files
        stand_in = (
            None if there in ends.values() else _ZeroModule() if isinstance(there, nn.Embedding) else Passthrough()
        )
        setattr(made.get_submodule(holder), key, stand_in)
    return made


def cut(model: PreTrainedModel, course: ModelProfile, stages: Sequence[range], number: int) -> PreTrainedModel:
    """One stage of a model: an ordinary transformers model that lacks what the other stages have. The model itself stays as it is.

    Hidden states come in as `Batch.hidden`, but for the first stage; those that are not the last give theirs.

    Args:
        course: of the model, by `observe`.
        stages: the layers of each, by `balance`.
        number: which stage.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=4, intermediate_size=48, vocab_size=64)
        >>> model, course = hf.build_on_meta(config), observe(config, 16)
        >>> last = cut(model, course, balance(course.each, 2, after=course.after), 1)
        >>> sorted({name.rpartition(".layers.")[2].split(".")[0] for name, _ in last.named_parameters() if ".layers." in name})
        ['2']
    """
    first, last = number == 0, number == len(stages) - 1
    made = _without(model, course, stages[number], first=first, last=last)
    whole: Any = model
    if hf.embedding(model).weight is hf.head(model).weight:  # a tied head has nothing of its own to be drawn
        whole = _shell(model)
        whole.set_output_embeddings(None)
    setattr(made, hf.WHOLE, (whole,))  # in a tuple: not a child, whose parameters this stage would have
    return made
