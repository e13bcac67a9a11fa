"""Freeze: trains some of the model's weights (last layers, head, norms, a pattern) and leaves the others unchanged.

What: a frozen weight gets no gradient and no optimizer state, and backward ends at the first trained layer. `layers: 4`
trains the last four layers, `train` adds weights by kind or by name (`train: [head]` alone is feature-based tuning: the
model's features with a new head), and `frozen` leaves out some of what would be trained. With `gradual`, training
begins with the last of these layers, and one more joins it every so many steps.
Helps: needs the memory and time of the trained layers alone: 8 of 32 layers need a quarter of gradients and optimizer
states, and half of the time (forward still runs all). Few rows overfit less, and what lower layers know is kept.
Hurts: less capacity than full fine-tuning; LoRA usually learns more with the same memory. A model from scratch needs
all of its weights.
Source: Howard and Ruder 2018, "Universal Language Model Fine-tuning" (ULMFiT, gradual unfreezing, arXiv:1801.06146);
Ben Zaken et al. 2022, "BitFit" (biases alone, arXiv:2106.10199); Lee et al. 2019, "What Would Elsa Do?" (last layers,
arXiv:1911.03090).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import Batch, Build, Change, Context, Numerics, Order, Stage, Tag, Technique, Trials
from preheat.errors import RecipeError, SettingError
from preheat.recipe import NonNegativeInt
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["Freeze", "find_active_layers", "freeze_parameters"]

_DEFAULT = 2  # layers, as LLaMA-Factory's freeze_trainable_layers
_NEVER = 1 << 20  # period of layers of which the last ones differ: above any number of layers


def freeze_parameters(
    model: PreTrainedModel, *, layers: int | None = None, train: Sequence[str] = (), frozen: Sequence[str] = ()
) -> tuple[int, int]:
    """Freezes a transformers model except for some of its weights, in place.

    Args:
        layers: train the last so many layers; None: all weights, also outside of layers.
        train: weights to train besides: `head`, `embeddings`, `norms`, `biases`, or regular expressions that are
            searched in the parameters' names.
        frozen: the same for weights to freeze, whatever else selects them.

    Returns:
        The numbers of trained and of all elements.

    Raises:
        SettingError: a pattern matches no parameter, or only one name of a tied one; nothing or everything is trained.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=8, num_hidden_layers=2, num_attention_heads=1, intermediate_size=8, vocab_size=8
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> freeze_parameters(model, layers=1, train=["head"])
        (528, 1064)
    """
    from preheat.models.parameter_selection import find_layer_names

    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    chosen = _select(model, "train", train)
    if layers is not None:
        of_layers = find_layer_names(model)
        chosen = chosen.union(*of_layers[len(of_layers) - min(layers, len(of_layers)) :])
    else:
        chosen = set(every)
    chosen -= _select(model, "frozen", frozen)
    setting = "frozen" if frozen else "train" if train else "layers"
    value = {"frozen": list(frozen), "layers": layers, "train": list(train)}[setting]
    if not chosen:
        raise SettingError(setting, f"{quote_value(value)} leaves nothing to train; name fewer weights to freeze")
    if chosen == every:
        raise SettingError(setting, f"{quote_value(value)} trains all weights; leave the technique out")
    # By identity: a tied weight is trained if any of its names is.
    trained = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in chosen}
    for p in model.parameters():
        p.requires_grad_(id(p) in trained)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, is_trained in sizes if is_trained), sum(n for n, _ in sizes)


def _select(model: PreTrainedModel, setting: str, patterns: Sequence[str]) -> set[str]:
    """Returns the names that any of the patterns selects."""
    from preheat.models.parameter_selection import find_split_names, select_parameters

    chosen: set[str] = set()
    for pattern in patterns:
        try:
            names = select_parameters(model, pattern)
        except ValueError as error:
            raise SettingError(setting, f"{quote_value(pattern)} {error}") from None
        if not names:
            raise SettingError(
                setting, f"{quote_value(pattern)} matches no parameter; names are such as {_name(model)}"
            )
        chosen |= names
    if (split := find_split_names(model, chosen)) is not None:
        raise SettingError(
            setting,
            f"{split[0]} and {split[1]} are one weight (they are tied), and only the first is named; name both "
            "(embeddings and head), or neither",
        )
    return chosen


def _list(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else patterns


def _name(model: PreTrainedModel) -> str:
    """Returns the name of a matrix of the last layer, as an example."""
    return [name for name, p in model.named_parameters() if p.ndim == 2 and "." in name][-2]


def find_active_layers(layers: int, gradual: int, updates: int) -> int:
    """Returns how many layers, counted from the last, are trained after so many updates of gradual unfreezing.

    Example:
        >>> [find_active_layers(3, 10, updates) for updates in (0, 9, 10, 20, 90)]
        [1, 1, 2, 3, 3]
    """
    return min(layers, 1 + updates // gradual) if gradual else layers


@dataclass(frozen=True, kw_only=True)
class Freeze(Technique):
    # Under adapters the base is frozen already: those techniques conflict.
    stage: ClassVar[Stage] = Stage.ADAPT
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(
        settings=(
            {"train": "o_proj|norm"},
            {"train": "lm_head|embed"},
            {"frozen": "q_proj"},
            {"layers": 1, "train": "norms", "frozen": "q_proj"},
        ),
    )
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.FROZEN_WEIGHTS})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.ADAPTER, Tag.QUANTIZED_BASE})

    layers: Literal["auto", "all"] | NonNegativeInt = "auto"
    """Train the last so many layers. auto: none if `train` names weights, all weights if only `frozen` does, else 2."""
    train: str | tuple[str, ...] = ()
    """Weights to train besides `layers` (one or a list): head, embeddings, norms, biases, or regular expressions for
    names of parameters, e.g. [head, q_proj]."""
    frozen: str | tuple[str, ...] = ()
    """Weights to freeze, of those that would be trained: the same kinds and expressions, e.g. [embeddings]."""
    gradual: NonNegativeInt = 0
    """Updates after which one more of `layers` is trained, from the last one on; 0: all from the start. Plans are of
    the last steps, with all of them."""

    def period(self) -> int:
        named = bool(self.train or self.frozen)
        return 1 if self.layers in ("all", 0) or (self.layers == "auto" and named) else _NEVER

    def check(self, context: Context) -> list[str]:
        problems = []
        count, layers = context.model.layers, self._count_layers(context.model.layers)
        # A search also builds the model with fewer layers than it has.
        if layers > count and "num_hidden_layers" not in context.recipe.model.config:
            problems.append(f"layers: {layers} is more than the {count} layers of the model; lower it")
        if self.gradual and not layers:
            problems.append(f"gradual: {self.gradual} is for layers, which join training one by one; set layers")
        if self.period() != 1 and Tag.PIPELINE_STAGES in context.tags:
            problems.append(
                f"layers: {layers}: does not go with pipeline_parallel, of whose stages only the last would train; use "
                "fsdp, or layers: all"
            )
        if self.gradual and math.prod(context.sizes.values()) > 1:
            problems.append("gradual: is for one device; set gradual: 0 on several")
        if self.gradual and Tag.STEP_IN_BACKWARD in context.tags:
            problems.append(
                "gradual: does not go with optimizer_in_backward, which waits for every gradient; leave one of them out"
            )
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        everything = self.layers == "auto" and bool(self.frozen) and not self.train
        try:
            trained, total = freeze_parameters(
                part,  # type: ignore[arg-type]
                layers=None if everything else self._count_layers(build.model.layers),
                train=_list(self.train),
                frozen=_list(self.frozen),
            )
        except SettingError as error:
            raise RecipeError(f"techniques.freeze.{error}") from None
        text = f"{trained:,} of {total:,} parameters are trained ({trained / total:.1%}), the others frozen"
        if self.gradual:
            self._unfreeze_gradually(build, part)
            text += f"; one more layer every {self.gradual:,} updates"
        return Change(text, trained)

    def _count_layers(self, count: int) -> int:
        """Returns the number of trained layers of a model with `count` layers."""
        if self.layers == "auto":
            return 0 if self.train else count if self.frozen else _DEFAULT
        return count if self.layers == "all" else self.layers

    def _unfreeze_gradually(self, build: Build, part: nn.Module) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        from preheat.models.module_lookup import find_anatomy

        count = self._count_layers(build.model.layers)
        layers = list(find_anatomy(part).layers)[::-1][:count]  # type: ignore[arg-type]
        # The optimizer has all of them from the start: those without a gradient are not updated. By name, because the
        # parameters are replaced when they get their values.
        trained = [{name for name, p in layer.named_parameters() if p.requires_grad} for layer in layers]

        def set_active_layers(batch: Batch) -> Batch:
            # A plan is of the largest step.
            if not isinstance(batch.tokens, FakeTensor):
                active = find_active_layers(count, self.gradual, build.state.updates)
                for number, (layer, names) in enumerate(zip(layers, trained, strict=True)):
                    for name, p in layer.named_parameters():
                        if name in names:
                            p.requires_grad_(number < active)
            return batch

        # From the number of updates alone: a resumed run goes on with the same layers. MOVE, which runs right before
        # the forward pass: transforms of the other orders may run while the step before is still computing.
        build.hooks.transforms.append((Order.MOVE, set_active_layers))
