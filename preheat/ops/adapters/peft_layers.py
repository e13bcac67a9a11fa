"""peft adapters in a model: injection on meta, initialization once the base is loaded, merging."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from preheat.ops.adapters.moe_lora import adapted_experts, merge_pairs
from preheat.ops.adapters.tied_head import TiedHead, tie, untie
from preheat.ops.classification_head import ClassHead
from preheat.ops.grouped_mm import ADAPTER
from preheat.ops.memory.selective_checkpoint import can_keep_results
from preheat.ops.quantization.packed import FrozenPacked, FrozenPackedMap

if TYPE_CHECKING:
    from peft import PeftConfig
    from peft.tuners.tuners_utils import BaseTunerLayer

    from preheat.ops.autograd_context import AutogradContext


__all__ = [
    "add_product",
    "added_linear_class",
    "base_layer_of",
    "draw",
    "inject",
    "merge",
    "names_of",
    "adapter_tensors",
    "parameters_of",
    "count_parameters",
    "prevent_fp32_cast",
    "disable_adapters",
]


def inject(model: nn.Module, config: PeftConfig) -> list[str]:
    """Injects peft's adapters into the layers of `config.target_modules` and freezes the rest, in place and also on
    meta.

    A new classification head stays trainable.

    If the embedding is adapted and the head tied to it, `config.ensure_weight_tying` gives the head the same adapter.

    Returns:
        Names of the adapted modules.

    Raises:
        ValueError: no module matches, or a matching module is not supported by the method or shares its weight with
            another one (a tied head, without `ensure_weight_tying`).
    """
    # peft creates its parameters on the default device, so a model on meta needs the context.
    with torch.device("meta") if next(model.parameters()).device.type == "meta" else nullcontext():
        try:
            _inject(model, config)
        except TypeError as error:  # peft raises it for a layer type that a method does not support
            raise ValueError(str(error)) from None
        except ValueError as error:
            # peft raises ValueError for other causes too; only its two messages about missing targets are translated.
            if "arget modules" not in str(error) and "were targeted" not in str(error):
                raise
            experts = any(p.ndim == 3 and ".experts." in name for name, p in model.named_parameters())
            hint = "; its experts hold theirs in one parameter, which the name `experts` stands for" if experts else ""
            raise ValueError(f"matches no linear map of the model{hint}") from None
    uses: dict[int, int] = {}
    if getattr(config, "ensure_weight_tying", False):
        _tie_head(model)
    for module in model.modules():
        # peft froze everything that is not an adapter.
        if isinstance(module, ClassHead):
            module.requires_grad_(True)
        if isinstance(module, TiedHead):
            continue  # shares the embedding's parameters
        for p in module.parameters(recurse=False):
            uses[id(p)] = uses.get(id(p), 0) + 1
    names = names_of(model)
    for name in names:
        if any(uses[id(p)] > 1 for p in base_layer_of(model, name).parameters()):
            raise ValueError(
                f"{name} shares its weight with another module, which merging would change too; lora's embedding_rank "
                "adapts an embedding and the head tied to it"
            )
    return names


def _tie_head(model: nn.Module) -> None:
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    # peft's layers forward `weight` to their base, so identity means a tied head.
    if hasattr(embedding, "get_base_layer") and head is not None and head.weight is embedding.weight:
        tie(head, embedding)


def _inject(model: nn.Module, config: PeftConfig, *, part: bool = False) -> None:
    """As peft's `inject_adapter_in_model`, which rejects tensors common to all layers (VeRA's projections); here each
    layer holds them as its own buffers.

    Args:
        part: the model contains only some of the modules that the settings refer to.
    """
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.lora import Embedding, Linear
    from peft.tuners.lycoris_utils import LycorisLayer

    # peft writes into the config that it is given.
    config = copy.deepcopy(config)
    tied = getattr(config, "ensure_weight_tying", False)
    with warnings.catch_warnings():
        if tied or part:  # the tied head's rank is set for other tools that read the config
            warnings.filterwarnings("ignore", message="The following rank_pattern keys", category=RuntimeWarning)
        if tied:
            config.ensure_weight_tying = False  # preheat's `tied_head` handles it
        # If a model has both Linear and Conv1D, peft toggles this setting per layer and warns each time.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
        # `inject` rejects tied weights, about which peft only warns.
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        tuner, lora = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type], config.peft_type == "LORA"
        if lora and config.target_modules != "all-linear":
            facade = _strip_family(model)
            tuner(facade, config, "default")
            model.peft_config = facade.peft_config  # for the export
        else:
            tuner(model, config, "default")
        if tied:
            config.ensure_weight_tying = True
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = added_linear_class()
        if isinstance(module, Embedding):
            # peft draws these from N(0, 1), which scales hidden states by the square root of the width. Rescaled, a
            # step moves logits as far as it does with LoRA on a linear layer.
            for drawn in module.lora_embedding_B.values():
                drawn.data.mul_(drawn.shape[0] ** -0.5)
        if isinstance(module, LycorisLayer) and module.module_dropout == {"default": 0.0}:
            module.module_dropout["default"] = _Nothing()  # type: ignore[assignment]


def _strip_family(model: nn.Module) -> nn.Module:
    """Returns a module of the same children, to inject into, of which peft does not know the family.

    In families with experts peft takes `gate_proj`, `up_proj` and `down_proj` of dense blocks and shared experts for
    the experts' stacked matrices, because these had such names once.
    """
    facade: Any = nn.Module()
    facade._modules, facade._parameters = model._modules, model._parameters
    facade.config = {"model_type": "custom"}
    return facade  # type: ignore[no-any-return]


@functools.cache
def added_linear_class() -> type[nn.Module]:
    """Returns a LoRA linear layer that adds the low-rank product to the base's result, in place if possible.

    peft scales the product and adds it in separate passes over all outputs: twice the bytes in forward, and one more
    product over all outputs in backward.
    """
    from peft.tuners.lora import Linear

    class AddedLinear(Linear):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            names = self.active_adapters
            if args or kwargs or self.disable_adapters or self.merged or len(names) != 1 or not self.is_plain(names[0]):
                return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
            # [rank, in] and [out, rank]. The scale multiplies [tokens, rank], the smallest tensor of the product.
            down, up = self.lora_A[names[0]], self.lora_B[names[0]].weight
            # result + (dropout(x) A^T s) B^T
            result = self.base_layer(x)
            small = (
                down(self.lora_dropout[names[0]](self._cast_input_dtype(x, down.weight.dtype))) * self.scaling[names[0]]
            )
            return add_product(result, small, up)

        def is_plain(self, name: str) -> bool:
            """True if the up projection is only a local weight; a sharded or hooked module must be called itself."""
            # Variants such as DoRA compute more than a sum.
            if name not in self.lora_A or name in self.lora_variant:
                return False
            last = self.lora_B[name]
            return (
                last.bias is None
                and not isinstance(last.weight, DTensor)
                and not (last._forward_hooks or last._forward_pre_hooks)
            )

    return AddedLinear


def add_product(result: Tensor, small: Tensor, up: Tensor) -> Tensor:
    """Returns result + small @ up.t(), computed in place in `result` if nothing else needs it.

    Args:
        result: [..., out]; small: [..., rank]; up: [out, rank].
    """
    low = torch.is_autocast_enabled(result.device.type)
    apart = any(isinstance(t, DTensor) for t in (result, small, up))
    # Sharded operands, or a sum that is promoted and rounded: out of place, as peft computes it.
    if apart or small.dtype != result.dtype or not (low or up.dtype == result.dtype):
        return (result + functional.linear(small, up)).to(result.dtype)
    up = up.to(result.dtype)
    if torch.compiler.is_compiling():  # the compiler fuses the addition
        return result + functional.linear(small, up)
    # in place, autograd would copy a view's gradient
    if result._is_view() or not result.is_contiguous() or can_keep_results():
        rows = torch.addmm(result.reshape(-1, result.shape[-1]), small.reshape(-1, small.shape[-1]), up.t())
        return rows.view(result.shape)
    # The base's matmul does not need its own result for backward, so overwriting it is safe.
    return _Added.apply(result, small, up)  # type: ignore[no-any-return,no-untyped-call]


class _Added(torch.autograd.Function):
    """`add_product` in place."""

    @staticmethod
    def forward(ctx: AutogradContext, result: Tensor, small: Tensor, up: Tensor) -> Tensor:
        # Autograd then knows that `result` is modified, and raises if another operator saved it.
        ctx.mark_dirty(result)
        ctx.save_for_backward(small, up)
        result.view(-1, result.shape[-1]).addmm_(small.reshape(-1, small.shape[-1]), up.t())
        return result

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        small, up = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        by_small = torch.mm(rows, up).view(small.shape) if ctx.needs_input_grad[1] else None  # [tokens, rank]
        # [out, rank]
        by_up = torch.mm(rows.t(), small.reshape(-1, small.shape[-1])) if ctx.needs_input_grad[2] else None
        # d (result + small up^T): the base's gradient passes through, [tokens, out] without a copy.
        return grad, by_small, by_up


class _Nothing:
    """Zero module dropout without a random draw: LoHa and LoKr would sync one from the device in each layer."""

    def __lt__(self, draw: object) -> bool:
        return True


def names_of(model: nn.Module) -> list[str]:
    """Returns the names of the adapted modules."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def base_layer_of(model: nn.Module, name: str) -> Any:
    """Returns the base layer under an adapter."""
    return model.get_submodule(name).get_base_layer()  # type: ignore[operator]


