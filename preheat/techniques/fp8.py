"""FP8: matmuls of linear layers in 8-bit floating point with dynamic scales, by torchao.

What: each linear layer casts its input, its weight and, in the backward pass, the gradient to fp8 with a scale from the
tensor's absolute maximum (`tensorwise`) or one scale per row (`rowwise`), and multiplies in fp8. Weights, optimizer and
everything else stay in bf16 or fp32, and so do embedding, head and layers whose sizes fp8 hardware does not support.
Helps: fp8 matmuls run at twice bf16's rate on supported devices; worth it for wide models (from about 4,096) under
compile.
Hurts: the casts cost bandwidth, so narrow models get slower; 3 bits of mantissa (`rowwise` loses less to outliers, and
is slower). A plan counts every cast, and a compiler fuses more of them than the plan assumes: planned speeds are low.
Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433); torchao's float8 training.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import Build, Change, Context, MissingPackage, Numerics, Searchable, Stage, Tag, Technique, Trials
from preheat.errors import RecipeError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Fp8", "convert_to_fp8"]

_ALIGNMENT = 16  # fp8 matmuls require sizes that are multiples of this
_MIN_CAPABILITY = (8, 9)  # compute capability of the first NVIDIA devices with fp8 (Ada); Hopper is 9.0


def convert_to_fp8(
    model: nn.Module,
    *,
    recipe: Literal["tensorwise", "rowwise"] = "tensorwise",
    keep: Iterable[nn.Module] = (),
    emulate: bool = False,
) -> tuple[list[str], list[str]]:
    """Converts linear layers to fp8 matmuls, in place; works on meta too. Their weights stay the same parameters.

    Args:
        recipe: one scale per tensor, or one per row.
        keep: modules to leave unchanged, e.g. the head.
        emulate: round to fp8 but multiply in the input's precision, which works on any device: to study the effect of
            rounding.

    Returns:
        Names of the converted layers, and of those skipped because a size is not a multiple of 16.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 10))
        >>> convert_to_fp8(model, emulate=True)
        (['0'], ['1'])
    """
    from torch import nn

    from preheat.models.torchao_import import silence_torchao

    with silence_torchao():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    excluded = {id(m) for m in keep}
    # Exact types: adapters and other subclasses have forward passes of their own.
    linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and id(m) not in excluded}
    # Forward sums over a layer's inputs and backward over its outputs, so both must be aligned.
    fits = {name for name, m in linear.items() if m.in_features % _ALIGNMENT == 0 and m.out_features % _ALIGNMENT == 0}
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name in fits, config=config)
    return sorted(fits), sorted(linear.keys() - fits)


@dataclass(frozen=True, kw_only=True)
class Fp8(Searchable):
    # Before KERNEL: a kernel may replace a module only in its final numeric form.
    stage: ClassVar[Stage] = Stage.FAKE_QUANTIZE
    numerics: ClassVar[Numerics] = "rounding"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="a CPU has no fp8 matmuls")
    needs: ClassVar[frozenset[Tag]] = frozenset({Tag.BF16_COMPUTE})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.FP8_COMPUTE})
    searched_on: ClassVar[frozenset[str]] = frozenset({"cuda"})

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """tensorwise: one scale per tensor, fastest; rowwise: one scale per row, closer to bf16."""

    def search_numerics(self) -> Literal["different"]:
        return "different"  # over a run: 3 bits of mantissa in every matmul

    def check(self, context: Context) -> list[str]:
        problems = []
        device, rows = context.device, context.recipe.batch.seq_len
        if device.kind == "cpu":
            problems.append(
                "needs a CUDA device of compute capability 8.9 or more (Ada, Hopper, Blackwell): a CPU has no fp8 "
                "matmuls"
            )
        elif device.capability is not None and device.capability < _MIN_CAPABILITY:
            capability = ".".join(map(str, device.capability))
            problems.append(f"needs compute capability 8.9 or more; {device.name} has {capability}: leave fp8 out")
        if rows % _ALIGNMENT:  # a weight's gradient sums over tokens, which are then the inner dimension
            problems.append(f"needs batch.seq_len to be a multiple of {_ALIGNMENT}, not {rows}")
        if importlib.util.find_spec("torchao") is None:
            problems.append(MissingPackage("needs torchao, which is not installed", "pip install torchao"))
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        from preheat.models.hf import head

        converted, left = convert_to_fp8(part, recipe=self.recipe, keep=[head(part)])
        if not converted:
            raise RecipeError(
                f"techniques.fp8: no linear map has sizes that are multiples of {_ALIGNMENT}; leave it out"
            )
        skipped = (
            f"; {len(left)} left in high precision, such as {left[0]} (not multiples of {_ALIGNMENT})" if left else ""
        )
        return Change(
            f"matmuls of {len(converted)} linear maps in fp8, {self.recipe} scales{skipped}; embedding and head high",
            len(converted),
        )

    def options(self, context: Context) -> Iterable[Technique]:
        return [Fp8(recipe="tensorwise"), Fp8(recipe="rowwise")]
