"""A lottery of smaller shapes: which mixture of fewer layers, heads, channels and stream dimensions loses least at a budget.

What: importance is measured once, as `width` and `depth` do; shapes that the budget allows are drawn by a seed, each is cut out of the
model, and the one with the lowest loss over the calibration rows is kept. The budget is a share of the parameters, of the latency (a row's
forward pass, measured here against the whole model's), or both.
Helps: one number in place of four; what a family can do without differs, and the mixture is found by trying. Hurts: a short measurement
and a pass over the rows for each draw; the loss before recovery ranks shapes well, not exactly as the loss after it; a latency is
that of this machine.
Serves llama, mistral, qwen2, qwen3 and gpt2; not experts.
Source: the search of Minitron, Muralidharan et al. 2024 (arXiv:2407.14679), section 2.3, at random instead of over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from preheat.compress.registry import Method
from preheat.core import Change, ModelFacts
from preheat.recipe import Bound, Count, Whole

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["ShapeSearch", "prune_by_lottery"]


def prune_by_lottery(
    model: PreTrainedModel,
    rows: Sequence[Tensor],
    *,
    parameters: float = 0.7,
    latency: float = 0.0,
    draws: int = 32,
    smallest: float = 0.4,
    multiple: int = 8,
    seed: int = 0,
    refit: bool = True,
) -> tuple[str, int]:
    """Makes a transformers model the best of the smaller shapes that are drawn for a budget, in place.

    Args:
        rows: calibration rows, [1, length] tokens each.
        parameters: share of the parameters that may stay; 0: no such budget.
        latency: share of the whole model's time for a row that may be taken; 0: no such budget.
        draws: how many shapes are tried.
        smallest: least share of each kind that is tried.
        multiple: channels and dimensions are multiples of it.
        seed: of the draws.
        refit: as in `prune_width`.

    Returns:
        What was done, in words, and the number of parameters that went away.

    Raises:
        RecipeError: no rows; a budget that no shape meets; a family that cannot be sliced.

    Example:
        >>> prune_by_lottery(model, rows, parameters=0.7)[0]                                        # doctest: +SKIP
        'channels 172 -> 96, layers 5 -> 4; 260,032 -> 181,312 parameters (69.7%); the best of 32 shapes by loss: 2.41 (worst 4.80)'
    """
    from preheat.compress import shape_sampling, structured_pruning
    from preheat.errors import RecipeError
    from preheat.models.conversions import slicing
    from preheat.models.layerwise import loss, plainly, require_rows

    require_rows(rows, "lottery")
    now, before = slicing.sizes_of(model.config), model.num_parameters()
    drawn = shape_sampling.draw(
        model, parameters=parameters or None, draws=draws, smallest=smallest, multiple=multiple, seed=seed
    )
    if not drawn:
        least = slicing.counter(model)(shape_sampling.least(model, smallest, multiple)) / before
        raise RecipeError(
            f"parameters: {parameters:g} is met by no shape that keeps {smallest:g} of each kind: the smallest has {least:.2f} of the parameters; "
            f"raise parameters to {least + 0.05:.2f}, or lower smallest"
        )
    importance = structured_pruning.measure(model, rows, products=refit)
    found: list[tuple[float, int, slicing.Sizes]] = []
    times: list[float] = []
    for sizes in drawn:
        made = structured_pruning.pruned(model, importance, sizes, refit=refit)
        if latency:
            times.append(shape_sampling.relative_time(made, model, rows))
            if times[-1] > latency:
                continue
        with plainly(made):
            found.append((loss(made, rows), len(found), sizes))
    if not found:
        raise RecipeError(
            f"latency: {latency:g} is met by none of {len(drawn)} shapes; the quickest takes {min(times):.2f} of the whole model's time; raise latency, or lower smallest{' and parameters' if parameters else ''}"
        )
    best, _, sizes = min(found)
    slicing.become(model, structured_pruning.pruned(model, importance, sizes, refit=refit))
    after = model.num_parameters()
    tried = f"the best of {len(found)} shapes by loss over {len(rows)} rows: {best:.3f} (the worst {max(found)[0]:.3f})"
    late = f"; {len(drawn) - len(found)} took more than {latency:g} of the time" if latency else ""
    return f"{structured_pruning.told(now, sizes, before, after)}; {tried}{late}", before - after


@dataclass(frozen=True, kw_only=True)
class ShapeSearch(Method):
    reads_rows: ClassVar[bool] = True

    parameters: Annotated[float, Bound(0, 1)] = 0.7
    """Share of the parameters that may stay; 0: no such budget."""
    latency: Annotated[float, Bound(0, 1)] = 0.0
    """Share of the whole model's time for a calibration row that may be taken, measured here; 0: no such budget."""
    draws: Count = 32
    """How many shapes are tried."""
    smallest: Annotated[float, Bound(0, 1, open_low=True)] = 0.4
    """Least share of layers, heads, channels and dimensions that is tried."""
    multiple: Count = 8
    """Channels and dimensions come in multiples of it: 64 or 128 for a GPU's kernels."""
    seed: Whole = 0
    """Of the draws."""
    refit: bool = True
    """Fit the maps behind heads and channels to what all of them wrote over the calibration rows, by least squares; false: plain slices. It takes about the model's memory again."""

    def check(self, model: ModelFacts) -> list[str]:
        found = [
            f"{knob}: {share} is no share of the whole; use a number between 0 and 1"
            for knob, share in (("parameters", self.parameters), ("latency", self.latency), ("smallest", self.smallest))
            if not 0 <= share < 1
        ]
        if not found and not self.parameters and not self.latency:
            found.append("parameters: 0 and latency: 0 leave no budget; give one of them, as parameters: 0.7")
        if self.draws < 1:
            found.append(f"draws: {self.draws} tries nothing; use 1 or more")
        return found

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return Change(
            *prune_by_lottery(
                model,
                rows,
                parameters=self.parameters,
                latency=self.latency,
                draws=self.draws,
                smallest=self.smallest,
                multiple=self.multiple,
                seed=self.seed,
                refit=self.refit,
            )
        )
