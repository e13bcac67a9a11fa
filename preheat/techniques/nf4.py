"""NF4: quantizes the frozen base to 4 bits; with LoRA this is QLoRA.

What: stores the weights of the linear layers in NF4, 16 levels at the quantiles of a normal distribution, with one
scale per 64 weights; the scales are quantized to 8 bits: 0.516 bytes per weight. Forward and backward dequantize each
weight while they use it. Experts that are one parameter are quantized too, unless `experts` is false. Embedding, head,
routers, norms and biases are not. Adapters are trained on top: `lora` with `nf4` is QLoRA (with
`variant: dora`, QDoRA).
Helps: the base needs an eighth of its fp32 and a quarter of its bf16 memory, so that larger models fit.
Hurts: each use of a weight dequantizes it, which slows steps down (most on short batches); the base is rounded (by
about 9 % of a weight's norm), and an adapter is trained to fit that rounded base. Merging gives full-precision weights:
those of the rounded base plus the adapter.
Source: QLoRA, Dettmers et al. 2023 (arXiv:2305.14314); the 8-bit scales: Dettmers et al. 2021 (arXiv:2110.02861).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from preheat.core import Build, Change, Context, Numerics, Searchable, Stage, Tag, Trials
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["Nf4", "dequantize_from_nf4", "quantize_to_nf4"]


def quantize_to_nf4(
    model: nn.Module, *, double_quantization: bool = True, keep: str | tuple[str, ...] = (), experts: bool = True
) -> list[str]:
    """Quantizes a transformers model's linear layers, except its head, and its experts to NF4, in place; on meta only
    their shapes.

    They cannot be trained any more: add an adapter next.

    Args:
        keep: further layers to leave out: a regular expression for module names, or their last parts
            (`("down_proj",)`).
        experts: quantize experts whose matrices are one parameter, too: `preheat.ops.grouped_mm.compute_experts`
            computes them then.

    Returns:
        Names of the quantized modules.

    Raises:
        ValueError: `keep` matches no linear layer, or nothing is left to quantize.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=16
        ... )
        >>> len(quantize_to_nf4(LlamaForCausalLM(config), keep=("down_proj",)))
        6
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from preheat.models.hf import head
    from preheat.models.moe import experts_of, routers
    from preheat.ops.quantization.packed import FrozenPacked
    from preheat.ops.quantization.packed_experts import pack_modules_

    last = head(model)  # type: ignore[arg-type]
    routing = {id(m) for router in routers(model) for m in router.modules()}
    maps = {
        name: m
        for name, m in model.named_modules()
        if type(m) in (nn.Linear, Conv1D) and m is not last and id(m) not in routing
    }
    stacked = {id(m) for m in experts_of(model) if not isinstance(m, FrozenPacked)} if experts else set()
    try:
        excluded = {name for name in maps if _is_matching(name, keep)}
    except re.error as error:
        raise ValueError(f"keep: {quote_value(keep)} is not a regular expression ({error})") from None
    if keep and not excluded:
        raise ValueError(f"keep: {quote_value(keep)} matches no linear map of the model")
    chosen = {
        name: m for name, m in model.named_modules() if (name in maps and name not in excluded) or id(m) in stacked
    }
    if not chosen:
        raise ValueError(f"keep: {quote_value(keep)} leaves no linear map to quantize")
    # Weights become packed bytes and scales, two values in a byte.
    pack_modules_(list(chosen.values()), double=double_quantization)
    return list(chosen)


def _is_matching(name: str, keep: str | tuple[str, ...]) -> bool:
    if isinstance(keep, str):
        return bool(keep) and re.fullmatch(keep, name) is not None
    return any(name == part or name.endswith(f".{part}") for part in keep)


def dequantize_from_nf4(model: nn.Module) -> int:
    """Dequantizes every NF4 layer to a plain one in fp32, in place. Returns their number."""
    from preheat.ops.quantization.nf4 import PackedMap
    from preheat.ops.quantization.packed_experts import Nf4Experts

    packed = [m for m in model.modules() if isinstance(m, (PackedMap, Nf4Experts))]
    for module in packed:
        module.unpack_()
    return len(packed)


@dataclass(frozen=True, kw_only=True)
class Nf4(Searchable):
    # Before ADAPT: adapters wrap the quantized layers.
    stage: ClassVar[Stage] = Stage.COMPRESS
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(settings=({"double_quantization": False, "keep": ".*down_proj"},))
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.QUANTIZED_BASE})
    needs: ClassVar[frozenset[Tag]] = frozenset({Tag.FROZEN_BASE})  # 4-bit weights cannot be trained
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.QUANTIZED_BASE})

    def search_numerics(self) -> Literal["different"]:
        return "different"

    double_quantization: bool = True
    """Quantize the scales too: 0.516 bytes per weight instead of 0.5625."""
    keep: str | tuple[str, ...] = ()
    """Linear layers besides the head that are not quantized: a regular expression for module names, or a list of their
    last parts."""
    experts: bool = True
    """Quantize experts whose matrices are one parameter, in models that have them."""

    def check(self, context: Context) -> list[str]:
        if self.experts and Tag.SHARDED_EXPERTS in context.tags:
            return ["experts: expert_parallel moves experts in full precision; set experts: false, or use fsdp"]
        return []

    def apply(self, build: Build, part: PreTrainedModel) -> Change:
        from preheat.errors import RecipeError
        from preheat.ops.adapters.peft_layers import count_parameters
        from preheat.ops.quantization.packed_experts import Nf4Experts

        try:
            names = quantize_to_nf4(
                part,
                double_quantization=self.double_quantization,
                keep=self.keep,
                experts=self.experts,
            )
        except ValueError as error:
            raise RecipeError(f"techniques.nf4.{error}") from None
        modules: list[Any] = [part.get_submodule(name) for name in names]
        # The weights are quantized as they are read from the folder.
        build.weights.pack(modules, r"\.nf4_")
        # The original shapes, which the packed parameters no longer have.
        weights = sum(m.count_weights() for m in modules)
        packed_bytes = sum(m.count_packed_bytes() for m in modules)
        rest = count_parameters(part)[1] - weights
        experts = sum(isinstance(m, Nf4Experts) for m in modules)
        layers = f" and the experts of {experts} layers" if experts else ""
        return Change(
            f"{len(names) - experts} linear maps{layers} in NF4: {weights:,} weights at "
            f"{packed_bytes / weights:.3f} bytes; {rest:,} stay as they are",
            len(names),
        )
