"""Attention sinks and chunked attention, by any kernel: as further keys and as shorter documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from preheat.core import MaskSpec

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

__all__ = ["CHUNK", "cut_into_chunks", "set_chunks", "attend_with_sinks"]

CHUNK = "preheat_chunk"
"""Attribute of an attention module whose tokens stay in chunks: their length."""


def set_chunks(attentions: Iterable[nn.Module]) -> None:
    """Sets `CHUNK` on the attention modules of the layers whose tokens stay in chunks (most layers of Llama 4).

    Done once, when the model is built: a forward pass that read the number of its layer could not be compiled into one
    graph for all layers, because the compiler makes it a constant of the graph.
    """
    for module in attentions:
        config: PretrainedConfig | None = getattr(module, "config", None)
        kinds, chunk = getattr(config, "layer_types", None), getattr(config, "attention_chunk_size", None)
        number = getattr(module, "layer_idx", None)
        if chunk is not None and kinds and isinstance(number, int) and kinds[number] == "chunked_attention":
            setattr(module, CHUNK, int(chunk))


def cut_into_chunks(mask: MaskSpec, chunk: int, rows: int, length: int) -> MaskSpec:
    """Returns the mask with every document cut into chunks from its start: a token sees its own chunk only.

    Example:
        >>> cut_into_chunks(MaskSpec(documents=((5, 2),)), 3, 1, 7).documents
        ((3, 2, 2),)
    """
    documents = mask.documents or ((length,),) * rows
    return replace(
        mask,
        documents=tuple(tuple(min(chunk, n - start) for n in row for start in range(0, n, chunk)) for row in documents),
    )


def attend_with_sinks(
    kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, sinks: Tensor
) -> Tensor:
    """Attention with a learned score per head that takes part in the softmax without a value (gpt-oss).

    A further token at the start of each document is the sink: its value is 0, and its key is 0 but for one more
    dimension, in which the queries of a head have its score and all other keys have 0. So any kernel that keeps to
    documents computes it, with gradients. Under a window it is a global token, which only some kernels have.

    Args:
        q, k, v: [rows, heads, length, head_dim]; k and v may have fewer heads that groups of query heads share.
        sinks: [heads].
    """
    import torch
    from torch.nn.functional import pad

    from preheat.hardware.transfers import to_device

    rows, heads, length, width = q.shape
    documents = mask.documents or ((length,),) * rows
    most = max(len(row) for row in documents)
    # Rows with fewer documents get documents of one token at their ends, so that all rows have one length.
    longer = tuple((*(n + 1 for n in row), *(1,) * (most - len(row))) for row in documents)
    # index: the token at each position of the longer row. back: the position of each token in the longer row.
    index = torch.full((rows, length + most), length)  # the token that is appended below
    back = torch.empty(rows, length, dtype=torch.int64)
    for row, lengths in enumerate(documents):
        start = 0
        for number, n in enumerate(lengths):
            first = start + number + 1
            index[row, first : first + n] = torch.arange(start, start + n)
            back[row, start : start + n] = torch.arange(first, first + n)
            start += n
    more = 8  # kernels want head dimensions in multiples of 8
    # The kernel computes scale * (q . k): sinks / scale in the query times 1 in the sink's key gives the sink's score.
    scores = (sinks / scale).to(q.dtype)[None, :, None, None].expand(rows, heads, length, 1)
    # The pad's last two numbers append one token, the source of all sinks; keys get theirs below.
    q = pad(torch.cat([q, scores], dim=-1), (0, more - 1, 0, 1))
    k, v = pad(k, (0, more)), pad(v, (0, width + more - v.shape[-1], 0, 1))
    sink = torch.nn.functional.one_hot(torch.tensor(width), width + more).to(k.dtype)
    sink = to_device(sink, k.device).expand(rows, k.shape[1], 1, width + more)
    k = torch.cat([k, sink], dim=2)
    # Reorders [.., length + 1, ..] to [.., length + documents, ..]: a copy of the sink before each document.
    at = to_device(index, q.device)[:, None, :, None]
    q, k, v = (x.gather(2, at.expand(-1, x.shape[1], -1, x.shape[-1])) for x in (q, k, v))
    # The sink is the first token of its document, so causality hides it from none;
    # `global_tokens` exempts it from windows. A window as long as a row hides nothing, but sinks lengthen it.
    window = mask.window if mask.window is not None and mask.window < length else None
    mask = replace(mask, window=window, documents=longer, global_tokens=max(mask.global_tokens, 1))
    out = kernel(q, k, v, mask, scale)
    # Drops the sinks' own results and the dimensions that were added to the values.
    where = to_device(back, q.device)[:, None, :, None]
    return out[..., :width].gather(2, where.expand(-1, heads, -1, width))
