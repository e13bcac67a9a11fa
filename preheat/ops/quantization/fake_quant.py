"""Fake quantization for QAT: forward uses weights rounded to a grid, backward is the identity (straight-through).

Straight-through estimator: Bengio et al. 2013 (arXiv:1308.3432); for quantization, Jacob et al. 2018
(arXiv:1712.05877). The grid of `preheat.ops.quantization.grids` is recomputed from the weights in each forward pass, so
that converting afterwards gives exactly the values that were trained with.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from preheat.ops.adapters.peft_layers import added_linear_class
from preheat.ops.quantization.grids import dequantize_groups, quantize_groups, quantize_rows, round_inputs
from preheat.ops.quantization.packed import FrozenPackedMap

if TYPE_CHECKING:
    from preheat.ops.autograd_context import AutogradContext


__all__ = ["Grid", "add_fake_quantization", "round_weight", "unfake_"]


@dataclass(frozen=True)
class Grid:
    """Quantization grid of a layer.

    Attributes:
        bits: 4 (in groups) or 8 (one scale per output).
        group: inputs per scale, for 4 bits.
        symmetric: no zeros, for 4 bits.
        inputs: also rounds inputs to int8 per token.
    """

    bits: int
    group: int = 0
    symmetric: bool = True
    inputs: bool = False


def round_weight(weight: Tensor, grid: Grid) -> Tensor:
    """Rounds a weight [out, in] to a grid; returns fp32.

    Example:
        >>> round_weight(torch.tensor([[-8.0, 7.0, 0.4, 1.0]]), Grid(4, 4)).tolist()
        [[-8.0, 7.0, 0.0, 1.0]]
    """
    if grid.bits == 4:
        return dequantize_groups(quantize_groups(weight, grid.group, symmetric=grid.symmetric))
    codes, scales = quantize_rows(weight)
    return codes.float() * scales.float()[:, None]


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, weight: Tensor, grid: Grid) -> Tensor:  # type: ignore[override]
        # Nothing is saved: the gradient passes through unchanged.
        return round_weight(weight, grid).to(weight.dtype)

    @staticmethod
    def backward(ctx: AutogradContext, slope: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        # Straight through, also for values that the grid clips.
        return slope, None


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor) -> Tensor:  # type: ignore[override]
        codes, scale = round_inputs(x.reshape(-1, x.shape[-1]))  # [tokens, in]
        return (codes * scale).view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: AutogradContext, slope: Tensor) -> Tensor:  # type: ignore[override]
        return slope


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid) -> Tensor:
    """weight: [out, in]."""
    values = _Weight.apply(weight, grid)
    return F.linear(
        _Inputs.apply(x) if grid.inputs else x, values.to(x.dtype) if values.dtype != x.dtype else values, bias
    )


class FakeLinear(nn.Linear):
    """A Linear with fake quantization; its parameters are those of the Linear."""

    preheat_grid: Grid

    def forward(self, x: Tensor) -> Tensor:
        return _multiply(x, self.weight, self.bias, self.preheat_grid)


class FakeConv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's Conv1D, [in, out], with fake quantization."""

    preheat_grid: Grid

    def forward(self, x: Tensor) -> Tensor:
        return _multiply(x, self.weight.t(), self.bias, self.preheat_grid)  # [in, out] -> [out, in]


@functools.cache
def _adapt_lora_class() -> type[nn.Module]:
    """Returns peft's LoRA layer with fake quantization of W + s B A together, as merging will give."""
    from peft.tuners.lora import Linear

    class FakeAdapted(Linear):
        preheat_grid: Grid

        def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
            base: Any = self.get_base_layer()
            weight = base.weight.float()
            # Rounding W and then adding s B A would train for values that no merged model has.
            if not self.disable_adapters:
                weight = weight + self.get_delta_weight("default").float()
            weight = weight.t() if isinstance(base, Conv1D) else weight
            kind = x.device.type
            x = x.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else base.weight.dtype)
            return _multiply(x, weight, None if base.bias is None else base.bias.to(x.dtype), self.preheat_grid)

    return FakeAdapted


_FAKE: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FakeLinear, Conv1D: FakeConv1D}


def add_fake_quantization(model: nn.Module, grids: Mapping[str, Grid]) -> int:
    """Adds fake quantization to layers of a model, in place. Under LoRA, base and adapter are rounded together.

    Args:
        grids: grid by layer name, without peft's `base_layer`.

    Returns:
        The number of layers.

    Raises:
        ValueError: an adapter is not plain LoRA, has dropout, or has a packed base, so that merging would give other
            values.
    """
    for name, grid in grids.items():
        module: Any = model.get_submodule(name)
        # Exact types: a subclass may compute something else from its weight.
        if type(module) in _FAKE:
            module.__class__ = _FAKE[type(module)]
        else:
            _require_lora(name, module)
            module.__class__ = _adapt_lora_class()
        module.preheat_grid = grid
    return len(grids)


def _require_lora(name: str, module: Any) -> None:
    from peft.tuners.lora import Linear

    if type(module) not in (Linear, added_linear_class()) or module.use_dora.get("default", False):
        raise ValueError(
            f"{name}: only a plain LoRA (variant lora, rslora or pissa) can be rounded together with its base"
        )
    # Dropout acts on the adapter's inputs, and W + s B A has no separate ones.
    if not isinstance(module.lora_dropout["default"], nn.Identity):
        raise ValueError(
            f"{name}: an adapter with dropout cannot be rounded together with its base; set its dropout to 0"
        )
    if isinstance(module.get_base_layer(), FrozenPackedMap):
        raise ValueError(f"{name}: its base is already quantized; train the adapter on the full base")


def unfake_(model: nn.Module) -> int:
    """Undoes `add_fake_quantization` in place; weights stay unrounded. Returns the number of layers."""
    plain: dict[type[nn.Module], type[nn.Module]] = {fake: real for real, fake in _FAKE.items()} | {
        _adapt_lora_class(): added_linear_class()
    }
    modules = [m for m in model.modules() if type(m) in plain]
    for module in modules:
        module.__class__ = plain[type(module)]
        del module.preheat_grid
    return len(modules)
