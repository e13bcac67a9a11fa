"""Random search over smaller shapes: the mix of layers, heads, channels and dimensions with the lowest loss.

What: importance is measured once, as in `width` and `depth`; shapes within the budget are drawn at random, each is cut
out of the model, and the one with the lowest loss over the calibration sequences is kept. The budget is a fraction of
the parameters, of the latency (a forward pass of one sequence, measured here relative to the whole model), or both.
Helps: one number instead of four; families differ in what they can do without, and the search finds the mix. Hurts: a
short measurement and a pass over the sequences for each draw; the loss before recovery ranks shapes well, but not
exactly as the loss after it; a latency holds for this machine only.
Serves llama, mistral, qwen2, qwen3 and gpt2; not experts.
Source: the search of Minitron, Muralidharan et al. 2024 (arXiv:2407.14679), section 2.3, random instead of exhaustive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from preheat.compress.registry import Method
from preheat.core import Change, ModelFacts
from preheat.recipe import Bound, Count, NonNegativeInt

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["ShapeSearch", "prune_by_shape_search"]


def prune_by_shape_search(
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
    """Prunes a transformers model to the best of the shapes drawn within a budget, in place.

    Args:
        rows: calibration sequences, [1, length] tokens each.
        parameters: maximum fraction of the parameters; 0: no such budget.
        latency: maximum fraction of the whole model's time for a row; 0: no such budget.
        draws: number of shapes to try.
        smallest: minimum fraction of each dimension.
        multiple: channels and hidden dimensions are multiples of it.
        seed: of the draws.
        refit: as in `prune_width`.

    Returns:
        A description, and the number of removed parameters.

    Raises:
        RecipeError: no rows; a budget that no shape meets; a family that cannot be sliced.

    Example:
        >>> prune_by_shape_search(model, rows, parameters=0.7)[0]  # doctest: +SKIP
        'channels 172 -> 96, layers 5 -> 4; 260,032 -> 181,312 parameters (69.7%); the best of 32 shapes by loss: 2.41'
    """
    from preheat.compress import shape_sampling, structured_pruning
    from preheat.errors import RecipeError
    from preheat.models.conversions import slicing
    from preheat.models.layerwise import compute_loss, plain_forward, require_rows

    require_rows(rows, "lottery")
    current, before = slicing.sizes_of(model.config), model.num_parameters()
    # Shapes within the parameter budget; latency can be measured only after slicing.
    drawn = shape_sampling.draw(
        model, parameters=parameters or None, draws=draws, smallest=smallest, multiple=multiple, seed=seed
    )
    if not drawn:
        least = (
            slicing.build_parameter_counter(model)(shape_sampling.smallest_sizes(model, smallest, multiple)) / before
        )
        raise RecipeError(
            f"parameters: {parameters:g} is met by no shape that keeps {smallest:g} of each kind: the "
            f"smallest has {least:.2f} of the parameters; "
            f"raise parameters to {least + 0.05:.2f}, or lower smallest"
        )
    # Once, on the whole model: all shapes are cut by the same scores.
    importance = structured_pruning.measure(model, rows, products=refit)
    candidates: list[tuple[float, int, slicing.Sizes]] = []
    times: list[float] = []
    for sizes in drawn:
        smaller = structured_pruning.build_pruned(model, importance, sizes, refit=refit)
        # Before the loss, which takes longer.
        if latency:
            times.append(shape_sampling.measure_relative_time(smaller, model, rows))
            if times[-1] > latency:
                continue
        with plain_forward(smaller):
            # The index decides between equal losses: `Sizes` has no order.
            candidates.append((compute_loss(smaller, rows), len(candidates), sizes))
    if not candidates:
        raise RecipeError(
            f"latency: {latency:g} is met by none of {len(drawn)} shapes; the quickest takes {min(times):.2f} "
            "of the whole model's time; raise latency, or lower "
            f"smallest{' and parameters' if parameters else ''}"
        )
    best, _, sizes = min(candidates)
    # Cut again, because keeping every candidate would take their memory together.
    slicing.replace_in_place(model, structured_pruning.build_pruned(model, importance, sizes, refit=refit))
    after = model.num_parameters()
    result = (
        f"the best of {len(candidates)} shapes by loss over {len(rows)} sequences: {best:.3f} (the worst "
        f"{max(candidates)[0]:.3f})"
    )
    too_slow = f"; {len(drawn) - len(candidates)} took more than {latency:g} of the time" if latency else ""
    return f"{structured_pruning.describe_change(current, sizes, before, after)}; {result}{too_slow}", before - after


@dataclass(frozen=True, kw_only=True)
class ShapeSearch(Method):
    reads_rows: ClassVar[bool] = True

    parameters: Annotated[float, Bound(0, 1)] = 0.7
    """Maximum fraction of the parameters; 0: no such budget."""
    latency: Annotated[float, Bound(0, 1)] = 0.0
    """Maximum fraction of the whole model's time for a calibration sequence, measured here; 0: no such budget."""
    draws: Count = 32
    """Number of shapes to try."""
    smallest: Annotated[float, Bound(0, 1, open_low=True)] = 0.4
    """Minimum fraction of layers, heads, channels and dimensions."""
    multiple: Count = 8
    """Channels and dimensions come in multiples of it: 64 or 128 for a GPU's kernels."""
    seed: NonNegativeInt = 0
    """Seed of the draws."""
    refit: bool = True
    """Refit the maps that read heads and channels to the full model's outputs over the calibration sequences, by least
    squares; false: only slice. It takes about the model's memory again."""

    def check(self, model: ModelFacts) -> list[str]:
        errors = [
            f"{knob}: {share} is not a fraction; use a number between 0 and 1"
            for knob, share in (("parameters", self.parameters), ("latency", self.latency), ("smallest", self.smallest))
            if not 0 <= share < 1
        ]
        if not errors and not self.parameters and not self.latency:
            errors.append("parameters: 0 and latency: 0 leave no budget; set one of them, e.g. parameters: 0.7")
        if self.draws < 1:
            errors.append(f"draws: {self.draws} tries nothing; use 1 or more")
        return errors

    def require(self, model: PreTrainedModel) -> None:
        from preheat.models.conversions.slicing import sizes_of

        sizes_of(model.config)  # raises for a family that cannot be sliced

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return Change(
            *prune_by_shape_search(
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
