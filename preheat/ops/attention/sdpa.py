"""Attention by torch's SDPA kernels over [rows, heads, length, head_dim], with the mask as data (MaskSpec)."""

from __future__ import annotations

import functools

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from preheat.core import MaskSpec
from preheat.hardware.transfers import to_device
from preheat.ops.attention.per_document import Documents, Passes, attend, attend_by_document
from preheat.ops.attention.varlen import attend_varlen, is_varlen_supported, varlen_passes

__all__ = [
    "KERNELS",
    "build_dense_mask",
    "flash_backward",
    "flash_forward",
    "cast_to_autocast",
    "is_packed",
    "reference_attention",
    "refuse_masks",
    "sdpa_attention",
    "has_sdpa_passes",
    "sdpa_passes",
    "is_visible",
    "starts_of",
]

KERNELS: dict[str, SDPBackend | list[SDPBackend]] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
    # Torch's own preference for the tensors and device: cuDNN on Hopper and data center Blackwell.
    "preferred": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
}
_FLASH = {"flash", "preferred"}  # these use the variable-length flash kernel for documents and windows
# CUDA's flash kernel requires a head dim that is a multiple of 8; torch pads others above the operator called here.
_FLASH_DIM = 8
_STATISTICS = 32  # the efficient kernel pads its log-sum-exp to a multiple of this


def is_visible(
    mask: MaskSpec, query: Tensor, key: Tensor, query_starts: Tensor | int = 0, key_starts: Tensor | int = 0
) -> Tensor:
    """Returns which query sees which key, elementwise over positions: the single definition of MaskSpec.

    Args:
        query, key: positions, broadcast against each other.
        query_starts, key_starts: start positions of their documents.
    """
    # Without causality all true, as a tensor of the broadcast shape: FlexAttention evaluates this per element.
    may = query >= key if mask.causal else (query >= key) | (query < key)
    if mask.window is not None:
        # Both directions; causality has already hidden the keys ahead.
        near = (query - key).abs() < mask.window
        if mask.global_tokens:
            # Global tokens are seen by all and see all, in terms of their position within the document.
            near = near | (key - key_starts < mask.global_tokens) | (query - query_starts < mask.global_tokens)
        may = may & near
    return may & (query_starts == key_starts) if mask.documents is not None else may


def starts_of(mask: MaskSpec, length: int, device: torch.device) -> Tensor:
    """Returns the start of each token's document, [rows, length]; zeros [1, length] without documents."""
    if mask.documents is None:
        return torch.zeros(1, length, dtype=torch.int64, device=device)
    # On the host, and sent in one copy: lengths (3, 2) give starts (0, 0, 0, 3, 3).
    rows: list[numpy.ndarray] = [numpy.repeat(numpy.cumsum((0, *cuts[:-1])), cuts) for cuts in mask.documents]
    return to_device(numpy.stack(rows), device)


def build_dense_mask(mask: MaskSpec, rows: int, length: int, device: torch.device) -> Tensor:
    """Returns the dense mask [rows or 1, 1, length, length], true if visible; n x n, for references only."""
    place, starts = torch.arange(length, device=device), starts_of(mask, length, device)
    starts = starts[:, None]  # [rows or 1, 1, length]
    may = is_visible(mask, place[:, None], place[None, :], starts[..., :, None], starts[..., None, :])
    return may.expand(starts.shape[0], 1, length, length)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, softcap: float | None = None
) -> Tensor:
    """Reference attention: materializes all scores, repeats grouped keys and values, softmax in fp32.

    Args:
        softcap: caps scores as softcap * tanh(score / softcap), as in Gemma 2.
    """
    # Grouped-query attention: each key/value head serves this many query heads.
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale  # [rows, heads, length, length]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~build_dense_mask(mask, q.shape[0], q.shape[2], q.device), float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


