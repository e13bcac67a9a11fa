"""Low-bit AdamW: the optimizer's moments in 8 or 4 bits with blockwise scales.

What: both moments are stored as indices into a non-uniform code book (denser near zero), scaled by the absolute maximum
of each block; a step dequantizes a chunk of elements at a time, updates them in fp32 and quantizes them again. Norms,
biases and small matrices keep fp32 moments. In 4 bits the second moments use a linear code book without zero, by blocks
(the paper scales a matrix's by rows and columns instead).
Helps: 2.03 bytes of state per parameter at 8 bits and blocks of 256, 1.03 at 4 bits, while AdamW keeps 8.
Hurts: a slower update (code book lookups); moments are rounded each step, at 4 bits visibly. It and `mixed_precision`
with bf16 weights each bring their own optimizer, so a recipe cannot have both (the plain function rounds bf16 weights
stochastically by itself).
Source: Dettmers et al. 2021 (arXiv:2110.02861); 4 bits: Li et al. 2023 (arXiv:2309.01507).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

from preheat.core import Build, Change, Context, Numerics, Searchable, Slot, Stage, Technique, Trials
from preheat.errors import RecipeError
from preheat.recipe import NonNegativeInt

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.optimizer import ParamsT

    from preheat.core.json_types import JsonObject
    from preheat.ops.optim.param_groups import AdamSettings

__all__ = ["LowBitAdamW", "low_bit_adamw"]


def low_bit_adamw(parameters: ParamsT, **settings: Any) -> torch.optim.Optimizer:
    """Returns the optimizer (`preheat.ops.optim.low_bit_adamw.LowBitAdamW`).

    Settings: bits, block, least, lr, betas, eps, weight_decay.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(128, 64)
        >>> optimizer = low_bit_adamw(layer.parameters(), bits=8, lr=1e-3)
        >>> sum(t.nbytes for t in optimizer.state[layer.weight].values()) / layer.weight.numel()
        2.03173828125
    """
    from preheat.ops.optim.low_bit_adamw import LowBitAdamW

    return LowBitAdamW(parameters, **settings)


@dataclass(frozen=True, kw_only=True)
class LowBitAdamW(Searchable):
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    numerics: ClassVar[Numerics] = "exact"  # for the gradients; the updates differ
    trials: ClassVar[Trials] = Trials(
        settings=(
            {"bits": 4, "block_size": 64, "min_size": 0},
            {"min_size": 0},
        )
    )
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OPTIMIZER})

    bits: Literal[8, 4] = 8
    """Bits per moment."""
    block_size: Literal[64, 128, 256, 512, 1024, 2048] = 256
    """Elements that share a scale; smaller blocks are more exact and cost 8 / block_size bytes per parameter."""

    min_size: NonNegativeInt = 4096
    """Parameters with fewer elements keep fp32 moments, as norms and biases do at any size."""

    def search_numerics(self) -> Literal["rounding", "different"]:
        # 4-bit moments change the updates visibly.
        return "rounding" if self.bits == 8 else "different"

    def apply(self, build: Build, part: nn.Module) -> Change:
        # A GPU wants few large kernels; a CPU chunks that fit its cache.
        chunk = 1 << 24 if build.device.kind == "cuda" else 1 << 18

        def make(groups: ParamsT, **settings: Unpack[AdamSettings]) -> torch.optim.Optimizer:
            # Seed and step decide stochastic rounding of bf16 weights, so that a resumed run repeats it.
            more: JsonObject = {"seed": build.recipe.seed, "number": lambda: build.state.updates, "chunk": chunk}
            try:
                return low_bit_adamw(
                    groups, bits=self.bits, block=self.block_size, least=self.min_size, **more, **settings
                )
            except ValueError as error:
                raise RecipeError(f"techniques.low_bit_adamw.{error}") from None

        build.claim(Slot.OPTIMIZER, make, self.name())
        count = sum(p.requires_grad for p in part.parameters())
        return Change(f"AdamW with moments in {self.bits} bits, a scale per {self.block_size} elements", count)

    def options(self, context: Context) -> Iterable[Technique]:
        # The mildest first.
        return [LowBitAdamW(), LowBitAdamW(bits=4, block_size=128)]
