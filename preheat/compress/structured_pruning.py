"""Structured pruning: importance of heads, channels, dimensions and layers over calibration sequences, and slicing.

The methods `width`, `depth` and `lottery` are settings over these functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from preheat.errors import RecipeError
from preheat.models.conversions import slicing
from preheat.models.conversions.slicing import KeptIndices, Sizes
from preheat.models.hf import find_anatomy
from preheat.models.layerwise import compute_loss, hook_hidden_states, matrix, plain_forward, run, skip_layers
from preheat.ops.pruning_scores import extract_blocks, find_highest, score_contribution, score_influence, sum_moments
from preheat.ops.pruning_scores import refit as fitted_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "Importance",
    "choose_kept",
    "count_of",
    "count_heads_at_once",
    "compute_influences",
    "compute_losses_without",
    "measure",
    "build_pruned",
    "require_skipped",
    "choose_sizes",
    "describe_change",
]


@dataclass(frozen=True)
class Importance:
    """Importance scores of a model's parts over calibration sequences; higher is more important.

    Attributes:
        heads: squared contribution of each query head to the residual stream, summed over tokens: [heads] per layer.
        channels: the same for each feed-forward channel: [channels] per layer.
        hidden: RMS of each residual dimension after its norms, over tokens, summed over the norms: [width].
        layers: how much each layer rotates the residual stream (block influence): [layers].
        streams: mean square of each norm's input, by the norm's name: [width].
        products: Gram matrix of the inputs of each map that reads heads or channels, summed over tokens, by its name:
            [in, in]. For all layers they take about the memory of the model's weights in fp32; empty unless requested.
    """

    heads: list[Tensor]
    channels: list[Tensor]
    hidden: Tensor
    layers: Tensor
    streams: dict[str, Tensor]
    products: dict[str, Tensor]


class _Mean:
    """A running mean over tokens."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0  # a tensor once something is added
        self.tokens = 0

    def add(self, value: Tensor, tokens: int) -> None:
        self._total, self.tokens = self._total + value, self.tokens + tokens

    @property
    def total(self) -> Tensor:
        assert isinstance(self._total, torch.Tensor), "nothing was added"
        return self._total

    def value(self) -> Tensor:
        return self.total / self.tokens


def measure(model: PreTrainedModel, rows: Sequence[Tensor], *, products: bool = False) -> Importance:
    """Computes the importance of all parts in one forward pass over the rows. `model` is one of `slicing.FAMILIES`.

    Heads and channels are scored by their contribution to the residual stream, including the following map, whereas
    Minitron (arXiv:2407.14679) scores the activations before that map. Residual dimensions are scored as there, by the
    outputs of the norms.

    Args:
        rows: calibration sequences, [1, length] tokens each.
        products: keep the Gram matrices of the inputs, too, which a refit needs.

    Raises:
        RecipeError: another family.
    """
    # Fails first for other families.
    sizes = slicing.sizes_of(model.config)
    hooks: list[tuple[nn.Module, Callable[[Tensor, Tensor], None]]] = []

    def watch(units: int) -> tuple[_Mean, Callable[[Tensor, Tensor], None]]:
        mean = _Mean()  # 1 unit: the full Gram matrix of all inputs
        # A sum is used here, not the mean, so the number of tokens does not matter.
        return mean, lambda before, after: mean.add(sum_moments(before.float(), 1 if products else units), 1)

    parts: dict[str, list[tuple[str, _Mean, nn.Module]]] = {"heads": [], "channels": []}
    units = {"heads": sizes.heads, "channels": sizes.channels}
    # Maps that read heads (output projections) and channels (down projections), per layer.
    for what, count in units.items():
        for _, name, module in slicing.find_readers(model, what):
            mean, record_products = watch(count)
            hooks.append((module, record_products))
            parts[what].append((name, mean, module))
    outs, streams = {}, {}
    for name, norm in slicing.find_stream_norms(model).items():
        outs[name], streams[name] = _Mean(), _Mean()
        # LayerNorm subtracts the mean first, so its statistic is the variance; RMSNorm's is the mean square.
        centred = isinstance(norm, torch.nn.LayerNorm)

        # The defaults bind this iteration's values; a closure would see the last norm's.
        def record(before: Tensor, after: Tensor, name: str = name, centred: bool = centred) -> None:
            before = before.float() - (before.float().mean(-1, keepdim=True) if centred else 0)
            for mean, x in ((outs[name], after.float()), (streams[name], before)):
                # (..., width) -> (width)
                mean.add(x.square().flatten(0, -2).sum(0), x.shape[:-1].numel())

        hooks.append((norm, record))
    layer_means, layer_hooks = _add_influence_hooks(model)
    # One pass serves all scores.
    with plain_forward(model), hook_hidden_states(hooks + layer_hooks):
        run(model, rows)
    scores: dict[str, list[Tensor]] = {what: [] for what in parts}
    for what, entries in parts.items():
        for _, mean, module in entries:
            # (units, unit size, unit size): diagonal blocks of the Gram matrix, or measured as such.
            second = extract_blocks(mean.total[0], units[what]) if products else mean.total
            # Squared norm of each unit's contribution after the map, from the second moments of the map's input.
            scores[what].append(score_contribution(matrix(module), second).cpu())
    return Importance(
        heads=scores["heads"],
        channels=scores["channels"],
        hidden=torch.stack([mean.value().sqrt() for mean in outs.values()]).sum(0).cpu(),
        layers=torch.stack([mean.value() for mean in layer_means]).cpu(),
        streams={name: mean.value().cpu() for name, mean in streams.items()},
        products={name: mean.total[0] for entries in parts.values() for name, mean, _ in entries} if products else {},
    )


