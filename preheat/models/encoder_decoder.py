"""Encoder-decoder models of transformers (the T5 family): an encoder reads a prompt, a decoder writes the answer.

A row of data is what it is for any model: prompts with their answers behind them, labels on the answers. Of each document the encoder reads what
stands before the first trained token; the decoder starts at that border and writes on. What it gives is put back where the labels stand in the row, so
that losses, objectives and data know nothing of all this. Rows stay packed: positions in T5 are distances, and no token sees another document.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from preheat.core import Batch, MaskSpec
from preheat.errors import DataError, RecipeError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor, nn
    from transformers import PretrainedConfig

__all__ = [
    "FAMILIES",
    "divided",
    "divided_evenly",
    "hidden_states",
    "refuse",
    "register",
    "stacks",
    "start_token",
]

FAMILIES = ("t5", "mt5")
"""T5, T5 1.1, Flan-T5 and mT5: learnt biases for distances, shared by the layers of a stack."""
_STEP = 64  # lengths are rounded up to it: libraries keep kernels, and heaps pieces, for each shape that they meet
NAME = "preheat-encoder-decoder"  # of our attention function in transformers' registry


def refuse(config: PretrainedConfig) -> None:
    """Raises RecipeError for an encoder-decoder of which preheat would compute something else than transformers does."""
    if config.model_type not in FAMILIES:
        raise RecipeError(
            f"model: {config.model_type} is an encoder-decoder, and of these preheat trains {' and '.join(FAMILIES)}; use one of them"
        )
    if config.dropout_rate:
        raise RecipeError(
            f"model: {config.model_type} has a dropout_rate of {config.dropout_rate}, in its attention too; set model.config.dropout_rate: 0"
        )


def stacks(model: Any) -> tuple[nn.Module, nn.Module]:
    """Encoder and decoder, each with its layers in `block`."""
    return model.get_encoder(), model.get_decoder()


# --- what is read and what is written ------------------------------------------------------------------------------


def divided(batch: Batch) -> Batch:
    """The batch with `mask.read`: of each document the encoder reads what stands before its first trained token. On the host.

    A document in which nothing is trained (padding, for one) is neither read nor written; of one that is trained all through one token is read.

    Raises:
        DataError: all documents are such: text to continue, and no prompts with answers.
    """
    if batch.mask.read is not None:
        return batch
    length = batch.tokens.shape[1]
    documents = batch.mask.documents or ((length,),) * len(batch.tokens)
    read, most = [], 0
    for row, labels in zip(documents, batch.labels.tolist(), strict=True):
        begin, found = 0, []
        for size in row:
            first = next((n for n in range(size) if labels[begin + n] != -100), size - 1)
            found.append(first + 1)
            most = max(most, first)
            begin += size
        read.append(tuple(found))
    if not most and batch.weight:
        where = f"rows {', '.join(map(str, batch.rows[:3]))}" if batch.rows else "rows"
        raise DataError(
            f"{where}: all documents are trained from their first token on, so an encoder has nothing to read of them; name data of prompts and answers "
            "(data.layout: prompt_completion, alpaca, messages), and leave data.train_on: all out"
        )
    return replace(batch, mask=replace(batch.mask, documents=documents, read=tuple(read)))


def divided_evenly(batch: Batch) -> Batch:
    """The batch as a plan takes it, which has no data: of each document one half is read, and the other written."""
    rows, length = batch.tokens.shape
    documents = batch.mask.documents or ((length,),) * rows
    read = tuple(tuple(-(-size // 2) for size in row) for row in documents)
    return replace(batch, mask=replace(batch.mask, documents=documents, read=read))


class _Places(NamedTuple):
    """Which places of a row the encoder reads and the decoder writes, packed to the left; [rows, n] each.

    Attributes:
        source, target: places in the row; where there is none, 0 for the source and the row's length for the target.
        begins: 1 where the decoder begins a document, whose first input is the start token.
        source_of, target_of: number of the document; where there is none -1 and -2, which nobody sees.
        sources, targets: lengths of the documents of each row.
    """

    source: numpy.ndarray
    target: numpy.ndarray
    begins: numpy.ndarray
    source_of: numpy.ndarray
    target_of: numpy.ndarray
    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=64)  # the layers of two stacks, and a second pass through them, ask for the same
def _places(documents: tuple[tuple[int, ...], ...], read: tuple[tuple[int, ...], ...]) -> _Places:
    import numpy

    spans = []  # of each row: (begin, read, whole) of the documents that are written
    for row, parts in zip(documents, read, strict=True):
        ends = numpy.cumsum(row).tolist()
        spans.append(
            [(end - size, part, size) for end, size, part in zip(ends, row, parts, strict=True) if part < size]
        )
    if not any(spans):  # padding alone: something runs all the same, since every device must take part
        spans[0] = [(0, 1, documents[0][0])]

    length = max(map(sum, documents))

    def width(most: int) -> int:
        return min(-(-most // _STEP) * _STEP, length)

    def table(rows: list[list[int]], empty: int) -> numpy.ndarray:
        wide = width(max(map(len, rows)))
        return numpy.array([row + [empty] * (wide - len(row)) for row in rows], numpy.int64)

    def lengths(rows: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        wide = width(max(map(sum, rows)))
        return tuple(tuple(row) + ((wide - sum(row),) if sum(row) < wide else ()) for row in rows)

    def spread(of: Any) -> list[list[int]]:
        return [[place for span in enumerate(row) for place in of(*span)] for row in spans]

    return _Places(
        table(spread(lambda _, s: range(s[0], s[0] + s[1])), 0),
        table(spread(lambda _, s: range(s[0] + s[1] - 1, s[0] + s[2])), length),
        table(spread(lambda _, s: [1] + [0] * (s[2] - s[1])), 0),
        table(spread(lambda n, s: [n] * s[1]), -1),
        table(spread(lambda n, s: [n] * (s[2] - s[1] + 1)), -2),
        lengths([[part for _, part, _ in row] for row in spans]),
        lengths([[size - part + 1 for _, part, size in row] for row in spans]),
    )


# --- the forward pass ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Masks:
    """Who sees whom: in the encoder, in the decoder, and [rows, 1, written, read] from the one into the other, bool, for all layers."""

    encoder: MaskSpec
    decoder: MaskSpec
    across: Tensor


def hidden_states(model: Any, tokens: Tensor, mask: MaskSpec, attention: Callable[..., Tensor]) -> Tensor:
    """What the decoder gives, [rows, length, width], at the places of the row whose labels it is to say; zeros elsewhere.

    Args:
        tokens: [rows, length].
        mask: with `documents` and `read`.
        attention: (q, k, v, mask, scale, *, bias) -> out, the bias bool or float, as of `preheat.ops.attention.multihead.attention_in_chunks`.
    """
    from preheat.hardware.transfers import to_device

    assert mask.documents is not None
    assert mask.read is not None
    encoder, decoder = stacks(model)
    places = _places(mask.documents, mask.read)
    source, target, begins, source_of, target_of = (to_device(t, tokens.device) for t in places[:5])
    masks = _Masks(
        MaskSpec(causal=False, documents=places.sources),
        MaskSpec(documents=places.targets),
        target_of[:, None, :, None] == source_of[:, None, None, :],
    )
    given: dict[str, Any] = {"preheat_masks": masks, "preheat_attention": attention}
    seen = encoder(input_ids=tokens.gather(1, source), **given).last_hidden_state
    before = tokens.gather(1, target.clamp(max=tokens.shape[1] - 1)).masked_fill(begins > 0, start_token(model.config))
    hidden = decoder(input_ids=before, encoder_hidden_states=seen, use_cache=False, **given).last_hidden_state
    if model.config.model_type == "t5" and model.config.scale_decoder_outputs:  # mT5 neither has the setting nor scales
        hidden = hidden * model.config.d_model**-0.5
    rows, length, width = *tokens.shape, hidden.shape[-1]
    into = hidden.new_zeros(rows, length + 1, width)  # the last place takes what is written nowhere
    return into.scatter(1, target[..., None].expand(-1, -1, width), hidden)[:, :length]


def start_token(config: Any) -> int:
    """What the decoder reads before it has written anything."""
    found = getattr(config, "decoder_start_token_id", None)
    found = config.pad_token_id if found is None else found
    if found is None:
        raise RecipeError(
            f"model: {config.model_type} names neither a decoder_start_token_id nor a pad_token_id; set model.config.pad_token_id"
        )
    return int(found)


@functools.cache
def register() -> str:
    """Puts our attention for these models into transformers' registry under its own name, which is returned."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    return NAME


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    position_bias: Tensor,
    preheat_masks: _Masks,
    preheat_attention: Callable[..., Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, as T5 calls it."""
    assert attention_mask is None, f"{type(module).__name__} made a mask of its own"
    if module.is_decoder and not module.is_causal:  # from the decoder into the encoder, where distances mean nothing
        mask, bias = MaskSpec(causal=False), preheat_masks.across
    else:
        mask, bias = preheat_masks.decoder if module.is_decoder else preheat_masks.encoder, position_bias
    return preheat_attention(query, key, value, mask, scaling, bias=bias).transpose(1, 2), None
