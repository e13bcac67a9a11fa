"""LoRA layers that share an input, or follow a gated activation, computed together on CUDA.

Each alone reads the input for its adapter, adds the adapter's product to the base's in a pass over the output, and in
backward gives a gradient of the whole input, which autograd adds to the others' in further passes. Together one matmul
computes all adapters' low-rank inputs, the base's matmul adds to the adapter's product while it writes, and all
gradients of the input are summed in the matmuls that compute them. The product silu(a) * b is not saved for the down
projection but recomputed in backward, which saves one tensor [tokens, intermediate size] per layer. Sources: the sums
are those of LoRA (arXiv:2106.09685); unsloth recomputes the gate's product too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from preheat.ops import rowwise_cuda
from preheat.ops.adapters.peft_layers import added_linear_class
from preheat.ops.memory.selective_checkpoint import can_keep_results
from preheat.ops.plain_tensors import is_plain_tensor
from preheat.ops.quantization.nf4 import Packed, PackedLinear, Tables, dequantize

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

    from preheat.ops.autograd_context import AutogradContext

__all__ = ["SharedInput", "compute_gated_block", "is_joinable", "compute_joint_lora", "join_adapters"]

P = ParamSpec("P")
T = TypeVar("T")


class _Map(NamedTuple):
    """The settings of a LoRA layer that are no tensors.

    Attributes:
        scale: alpha / rank.
        packed: shape of a weight in NF4; None for a plain weight.
        biased: has a (frozen) bias.
    """

    scale: float
    packed: tuple[int, int] | None
    biased: bool


class _Operands(NamedTuple):
    """Tensors of a LoRA layer: A [rank, in], B [out, rank], the bias, and the weight [out, in] or its NF4 tensors."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    weight: tuple[Tensor | None, ...]


_COUNT = 8  # tensors of a layer: A, B, bias, and the five of an NF4 weight


def _split_layer(layer: LoraLayer) -> tuple[_Map, list[Tensor | None]]:
    """Returns the `_Map` of a LoRA layer that `is_joinable` accepts, and its `_COUNT` tensors."""
    (name,) = layer.active_adapters
    base = layer.base_layer
    packed = isinstance(base, PackedLinear)
    weight = (*base._packed(), *base._tables()) if packed else (base.weight, *(None,) * 4)
    tensors = [layer.lora_A[name].weight, layer.lora_B[name].weight, base.bias, *weight]
    return _Map(layer.scaling[name], base.nf4_shape if packed else None, base.bias is not None), tensors


def _collect_operands(tensors: Sequence[Tensor | None]) -> list[_Operands]:
    groups = (tensors[start : start + _COUNT] for start in range(0, len(tensors), _COUNT))
    return [_Operands(group[0], group[1], group[2], tuple(group[3:])) for group in groups]  # type: ignore[arg-type]


def _dense_weight(map_: _Map, operands: _Operands, dtype: torch.dtype) -> Tensor:
    """Returns the base's weight [out, in], dequantized if it is in NF4."""
    if map_.packed is None:
        return operands.weight[0]  # type: ignore[return-value]
    codes, scales, ranges, pairs, levels = operands.weight
    return dequantize(Packed(codes, scales, ranges), map_.packed, dtype, Tables(pairs, levels))  # type: ignore[arg-type]


def _forward(rows: Tensor, maps: Sequence[_Map], layers: Sequence[_Operands]) -> tuple[list[Tensor], Tensor]:
    """Computes x W^T + (x A^T) (s B)^T of each layer.

    Args:
        rows: [tokens, in].

    Returns:
        The results [tokens, out], and x A^T of all layers, [tokens, sum of ranks].
    """
    small = torch.mm(rows, _stack_down(layers, rows.dtype).t())
    results = []
    for part, map_, layer in zip(small.split([layer.a.shape[0] for layer in layers], 1), maps, layers, strict=True):
        up = _scale_up(map_, layer, rows.dtype).t()
        # The adapter's product first: the base's matmul adds to it while it writes, for half of the bytes that adding
        # the adapter's product to the base's would move.
        out = torch.mm(part, up) if layer.bias is None else torch.addmm(layer.bias.to(rows.dtype), part, up)
        results.append(out.addmm_(rows, _dense_weight(map_, layer, rows.dtype).t()))
    return results, small


def _stack_down(layers: Sequence[_Operands], dtype: torch.dtype) -> Tensor:
    """Returns A of all layers, [sum of ranks, in]."""
    return torch.cat([layer.a for layer in layers]).to(dtype)


def _scale_up(map_: _Map, layer: _Operands, dtype: torch.dtype) -> Tensor:
    """Returns s B, [out, rank]."""
    return (layer.b * map_.scale).to(dtype)


def _grad_low_rank(slopes: Sequence[Tensor], maps: Sequence[_Map], layers: Sequence[_Operands]) -> Tensor:
    """Returns the gradient by x A^T of all layers, [tokens, sum of ranks], from those of the results."""
    pairs = zip(slopes, maps, layers, strict=True)
    return torch.cat([torch.mm(slope, _scale_up(map_, layer, slope.dtype)) for slope, map_, layer in pairs], dim=1)


