"""Attention over [rows, heads, length, head_dim] with the mask as data (MaskSpec)."""

from __future__ import annotations

import functools

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from preheat.ops.documents import Passes, attend, by_document
from preheat.technique import MaskSpec

__all__ = [
    "KERNELS",
    "allowed",
    "flash_backward",
    "flash_forward",
    "in_compute_dtype",
    "packed",
    "reference_attention",
    "refuse_masks",
    "sdpa_attention",
    "sees",
    "starts_of",
]

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_FLASH_DIM = 8  # CUDA's kernel wants heads of a multiple of this; torch pads others, above the operator that is called here


def sees(mask: MaskSpec, query: Tensor, key: Tensor, query_starts: Tensor | int = 0, key_starts: Tensor | int = 0) -> Tensor:
    """Which query may look at which key, elementwise over places in a row: the one definition of MaskSpec.

    Args:
        query, key: places, broadcast against each other.
        query_starts, key_starts: where the documents of the two begin.
    """
    may = query >= key if mask.causal else (query >= key) | (query < key)
    if mask.window is not None:
        near = (query - key).abs() < mask.window
        if mask.global_tokens:
            near = near | (key - key_starts < mask.global_tokens) | (query - query_starts < mask.global_tokens)
        may = may & near
    return may & (query_starts == key_starts) if mask.documents is not None else may


def starts_of(mask: MaskSpec, length: int, device: torch.device) -> Tensor:
    """Where the document of each token begins, [rows, length]; [1, length] of zeros without documents."""
    if mask.documents is None:
        return torch.zeros(1, length, dtype=torch.int64, device=device)
    rows: list[numpy.ndarray] = [numpy.repeat(numpy.cumsum((0, *cuts[:-1])), cuts) for cuts in mask.documents]
    return torch.from_numpy(numpy.stack(rows)).to(device)


def allowed(mask: MaskSpec, rows: int, length: int, device: torch.device) -> Tensor:
    """The mask as a tensor, [rows or 1, 1, length, length], true where a token may look. For references only: it is n x n."""
    place, starts = torch.arange(length, device=device), starts_of(mask, length, device)
    starts = starts[:, None]
    may = sees(mask, place[:, None], place[None, :], starts[..., :, None], starts[..., None, :])
    return may.expand(starts.shape[0], 1, length, length)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, softcap: float | None = None
) -> Tensor:
    """The plain form: all scores in memory, keys and values repeated for their groups, softmax in fp32.

    Args:
        softcap: scores are bent to softcap * tanh(score / softcap), as in Gemma 2.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~allowed(mask, q.shape[0], q.shape[2], q.device), float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


def in_compute_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of an autocast that is on, as autocast does for torch's own attention."""
    kind = tensors[0].device.type
    return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors) if torch.is_autocast_enabled(kind) else tensors


def refuse_masks(mask: MaskSpec, length: int, who: str) -> None:
    """Raises where a kernel without windows is asked for one, or documents are not causal."""
    if mask.window is not None and mask.window < length:
        raise ValueError(f"{who} has no sliding window (asked for {mask.window} at {length} tokens); use blocks or flex")
    if packed(mask) and not mask.causal:
        raise ValueError(f"{who} keeps documents apart only where attention is causal")


def packed(mask: MaskSpec) -> bool:
    """Whether a row holds more than one document."""
    return mask.documents is not None and any(len(d) > 1 for d in mask.documents)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, kernel: str = "flash") -> Tensor:
    """Torch's fused attention by the named kernel: no scores in memory, no repeated keys and values, no mask tensor.

    Documents are attended by themselves (those of about equal length in one call), so the work falls with their length.
    A window, or documents without a causal mask, would need a mask tensor and are refused.

    Raises:
        ValueError: a window shorter than the sequence, or documents that are not causal: these kernels have no argument for them.
        RuntimeError: from torch, when the named kernel cannot serve these tensors.
    """
    refuse_masks(mask, q.shape[2], "SDPA")
    grouped = q.shape[1] != k.shape[1]
    if isinstance(q, FakeTensor) and q.device.type == "cpu":  # a dry run for a GPU: what the kernel keeps is the same
        kernel = "flash"

    apart = mask.documents if packed(mask) else None
    if apart is not None and kernel == "flash" and (q.device.type == "cpu" or q.shape[-1] % _FLASH_DIM == 0):
        q, k, v = in_compute_dtype(q, k, v)
        return attend(_flash(mask.causal, scale), q, k, v, apart)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=mask.causal, scale=scale, enable_gqa=grouped)

    with sdpa_kernel(KERNELS[kernel]):
        return by_document(fused, q, k, v, apart) if apart is not None else fused(q, k, v)


def _flash(causal: bool, scale: float) -> Passes:
    return Passes(
        functools.partial(flash_forward, causal=causal, scale=scale),
        functools.partial(flash_backward, causal=causal, scale=scale),
        keeps_result=True,
    )


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Torch's flash attention, beneath autograd: the result and the log of the sum of exponentials, [rows, heads, length]."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]  # type: ignore[no-any-return]


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `flash_forward` by q, k and v."""
    if q.device.type == "cpu":
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of random numbers, which no dropout asks for
        made = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, state, state, scale=scale
        )
    return made  # type: ignore[no-any-return]
