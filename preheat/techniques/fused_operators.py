"""Fused operators: RMSNorm and the gated activation as single operators that save only their inputs for backward.

What: transformers computes them as chains of small operators and keeps several intermediate tensors; here the norm
saves its input and one number per row, the gate its two inputs, and the backward pass recomputes the rest. Under
autocast the norm directly returns half precision, so that the linear layers behind it need no copies of their own. On
CUDA the norm is torch's fused kernel, and the gate and the rotary embedding are Triton kernels of one pass. On a CPU
with a C++ compiler all are C++ kernels of one pass; without one the norm runs over rows that stay in cache. On CUDA,
LoRA layers that share an input are computed together (`adapters`): fewer passes over activations in both directions,
and the product behind the gate is computed again instead of saved.
Helps: about a third less of a layer's saved activations without recomputing any matmul, and fewer passes over memory;
also under tensor parallel. With LoRA on CUDA, another fifth less.
Hurts: a compiler fuses the same operators by itself, and Liger has kernels for them on CUDA, so it cannot be combined
with either.
Source: saved inputs instead of intermediates as in Andoorveedu et al. 2022, Tempo (arXiv:2210.10246).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from preheat.core import Axis, Build, Change, Context, Numerics, Searchable, Stage, Tag, Technique, Trials
from preheat.errors import RecipeError
from preheat.hardware.cpp_build import find_compiler

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["FusedOperators", "fuse_operators"]

_GROUPS = "groups of LoRA layers"


def fuse_operators(
    model: PreTrainedModel,
    *,
    norm: bool = True,
    gate: bool = True,
    rotary: bool = False,
    adapters: bool = False,
    device: str = "cpu",
) -> dict[str, int]:
    """Replaces RMSNorms and gated activations of a transformers model (Llama-like) by fused operators, in place.

    Args:
        norm: replace the RMSNorms.
        gate: replace silu(a) * b of the feed-forward; other activations stay.
        rotary: replace the rotary embedding.
        adapters: compute LoRA layers that share an input together.
        device: cpu or cuda, on which the model runs.

    Returns:
        The number of replaced modules by kind.

    Raises:
        RecipeError: the model family has other norms.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=96
        ... )
        >>> fuse_operators(LlamaForCausalLM(config))
        {'norms': 5, 'gated activations': 2}
    """
    from preheat.models.hf import find_anatomy
    from preheat.models.kernel_swap import is_gated_silu, use_kernels
    from preheat.ops import fused_norm_gate, rowwise_cpu, rowwise_cuda
    from preheat.ops.adapters.joint_lora import join_adapters

    cuda = device == "cuda"
    # Only silu gates: the fused operator has this activation built in.
    gate = gate and is_gated_silu(model)
    counts = use_kernels(
        model,
        norm=fused_norm_gate.rms_norm if norm else None,
        rotary=(rowwise_cuda.rotary if cuda else rowwise_cpu.rotary) if rotary else None,
        gate=(rowwise_cuda.gated_silu if cuda else fused_norm_gate.gated_silu) if gate else None,
    )
    if adapters and (groups := join_adapters(find_anatomy(model).layers, blocks=gate)):
        counts[_GROUPS] = groups
    return counts


@dataclass(frozen=True, kw_only=True)
class FusedOperators(Searchable):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Numerics] = "rounding"
    trials: ClassVar[Trials] = Trials(settings=({"gate": False},))
    memory_saving: ClassVar[bool] = True
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.FUSED_OPERATORS})
    conflicts: ClassVar[frozenset[Tag]] = frozenset({Tag.FUSED_LAYERS, Tag.COMPILED_LAYERS})

    norm: bool = True
    """RMSNorm that saves only its input."""
    gate: bool = True
    """silu(a) * b of the feed-forward, saving only a and b; other activations stay as they are."""
    adapters: bool = True
    """On CUDA: LoRA layers that share an input are computed together, and the gate's product is computed again in
    backward instead of saved for them."""

    def search_numerics(self) -> Literal["rounding"]:
        return "rounding"

    def check(self, context: Context) -> list[str]:
        from preheat.models.kernel_swap import KERNEL_FAMILIES

        problems = []
        if context.model.family not in KERNEL_FAMILIES:
            problems.append(f"is for {', '.join(KERNEL_FAMILIES)}, not {context.model.family}; leave it out")
        if not (self.norm or self.gate or (self.adapters and context.device.kind == "cuda")):
            problems.append("norm, gate, adapters: none applies here; leave fused_operators out")
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        # DTensor has no rule for an operator of ours: register how its inputs may be sharded.
        if build.mesh.size(Axis.TENSOR) > 1:
            from preheat.ops.fused_norm_gate import register_row_sharding

            register_row_sharding()
        kind = build.device.kind
        counts = fuse_operators(
            part,
            norm=self.norm,
            gate=self.gate,
            # Without a compiler a CPU has no operator for it. With neither of the others, only adapters are meant.
            rotary=(self.norm or self.gate) and (kind == "cuda" or find_compiler() is not None),
            adapters=self.adapters and kind == "cuda",
            device=kind,
        )
        groups = counts.pop(_GROUPS, 0)
        parts = [", ".join(f"{n} {what}" for what, n in counts.items()) + " save only their inputs"] if counts else []
        parts += [f"{groups} groups of LoRA layers are computed together"] if groups else []
        if not parts:
            raise RecipeError(
                "techniques.fused_operators.adapters: no LoRA layers can be computed together; leave it out"
            )
        return Change("; ".join(parts), sum(counts.values()) + groups)

    def options(self, context: Context) -> Iterable[Technique]:
        # On a CPU without a compiler they are barely faster, and their plans have not been validated.
        return [self] if context.device.kind == "cuda" or find_compiler() is not None else []