def _grad_input(low: Tensor, slopes: Sequence[Tensor], maps: Sequence[_Map], layers: Sequence[_Operands]) -> Tensor:
    """Returns the gradient by x [tokens, in]: the sum over the layers of slope W + low A."""
    total = torch.mm(low, _stack_down(layers, low.dtype))
    for slope, map_, layer in zip(slopes, maps, layers, strict=True):
        total.addmm_(slope, _dense_weight(map_, layer, low.dtype))
    return total


def _grad_layers(
    low: Tensor,
    slopes: Sequence[Tensor],
    rows: Tensor,
    small: Tensor,
    maps: Sequence[_Map],
    layers: Sequence[_Operands],
) -> list[Tensor | None]:
    """Returns the gradients by the tensors of the layers, `_COUNT` each: those by A and B, and None for the base's."""
    ranks = [layer.a.shape[0] for layer in layers]
    by_down = torch.mm(low.t(), rows).split(ranks)  # [rank, in] each
    grads: list[Tensor | None] = []
    for slope, part, down, map_, layer in zip(slopes, small.split(ranks, 1), by_down, maps, layers, strict=True):
        by_up = torch.mm(slope.t(), part)  # [out, rank]
        grads += [down.to(layer.a.dtype), by_up.to(layer.b.dtype).mul_(map_.scale), *(None,) * (_COUNT - 2)]
    return grads


class _Joined(torch.autograd.Function):
    """Several LoRA layers of one input."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, maps: tuple[_Map, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])
        results, small = _forward(rows, maps, _collect_operands(tensors))
        ctx.save_for_backward(rows, small, *tensors)
        ctx.maps = maps
        return tuple(result.view(*x.shape[:-1], -1) for result in results)

    @staticmethod
    def backward(ctx: AutogradContext, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        rows, small, *tensors = ctx.saved_tensors
        layers, flat = _collect_operands(tensors), [slope.reshape(-1, slope.shape[-1]) for slope in slopes]
        low = _grad_low_rank(flat, ctx.maps, layers)
        by_x = _grad_input(low, flat, ctx.maps, layers) if ctx.needs_input_grad[0] else None
        grads = _grad_layers(low, flat, rows, small, ctx.maps, layers)
        return None if by_x is None else by_x.view(*slopes[0].shape[:-1], -1), None, *grads


class _Block(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)) of three LoRA layers."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, maps: tuple[_Map, ...], *tensors: Tensor | None) -> Tensor:
        rows, layers = x.reshape(-1, x.shape[-1]), _collect_operands(tensors)
        (a, b), small = _forward(rows, maps[:2], layers[:2])
        (out,), small_down = _forward(rowwise_cuda.gated_silu(a, b), maps[2:], layers[2:])
        ctx.save_for_backward(rows, small, small_down, a, b, *tensors)
        ctx.maps = maps
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: AutogradContext, slope: Tensor) -> tuple[Tensor | None, ...]:
        rows, small, small_down, a, b, *tensors = ctx.saved_tensors
        layers, flat = _collect_operands(tensors), [slope.reshape(-1, slope.shape[-1])]
        first, last = (ctx.maps[:2], layers[:2]), (ctx.maps[2:], layers[2:])
        low = _grad_low_rank(flat, *last)
        product = _grad_input(low, flat, *last)  # the gradient by silu(a) b,
        slopes = rowwise_cuda.gated_silu_backward_(product, a, b)  # and from here on silu(a) b itself
        by_down = _grad_layers(low, flat, product, small_down, *last)
        del product
        low = _grad_low_rank(slopes, *first)
        by_x = _grad_input(low, slopes, *first) if ctx.needs_input_grad[0] else None
        grads = _grad_layers(low, slopes, rows, small, *first)
        return None if by_x is None else by_x.view(*slope.shape[:-1], -1), None, *grads, *by_down


def is_joinable(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """True if the layers are plain LoRA on frozen plain or NF4 weights in the dtype that x is multiplied in.

    Otherwise each layer computes its own sum: variants, dropout, sharded or hooked modules, weights that are cast for
    each use, under a compiler, and where a selective checkpoint chooses what to keep.
    """
    if torch.compiler.is_compiling() or can_keep_results() or not is_plain_tensor(x):
        return False
    dtype = _compute_dtype(x)
    return all(_is_plain(layer, dtype, autocast=_is_autocast(x)) for layer in layers)


def _is_autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if _is_autocast(x) else x.dtype


def _is_plain(module: nn.Module, dtype: torch.dtype, *, autocast: bool) -> bool:
    layer: LoraLayer = module
    if (
        type(module) is not added_linear_class()
        or layer.disable_adapters
        or layer.merged
        or len(layer.active_adapters) != 1
    ):
        return False
    (name,) = layer.active_adapters
    base = layer.base_layer
    if type(base) not in (nn.Linear, PackedLinear) or not layer.is_plain(name):
        return False
    first, last, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    packed = type(base) is PackedLinear
    weight = base.nf4_codes if packed else base.weight
    if type(first) is not nn.Linear or type(last) is not nn.Linear:  # in eight bits
        return False
    parts = (base, first, last)
    return (
        (isinstance(dropout, nn.Identity) or not dropout.training)
        and is_plain_tensor(weight, first.weight)
        and not weight.requires_grad
        and (packed or weight.dtype == dtype)
        and (base.bias is None or (is_plain_tensor(base.bias) and not base.bias.requires_grad))
        and (autocast or first.weight.dtype == dtype)
        # Replaced forwards (`keep_fp32`) and hooks (gathers) run only if the module itself is called.
        and not any(_is_replaced(part) or _is_hooked(part) for part in parts)
    )


def _is_replaced(module: nn.Module) -> bool:
    """True if this module has a `forward` of its own, which hides that of its class."""
    return "forward" in vars(module)


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def compute_joint_lora(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Returns the results of LoRA layers of one input, which `is_joinable` accepts.

    Args:
        x: [..., in].

    Returns:
        [..., out] of each layer, in autocast's dtype if it is on.
    """
    maps, tensors = _split_layers(layers)
    return _Joined.apply(x.to(_compute_dtype(x)), maps, *tensors)  # type: ignore[no-any-return,no-untyped-call]


