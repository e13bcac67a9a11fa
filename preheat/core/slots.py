"""Stages, slots and orders: the extension points of a build. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, TypeAlias

__all__ = ["Change", "Finish", "Order", "Slot", "SlotFunction", "Stage"]


class Stage(IntEnum):
    """The stage of the build at which a technique is applied; defines their order."""

    STRUCTURE = 0
    COMPRESS = 1
    ADAPT = 2
    FAKE_QUANTIZE = 3
    KERNEL = 4
    PIPELINE_SPLIT = 5
    PARALLEL = 6
    CHECKPOINT = 7
    COMPILE = 8
    SHARD = 9
    MATERIALIZE = 10
    OPTIMIZER = 11
    LOADER = 12


class Slot(StrEnum):
    """A function of the build that exactly one technique may own; the engine installs a default until one does."""

    HIDDEN = "hidden"  #            (part, batch) -> Tensor [rows, length, width]
    ROW_LOSS = "row_loss"  #        RowLoss: (logits [n, vocabulary], *aligned [n]) -> Tensor [n]
    OVER_LOGITS = "over_logits"  #  (hidden, head, row_loss, *aligned) -> Tensor, the sum of the row losses
    OBJECTIVE = "objective"  #      (batch, hidden, over_logits) -> LossSum
    # (part, run) -> run(): every access to the weights of a part goes through here, where FSDP gathers them
    UNSHARD_SCOPE = "unshard_scope"
    # (part, batch) -> (sum of the losses, or hidden states if the part has no head; metrics)
    STAGE_LOSS = "stage_loss"
    # (build, batch) -> LossSum, through all parts; with several parts for evaluation only
    MODEL_LOSS = "model_loss"
    FORWARD_BACKWARD = "forward_backward"  # (build, batches, global_weight) -> LossSum
    CLIP = "clip"  #                (build) -> norm, a tensor
    UPDATE = "update"  #            (build, norm) -> finite, a tensor
    BATCH_SHAPE = "batch_shape"  #  (progress from 0 to 1) -> Shape; that of 1 needs the most memory
    # (rows, seed, committed, samples of the whole run or None) -> Iterator[int], row numbers
    SAMPLE_ORDER = "sample_order"
    ATTENTION_KERNEL = "attention_kernel"  #     (q, k, v, mask, scale) -> Tensor
    ATTENTION_EXCHANGE = "attention_exchange"  # (kernel) -> kernel
    # bf16 weights and a low-bit AdamW each bring an optimizer; without this slot the second would silently replace the
    # first.
    OPTIMIZER = "optimizer"  #      (groups, settings) -> torch.optim.Optimizer


SlotFunction: TypeAlias = Callable[..., Any]
"""A function in a slot. Each slot has its own signature: the comments in `Slot`."""


class Order(IntEnum):
    """The order of transforms on a batch."""

    SHIFT = 0
    PACK = 1
    SPLIT = 2
    MOVE = 3


class Finish(IntEnum):
    """The order in which gradients are finished before clipping."""

    REDUCE = 0
    TIE = 1
    UNSCALE = 2


@dataclass(frozen=True)
class Change:
    """A technique's change to a build, for the run's records and the report."""

    what: str
    """A description: 'attention of 6 layers by SDPA'."""
    count: int
    """The number of changed modules, parameters or steps."""
    kernel: str = ""
    """The selected kernel, if there is a choice."""
    detail: str = ""
    """Details that are too long for a line, e.g. the bits of each layer."""

    def __post_init__(self) -> None:
        if self.count < 1 or not self.what:
            raise ValueError(f"an empty change ({self.what!r}, {self.count}): the technique found nothing to act on")
