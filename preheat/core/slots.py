"""Stages, slots and orders: the extension points of a build. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, TypeAlias

__all__ = ["Change", "Finish", "Order", "Slot", "SlotFunction", "Stage"]


class Stage(IntEnum):
    """The stage of the build at which a technique is applied; defines their order."""

    # The order is explained at `_apply` in engine/builder.py, where the stages run.
    STRUCTURE = 0  # which modules there are: classification, upcycling, tied_embeddings
    COMPRESS = 1  # base weights in few bits: nf4
    ADAPT = 2  # adapters: lora, peft_adapter
    FAKE_QUANTIZE = 3  # trained weights in few bits: quantization_aware, fp8
    KERNEL = 4  # other code for the same modules and slots: efficient_attention, liger
    PIPELINE_SPLIT = 5  # cuts stages and adds teachers or references: pipeline_parallel, preference
    PARALLEL = 6  # splits within layers: tensor_parallel, context_parallel, expert_parallel
    CHECKPOINT = 7  # wraps layers: activation_checkpointing, activation_offload
    COMPILE = 8  # each layer becomes a graph
    SHARD = 9  # last on meta: fsdp, data_parallel
    MATERIALIZE = 10  # needs values on the device: expert_balancing
    OPTIMIZER = 11  # adamw's replacements, zero1, optimizer_offload
    LOADER = 12  # groups rows into batches, and wraps the finished build: gradient_accumulation, dynamic_batch


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

    PACK = 0  # on full rows: what needs complete documents
    SPLIT = 1  # context parallelism: this rank's positions only, so that no more are copied
    MOVE = 2  # to the device, and what computes there


class Finish(IntEnum):
    """The order in which gradients are finished before clipping."""

    REDUCE = 0  # over ranks: replicated weights under tensor parallelism
    TIE = 1  # copies of a tied weight on other pipeline stages
    UNSCALE = 2  # last: on the complete sums


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

    # A technique that matches no module (a misspelled name, an unknown family) must not look applied.
    def __post_init__(self) -> None:
        if self.count < 1 or not self.what:
            raise ValueError(f"an empty change ({self.what!r}, {self.count}): the technique found nothing to act on")
