"""Encoder-decoder models of transformers (the T5 family): the encoder reads the prompt, the decoder the answer.

Rows of data are the same as for any model: prompts followed by answers, labels on the answers. The encoder reads each
document up to its first trained token; the decoder starts there. Its outputs are scattered back to the positions of the
labels in the row, so that losses, objectives and data need no special case. Rows stay packed: T5's positions are
distances, and no token attends to another document.
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
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "FAMILIES",
    "split_documents",
    "split_documents_evenly",
    "hidden_states",
    "refuse",
    "register",
    "stacks",
    "start_token",
]

FAMILIES = ("t5", "mt5")
"""T5, T5 1.1, Flan-T5 and mT5: learnt biases for distances, shared by the layers of a stack."""
_STEP = 64  # lengths are rounded up to it, because libraries cache kernels, and heaps fragment, per shape
NAME = "preheat-encoder-decoder"  # our attention function in transformers' registry


def refuse(config: PretrainedConfig) -> None:
    """Raises RecipeError for an encoder-decoder that preheat would compute differently from transformers."""
    if config.model_type not in FAMILIES:
        raise RecipeError(
            f"model: {config.model_type} is an encoder-decoder, of which preheat trains {' and '.join(FAMILIES)}; use "
            "one of them"
        )
    if config.dropout_rate:
        raise RecipeError(
            f"model: {config.model_type} has a dropout_rate of {config.dropout_rate}, in its attention too; set "
            "model.config.dropout_rate: 0"
        )


def stacks(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Encoder and decoder, each with its layers in `block`."""
    return model.get_encoder(), model.get_decoder()


# --- what the encoder and the decoder read -------------------------------------------------------------------------


def split_documents(batch: Batch) -> Batch:
    """Sets `mask.read`: the encoder reads each document up to its first trained token. On the host.

    Documents without trained tokens (such as padding) are read by neither; of one that is trained throughout one token
    is read.

    Raises:
        DataError: all documents are trained throughout: plain text instead of prompts with answers.
    """
    if batch.mask.read is not None:
        return batch
    length = batch.tokens.shape[1]
    documents = batch.mask.documents or ((length,),) * len(batch.tokens)
    read, most = [], 0
    for row, labels in zip(documents, batch.labels.tolist(), strict=True):
        begin, prompts = 0, []
        for size in row:
            # The label of a position is the next token: the first position with a label is the prompt's last token.
            # Without one, the encoder gets the whole document, and `_build_positions` leaves it out.
            first = next((n for n in range(size) if labels[begin + n] != -100), size - 1)
            prompts.append(first + 1)
            most = max(most, first)
            begin += size
        read.append(tuple(prompts))
    if not most and batch.weight:
        where = f"sequences {', '.join(map(str, batch.rows[:3]))}" if batch.rows else "sequences"
        raise DataError(
            f"{where}: all documents are trained from their first token on, so an encoder has nothing to read; name "
            "data of prompts and answers (data.layout: prompt_completion, alpaca, messages), and leave "
            "data.train_on: all out"
        )
    return replace(batch, mask=replace(batch.mask, documents=documents, read=tuple(read)))


