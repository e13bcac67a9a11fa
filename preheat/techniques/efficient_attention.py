"""Efficient attention: fused attention kernels without scores, repeated keys or a mask tensor in memory.

What: blockwise scaled-dot-product attention with an explicit kernel; grouped queries read their shared keys and values
without copies; causal masking by an argument; packed documents separately (on CUDA in one call of flash attention's
variable-length form); windows by kernels that skip masked blocks.
Helps: memory linear in length instead of quadratic (benchmarks/results/attention_memory.md), and less memory traffic.
On a CPU `blocks` is 1.4 to 3.5 times as fast as torch's own kernel up to 4,096 tokens with its C++ kernel, and in bf16
1.1 to 2 times up to 2,048 without a compiler (benchmarks/results/attention_cpu.md).
Hurts: no known disadvantage if a fused kernel exists; the order of sums differs, so results agree up to rounding, and
`blocks` without its C++ kernel rounds scores to bf16 too. On an H200 all kernels but those of the flash-attn packages,
which were not run, agree with fp64 (benchmarks/results/gpu_check-correct.md).
Source: Dao et al. 2022 (arXiv:2205.14135); FlashAttention 2 (arXiv:2307.08691) and 3 (arXiv:2407.08608); FlexAttention:
Dong et al. 2024 (arXiv:2412.05496); grouped queries: Ainslie et al. 2023 (arXiv:2305.13245).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from preheat.core import (
    Axis,
    Build,
    Change,
    Context,
    MaskSpec,
    MissingPackage,
    Numerics,
    Searchable,
    Slot,
    Stage,
    Tag,
    Trials,
)
from preheat.hardware.cpp_build import find_compiler

if TYPE_CHECKING:
    from torch import Tensor, nn

    from preheat.ops.attention.multihead import EfficientAttention

    Model = TypeVar("Model", bound=nn.Module)

__all__ = [
    "EfficientAttention",
    "EfficientAttentionTechnique",
    "attend",
    "convert_model_to_efficient_attention",
    "efficient_attention",
]


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskSpec | None = None, scale: float | None = None, kernel: str = "flash"
) -> Tensor:
    """Computes fused attention of [rows, heads, length, head_dim]; `k` and `v` may have fewer heads.

    Args:
        mask: causal over the whole row by default.
        scale: head_dim ** -0.5 by default.
        kernel: torch's flash, efficient, cudnn or math, which raise if they do not support the inputs; blocks; flex;
            flash2 or flash3.

    Example:
        >>> import torch
        >>> attend(torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)).shape
        torch.Size([1, 4, 8, 16])
    """
    return _choose_kernel(kernel)(q, k, v, mask or MaskSpec(), scale if scale is not None else q.shape[-1] ** -0.5)


def convert_model_to_efficient_attention(model: Model) -> Model:
    """Switches a model to preheat's attention kernels, in place; weights, names and signatures are unchanged.

    A transformers model (decoder or encoder) uses its own attention interface: padding masks, caches and generation
    work, and windows are computed as windows. Rows packed by `position_ids` and steps with a cache use a mask tensor,
    as in transformers. In any other model each `torch.nn.MultiheadAttention` is replaced: key_padding_mask, attn_mask
    and batch_first keep their meaning. `need_weights=True` still returns weights, with all scores in memory; by default
    the weights are None. (torch's TransformerEncoderLayer uses its own kernel in eval mode without gradients, converted
    or not.)

    Returns:
        The model.

    Raises:
        ValueError: the attention cannot be replaced, or none was found; the message names it.

    Example:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> convert_model_to_efficient_attention(layer)(torch.randn(2, 10, 16)).shape
        torch.Size([2, 10, 16])
    """
    from preheat.models.attention_patch import is_transformers_model, switch_attention
    from preheat.ops.attention.multihead import attend_any, convert_multihead

    if is_transformers_model(model):
        switch_attention(model, attend_any)  # type: ignore[arg-type]
    elif not convert_multihead(model):
        raise ValueError(
            f"{type(model).__name__} is no transformers model and holds no torch.nn.MultiheadAttention to convert"
        )
    return model


efficient_attention = convert_model_to_efficient_attention


def __getattr__(name: str) -> type[nn.Module]:
    """Imports `EfficientAttention` on first access: the module is a torch class."""
    if name != "EfficientAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from preheat.ops.attention.multihead import EfficientAttention

    return EfficientAttention


def _choose_kernel(name: str, *, varlen: bool | None = None) -> Callable[..., Tensor]:
    if name == "blocks":
        from preheat.ops.attention.blockwise import attend_blockwise

        return attend_blockwise
    if name == "flex":
        from preheat.ops.attention.flex import compiled_flex_attention

        return compiled_flex_attention
    if name in _PACKAGES:
        from preheat.ops.attention.flash_package import flash_package_attention

        return functools.partial(flash_package_attention, version=int(name[-1]))
    from preheat.ops.attention.sdpa import sdpa_attention

    return functools.partial(sdpa_attention, kernel=name, varlen=varlen)


_PACKAGES = {  # kernel -> (distribution, install command)
    "flash2": ("flash-attn", "pip install flash-attn --no-build-isolation"),
    "flash3": (
        "flash-attn-3",
        'pip install --no-build-isolation "git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper"',
    ),
}
_WINDOWS = {"blocks", "flex", "flash2", "flash3"}  # windows, without computing masked blocks
_GLOBAL = {"blocks", "flex"}  # first tokens of a document that all of it sees
_SOFTCAP = {"blocks", "flex"}  # capped scores
_FLASH_HEAD = 256  # the largest head_dim of flash attention's kernels
_FLEX_HEAD = 16  # the smallest head_dim that FlexAttention's CUDA kernels support
_AMPERE = (8, 0)  # the lowest compute capability of flash attention
_CUDNN = (9, 10)  # major compute capabilities for which torch prefers cuDNN's attention
_CUDNN_VERSION = 91500  # torch prefers cuDNN above this version (`check_prefer_cudnn_attention` in sdp_utils.cpp)
_CUDNN_HEAD = 128  # the largest head_dim that every cuDNN version supports in both passes


def _is_half(context: Context | Build) -> bool:
    return bool({Tag.BF16_COMPUTE, Tag.FP16_COMPUTE} & context.tags)


@dataclass(frozen=True, kw_only=True)
class EfficientAttentionTechnique(Searchable):
    stage: ClassVar[Stage] = Stage.KERNEL
    numerics: ClassVar[Numerics] = "exact"
    trials: ClassVar[Trials] = Trials(settings=({"kernel": "blocks"},))
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.ATTENTION_KERNEL})

    kernel: Literal["auto", "flash", "efficient", "cudnn", "blocks", "flex", "flash2", "flash3"] = "auto"
    """The kernel; auto takes the fastest that supports the model: on a CPU blocks for windows, capped scores (Gemma 2)
    and up to 4,096 tokens (without a C++ compiler 2,048 in bf16), otherwise flash; on CUDA flash in half precision
    (cudnn for sequences of one document if torch prefers it: Hopper), efficient in fp32, and flex for capped scores,
    global tokens, and windows in fp32. flash2 and flash3 are separate packages. The run records the choice."""

    def _choose_kernel(self, context: Context | Build) -> str:
        if self.kernel != "auto":
            return self.kernel
        from preheat.ops.attention.causal_cpu import UP_TO
        from preheat.ops.attention.multihead import BLOCKS_UP_TO

        # On a CPU torch's kernel has no window and no cap, and is slower than blocks for short rows.
        if context.device.kind == "cpu":
            fast = UP_TO if _can_use_blocks(context) else BLOCKS_UP_TO if Tag.BF16_COMPUTE in context.tags else 0
            return "blocks" if _is_beyond_causal(context) or context.recipe.batch.seq_len <= fast else "flash"
        # An unknown capability, as of a device given by its figures, counts as recent.
        if _is_half(context) and (context.device.capability or _AMPERE) >= _AMPERE and _is_flash_supported(context):
            return "cudnn" if _is_cudnn_preferred(context) else "flash"
        # Of the remaining kernels, flex supports any mask but no tiny heads, and efficient only aligned heads.
        if _is_beyond_causal(context) or context.model.head_dim % _required_alignment(context):
            return "flex" if context.model.head_dim >= _FLEX_HEAD else "blocks"
        return "efficient"

    def search_numerics(self) -> Literal["exact"]:
        return "exact"

    def check(self, context: Context) -> list[str]:
        chosen, cuda = self._choose_kernel(context), context.device.kind == "cuda"
        half = _is_half(context)
        # With cuDNN's attention, auto uses flash attention for windows.
        flash = {"flash", "cudnn"} if self.kernel == "auto" else {"flash"}
        problems = []
        if (
            _has_window(context)
            and chosen not in _WINDOWS
            and not (cuda and chosen in flash and _is_flash_supported(context))
        ):
            problems.append(
                f"kernel: {chosen} does not support windows, and attention here has one; use blocks, flex or auto"
            )
        if context.model.score_softcap and chosen not in _SOFTCAP:
            problems.append(
                f"kernel: {chosen} cannot cap its scores, as {context.model.family} does; use blocks, flex or auto"
            )
        if Tag.GLOBAL_TOKENS in context.tags and chosen not in _GLOBAL and chosen in _WINDOWS:
            problems.append(f"kernel: {chosen} has no global tokens; use blocks, flex or auto")
        if chosen == "flex" and not cuda:
            problems.append(
                "kernel: flex needs a CUDA device, since torch has no backward "
                "pass for it on a CPU; use blocks, flash or auto"
            )
        elif not cuda and chosen not in ("flash", "blocks"):
            problems.append(f"kernel: {chosen} needs a CUDA device; use flash, blocks or auto")
        if chosen == "flex" and cuda and context.model.head_dim < _FLEX_HEAD:
            problems.append(
                f"kernel: flex needs heads of at least {_FLEX_HEAD}, and the "
                f"model's have {context.model.head_dim}; use blocks"
            )
        if chosen in ("flash", *_PACKAGES) and cuda and not half:
            problems.append(
                f"kernel: {chosen} on CUDA needs bf16 or fp16; add mixed_precision, or use kernel: efficient"
            )
        if chosen == "flash" and cuda and (context.device.capability or _AMPERE) < _AMPERE:
            problems.append(
                "kernel: flash needs an Ampere GPU (8.0) or later, and this one "
                f"is {context.device.capability}; use efficient or auto"
            )
        if chosen in _PACKAGES and context.device.at_hand and not _is_installed(_PACKAGES[chosen][0]):
            name, command = _PACKAGES[chosen]
            problems.append(MissingPackage(f"kernel: {chosen} needs the package {name}", command))
        if chosen == "flash3" and cuda and context.device.capability is not None and context.device.capability < (9, 0):
            problems.append(
                "kernel: flash3 needs a Hopper GPU (9.0), and this one is "
                f"{context.device.capability}; use flash2 or flash"
            )
        if chosen == "efficient" and context.model.head_dim % (align := _required_alignment(context)):
            problems.append(
                f"kernel: efficient needs heads of a multiple of {align}, and "
                f"the model's have {context.model.head_dim}; use blocks"
            )
        return problems

    def apply(self, build: Build, part: nn.Module) -> Change:
        chosen = self._choose_kernel(build)
        # If auto selects cuDNN, packed rows and windows still use flash attention.
        both = self.kernel == "auto" and chosen == "cudnn"
        # By the recipe's device: a dry run computes on another one.
        kernel = _choose_kernel("preferred" if both else chosen, varlen=True if build.device.kind == "cuda" else None)
        build.claim(Slot.ATTENTION_KERNEL, kernel, self.name())
        shared = (
            f", {build.model.heads} query heads on {build.model.kv_heads}"
            if build.model.kv_heads != build.model.heads
            else ""
        )
        more = ", packed sequences by flash" if both else ""
        return Change(f"attention of {build.model.layers} layers{shared}{more}", build.model.layers, kernel=chosen)


def _score_dim(context: Context | Build) -> int:
    """Returns the dimension of the queries and keys that kernels get."""
    return context.model.head_dim + context.model.alibi_dim


def _has_window(context: Context | Build) -> bool:
    """Returns True if some layer sees less than a sequence, by the model's own window or by a technique."""
    window = context.model.window
    return Tag.SLIDING_WINDOW in context.tags or (window is not None and window < context.recipe.batch.seq_len)


