"""Attention in which the tokens of an image see each other whatever their order (Gemma 3), by any causal kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from preheat.core import MaskSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attend_image_blocks"]


def attend_image_blocks(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    scale: float,
    blocks: Sequence[Sequence[tuple[int, int]]],
) -> Tensor:
    """Computes the attention of the tokens of images again, in place of a causal kernel's results for them.

    They see all of their image, and what is before it in the document; a window hides only what is before. Other
    tokens see the same as without images.

    Args:
        out: [rows, heads, length, head_dim], the result of the causal kernel.
        q, k, v: [rows, heads, length, head_dim]; k and v may have fewer heads that groups of query heads share.
        blocks: for each row (start, end) of each image's tokens.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    out = out.clone()
    for row, spans in enumerate(blocks):
        starts = [0] if mask.documents is None else list(accumulate(mask.documents[row], initial=0))
        for start, end in spans:
            first = max(s for s in starts if s <= start)
            hidden = None
            if mask.window is not None and end - first > mask.window:
                first = max(first, start - mask.window + 1)
                queries = torch.arange(start, end, device=q.device)[:, None]
                hidden = queries - torch.arange(first, end, device=q.device) < mask.window
            here, seen = (slice(row, row + 1), slice(None)), slice(first, end)
            out[(*here, slice(start, end))] = scaled_dot_product_attention(
                q[(*here, slice(start, end))],
                k[(*here, seen)],
                v[(*here, seen)],
                attn_mask=hidden,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            ).to(out.dtype)
    return out
