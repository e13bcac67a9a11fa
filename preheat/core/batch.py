"""What a step reads and gives: batches, masks as data, losses as sums. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from preheat.core.vision import Images

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Batch", "LossSum", "MaskSpec", "RowLoss", "Shape", "Stateful"]


@dataclass(frozen=True)
class MaskSpec:
    """Which tokens may see which, as data: never an n x n tensor.

    Attributes:
        causal: a token sees itself and what stands before it.
        window: and at most so many tokens back, itself included; None: all.
        global_tokens: so many tokens at a document's beginning see all of it and are seen by all, whatever the window.
        documents: for each row of the batch the lengths of its documents, on the host; their sum is the row's length.
            A token sees its own document only. None: each row is one document.
        read: of each document so many tokens at its beginning are read by an encoder, and what stands behind them is
            written by a decoder; beside `documents`. None: the model is no encoder-decoder.
    """

    causal: bool = True
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    global_tokens: int = 0
    read: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Shape:
    """Rows of the next global batch, their length, rows of a micro-batch. Shorter rows: `rows` is ceil(whole *
    batch.length / length)."""

    rows: int
    length: int
    micro: int


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        tokens: [rows, length] int64.
        labels: [rows, length] int64, aligned with `tokens`: the label of place t is the token at t + 1; -100: not
            trained.
        positions: [rows, length] int64, counted within each document; [rows, length, 3] where rows hold images: along
            time, height and width (M-RoPE).
        mask: which tokens see which.
        weight: on the host, what the loss is the mean over: trained labels, or examples where an objective compares
            them.
        rows: which rows of the data these are, for messages and for `rerun`.
        group: sequences of an example, which stand side by side: 2 where they are compared, what is preferred first.
        liked: for each row, and each of its sequences without the padding, 1 where the answer was liked and 0 where
            not; (): not said.
        beside: [rows, length, ...] each, what a technique put beside every token.
        hidden: [rows, length, width], what the stage of a pipeline before this one gives in place of the tokens'
            embeddings.
        images: of all rows, where the model reads images; None: there is nothing for its vision tower to do.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    mask: MaskSpec
    weight: int
    rows: tuple[int, ...] = ()
    group: int = 1
    liked: tuple[tuple[int, ...], ...] = ()
    hidden: Tensor | None = None
    beside: tuple[Tensor, ...] = ()
    images: Images | None = None


@dataclass
class LossSum:
    """A loss as its sum and the weight to divide by, so that parts of a batch add up exactly; metrics are sums too."""

    total: Tensor
    weight: int | float
    metrics: dict[str, Tensor] = field(default_factory=dict)


class RowLoss(Protocol):
    """A loss of each row of logits. With `value_and_grad_` it can be differentiated without autograd, in place."""

    @property
    def measured(self) -> RowLoss:
        """What an evaluation takes: this loss in nats, without what only training adds."""

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor: ...


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