def _is_beyond_causal(context: Context | Build) -> bool:
    """Returns True if attention is more than plain causal attention: windowed, or with capped scores."""
    return _has_window(context) or context.model.score_softcap is not None


def _can_use_blocks(context: Context | Build) -> bool:
    """Returns True if blocks compute plain causal attention with their C++ kernel."""
    return find_compiler() is not None and context.model.head_dim % 16 == 0


def _is_flash_supported(context: Context | Build) -> bool:
    """Returns True if flash attention supports the mask of the layers: plain causal, or a window."""
    sizes = context.sizes if isinstance(context, Context) else context.mesh.sizes
    if context.model.score_softcap is not None or _score_dim(context) > _FLASH_HEAD:
        return False
    if not _has_window(context):
        return True
    unsharded = sizes[Axis.CONTEXT] == 1  # ring attention over shards has no window
    return unsharded and context.model.head_dim % 8 == 0 and Tag.GLOBAL_TOKENS not in context.tags


def _is_cudnn_preferred(context: Context | Build) -> bool:
    """Returns True if torch itself would choose cuDNN's attention for rows of one document."""
    device, width = context.device, _score_dim(context)
    if (device.capability or (0,))[0] not in _CUDNN or width % 8 or width > _CUDNN_HEAD:
        return False
    from torch.backends import cudnn

    # The cuDNN version of a remote device is unknown: assume a recent one.
    return not device.at_hand or (cudnn.version() or 0) > _CUDNN_VERSION


def _required_alignment(context: Context | Build) -> int:
    """Returns the divisor of head_dim that the efficient kernel requires: 16 bytes."""
    # Elements in 16 bytes: 8 in half precision, 4 in fp32.
    return 8 if _is_half(context) else 4


def _is_installed(distribution: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
