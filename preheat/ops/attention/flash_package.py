"""Attention by the flash-attn packages (2 and 3), using their variable-length kernel. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from preheat.core import MaskSpec
from preheat.ops.attention.sdpa import cast_to_autocast
from preheat.ops.attention.varlen import attend_varlen, compute_bounds

__all__ = ["flash_package_attention"]


def _load_varlen(version: int) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    # Two packages: flash-attn is imported as flash_attn, version 3 as flash_attn_interface.
    if version == 2:
        from flash_attn import flash_attn_varlen_func
    else:
        from flash_attn_interface import flash_attn_varlen_func
    return flash_attn_varlen_func


def flash_package_attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, version: int) -> Tensor:
    """Computes attention over [rows, heads, length, head_dim] in bf16 or fp16 on CUDA, all documents in one call.

    In a dry run (fake tensors), torch's own flash attention replaces it.

    Raises:
        ValueError: global tokens with a window, which these kernels do not support.
        ImportError: the package is not installed.
    """
    rows, heads, length, _ = q.shape
    window = mask.window if mask.window is not None and mask.window < length else None
    if window is not None and mask.global_tokens:
        raise ValueError(
            f"FlashAttention {version} has no global tokens (asked for {mask.global_tokens}); use blocks or flex"
        )
    if isinstance(q, FakeTensor):
        return attend_varlen(q, k, v, mask, scale)
    q, k, v = cast_to_autocast(q, k, v)
    bounds = compute_bounds(mask, rows, length, q)
    out = _load_varlen(version)(
        # [tokens, heads, head_dim] each; fewer key heads are supported.
        *(t.transpose(1, 2).reshape(rows * length, t.shape[1], t.shape[3]) for t in (q, k, v)),
        # Queries and keys are the same tokens, so they share offsets and lengths.
        cu_seqlens_q=bounds.offsets,
        cu_seqlens_k=bounds.offsets,
        max_seqlen_q=bounds.longest,
        max_seqlen_k=bounds.longest,
        softmax_scale=scale,
        causal=mask.causal,
        # Tokens to the left and right besides itself; -1: no limit.
        window_size=(-1, -1) if window is None else (window - 1, 0 if mask.causal else window - 1),
    )
    out = out[0] if isinstance(out, tuple) else out  # early releases of 3 give the log-sum-exp too
    return out.view(rows, length, heads, -1).transpose(1, 2)
