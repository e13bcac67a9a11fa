"""Liger: Triton kernels for RMSNorm, rotary embedding, the gated activation, and head plus loss.

What: each of these operators is one kernel of the liger-kernel package, which saves less for the backward pass than
torch's chain of operators. Only this run's model is patched, not transformers itself. `loss` also fuses head and cross
entropy.
Helps: these operators are memory-bound, and read and write once when fused.
Hurts: CUDA only; a compiler fuses the same operators by itself; `loss` reads two numbers back from the device in each
micro-batch. The plan models them as fused_operators, which save the same tensors (Triton kernels cannot run without a
device), and the rotary embedding as torch's own.
Source: Hsu et al. 2024, Liger Kernel (arXiv:2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from preheat.core import (
    Build,
    Change,
    Context,
    MissingPackage,
    Numerics,
    Searchable,
    Slot,
    Stage,
    Tag,
    Technique,
    Trials,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

__all__ = ["Liger", "use_liger"]

T = TypeVar("T")


def use_liger(model: PreTrainedModel, *, norm: bool = True, rotary: bool = True, gate: bool = True) -> dict[str, int]:
    """Switches a transformers model (Llama-like) to Liger's kernels, in place; other models are not affected.

    Returns:
        The number of modules by kernel.

    Raises:
        RecipeError: these kernels do not support the model family.
        ImportError: liger-kernel is not installed.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM                      # doctest: +SKIP
        >>> use_liger(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2)).cuda())        # doctest: +SKIP
        {'norms': 5, 'rotary embeddings': 2, 'gated activations': 2}
    """
    import torch
    from liger_kernel.transformers.functional import liger_rms_norm, liger_rope, liger_swiglu
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    from preheat.models.kernel_swap import use_kernels
    from preheat.ops.fused_norm_gate import gated_silu, rms_norm

    # Chosen in each call: one model is planned and then trained.
    def fall_back_on_cpu(kernel: Callable[..., T], plain: Callable[..., T]) -> Callable[..., T]:
        # Triton kernels cannot run on the fake tensors of a dry run.
        return lambda *tensors: (plain if is_in_torch_dispatch_mode() else kernel)(*tensors)

    # q, k: [rows, heads, length, head_dim]; cos, sin: [rows, length, head_dim].
    def apply_plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

        def rotate_half(x: Tensor) -> Tensor:
            # Rotates the two halves of a head against each other, as Llama does (not neighbouring pairs).
            a, b = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-b, a), dim=-1) * sin

        return rotate_half(q), rotate_half(k)

    return use_kernels(
        model,
        norm=fall_back_on_cpu(liger_rms_norm, rms_norm) if norm else None,
        rotary=fall_back_on_cpu(liger_rope, apply_plain_rotary) if rotary else None,
        gate=fall_back_on_cpu(liger_swiglu, gated_silu) if gate else None,
    )


@dataclass(frozen=True, kw_only=True)
class Liger(Searchable):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Numerics] = "rounding"
    trials: ClassVar[Trials] = Trials(refused_on_cpu="need a CUDA device")
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OVER_LOGITS})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.FUSED_LAYERS})
    searched_on: ClassVar[frozenset[str]] = frozenset({"cuda"})

    norm: bool = True
    """RMSNorm by Liger."""
    rotary: bool = True
    """Rotary embedding by Liger."""
    gate: bool = True
    """silu(a) * b of the feed-forward by Liger."""
    loss: bool = False
    """Head and cross entropy by Liger, in chunks of its own choice."""

    def claimed(self) -> frozenset[Slot]:
        return self.owns if self.loss else frozenset()

    def provided(self) -> frozenset[Tag]:
        # The loss alone replaces no module of the layers.
        return self.provides if self.norm or self.rotary or self.gate else frozenset()

    def search_numerics(self) -> Literal["rounding"]:
        return "rounding"

    def options(self, context: Context) -> Iterable[Technique]:
        # A remote device may lack the package; fused_operators, which have the same plan, ship with preheat.
        return [self] if context.device.at_hand else []

    def check(self, context: Context) -> list[str]:
        from preheat.models.kernel_swap import KERNEL_FAMILIES

        if context.device.kind != "cuda":
            return [
                "Liger's kernels need a CUDA device; leave it out on a CPU (use chunked_loss and efficient_attention "
                "there)"
            ]
        # Looked up, not imported: importing Liger imports torch and Triton.
        import importlib.util

        problems: list[str] = []
        if importlib.util.find_spec("liger_kernel") is None:
            problems.append(MissingPackage("liger-kernel is not installed", "pip install liger-kernel"))
        if context.model.family not in KERNEL_FAMILIES and self.provided():
            problems.append(
                f"its norm, rotary and gate are for {', '.join(KERNEL_FAMILIES)}, not "
                f"{context.model.family}; set all three to false"
            )
        if not (self.norm or self.rotary or self.gate or self.loss):
            problems.append("norm, rotary, gate, loss: all are false; leave liger out")
        if self.loss and (
            other := [t.name() for t in context.recipe.techniques.values() if Slot.ROW_LOSS in t.claimed()]
        ):
            problems.append(f"loss: is plain cross entropy, without the terms of {other[0]}; set loss: false")
        if self.loss and context.model.logit_softcap:
            problems.append(f"loss: would leave out the cap on the logits of {context.model.family}; set loss: false")
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        # Only these modules: transformers itself stays as it is for other models in the process.
        counts = use_liger(part, norm=self.norm, rotary=self.rotary, gate=self.gate) if self.provided() else {}
        if self.loss:
            from preheat.models.hf import require_plain_head
            from preheat.ops.losses.cross_entropy import sum_liger_loss

            require_plain_head(part, self.name())
            build.claim(Slot.OVER_LOGITS, sum_liger_loss, self.name())
            counts = {**counts, "head with loss": 1}
        return Change(", ".join(f"{n} {what}" for what, n in counts.items()), sum(counts.values()), kernel="liger")
