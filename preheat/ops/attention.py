"""Attention over [rows, heads, length, head_dim] with the mask as data (MaskSpec)."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from preheat.technique import MaskSpec

__all__ = ["KERNELS", "allowed", "reference_attention", "sdpa_attention"]

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def allowed(mask: MaskSpec, rows: int, length: int, device: torch.device) -> Tensor:
    """The mask as a tensor, [rows or 1, 1, length, length], true where a token may look. For references only: it is n x n."""
    place = torch.arange(length, device=device)
    may = torch.ones(length, length, dtype=torch.bool, device=device)
    if mask.causal:
        may &= place[:, None] >= place[None, :]
    if mask.window is not None:
        may &= (place[:, None] - place[None, :]).abs() < mask.window
    if mask.documents is None:
        return may[None, None]
    owner = torch.stack(
        [
            torch.repeat_interleave(torch.arange(len(d), device=device), torch.tensor(d, device=device), output_size=length)
            for d in mask.documents
        ]
    )
    return (may & (owner[:, :, None] == owner[:, None, :]))[:, None]


def reference_attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
    """The plain form: all scores in memory, keys and values repeated for their groups, softmax in fp32."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    scores = scores.masked_fill(~allowed(mask, q.shape[0], q.shape[2], q.device), float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, kernel: str = "flash") -> Tensor:
    """Torch's fused attention by the named kernel: no scores in memory, no repeated keys and values, no mask tensor.

    Documents are attended one by one (neighbouring rows that are cut alike together), so the work falls with their length
    and no mask is needed. A window needs a mask tensor, and is refused.

    Raises:
        ValueError: a window shorter than the sequence, which these kernels have no argument for.
        RuntimeError: from torch, when the named kernel cannot serve these tensors.
    """
    if mask.window is not None and mask.window < q.shape[2]:
        raise ValueError(f"SDPA has no sliding window (asked for {mask.window} at {q.shape[2]} tokens)")
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(KERNELS[kernel]):
        if mask.documents is None or all(len(d) == 1 for d in mask.documents):
            return scaled_dot_product_attention(q, k, v, is_causal=mask.causal, scale=scale, enable_gqa=grouped)
        # `split`, not slices: its backward joins the pieces once, where each slice's would fill a whole tensor with zeros.
        runs = [(cuts, len(list(same))) for cuts, same in groupby(mask.documents)]
        out = []
        for (cuts, _), *parts in zip(runs, *(t.split([n for _, n in runs]) for t in (q, k, v)), strict=True):
            pieces = zip(*(t.split(list(cuts), dim=2) for t in parts), strict=True)
            done = [
                scaled_dot_product_attention(*piece, is_causal=mask.causal, scale=scale, enable_gqa=grouped) for piece in pieces
            ]
            out.append(done[0] if len(done) == 1 else torch.cat(done, dim=2))
        return out[0] if len(out) == 1 else torch.cat(out)