def cast_to_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts the tensors to autocast's dtype if it is on, as autocast does for torch's attention."""
    kind = tensors[0].device.type
    return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors) if torch.is_autocast_enabled(kind) else tensors


def refuse_masks(mask: MaskSpec, length: int, who: str) -> None:
    """Rejects masks that a kernel without a mask tensor cannot compute.

    Args:
        length: the sequence's length in tokens; a window at least as long is no restriction.
        who: the kernel's name, for the message.

    Raises:
        ValueError: the mask has a shorter sliding window, or asks for bidirectional attention over packed rows.
    """
    if mask.window is not None and mask.window < length:
        raise ValueError(
            f"{who} has no sliding window (asked for {mask.window} at {length} tokens); use blocks or flex"
        )
    if is_packed(mask) and not mask.causal:
        raise ValueError(f"{who} supports packed documents only if attention is causal")


def is_packed(mask: MaskSpec) -> bool:
    """True if a row holds more than one document."""
    return mask.documents is not None and any(len(d) > 1 for d in mask.documents)


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, kernel: str = "flash", varlen: bool | None = None
) -> Tensor:
    """Computes attention by the named SDPA kernel, without materializing scores or a mask tensor.

    On CUDA `flash` (and `preferred`) handles packed documents and windows in one call of the variable-length kernel.
    Elsewhere documents are attended separately (those of similar length in one call), so that the work shrinks with
    their length; anything that needs a mask tensor is rejected: a window, or documents without a causal mask.
    `efficient` does not support grouped keys and values: they are repeated in each pass and not saved.

    Args:
        varlen: use the variable-length kernel if it supports the inputs; None: only on CUDA.

    Raises:
        ValueError: the kernel does not support a window shorter than the sequence, or documents that are not causal.
        RuntimeError: raised by torch if the named kernel does not support these tensors.
    """
    if _takes_varlen(q, k, v, mask, kernel, varlen):
        q, k, v = cast_to_autocast(q, k, v)
        # One call for all documents, at their true lengths.
        return attend_varlen(q, k, v, mask, scale)
    refuse_masks(mask, q.shape[2], "SDPA")
    # A row of one document needs no separation.
    apart = mask.documents if is_packed(mask) else None
    grouped = q.shape[1] != k.shape[1]
    if _is_dry_run(q) and kernel != "efficient":  # replaces a GPU kernel that saves the same tensors
        kernel = "flash"
    # Autograd would save more than these passes need: rearranged documents, and repeated keys and values.
    # torch.compile differentiates what it traces by itself.
    more = apart is not None or (grouped and kernel == "efficient")
    if more and not torch.compiler.is_compiling() and has_sdpa_passes(q, kernel=kernel):
        q, k, v = cast_to_autocast(q, k, v)
        return attend(sdpa_passes(q, k, v, mask, scale, kernel=kernel, varlen=False)[0], q, k, v, apart)
    # Compiled, or without passes of our own: autograd differentiates the repetition, and saves its result.
    if kernel == "efficient":
        k, v, grouped = _repeat_heads(k, q), _repeat_heads(v, q), False
    # The CPU's flash kernel is the only fused one that fake CPU tensors have.
    if _is_dry_run(q):
        kernel = "flash"

    def attend_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=mask.causal, scale=scale, enable_gqa=grouped)

    # Inputs that the named kernel does not support are an error here, not a silent fall back to materialized scores.
    with sdpa_kernel(KERNELS[kernel]):
        return attend_by_document(attend_fused, q, k, v, apart) if apart is not None else attend_fused(q, k, v)


def sdpa_passes(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, kernel: str = "flash", varlen: bool | None = None
) -> tuple[Passes, Documents | None]:
    """Returns forward and backward of `sdpa_attention` below autograd, and the documents to separate.

    Requires `has_sdpa_passes`.
    """
    if _takes_varlen(q, k, v, mask, kernel, varlen):
        return varlen_passes(q, mask, scale), None
    refuse_masks(mask, q.shape[2], "SDPA")
    passes = (
        _build_efficient_passes(mask.causal, scale)
        if kernel == "efficient"
        else _build_flash_passes(mask.causal, scale)
    )
    return passes, mask.documents if is_packed(mask) else None


def has_sdpa_passes(q: Tensor, *, kernel: str = "flash", varlen: bool | None = None) -> bool:
    """True if forward and backward of a kernel can be called below autograd, for any mask."""
    # `varlen` has no effect: callers pass all settings of the kernel. A CPU has no memory-efficient kernel; a dry run's
    # fake tensors are planned by flash.
    if kernel == "efficient":
        return q.device.type != "cpu" or _is_dry_run(q)
    return kernel in _FLASH and (q.device.type == "cpu" or q.shape[-1] % _FLASH_DIM == 0)


def _takes_varlen(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, kernel: str, varlen: bool | None) -> bool:
    # Plain rows keep the fixed-length kernel, which needs no offsets.
    needed = is_packed(mask) or (mask.window is not None and mask.window < q.shape[2])
    wanted = varlen if varlen is not None else q.device.type == "cuda"
    return needed and wanted and kernel in _FLASH and is_varlen_supported(q, k, v, mask)


def _is_dry_run(q: Tensor) -> bool:
    return isinstance(q, FakeTensor) and q.device.type == "cpu"


def _build_flash_passes(causal: bool, scale: float) -> Passes:
    return Passes(
        functools.partial(flash_forward, causal=causal, scale=scale),
        functools.partial(flash_backward, causal=causal, scale=scale),
        statistics=True,
    )


def _build_efficient_passes(causal: bool, scale: float) -> Passes:
    return Passes(
        functools.partial(_efficient_forward, causal=causal, scale=scale),
        functools.partial(_efficient_backward, causal=causal, scale=scale),
        statistics=True,
    )


def _repeat_heads(t: Tensor, q: Tensor) -> Tensor:
    """Repeats keys or values for each head of `q`."""
    # Interleaved: query heads i * groups to (i + 1) * groups - 1 use key head i, as in transformers' repeat_kv.
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """As `flash_forward`, by the memory-efficient kernel (supports fp32); a dry run uses flash, which allocates as
    much.
    """
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    if q.device.type == "cpu":
        return flash_forward(q, k, v, causal=causal, scale=scale)
    # Arguments after v: no bias, return the log-sum-exp, no dropout.
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    # Cut to [n, heads, length], as `Passes` defines it; backward pads it again.
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of `_efficient_forward`; sums those of keys and values over the heads that share them."""
    each = _repeat_heads(k, q), _repeat_heads(v, q)
    if q.device.type == "cpu":
        a, b, c = flash_backward(grad, q, *each, out, lse, causal=causal, scale=scale)
    else:
        # The kernel's own padding is inf, for which exp(score - lse) is 0.
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % _STATISTICS), value=float("inf")).contiguous()
        state = torch.empty((), dtype=torch.int64, device=q.device)  # unused RNG state: no dropout
        a, b, c, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, *each, None, out, lse, state, state, 0.0, [True, True, True, False], causal, scale=scale
        )
    # [rows, heads, length, dim] -> [rows, kv_heads, groups, length, dim], summed over the groups
    b, c = (g if g.shape == t.shape else g.unflatten(1, (t.shape[1], -1)).sum(2) for g, t in ((b, k), (c, v)))
    return a, b, c


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Runs torch's flash attention below autograd; returns the result and the log-sum-exp [rows, heads, length]."""
    # 0.0 is the dropout in all of these calls.
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            q, k, v, 0.0, causal, scale=scale
        )
    return torch.ops.aten._scaled_dot_product_flash_attention(  # type: ignore[no-any-return]
        q, k, v, 0.0, causal, scale=scale
    )[:2]


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients with respect to q, k and v, in their shapes, from the results of `flash_forward`.

    Args:
        grad: the gradient with respect to `out`, in its shape.
        q: [rows, heads, length, head_dim], as `out`; k and v: [rows, kv_heads, length, head_dim].
        lse: [rows, heads, length], the log-sum-exp of the scores.
        scale: factor on the scores.
    """
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # unused RNG state: no dropout
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            # After the log-sum-exp: no document offsets, and the two lengths.
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            state,
            state,
            scale=scale,
        )
    return grads  # type: ignore[no-any-return]
