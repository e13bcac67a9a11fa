"""Structured pruning: what each head, channel, stream dimension and layer does over calibration rows, and the model without the least of them.

The methods `width`, `depth` and `lottery` are settings over these functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from preheat.errors import RecipeError
from preheat.models.conversions import slicing
from preheat.models.conversions.slicing import Kept, Sizes
from preheat.models.hf import anatomy
from preheat.models.layerwise import hooked, loss, matrix, plainly, run, skipping
from preheat.ops.pruning_scores import added, blocks, highest, influence, moments
from preheat.ops.pruning_scores import refit as fitted_map

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = [
    "Importance",
    "chosen",
    "count_of",
    "heads_at_once",
    "influences",
    "losses_without",
    "measure",
    "pruned",
    "require_skipped",
    "shares",
    "told",
]


@dataclass(frozen=True)
class Importance:
    """What the parts of a model do over calibration rows; the more the higher.

    Attributes:
        heads: what each query head adds to the stream, squared and summed over tokens: [heads] for each layer.
        channels: the same of each feed-forward channel: [channels] for each layer.
        hidden: size of each dimension of the stream behind its norms, root mean square over tokens, summed over the norms: [width].
        layers: how much each layer turns the stream (block influence): [layers].
        streams: mean square of what each norm over the stream reads, by the norm's name: [width].
        products: of the inputs of each map that reads heads or channels with one another, summed over tokens, by its name: [in, in]. For all
            layers they take about the memory that the model's weights take in fp32; empty where they were not asked for.
    """

    heads: list[Tensor]
    channels: list[Tensor]
    hidden: Tensor
    layers: Tensor
    streams: dict[str, Tensor]
    products: dict[str, Tensor]


class _Mean:
    """A mean over tokens that come row by row."""

    def __init__(self) -> None:
        self.total: Any = 0.0
        self.tokens = 0

    def add(self, value: Tensor, tokens: int) -> None:
        self.total, self.tokens = self.total + value, self.tokens + tokens

    def value(self) -> Tensor:
        return self.total / self.tokens  # type: ignore[no-any-return]


def measure(model: PreTrainedModel, rows: Sequence[Tensor], *, products: bool = False) -> Importance:
    """Passes the rows through the model once and looks at all its parts. `model` is one of `slicing.FAMILIES`.

    Heads and channels count by what they add to the stream, the map behind them included, where Minitron (arXiv:2407.14679) looks at
    the activations before that map; stream dimensions as there, by the norms' outputs.

    Args:
        rows: calibration rows, [1, length] tokens each.
        products: keep the inputs' products too, which a refit needs.

    Raises:
        RecipeError: another family.
    """
    sizes = slicing.sizes_of(model.config)
    hooks: list[Any] = []

    def watch(units: int) -> tuple[_Mean, Any]:
        mean = _Mean()  # one unit of all inputs: products of everything with everything
        return mean, lambda before, after: mean.add(moments(before.float(), 1 if products else units), 1)

    found: dict[str, list[tuple[str, _Mean, Any]]] = {"heads": [], "channels": []}
    units = {"heads": sizes.heads, "channels": sizes.channels}
    for what, count in units.items():
        for _, name, module in slicing.readers(model, what):
            mean, tell_products = watch(count)
            hooks.append((module, tell_products))
            found[what].append((name, mean, module))
    outs, streams = {}, {}
    for name, norm in slicing.norms_over_stream(model).items():
        outs[name], streams[name] = _Mean(), _Mean()
        centred = isinstance(norm, torch.nn.LayerNorm)

        def tell(before: Tensor, after: Tensor, name: str = name, centred: bool = centred) -> None:
            before = before.float() - (before.float().mean(-1, keepdim=True) if centred else 0)
            for mean, x in ((outs[name], after.float()), (streams[name], before)):
                mean.add(x.square().flatten(0, -2).sum(0), x.shape[:-1].numel())

        hooks.append((norm, tell))
    turns, more = _influence_hooks(model)
    with plainly(model), hooked(hooks + more):
        run(model, rows)
    scores: dict[str, list[Tensor]] = {what: [] for what in found}
    for what, parts in found.items():
        for _, mean, module in parts:
            second = blocks(mean.total[0], units[what]) if products else mean.total
            scores[what].append(added(matrix(module), second).cpu())
    return Importance(
        heads=scores["heads"],
        channels=scores["channels"],
        hidden=torch.stack([mean.value().sqrt() for mean in outs.values()]).sum(0).cpu(),
        layers=torch.stack([mean.value() for mean in turns]).cpu(),
        streams={name: mean.value().cpu() for name, mean in streams.items()},
        products={name: mean.total[0] for parts in found.values() for name, mean, _ in parts} if products else {},
    )


def influences(model: PreTrainedModel, rows: Sequence[Tensor]) -> Tensor:
    """How much each layer turns the stream, [layers]; of a model of any family."""
    means, hooks = _influence_hooks(model)
    with plainly(model), hooked(hooks):
        run(model, rows)
    return torch.stack([mean.value() for mean in means]).cpu()


def _influence_hooks(model: PreTrainedModel) -> tuple[list[_Mean], list[Any]]:
    means = [_Mean() for _ in anatomy(model).layers]

    def tell(mean: _Mean) -> Any:
        return lambda before, after: mean.add(
            influence(before.float(), after.float()) * before.shape[-2], before.shape[-2]
        )

    return means, [(layer, tell(mean)) for layer, mean in zip(anatomy(model).layers, means, strict=True)]


def chosen(importance: Importance, now: Sizes, wanted: Sizes) -> Kept:
    """The most important parts for the wanted sizes: layers and stream dimensions of the model, heads and channels of each layer by itself.

    Key-value heads go with all their query heads, by the sum of what these add; where fewer query heads to each are wanted, those of each
    key-value head are compared with one another.
    """
    kept = Kept()
    if wanted.layers < now.layers:
        kept = replace(kept, layers=highest(importance.layers, wanted.layers))
    if wanted.hidden < now.hidden:
        kept = replace(kept, hidden=highest(importance.hidden, wanted.hidden))
    if wanted.channels < now.channels:
        kept = replace(kept, channels=[highest(scores, wanted.channels) for scores in importance.channels])
    if (wanted.heads, wanted.kv_heads) != (now.heads, now.kv_heads):
        group = now.heads // now.kv_heads
        heads, kv_heads = [], []
        for scores in importance.heads:
            by_group = scores.view(now.kv_heads, group)
            groups = highest(by_group.sum(1), wanted.kv_heads)
            within = [g * group + highest(by_group[g], wanted.heads // wanted.kv_heads) for g in groups.tolist()]
            heads.append(torch.cat(within))
            kv_heads.append(groups)
        kept = replace(kept, heads=heads, kv_heads=kv_heads)
    return kept


def pruned(model: PreTrainedModel, importance: Importance, wanted: Sizes, *, refit: bool = False) -> PreTrainedModel:
    """A new model of the wanted sizes from the most important parts of `model`, which stays as it is.

    A norm over fewer dimensions divides by their own size: its weight is scaled by what the size of the stream changes over the
    calibration rows, so that what is left of it stays as large as it was.

    Args:
        refit: fit what the heads and channels that stay write to the stream to what all of them wrote, by least squares; else slices alone.
    """
    kept = chosen(importance, slicing.sizes_of(model.config), wanted)
    made = slicing.smaller(model, kept)
    if kept.hidden is not None:
        before = slicing.origin(model, kept)
        with torch.no_grad():
            for name, norm in slicing.norms_over_stream(made).items():
                squares = importance.streams[before(name)[1]]
                norm.weight.mul_((squares[kept.hidden].mean() / squares.mean()).sqrt())  # type: ignore[operator,union-attr]
    if refit:
        with torch.no_grad():
            _refit(model, made, kept, importance.products)
    return made


def _refit(model: PreTrainedModel, made: PreTrainedModel, kept: Kept, products: Mapping[str, Tensor]) -> None:
    """Fits the maps of `made` that read heads and channels, in place."""
    before, indices = slicing.origin(model, kept), slicing.Indices(model, kept)
    for what in ("heads", "channels"):
        for _, name, module in slicing.readers(made, what):
            layer, source = before(name)
            index = indices.of(what, layer) if indices.narrow else None
            if index is None:
                continue
            fitted = fitted_map(
                matrix(model.get_submodule(source)), products[source], index.to(products[source].device)
            )
            matrix(module).copy_(fitted if kept.hidden is None else fitted[kept.hidden.to(fitted.device)])


def heads_at_once(now: Sizes) -> int:
    """Query heads that come and go together: those of a key-value head; where one serves all, any by itself."""
    return now.heads // now.kv_heads if now.kv_heads > 1 else 1


def shares(
    now: Sizes, config: Any, *, heads: float = 1.0, channels: float = 1.0, hidden: float = 1.0, multiple: int = 8
) -> Sizes:
    """The sizes that shares ask for: heads by key-value groups, channels and stream dimensions by multiples; the nearest that there is.

    Raises:
        RecipeError: a share leaves nothing, or transformers has no such model of the family.
    """
    group = heads_at_once(now)
    each = f"of each of the {now.layers} layers"
    what = f"heads {each}" if group == 1 else f"groups of {group} query heads on a key-value head {each}"
    kept = count_of("heads", heads, now.heads // group, what)
    wanted = replace(
        now,
        hidden=count_of("hidden", hidden, now.hidden, "dimensions of the stream", multiple),
        heads=kept * group,
        kv_heads=kept if now.kv_heads > 1 else 1,
        channels=count_of("channels", channels, now.channels, f"channels {each}", multiple),
    )
    if problem := slicing.misfit(config, wanted):
        raise RecipeError(f"heads: {heads}, hidden: {hidden}: {problem}")
    return wanted


def told(now: Sizes, made: Sizes, before: int, after: int) -> str:
    """What became of the sizes, in words."""
    pairs = [
        ("layers", now.layers, made.layers),
        ("width", now.hidden, made.hidden),
        ("query heads", now.heads, made.heads),
        ("key-value heads", now.kv_heads, made.kv_heads),
        ("channels", now.channels, made.channels),
    ]
    changed = ", ".join(f"{what} {a:,} -> {b:,}" for what, a, b in pairs if a != b)
    return f"{changed}; {before:,} -> {after:,} parameters ({after / before:.1%})"


def count_of(knob: str, share: float, now: int, what: str, multiple: int = 1) -> int:
    """The multiple nearest to a share of `now`; all of it for 1.

    Raises:
        RecipeError: none is left; the words name the share that leaves one.
    """
    count = now if share == 1 else min(int(share * now / multiple + 0.5) * multiple, now)
    if count < 1:
        by = f" by multiples of {multiple}" if multiple > 1 else ""
        raise RecipeError(
            f"{knob}: {share:g} leaves none of the {now:,} {what}{by}; {math.ceil(multiple / now * 1000) / 1000:g} leaves {multiple}"
        )
    return count


def losses_without(model: PreTrainedModel, rows: Sequence[Tensor]) -> Tensor:
    """The loss over the rows without each layer, [layers]."""
    with plainly(model):
        found = []
        for layer in anatomy(model).layers:
            with skipping([layer]):
                found.append(loss(model, rows))
    return torch.tensor(found)


def require_skipped(model: PreTrainedModel, made: PreTrainedModel, kept: Tensor, rows: Sequence[Tensor]) -> None:
    """Raises RecipeError where a model of fewer layers is not the larger one with the others skipped, to rounding.

    So families are found out that tell their layers apart by number in a way of their own.
    """
    gone = [layer for n, layer in enumerate(anatomy(model).layers) if n not in kept.tolist()]
    row = max(rows, key=lambda row: row.shape[-1]).to(model.device)
    with plainly(model), plainly(made), skipping(gone):
        wanted, found = model(input_ids=row).logits, made(input_ids=row).logits
    off = float((found - wanted).norm() / wanted.norm())
    if not off < 1e-3:
        raise RecipeError(
            f"model: {model.config.model_type} tells its layers apart by their number, so that without some of them the others compute "
            f"something else (logits differ by {off:.1%}); make it narrower by the method width, or name another model"
        )