def parameters_of(model: nn.Module, names: list[str]) -> str:
    """Returns a regular expression that matches the adapters' own parameters and buffers."""
    # First name parts only (lora_A, lora_B, ...), so that the expression stays short for any number of layers.
    own = {key for name in names for key, _ in adapter_tensors(model.get_submodule(name))}
    return r"\.(" + "|".join(sorted(re.escape(key.partition(".")[0]) for key in own)) + r")(\.|$)"


def adapter_tensors(layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters and buffers of an adapted module without those of its base."""
    return [(k, t) for k, t in (*layer.named_parameters(), *layer.named_buffers()) if not k.startswith("base_layer.")]


def draw(model: nn.Module, config: PeftConfig, names: list[str]) -> None:
    """Initializes adapters as peft does, in place, once the base weights are loaded.

    Lets peft recreate each module over an fp32 copy of the base, so that values derived from the base (DoRA's
    magnitudes, PiSSA's singular vectors) are correct, and copies back what a method subtracts from the base (PiSSA).
    """
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    # VeRA and RandLoRA draw projections that all layers share: they are recreated together. Other methods go module by
    # module, so that only one fp32 copy of a base exists at a time.
    shared = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type].uses_shared_state or config.peft_type == "RANDLORA"
    for group in [names] if shared else [[name] for name in names]:
        _draw(model, config, group, in_fp32=not shared)


def _draw(model: nn.Module, config: PeftConfig, names: list[str], *, in_fp32: bool) -> None:
    alone: nn.Module = nn.Module()  # contains only the adapted modules' bases, under their names
    alone.config = getattr(model, "config", None) or {"model_type": "custom"}  # type: ignore[assignment]
    bases: dict[str, tuple[Any, Any]] = {}
    for name in names:
        base = base_layer_of(model, name)
        if not isinstance(base, FrozenPackedMap):
            low = base.weight.dtype != torch.float32
            bases[name] = base, (copy.deepcopy(base).float() if low and in_fp32 else base)
        elif base.weight.is_meta:
            # Of another pipeline stage: its adapter is drawn so that all stages consume the same random numbers.
            device = next(tensor.device for _, tensor in adapter_tensors(model.get_submodule(name)))
            bases[name] = base, _create_stand_in(base, device)
        else:  # dequantizes to fp32 itself
            bases[name] = base, base
        # The same module path, since per-layer ranks (rank_pattern) match on names.
        parent, (*path, last) = alone, name.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, bases[name][1])
    config = copy.deepcopy(config)
    # Full names select exactly these modules, whatever form the original selection had.
    config.target_modules, config.exclude_modules = set(names), None
    _inject(alone, config, part=True)
    with torch.no_grad():
        for name, (base, full) in bases.items():
            values = dict(adapter_tensors(alone.get_submodule(name)))
            for key, target in adapter_tensors(model.get_submodule(name)):
                target.copy_(values[key])
            # PiSSA and its like subtract the initial pair from the base: the copy's weight goes back, rounded once.
            if full is not base:
                base.weight.copy_(full.weight)


def _create_stand_in(base: FrozenPackedMap, device: torch.device) -> nn.Module:
    """Returns a plain layer of zeros in place of a packed one on meta."""
    plain = copy.deepcopy(base)
    plain.unpack_()
    plain.to_empty(device=device)
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    return plain


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Context manager that disables a model's adapters, in place.

    Sets peft's flag on each layer directly, since `enable_adapters` would also toggle requires_grad.
    """
    layers: list[BaseTunerLayer] = [model.get_submodule(name) for name in names_of(model)]
    pairs: list[Any] = [vars(experts)[ADAPTER] for experts in adapted_experts(model)]
    # `disable_adapters` of the layer reads this attribute.
    for layer in layers:
        layer._disable_adapters = True
    for pair in pairs:
        pair.off = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        for pair in pairs:
            pair.off = False


def prevent_fp32_cast(model: nn.Module) -> None:
    """Keeps peft from casting adapter inputs to fp32 under autocast, which would cast them back at once. In place.

    Each cast makes a copy that is saved for backward, per adapted layer; the results are the same.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    # Under autocast the matmul casts to half precision itself, so an fp32 copy is pure waste.
    def cast(by_peft: Callable[[Tensor, torch.dtype], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
        return x if torch.is_autocast_enabled(x.device.type) else by_peft(x, dtype)

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module._cast_input_dtype = functools.partial(  # type: ignore[method-assign,assignment]
                cast, module._cast_input_dtype
            )


def merge(model: nn.Module) -> int:
    """Merges every adapter into its base in fp32 and removes the adapters, in place. A 4-bit base is dequantized.

    Returns:
        The number of merged adapters.

    Raises:
        ValueError: an adapter cannot be merged into a weight.
    """
    names = names_of(model)
    # A merged NF4 layer gets the dtype of the model's first weight.
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for name in names:
        layer: BaseTunerLayer = model.get_submodule(name)
        base = layer.get_base_layer()
        if isinstance(base, FrozenPackedMap):
            base.unpack_()
            base_dtype = dtype
        else:
            base_dtype = base.weight.dtype
        # In fp32, so that the sum of base and adapter is rounded once.
        base.float()
        with torch.no_grad():
            layer.merge()
        base.to(base_dtype)
        parent, _, last = name.rpartition(".")
        # The base replaces peft's wrapper, so that names are those of the original model again.
        setattr(model.get_submodule(parent), last, base)
    merged = len(names) + merge_pairs(model, dtype)
    # Packed layers without an adapter, too: a merged model is a plain one.
    for packed in [module for module in model.modules() if isinstance(module, FrozenPacked)]:
        packed.unpack_()
        packed.to(dtype)
    for module in model.modules():
        if isinstance(module, TiedHead):
            untie(module)
    # The tuner left its settings on the model; they describe no adapter any more.
    vars(model).pop("peft_config", None)
    return merged


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Returns the numbers of trained and of all weights; counts packed weights as weights, not bytes."""
    # Packed codes are counted as bytes at first, and replaced by the layer's true size.
    total = sum(p.numel() for p in model.parameters())
    for module in model.modules():
        if isinstance(module, FrozenPacked):
            weights, elements = module.count_packed()
            total += weights - elements
    return sum(p.numel() for p in model.parameters() if p.requires_grad), total