def split_documents_evenly(batch: Batch) -> Batch:
    """Sets `mask.read` for planning, which has no data: half of each document is read by the encoder."""
    rows, length = batch.tokens.shape
    documents = batch.mask.documents or ((length,),) * rows
    # Rounded up, so that a document of one token has something to read.
    read = tuple(tuple(-(-size // 2) for size in row) for row in documents)
    return replace(batch, mask=replace(batch.mask, documents=documents, read=read))


class _Positions(NamedTuple):
    """Positions of a row that the encoder and the decoder read, packed to the left; [rows, n] each.

    Attributes:
        source, target: positions in the row; padding is 0 for the source and the row's length for the target.
        begins: 1 at the first decoder position of a document, whose input is the start token.
        source_of, target_of: index of the document; padding is -1 and -2, which no token attends to.
        sources, targets: lengths of the documents of each row.
    """

    source: numpy.ndarray
    target: numpy.ndarray
    begins: numpy.ndarray
    source_of: numpy.ndarray
    target_of: numpy.ndarray
    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=64)  # all layers of both stacks, and a recomputation, use the same
def _build_positions(documents: tuple[tuple[int, ...], ...], read: tuple[tuple[int, ...], ...]) -> _Positions:
    import numpy

    spans = []  # per row: (begin, tokens of the encoder, size) of the documents that the decoder reads
    for row, parts in zip(documents, read, strict=True):
        ends = numpy.cumsum(row).tolist()
        spans.append(
            [(end - size, part, size) for end, size, part in zip(ends, row, parts, strict=True) if part < size]
        )
    if not any(spans):  # only padding: run something, since collectives need every rank
        spans[0] = [(0, 1, documents[0][0])]

    length = max(map(sum, documents))

    # Rounded up to _STEP, but never longer than the row.
    def max_width(most: int) -> int:
        return min(-(-most // _STEP) * _STEP, length)

    def build_table(rows: list[list[int]], empty: int) -> numpy.ndarray:
        wide = max_width(max(map(len, rows)))
        return numpy.array([row + [empty] * (wide - len(row)) for row in rows], numpy.int64)

    # The padding is one more document of the row, so no other document attends to it.
    def count_lengths(rows: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        wide = max_width(max(map(sum, rows)))
        return tuple(tuple(row) + ((wide - sum(row),) if sum(row) < wide else ()) for row in rows)

    def spread_positions(of: Any) -> list[list[int]]:
        return [[place for span in enumerate(row) for place in of(*span)] for row in spans]

    return _Positions(
        build_table(spread_positions(lambda _, s: range(s[0], s[0] + s[1])), 0),
        # The decoder's positions begin at the prompt's last token, whose label is the answer's first token.
        build_table(spread_positions(lambda _, s: range(s[0] + s[1] - 1, s[0] + s[2])), length),
        build_table(spread_positions(lambda _, s: [1] + [0] * (s[2] - s[1])), 0),
        build_table(spread_positions(lambda n, s: [n] * s[1]), -1),
        build_table(spread_positions(lambda n, s: [n] * (s[2] - s[1] + 1)), -2),
        count_lengths([[part for _, part, _ in row] for row in spans]),
        count_lengths([[size - part + 1 for _, part, size in row] for row in spans]),
    )


# --- the forward pass ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Masks:
    """Masks for all layers: of the encoder, of the decoder, and bool [rows, 1, target, source] for cross-attention."""

    encoder: MaskSpec
    decoder: MaskSpec
    across: Tensor


def hidden_states(model: PreTrainedModel, tokens: Tensor, mask: MaskSpec, attention: Callable[..., Tensor]) -> Tensor:
    """The decoder's hidden states, [rows, length, width], at the positions whose labels it predicts; else zeros.

    Args:
        tokens: [rows, length].
        mask: with `documents` and `read`.
        attention: (q, k, v, mask, scale, *, bias) -> out, the bias bool or float, as in
            `preheat.ops.attention.multihead.attend_in_chunks`.
    """
    from preheat.hardware.transfers import to_device

    assert mask.documents is not None
    assert mask.read is not None
    encoder, decoder = stacks(model)
    # Computed on the host from lengths, so nothing waits for the device.
    indices = _build_positions(mask.documents, mask.read)
    source, target, begins, source_of, target_of = (to_device(t, tokens.device) for t in indices[:5])
    masks = _Masks(
        MaskSpec(causal=False, documents=indices.sources),
        MaskSpec(documents=indices.targets),
        # Cross-attention within a document only, and never of padding: its indices -2 and -1 are unequal.
        target_of[:, None, :, None] == source_of[:, None, None, :],
    )
    # transformers hands unknown arguments through all layers to the attention function.
    given: dict[str, Any] = {"preheat_masks": masks, "preheat_attention": attention}
    encoded = encoder(input_ids=tokens.gather(1, source), **given).last_hidden_state
    # The decoder's input is the token at each position; at a document's first one it is the start token. Padding has
    # position `length`, one beyond the row: clamped for reading, and an extra position when writing.
    before = tokens.gather(1, target.clamp(max=tokens.shape[1] - 1)).masked_fill(begins > 0, start_token(model.config))
    hidden = decoder(input_ids=before, encoder_hidden_states=encoded, use_cache=False, **given).last_hidden_state
    if model.config.model_type == "t5" and model.config.scale_decoder_outputs:  # mT5 does not scale
        hidden = hidden * model.config.d_model**-0.5
    rows, length, width = *tokens.shape, hidden.shape[-1]
    into = hidden.new_zeros(rows, length + 1, width)  # the extra position receives the padding
    return into.scatter(1, target[..., None].expand(-1, -1, width), hidden)[:, :length]


def start_token(config: PretrainedConfig) -> int:
    """The decoder's first input."""
    token = getattr(config, "decoder_start_token_id", None)
    token = config.pad_token_id if token is None else token
    if token is None:
        raise RecipeError(
            f"model: {config.model_type} names neither a decoder_start_token_id nor a pad_token_id; set "
            "model.config.pad_token_id"
        )
    return int(token)


@functools.cache
def register() -> str:
    """Registers our attention for these models in transformers' registry; returns its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    return NAME


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    position_bias: Tensor,
    preheat_masks: _Masks,
    preheat_attention: Callable[..., Tensor],
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface, as T5 calls it."""
    assert attention_mask is None, f"{type(module).__name__} made a mask of its own"
    if module.is_decoder and not module.is_causal:  # cross-attention, which has no distance bias
        mask, bias = MaskSpec(causal=False), preheat_masks.across
    else:
        mask, bias = preheat_masks.decoder if module.is_decoder else preheat_masks.encoder, position_bias
    return preheat_attention(query, key, value, mask, scaling, bias=bias).transpose(1, 2), None
