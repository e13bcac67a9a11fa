"""LoRA: freeze the model, train low-rank additions to its linear maps. By peft.

What: each chosen linear map W becomes W + (alpha / rank) B A with A and B of `rank`; only A and B are trained.
Helps: gradients and optimizer state for a small share of the parameters; adapters of a few megabytes; merged away for
inference. Hurts: less capacity than full tuning for large shifts of domain; the base still stands in memory.
Source: Hu et al. 2021 (arXiv:2106.09685); all linear maps: Dettmers et al. 2023 (arXiv:2305.14314).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from preheat.recipe import Bound, Positive, Share
from preheat.technique import Build, Change, Context, Stage, Tag, Technique

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Lora", "add_lora", "merge_lora"]


def add_lora(
    model: nn.Module, *, rank: int = 16, alpha: float = 32, dropout: float = 0.0, targets: str | tuple[str, ...] = "all-linear"
) -> list[str]:
    """Adds LoRA to a transformers model and freezes the rest, in place; works on meta too.

    Args:
        targets: `all-linear` (all but the head), a regular expression for module names, or their last parts (`("q_proj", "v_proj")`).

    Returns:
        Names of the adapted modules.

    Raises:
        ValueError: no module matches `targets`.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),  # GPT-2 stores its matrices transposed
    )
    inject_adapter_in_model(config, model)
    return [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def merge_lora(model: nn.Module) -> int:
    """Adds each adapter into its base weight in fp32 and takes the adapters out, in place. Returns how many."""
    import torch
    from peft.tuners.lora import LoraLayer

    found = [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]
    with torch.no_grad():
        for name, layer in found:
            base: Any = layer.get_base_layer()
            added = cast(Any, layer).get_delta_weight("default").float()
            base.weight.data = (base.weight.float() + added).to(base.weight.dtype)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, base)
    return len(found)


def _draw(module: Any) -> None:
    """A at random, B zero: the adapted model starts as the base (Hu et al. 2021)."""
    module.reset_lora_parameters("default", True)


@dataclass(frozen=True, kw_only=True)
class Lora(Technique):
    stage: ClassVar[Stage] = Stage.ADAPT
    numerics: ClassVar[Any] = "different"
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag("adapter"), Tag("frozen-base")})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag("adapter")})

    rank: Annotated[int, Bound(1)] = 16
    """Rank of the additions."""
    alpha: Positive = 32.0
    """The additions are scaled by alpha / rank."""
    dropout: Share = 0.0
    """Dropout on the additions' input."""
    targets: str | tuple[str, ...] = "all-linear"
    """all-linear (all but the head), a regular expression for module names, or a list of their last parts."""

    def apply(self, build: Build, part: Any) -> Change:
        from preheat.errors import RecipeError

        try:
            names = add_lora(part, rank=self.rank, alpha=self.alpha, dropout=self.dropout, targets=self.targets)
        except ValueError as error:
            raise RecipeError(
                f"techniques.lora.targets: {self.targets!r} matches no linear map of the model ({str(error).splitlines()[0][:160]})"
            ) from None
        build.weights.fresh(r"\.lora_[AB]\.", names, _draw)
        trained = sum(p.numel() for p in part.parameters() if p.requires_grad)
        whole = sum(p.numel() for p in part.parameters())
        return Change(
            f"rank {self.rank} on {len(names)} linear maps: {trained:,} of {whole:,} parameters trained ({trained / whole:.1%})",
            len(names),
        )

    def options(self, context: Context) -> Iterable[Technique]:
        return [Lora(rank=rank, alpha=2.0 * rank) for rank in (8, 16, 64)]
