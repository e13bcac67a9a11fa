"""Single changes of a run that a user of another trainer can make: to train faster, or in less memory. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from preheat.core import Numerics, Technique, registry
from preheat.recipe import Recipe

__all__ = ["Change", "list_changes"]


@dataclass(frozen=True)
class Change:
    """A change of a recipe.

    Attributes:
        kind: of several changes of a kind, only one is made.
        add: techniques to set -> their settings.
        remove: techniques to take out.
        micro_batches: of a step per device, with the same global batch; None: as before.
        numerics: the largest change of the results, compared with the run as it is.
    """

    kind: str
    add: Mapping[str, Mapping[str, Any]]
    remove: tuple[str, ...] = ()
    micro_batches: int | None = None
    numerics: Numerics = "exact"

    def apply(self, recipe: Recipe) -> Recipe:
        """Returns the changed recipe."""
        known = registry()
        techniques = {name: t for name, t in recipe.techniques.items() if name not in self.remove}
        for name, settings in self.add.items():
            present = techniques.get(name)
            techniques[name] = replace(present, **settings) if present else known[name](**settings)
        if self.micro_batches is not None:
            techniques.pop("gradient_accumulation", None)
            if self.micro_batches > 1:
                techniques["gradient_accumulation"] = _accumulate(self.micro_batches)
        return replace(recipe, techniques=techniques)


def _accumulate(steps: int) -> Technique:
    return registry()["gradient_accumulation"](steps=steps)  # type: ignore[call-arg]


_OPTIMIZERS = ("low_bit_adamw", "adafactor", "lion", "muon", "apollo")
_OTHER_LOSSES = ("chunked_loss", "liger", "pipeline_parallel")
"""Techniques with which the head and the loss are in chunks already, or cannot be."""
_FACTORS = (2, 4, 8)
"""Times a micro-batch is made larger or smaller."""


def list_changes(recipe: Recipe, *, smaller: bool, growth: float) -> list[Change]:
    """Returns the changes that may help a recipe that was read from another trainer's file.

    Args:
        smaller: to need less memory, whatever the speed; False: to be faster.
        growth: the micro-batch that fits over the recipe's, by an estimate.

    Example:
        >>> from preheat.recipe import parse
        >>> recipe = parse("{model: {size: 15M}, stop: {max_steps: 1}, techniques: {activation_checkpointing: {}}}")
        >>> [change.kind for change in list_changes(recipe, smaller=False, growth=1.0)]
        ['checkpointing', 'checkpointing', 'attention', 'loss', 'kernels', 'kernels', 'kernels']
    """
    changes = [*_change_recomputation(recipe, smaller), *_change_micro_batch(recipe, smaller, growth)]
    changes += _change_kernels(recipe)
    return [*changes, *(_shrink_states(recipe) if smaller else _keep_more(recipe))]


def _change_recomputation(recipe: Recipe, smaller: bool) -> Iterator[Change]:
    """Yields more recomputation, or less."""
    present = recipe.techniques.get("activation_checkpointing")
    if smaller and present is None:
        yield Change("checkpointing", {"activation_checkpointing": {}})
    elif not smaller and present is not None:
        yield Change("checkpointing", {}, ("activation_checkpointing", "activation_offload"))
        if present == registry()["activation_checkpointing"]():
            yield Change("checkpointing", {"activation_checkpointing": {"mode": "selective"}})


def _change_micro_batch(recipe: Recipe, smaller: bool, growth: float) -> Iterator[Change]:
    """Yields the largest micro-batch that may fit, with the same global batch: of more, each costs a dry run."""
    accumulation = recipe.techniques.get("gradient_accumulation")
    count = accumulation.micro_batch_count() if accumulation else 1
    if smaller:
        counts = [count * n for n in _FACTORS if recipe.batch.size % (count * n) == 0]
        fitting = next((n for n in counts if count / n <= growth), counts[-1] if counts else None)
    else:
        counts = [count // n for n in reversed(_FACTORS) if count % n == 0]
        fitting = next((n for n in counts if count / n <= growth), None)
    if fitting:
        yield Change("micro-batch", {}, micro_batches=fitting)


def _change_kernels(recipe: Recipe) -> Iterator[Change]:
    """Yields fused kernels, which need less time and less memory."""
    techniques = recipe.techniques
    if "efficient_attention" not in techniques:
        yield Change("attention", {"efficient_attention": {}}, numerics="rounding")
    whole_loss = not any(name in techniques for name in _OTHER_LOSSES)
    if whole_loss:
        yield Change("loss", {"chunked_loss": {}})
    if "compile" in techniques:
        return
    fused = {"norm": True, "gate": True, "adapters": False}
    if "fused_operators" not in techniques:
        yield Change("kernels", {"fused_operators": fused}, numerics="rounding")
        if whole_loss:
            yield Change("kernels", {"fused_operators": fused, "chunked_loss": {}}, numerics="rounding")
    yield Change("kernels", {"compile": {}}, ("fused_operators",), numerics="rounding")


def _keep_more(recipe: Recipe) -> Iterator[Change]:
    """Yields changes that spend memory on speed."""
    techniques = recipe.techniques
    if "nf4" in techniques and "lora" in techniques:
        yield Change("base", {}, ("nf4",), numerics="different")
    fsdp = techniques.get("fsdp")
    if fsdp is not None and vars(fsdp)["reshard_after_forward"]:
        yield Change("sharding", {"fsdp": {"reshard_after_forward": False}})


def _shrink_states(recipe: Recipe) -> Iterator[Change]:
    """Yields changes that need less memory for weights and the optimizer's states."""
    techniques = recipe.techniques
    if "data_parallel" in techniques:
        precision = techniques.get("mixed_precision")
        # Trainers gather fp32 weights in the precision of autocast, as `settings.build_values` has it.
        autocast = precision is not None and vars(precision)["mode"] == "bf16" and "lora" not in techniques
        yield Change("sharding", {"fsdp": {"gather": "bf16"} if autocast else {}}, ("data_parallel", "zero1"))
    if "fsdp" in techniques and not vars(techniques["fsdp"])["reshard_after_forward"]:
        yield Change("sharding", {"fsdp": {"reshard_after_forward": True}})
    if not any(name in techniques for name in _OPTIMIZERS):
        yield Change("optimizer", {"low_bit_adamw": {"bits": 8}}, numerics="different")
    if "lora" in techniques and "nf4" not in techniques:
        # The precision of a frozen base is not stated beside 4 bits.
        quantized: dict[str, dict[str, Any]] = {"nf4": {}}
        if "mixed_precision" in techniques:
            quantized["mixed_precision"] = {"frozen": "auto"}
        yield Change("base", quantized, numerics="different")