def compute_influences(model: PreTrainedModel, rows: Sequence[Tensor]) -> Tensor:
    """Returns the block influence of each layer, [layers]; works for any family."""
    means, hooks = _add_influence_hooks(model)
    with plain_forward(model), hook_hidden_states(hooks):
        run(model, rows)
    return torch.stack([mean.value() for mean in means]).cpu()


def _add_influence_hooks(
    model: PreTrainedModel,
) -> tuple[list[_Mean], list[tuple[nn.Module, Callable[[Tensor, Tensor], None]]]]:
    means = [_Mean() for _ in find_anatomy(model).layers]

    def record(mean: _Mean) -> Callable[[Tensor, Tensor], None]:
        # A mean over tokens, weighted by the tokens of the row.
        return lambda before, after: mean.add(
            score_influence(before.float(), after.float()) * before.shape[-2], before.shape[-2]
        )

    return means, [(layer, record(mean)) for layer, mean in zip(find_anatomy(model).layers, means, strict=True)]


def choose_kept(importance: Importance, current: Sizes, wanted: Sizes) -> KeptIndices:
    """Selects the most important parts for the target sizes: layers and residual dimensions globally, heads and
    channels per layer.

    Key-value heads are scored by the sum of their query heads, and keep all of them. If fewer query heads per key-value
    head are wanted, the query heads of each group compete with each other.
    """
    selection = KeptIndices()
    if wanted.layers < current.layers:
        selection = replace(selection, layers=find_highest(importance.layers, wanted.layers))
    if wanted.hidden < current.hidden:
        selection = replace(selection, hidden=find_highest(importance.hidden, wanted.hidden))
    if wanted.channels < current.channels:
        # Layers have equal sizes, so each keeps its own best channels and heads.
        selection = replace(
            selection, channels=[find_highest(scores, wanted.channels) for scores in importance.channels]
        )
    if (wanted.heads, wanted.kv_heads) != (current.heads, current.kv_heads):
        group = current.heads // current.kv_heads
        heads, kv_heads = [], []
        for scores in importance.heads:
            # (key-value heads, query heads of each)
            by_group = scores.view(current.kv_heads, group)
            groups = find_highest(by_group.sum(1), wanted.kv_heads)
            # Query heads of key-value head g are numbers g * group to (g + 1) * group - 1.
            within = [g * group + find_highest(by_group[g], wanted.heads // wanted.kv_heads) for g in groups.tolist()]
            heads.append(torch.cat(within))
            kv_heads.append(groups)
        selection = replace(selection, heads=heads, kv_heads=kv_heads)
    return selection


def build_pruned(
    model: PreTrainedModel, importance: Importance, wanted: Sizes, *, refit: bool = False
) -> PreTrainedModel:
    """Returns a new model of the target sizes with the most important parts of `model`, which is unchanged.

    A norm over fewer dimensions divides by a different RMS. Its weight is scaled by the ratio over the calibration
    rows, so that the remaining dimensions keep their magnitude.

    Args:
        refit: fit the maps that read the remaining heads and channels to the outputs of the full model, by least
            squares; else only slice.
    """
    selection = choose_kept(importance, slicing.sizes_of(model.config), wanted)
    smaller = slicing.build_smaller(model, selection)
    if selection.hidden is not None:
        # Maps names of the smaller model to those of the original, whose layers have other indices.
        before = slicing.build_name_map(model, selection)
        with torch.no_grad():
            for name, norm in slicing.find_stream_norms(smaller).items():
                squares = importance.streams[before(name)[1]]
                # w' = w sqrt(mean of the remaining squares / mean of all squares)
                norm.weight.mul_(  # type: ignore[operator,union-attr]
                    (squares[selection.hidden].mean() / squares.mean()).sqrt()
                )
    if refit:
        with torch.no_grad():
            _refit(model, smaller, selection, importance.products)
    return smaller


def _refit(
    model: PreTrainedModel, smaller: PreTrainedModel, selection: KeptIndices, products: Mapping[str, Tensor]
) -> None:
    """Refits the maps of the smaller model that read heads and channels, in place."""
    before, indices = slicing.build_name_map(model, selection), slicing.Indices(model, selection)
    for what in ("heads", "channels"):
        for _, name, module in slicing.find_readers(smaller, what):
            layer, source = before(name)
            # None: this part was not narrowed, so its map is unchanged.
            index = indices.of(what, layer) if indices.narrow else None
            if index is None:
                continue
            fitted = fitted_map(
                matrix(model.get_submodule(source)), products[source], index.to(products[source].device)
            )
            # A narrower stream also drops the map's outputs.
            matrix(module).copy_(fitted if selection.hidden is None else fitted[selection.hidden.to(fitted.device)])


def count_heads_at_once(current: Sizes) -> int:
    """Returns the number of query heads pruned together: those of a key-value head, or 1 if one key-value head serves
    all."""
    return current.heads // current.kv_heads if current.kv_heads > 1 else 1


def choose_sizes(
    current: Sizes,
    config: PretrainedConfig,
    *,
    heads: float = 1.0,
    channels: float = 1.0,
    hidden: float = 1.0,
    multiple: int = 8,
) -> Sizes:
    """Returns the sizes nearest to the given fractions: heads in key-value groups, channels and hidden dimensions in
    multiples.

    Raises:
        RecipeError: a fraction leaves nothing, or transformers does not support such a model of the family.
    """
    group = count_heads_at_once(current)
    each = f"of each of the {current.layers} layers"
    what = f"heads {each}" if group == 1 else f"groups of {group} query heads on a key-value head {each}"
    groups = count_of("heads", heads, current.heads // group, what)
    wanted = replace(
        current,
        hidden=count_of("hidden", hidden, current.hidden, "dimensions of the stream", multiple),
        heads=groups * group,
        kv_heads=groups if current.kv_heads > 1 else 1,
        channels=count_of("channels", channels, current.channels, f"channels {each}", multiple),
    )
    # transformers may require, for example, that the heads divide the width.
    if problem := slicing.describe_misfit(config, wanted):
        raise RecipeError(f"heads: {heads}, hidden: {hidden}: {problem}")
    return wanted


def describe_change(old: Sizes, new: Sizes, before: int, after: int) -> str:
    """Describes the change of the sizes."""
    pairs = [
        ("layers", old.layers, new.layers),
        ("width", old.hidden, new.hidden),
        ("query heads", old.heads, new.heads),
        ("key-value heads", old.kv_heads, new.kv_heads),
        ("channels", old.channels, new.channels),
    ]
    changed = ", ".join(f"{what} {a:,} -> {b:,}" for what, a, b in pairs if a != b)
    return f"{changed}; {before:,} -> {after:,} parameters ({after / before:.1%})"


def count_of(knob: str, share: float, current: int, what: str, multiple: int = 1) -> int:
    """Returns the multiple nearest to a fraction of `current`; all of it for 1.

    Raises:
        RecipeError: none is left; the message names the fraction that leaves one.
    """
    # int(x + 0.5) rounds halves up, unlike round(), so that a larger fraction never gives less.
    count = current if share == 1 else min(int(share * current / multiple + 0.5) * multiple, current)
    if count < 1:
        by = f" by multiples of {multiple}" if multiple > 1 else ""
        raise RecipeError(
            f"{knob}: {share:g} leaves none of the {current:,} {what}{by}; "
            f"{math.ceil(multiple / current * 1000) / 1000:g} leaves {multiple}"
        )
    return count


def compute_losses_without(model: PreTrainedModel, rows: Sequence[Tensor]) -> Tensor:
    """Returns the loss over the rows without each layer, [layers]."""
    with plain_forward(model):
        losses = []
        for layer in find_anatomy(model).layers:
            # One pass over the rows per layer.
            with skip_layers([layer]):
                losses.append(compute_loss(model, rows))
    return torch.tensor(losses)


def require_skipped(model: PreTrainedModel, smaller: PreTrainedModel, kept: Tensor, rows: Sequence[Tensor]) -> None:
    """Raises RecipeError unless the pruned model computes the same as the original with the removed layers skipped.

    This detects families whose layers depend on their index, for example for alternating attention windows.
    """
    removed = [layer for n, layer in enumerate(find_anatomy(model).layers) if n not in kept.tolist()]
    # The longest row, because short ones fit into every attention window.
    row = max(rows, key=lambda row: row.shape[-1]).to(model.device)
    with plain_forward(model), plain_forward(smaller), skip_layers(removed):
        expected, logits = model(input_ids=row).logits, smaller(input_ids=row).logits
    difference = float((logits - expected).norm() / expected.norm())
    # Also true for NaN.
    if not difference < 1e-3:
        raise RecipeError(
            f"model: {model.config.model_type} has layers that depend on their index, so that without some of them "
            f"the others compute something else (logits differ by {difference:.1%}); make it narrower by the method "
            "width, or name another model"
        )
