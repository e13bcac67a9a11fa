"""A bit budget, allocated where it reduces the loss most: mixed precision by search.

What: each map of the layers gets four bits (groups of 128, of 32, or of 32 with zeros), eight or sixteen, such that all
of them together take `bits` per weight on average, scales included. The sensitivity of the loss to each choice of each
map is measured on calibration sequences: one backward pass per sequence gives every token's gradient, and with it the
second-order rise of the loss (`preheat.ops.quantization.bit_allocation`). The predicted rise is reported together with
the measured one. Embedding and head stay in eight bits, outside the budget. The four-bit codes are then chosen by GPTQ
or by rounding to the nearest. Helps: for a size between those of two uniform methods, and at the size of a uniform one
if some maps are less sensitive than others. Hurts: takes a backward pass over calibration sequences (`rows`), in fp32.
Source: sensitivity by the Fisher information as in Kim et al. 2023, SqueezeLLM (arXiv:2306.07629), section 4.1, here by
map and token; allocation along convex hulls: Shoham and Gersho 1988, "Efficient bit allocation for an arbitrary set of
quantizers".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.compress.quantize import High, choose_group_size, count_weights_and_bits, keep_high
from preheat.compress.registry import Method
from preheat.core import Change
from preheat.errors import RecipeError
from preheat.recipe import Count, Positive

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

__all__ = ["BitBudget", "estimate_sensitivity", "spend_bits"]

# In ascending order of bits.
CHOICES = ("int4 in groups of 128", "int4 in groups of 32", "int4 in groups of 32 with zeros", "int8", "bf16")

_TOKENS = 2048  # per backward pass


def _choose_grid(name: str, module: nn.Module, choice: str) -> tuple[int, bool]:
    """Returns the group size and symmetry of one of the four-bit choices."""
    from preheat.ops.quantization.grids import nearest_divisor
    from preheat.ops.quantization.linear import map_weight

    if choice == CHOICES[0]:
        # The divisor of the inputs nearest to 128.
        return nearest_divisor(map_weight(module).shape[1], 128), True
    return choose_group_size(name, module, "auto", "bit_budget"), choice == CHOICES[1]


def _quantize_map(name: str, module: nn.Module, choice: str) -> nn.Module:
    """Returns the map quantized as one of the choices; the map itself for bf16."""
    from preheat.ops.quantization.linear import Int4Linear, Int8Linear

    if choice == "bf16":
        return module
    if choice == "int8":
        return Int8Linear.of(module)
    group, symmetric = _choose_grid(name, module, choice)
    return Int4Linear.of(module, group=group, symmetric=symmetric)


def estimate_sensitivity(
    model: PreTrainedModel, maps: dict[str, nn.Module], rows: Sequence[Tensor], choices: Sequence[str] = CHOICES
) -> dict[str, list[float]]:
    """Estimates the rise of the mean loss per token for each choice of each map, in nats, to second order.

    Args:
        maps: linear maps of the model, by name.
        rows: [1, length] tokens each, all of one length.
        choices: of `CHOICES`.

    Returns:
        For each map one value per choice.

    Example:
        >>> estimate_sensitivity(model, {"lm_head": model.lm_head}, rows)["lm_head"]  # doctest: +SKIP
    """
    import torch

    from preheat.models.layerwise import join_rows, plain_forward
    from preheat.ops.quantization.bit_allocation import estimate_loss_rise
    from preheat.ops.quantization.linear import map_weight

    totals = {name: [0.0] * len(choices) for name in maps}

    def watch(name: str) -> Callable[..., None]:
        def forward(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            # (tokens, in)
            x = args[0].detach().flatten(0, -2)

            def backward(gradient: Tensor) -> None:
                weight = map_weight(module).detach()
                for n, choice in enumerate(choices):
                    # dW of this choice. Its effect on the loss is measured with the gradient of the map's output
                    # (tokens, out).
                    change = map_weight(_quantize_map(name, module, choice)).detach() - weight
                    # The unquantized map is in fp32 here, and is written in bf16.
                    if choice == "bf16":
                        change = weight.bfloat16().float() - weight
                    totals[name][n] += estimate_loss_rise(x, change, gradient.flatten(0, -2))

            # A hook on the output runs during backward, when its gradient exists; `x` stays alive until then.
            out.register_hook(backward)

        return forward

    hooks = [module.register_forward_hook(watch(name)) for name, module in maps.items()]
    tokens = 0
    try:
        with plain_forward(model), torch.enable_grad():
            # Each choice is quantized again for each batch, as keeping all would take several times the model's memory.
            # (rows of about 2,048 tokens together, length)
            for batch in (b for rows in join_rows(rows) for b in rows.split(max(1, _TOKENS // rows.shape[1]))):
                batch = batch.to(model.device)
                # Differentiates activations only, no weights: the graph starts at the embedding's output.
                embedded = model.get_input_embeddings()(batch).detach().requires_grad_()
                logits = model(inputs_embeds=embedded, use_cache=False).logits[:, :-1].float().flatten(0, 1)
                # Summed over tokens, so that each token's gradient does not depend on the batch.
                torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").backward(
                    inputs=[embedded]
                )
                tokens += batch[:, 1:].numel()
    finally:
        for handle in hooks:
            handle.remove()
    return {name: [rise / tokens for rise in rises] for name, rises in totals.items()}


def spend_bits(model: PreTrainedModel, rows: Sequence[Tensor], settings: BitBudget | None = None) -> Change:
    """Quantizes the linear maps of a transformers model within a bit budget, in place.

    Args:
        rows: calibration sequences, [1, length] tokens each.

    Raises:
        RecipeError: a budget that is too small, or above 16.
        DataError: too few rows, or all alike.

    Example:
        >>> spend_bits(model, rows, BitBudget(bits=5))  # doctest: +SKIP
    """
    from preheat.compress.calibration import require_rows, walk
    from preheat.compress.quantize import choose_maps
    from preheat.ops.quantization.awq_gptq import quantize_gptq
    from preheat.ops.quantization.bit_allocation import allocate_bits
    from preheat.ops.quantization.linear import Int4Linear, map_weight
    from preheat.ops.quantization.serialization import put_in

    chosen = settings or BitBudget()
    require_rows(rows)
    maps, excluded = choose_maps(model, chosen, "bit_budget")
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    # On the model before any map is changed: all predictions have the same reference.
    rises = estimate_sensitivity(model, maps, rows[: chosen.rows])
    sizes = {name: [_count_bits(name, module, choice) for choice in CHOICES] for name, module in maps.items()}
    weights = sum(map_weight(module).numel() for module in maps.values())
    # Minimizes the sum of the predicted rises subject to the sum of the bits.
    try:
        numbers = allocate_bits(list(sizes.values()), [rises[name] for name in maps], chosen.bits * weights)
    except ValueError:
        least = sum(map(min, sizes.values())) / weights
        raise RecipeError(
            f"--bits {chosen.bits:g}: the minimum is {least:.2f} bits per weight (four bits and a scale for "
            "each group); raise it"
        ) from None
    plan = {name: CHOICES[n] for name, n in zip(maps, numbers, strict=True)}
    predicted = sum(rises[name][n] for name, n in zip(maps, numbers, strict=True))
    # For the measured rise; after this point the maps are replaced.
    before = _compute_loss(model, rows[: chosen.rows])
    if chosen.rounding == "gptq":
        # Layer by layer, so that GPTQ sees inputs that come out of the quantized layers before it.
        for layer in walk(model, rows):
            layer_maps = {name: m for name, m in maps.items() if name.startswith(f"{layer.name}.")}
            # Only four-bit maps need input statistics.
            inputs = layer.inputs({name: m for name, m in layer_maps.items() if plan[name].startswith("int4")})
            for name, module in layer_maps.items():
                replacement = _quantize_map(name, module, plan[name])
                if name in inputs:
                    group, symmetric = _choose_grid(name, module, plan[name])
                    replacement = Int4Linear.of(
                        module, quantize_gptq(map_weight(module), inputs[name].gram, group, symmetric=symmetric)
                    )
                if replacement is not module:
                    put_in(model, name, replacement)
    for name, module in maps.items():  # all maps if rounding to nearest; with GPTQ those outside the layers
        if plan[name] != "bf16" and model.get_submodule(name) is module:
            put_in(model, name, _quantize_map(name, module, plan[name]))
    measured = _compute_loss(model, rows[: chosen.rows]) - before
    keep_high(model, excluded, chosen.high, tied=tied)
    choices = "; ".join(f"{name}: {choice}" for name, choice in plan.items())
    return Change(_describe_choices(model, plan, predicted, measured, chosen), len(maps), detail=f"By map: {choices}")


def _count_bits(name: str, module: nn.Module, choice: str) -> float:
    from preheat.ops.quantization.linear import map_weight

    if choice == "bf16":
        return 16.0 * map_weight(module).numel()
    quantized = _quantize_map(name, module, choice)
    # Scales and zeros count; a bias is the same in all choices.
    return float(sum(8 * p.nbytes for key, p in quantized.named_parameters() if key != "bias"))


def _compute_loss(model: PreTrainedModel, rows: Sequence[Tensor]) -> float:
    """Returns the mean loss per token."""
    import torch

    from preheat.models.layerwise import plain_forward

    total = count = 0.0
    with plain_forward(model), torch.no_grad():
        for row in rows:
            row = row.to(model.device)
            # (length - 1, vocabulary)
            logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum"))
            count += row.shape[1] - 1
    return total / count


def _describe_choices(
    model: PreTrainedModel, plan: dict[str, str], predicted: float, measured: float, settings: BitBudget
) -> str:
    weights, bits = count_weights_and_bits(model, list(plan))
    by_choice = {choice: [name for name in plan if plan[name] == choice] for choice in CHOICES}
    counts = "; ".join(f"{len(names)} in {choice}" for choice, names in by_choice.items() if names)
    return (
        f"{len(plan)} linear maps in {bits / weights:.2f} bits a weight on average (of {settings.bits:g} allowed), "
        "four bits by "
        f"{'GPTQ' if settings.rounding == 'gptq' else 'the nearest'}: {counts}. To the nearest the loss on "
        "calibration sequences would rise by "
        f"{predicted:.4f} (predicted); it rose by {measured:.4f}"
    )


@dataclass(frozen=True, kw_only=True)
class BitBudget(High, Method):
    reads_rows: ClassVar[bool] = True

    bits: Positive = 4.5
    """Bits a weight over the maps that are quantized, scales included, on average."""
    keep: str | tuple[str, ...] = ("embedding", "head")
    """Modules kept in `high`, outside the budget: embedding, head, first and last (layer), last parts of names, or
    regular expressions for whole names."""
    rounding: Literal["gptq", "nearest"] = "gptq"
    """How four-bit codes are chosen."""
    rows: Count = 32
    """Calibration sequences that the sensitivity is measured on, at most."""

    def __post_init__(self) -> None:
        if self.bits > 16:
            raise ValueError(f"bits: {self.bits:g} is more than the 16 of bf16; lower it")

    def apply(self, model: PreTrainedModel, rows: Sequence[Tensor]) -> Change:
        return spend_bits(model, rows, self)
