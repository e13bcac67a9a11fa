"""Inputs and outputs of a step: batches, masks as data, losses as sums. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from preheat.core.vision import Images

if TYPE_CHECKING:
    from torch import Tensor

    from preheat.core.json_types import StateDict

__all__ = ["Batch", "LossSum", "MaskSpec", "RowLoss", "Shape", "Stateful"]


@dataclass(frozen=True)
class MaskSpec:
    """The attention mask as data: never an n x n tensor.

    Attributes:
        causal: a token sees itself and the tokens before it.
        window: number of last tokens that a token sees, itself included; None: all.
        global_tokens: this many tokens at a document's start see all of it and are seen by all, whatever the window.
        documents: for each row of the batch the lengths of its documents, on the host; their sum is the row's length. A
            token sees its own document only. None: each row is one document.
        blocks: for each row (start, end) of the tokens of each image: they see each other whatever their order.
            Resolved before a kernel is called. None: no token sees a later one.
        read: for each document the number of tokens at its start that an encoder reads, the rest being for the decoder;
            requires `documents`. None: the model is no encoder-decoder.
    """

    causal: bool = True
    window: int | None = None
    # Tuples: hashable, so that masks and tiles can be cached by them.
    documents: tuple[tuple[int, ...], ...] | None = None
    global_tokens: int = 0
    blocks: tuple[tuple[tuple[int, int], ...], ...] | None = None
    read: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Shape:
    """Rows of the next global batch, their length, and the rows of a micro-batch.

    For shorter rows, `rows` is ceil(full rows * batch.seq_len / length).
    """

    rows: int
    length: int
    micro: int


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        tokens: [rows, length] int64.
        labels: [rows, length] int64, aligned with `tokens`: the label at position t is the token at t + 1; -100: not
            trained.
        positions: [rows, length] int64, counted within each document; [rows, length, 3] if rows contain images: along
            time, height and width (M-RoPE).
        mask: which tokens attend to which.
        weight: divisor of the mean loss, on the host: trained labels, or examples if the objective compares them.
        rows: numbers of the data rows, for messages and seeds.
        group: consecutive sequences per example: 2 for preference pairs, the preferred one first.
        desirable: for each row, and each of its sequences without the padding, 1 if the answer was liked and 0 if not;
            (): unknown.
        aligned: [rows, length, ...] each, per-token tensors that a technique added.
        hidden: [rows, length, width], the output of the previous pipeline stage, used instead of token embeddings.
        images: of all rows, if the model reads images; None: there is nothing for its vision tower to do.
        padding: [rows, length] bool, true at positions that belong to no document; None: no position does. Statistics
            over positions leave them out.
        sources: [rows, length] int16, the number of the source of `data.source` that a token is from; None: there is
            only one source, or they are unknown.
        exchanged: the same prompts with each other's answers, if the objective compares with those.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    mask: MaskSpec
    weight: int
    rows: tuple[int, ...] = ()
    group: int = 1
    desirable: tuple[tuple[int, ...], ...] = ()
    hidden: Tensor | None = None
    aligned: tuple[Tensor, ...] = ()
    images: Images | None = None
    padding: Tensor | None = None
    sources: Tensor | None = None
    exchanged: Batch | None = None


@dataclass
class LossSum:
    """A loss as a sum and its divisor, so that parts of a batch add up exactly; metrics are sums too."""

    total: Tensor
    weight: float | Tensor  # a tensor if summed over devices: reading it would synchronize with them
    metrics: dict[str, Tensor] = field(default_factory=dict)


class RowLoss(Protocol):
    """A loss per row of logits. With `value_and_grad_` it can be differentiated without autograd, in place."""

    @property
    def measured(self) -> RowLoss:
        """Returns the loss for evaluation: in nats, without training-only terms."""

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor: ...


class Stateful(Protocol):
    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...