def compute_gated_block(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """Returns down(silu(gate(x)) * up(x)) of LoRA layers that `is_joinable` accepts; x: [..., in]."""
    maps, tensors = _split_layers((gate, up, down))
    return _Block.apply(x.to(_compute_dtype(x)), maps, *tensors)  # type: ignore[no-any-return,no-untyped-call]


def _split_layers(layers: Sequence[nn.Module]) -> tuple[tuple[_Map, ...], list[Tensor | None]]:
    parts = [_split_layer(layer) for layer in layers]
    return tuple(map_ for map_, _ in parts), [t for _, tensors in parts for t in tensors]


class SharedInput:
    """LoRA layers that a model calls one after the other with the same input: the first call computes all of them.

    Args:
        layers: in the order of the calls.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = list(layers)
        self._plain = [layer.forward for layer in layers]
        # Results that were computed and not asked for yet, by the layer's number, and the input they belong to.
        self._input: Tensor | None = None
        self._ready: dict[int, Tensor] = {}

    def call(self, number: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Stands for the `forward` of a layer."""
        if self._input is x and number in self._ready:
            result = self._ready.pop(number)
            if not self._ready:
                self._input = None
            return result
        self._clear()  # another input, or another order
        if number or args or kwargs or not is_joinable(x, self.layers):
            return self._plain[number](x, *args, **kwargs)  # type: ignore[no-any-return]
        first, *others = compute_joint_lora(x, self.layers)
        if others:
            self._input, self._ready = x, dict(enumerate(others, 1))
        return first

    def around(self, forward: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the `forward` of the module whose layers these are."""
        try:
            return forward(*args, **kwargs)
        finally:
            # After an error between two of the calls (out of memory) they would keep the whole graph alive.
            self._clear()

    def _clear(self) -> None:
        self._input, self._ready = None, {}


def join_adapters(layers: Iterable[Any], *, blocks: bool = True) -> int:
    """Joins the LoRA layers of transformer layers (Llama-like), in place. Returns the number of joined groups.

    Queries, keys and values are joined, so is the output projection with its own adapter, and the three of the
    feed-forward block. A group in which a layer has no LoRA stays as it is.

    Args:
        blocks: the feed-forward blocks are down(silu(gate(x)) * up(x)) and are joined too.
    """
    count = 0
    for layer in layers:
        attention, block = layer.self_attn, layer.mlp
        for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
            group = [getattr(attention, name) for name in names]
            if all(_may_join(module) and not _is_replaced(module) for module in group):
                shared = SharedInput(group)
                for number, module in enumerate(group):
                    module.forward = functools.partial(shared.call, number)
                if len(group) > 1:
                    attention.forward = functools.partial(shared.around, attention.forward)
                count += 1
        group = [getattr(block, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        if blocks and all(map(_may_join, group)):
            block.forward = functools.partial(_forward_block, block, block.forward)
            count += 1
    return count


def _may_join(module: nn.Module | None) -> bool:
    """True if it is a LoRA layer without variants (DoRA) and dropout, which are computed alone in training."""
    layer: LoraLayer = module
    if type(module) is not added_linear_class() or layer.lora_variant:
        return False
    return not any(getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values())


def _forward_block(block: Any, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    group = (block.gate_proj, block.up_proj, block.down_proj)
    # Checked in each call, because a later technique may replace a projection's `forward`.
    alone = any(_is_replaced(part) or _is_hooked(part) for part in group) or not is_joinable(x, group)
    return plain(x) if alone else compute_gated_block(x, *group)
