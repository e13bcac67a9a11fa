"""Vision tower: trains nothing, the projectors, or all of a vision-language model's vision tower.

What: `frozen` trains the language model alone; `projectors` also the small networks that map the tower's features to
the text's width (Qwen3-VL's merger and its deepstack mergers); `all` the whole tower. This concerns the weights
themselves: with adapters (`lora`), which freeze the language model, the tower then has no adapters. Without this
technique the tower is treated like the rest: trained or given adapters along with it.
Helps: a frozen tower needs no gradients, optimizer state or activations, and keeps what it learnt from far more images
than a fine-tuning has.
Hurts: images unlike those (scans, diagrams, microscopy) need a trained tower, or adapters in it.
Source: Liu et al. 2023, "Visual Instruction Tuning" (arXiv:2304.08485), train projector and language model on a frozen
tower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import Build, Change, Context, Numerics, Stage, Tag, Technique, Trials

if TYPE_CHECKING:
    from torch import nn

__all__ = ["VisionTower", "train_tower"]


def train_tower(
    tower: nn.Module, train: Literal["frozen", "projectors", "all"], projectors: tuple[str, ...]
) -> tuple[int, int]:
    """Selects which parameters of a vision tower are trained, in place.

    Args:
        tower: the vision tower, such as `model.model.visual` of a Qwen3-VL.
        train: nothing, the projectors, or everything.
        projectors: names of its children that are projectors.

    Returns:
        The numbers of trained and of all parameters of the tower.

    Example:
        >>> from torch import nn
        >>> tower = nn.ModuleDict({"blocks": nn.Linear(4, 4), "merger": nn.Linear(4, 2)})
        >>> train_tower(tower, "projectors", ("merger",))
        (10, 30)
    """
    # Children, then the tower's own parameters: projectors are children.
    for name, child in tower.named_children():
        child.requires_grad_(train == "all" or (train == "projectors" and name in projectors))
    for p in tower.parameters(recurse=False):
        p.requires_grad_(train == "all")
    sizes = [(p.numel(), p.requires_grad) for p in tower.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)


@dataclass(frozen=True, kw_only=True)
class VisionTower(Technique):
    # In the stage of adapters, which freeze the model: by its name it applies after them, so that its choice remains.
    stage: ClassVar[Stage] = Stage.ADAPT
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="llama has no vision tower")
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.NO_TOWER_ADAPTERS})

    train: Literal["frozen", "projectors", "all"] = "frozen"
    """frozen; projectors: only those to the text's width; all. Adapters of `lora` or `peft_adapter` leave the tower out
    in any case: for adapters in the tower too, leave this technique out."""

    def check(self, context: Context) -> list[str]:
        if context.model.vision is None:
            return [f"{context.model.family} has no vision tower; leave it out"]
        if self.train != "frozen" and Tag.QUANTIZED_BASE in context.tags:
            return [
                f"train: {self.train} trains weights that are quantized; use frozen, or leave it out for adapters in "
                "the tower"
            ]
        return []

    def apply(self, build: Build, part: nn.Module) -> Change:
        from torch import nn

        from preheat.models.vision import find_vision_modules

        modules, projectors = find_vision_modules(part)  # type: ignore[arg-type]
        trained, total = train_tower(nn.ModuleDict(modules), self.train, projectors)
        return Change(f"vision tower: {trained:,} of {total:,} parameters trained ({self.train})", total)
