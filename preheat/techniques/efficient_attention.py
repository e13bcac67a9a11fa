"""Efficient attention: fused kernels, the kernel stated, without scores, repeated keys or a mask tensor in memory.

What: scaled-dot-product attention block by block; grouped queries read their shared keys and values without copies; causal
by an argument; packed documents attended one by one.
Helps: memory linear in length instead of quadratic, and less traffic. On a CPU in bf16 `blocks` (batched products over
blocks of queries) is 1.1 to 2 times as fast as torch's own kernel up to 2,048 tokens. Hurts: nothing known where a fused kernel
exists; the sums are ordered otherwise, so results agree up to rounding, and `blocks` rounds scores to bf16 too.
Source: Dao et al. 2022 (arXiv:2205.14135); grouped queries: Ainslie et al. 2023 (arXiv:2305.13245).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from preheat.technique import Build, Change, Context, MaskSpec, Slot, Stage, Tag, Technique

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EfficientAttention", "attend"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskSpec | None = None, scale: float | None = None, kernel: str = "flash"
) -> Tensor:
    """Fused attention of [rows, heads, length, head_dim]; `k` and `v` may have fewer heads.

    Args:
        mask: causal over the whole row when not given.
        scale: head_dim ** -0.5 when not given.
        kernel: flash, efficient, cudnn or math of torch, which raises where they cannot serve; or blocks.

    Example:
        >>> import torch
        >>> attend(torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)).shape
        torch.Size([1, 4, 8, 16])
    """
    return _kernel(kernel)(q, k, v, mask or MaskSpec(), scale if scale is not None else q.shape[-1] ** -0.5)


def _kernel(name: str) -> Callable[..., Tensor]:
    from preheat.ops.attention import blocked_attention, sdpa_attention

    return blocked_attention if name == "blocks" else functools.partial(sdpa_attention, kernel=name)


_BLOCKS_UP_TO = 2048  # tokens; benchmarks/results/attention_cpu.md


@dataclass(frozen=True, kw_only=True)
class EfficientAttention(Technique):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Any] = "exact"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.ATTENTION_KERNEL})

    kernel: Literal["auto", "flash", "efficient", "cudnn", "blocks"] = "auto"
    """The kernel; auto takes the fastest that serves: on a CPU blocks for bf16 up to 2,048 tokens, else flash; on CUDA flash,
    or efficient for fp32. The run records which."""

    def _chosen(self, context: Context | Build) -> str:
        if self.kernel != "auto":
            return self.kernel
        half = Tag("bf16-compute") in context.tags
        if context.device.kind == "cpu":
            return "blocks" if half and context.recipe.batch.length <= _BLOCKS_UP_TO else "flash"
        return "flash" if half else "efficient"

    def check(self, context: Context) -> list[str]:
        why = []
        window, length = context.model.window, context.recipe.batch.length
        if window is not None and window < length:
            why.append(f"the model's window of {window} is shorter than batch.length {length}, and SDPA has no window")
        chosen = self._chosen(context)
        if context.device.kind == "cpu" and chosen not in ("flash", "blocks"):
            why.append(f"kernel: {chosen} needs a CUDA device; use flash, blocks or auto")
        if chosen == "flash" and context.device.kind == "cuda" and Tag("bf16-compute") not in context.tags:
            why.append("kernel: flash on CUDA needs bf16 or fp16; add mixed_precision, or use kernel: efficient")
        if chosen == "efficient" and context.model.kv_heads != context.model.heads:
            why.append(
                "kernel: efficient cannot share keys and values among heads; compute in bf16, which the flash kernel can"
            )
        return why

    def apply(self, build: Build, part: Any) -> Change:
        chosen = self._chosen(build)
        build.own(Slot.ATTENTION_KERNEL, _kernel(chosen), self.name())
        shared = (
            f", {build.model.heads} query heads on {build.model.kv_heads}" if build.model.kv_heads != build.model.heads else ""
        )
        return Change(f"attention of {build.model.layers} layers{shared}", build.model.layers, kernel=chosen)
